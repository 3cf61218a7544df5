"""`logs`: what the worker of a stage wrote, while it writes."""

import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from opdctl.cli.inspect import failure, find_run, find_stage
from opdctl.cli.options import HERE, RunOption, StageArgument, WorkspaceOption

if TYPE_CHECKING:
    from opdctl.store import Attempt, RunDir, StageDir

LOOK_EVERY_S = 0.3


def logs(
    stage: StageArgument,
    run_name: RunOption = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the stage ends, over attempts.")] = False,
    number: Annotated[int | None, typer.Option("--attempt", min=1, help="The last one if absent.")] = None,
    workspace: WorkspaceOption = HERE,
) -> None:
    """Print what a stage's worker wrote."""
    from opdctl.console import make_console
    from opdctl.errors import ConfigError

    run = find_run(workspace, run_name)
    found = find_stage(run, stage)
    attempts = found.attempts()
    chosen = [attempt for attempt in attempts if number in (None, attempt.number)][-1:]
    if number is not None and not chosen:
        known = ", ".join(str(attempt.number) for attempt in attempts) or "none"
        raise ConfigError(f"stage {stage} of run {run.name} has no attempt {number}", hint=f"attempts: {known}")
    if not chosen and not (follow and run.busy()):
        reused = found.reference()
        hint = f"it reuses a checkpoint: opdctl logs '{reused.name}' --run {reused.run}" if reused else ""
        raise ConfigError(f"stage {stage} of run {run.name} was not started, so it has no log", hint=hint)
    if follow:
        printed = _follow(run, found, number or (chosen[0].number if chosen else 1), only=number is not None)
    else:
        printed = _print_from(chosen[0], 0)
    if not printed:
        why = failure(attempts[-1]) if (attempts := found.attempts()) else ""
        told = f"the worker of {stage} printed nothing; its steps: opdctl status {run.name}"
        make_console(stderr=True).print(f"{told}\nit failed: {why}" if why else told, soft_wrap=True)


def _follow(run: "RunDir", stage: "StageDir", first: int, *, only: bool) -> int:
    """The log of attempt `first` as it grows, then later ones (unless `only`), until nothing more is to come.

    Returns the number of bytes printed.
    """
    shown: dict[int, int] = {}  # attempt -> bytes printed
    while True:
        # asked before the look at the logs, so that nothing is missed
        done = stage.record() is not None and not any(attempt.lives() for attempt in stage.attempts())
        over = done or not run.busy()
        attempts = [a for a in stage.attempts() if a.number == first or (a.number > first and not only)]
        over = over or (only and all(a.worker.exists() and not a.lives() for a in attempts))
        for attempt in attempts:
            shown[attempt.number] = _print_from(attempt, shown.get(attempt.number, 0))
        if over:
            return sum(shown.values())
        time.sleep(LOOK_EVERY_S)


def _print_from(attempt: "Attempt", start: int) -> int:
    """Print the log from byte `start` on; returns where it ends by now."""
    if not attempt.log.exists():
        return start
    with attempt.log.open("rb") as handle:
        handle.seek(start)
        while piece := handle.read(1 << 16):
            sys.stdout.buffer.write(piece)
            start += len(piece)
    sys.stdout.buffer.flush()
    return start
