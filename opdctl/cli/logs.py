"""`logs`: what the worker of a stage wrote, while it writes."""

import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from opdctl.cli.inspect import busy, find_run, find_stage
from opdctl.cli.options import HERE, RunOption, StageArgument, WorkspaceOption

if TYPE_CHECKING:
    from opdctl.store import Attempt, RunDir, StageDir

LOOK_EVERY_S = 0.3
GRACE_S = 3.0  # without any worker, between two stages say, before nothing more is expected


def logs(
    stage: StageArgument,
    run_name: RunOption = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the stage ends, over attempts.")] = False,
    number: Annotated[int | None, typer.Option("--attempt", min=1, help="The last one if absent.")] = None,
    workspace: WorkspaceOption = HERE,
) -> None:
    """Print what a stage's worker wrote."""
    from opdctl.errors import ConfigError

    run = find_run(workspace, run_name)
    found = find_stage(run, stage)
    attempts = found.attempts()
    chosen = [attempt for attempt in attempts if number in (None, attempt.number)][-1:]
    if number is not None and not chosen:
        known = ", ".join(str(attempt.number) for attempt in attempts) or "none"
        raise ConfigError(f"stage {stage} of run {run.name} has no attempt {number}", hint=f"attempts: {known}")
    if not chosen and not (follow and busy(run)):
        reused = found.reference()
        hint = f"it reuses a checkpoint: opdctl logs '{reused.name}' --run {reused.run}" if reused else ""
        raise ConfigError(f"stage {stage} of run {run.name} was not started, so it has no log", hint=hint)
    if follow:
        _follow(run, found, number or (chosen[0].number if chosen else 1), only=number is not None)
    else:
        _print_from(chosen[0], 0)


def _follow(run: "RunDir", stage: "StageDir", first: int, *, only: bool) -> None:
    """The log of attempt `first` as it grows, then later ones (unless `only`), until nothing more is to come."""
    shown: dict[int, int] = {}  # attempt -> bytes printed
    quiet_since = time.monotonic()
    while True:
        attempts = [a for a in stage.attempts() if a.number == first or (a.number > first and not only)]
        works = any(attempt.lives() for attempt in attempts)  # asked before the look at the log: nothing is missed
        for attempt in attempts:
            shown[attempt.number] = _print_from(attempt, shown.get(attempt.number, 0))
        if works or (busy(run) and not only and stage.record() is None):
            quiet_since = time.monotonic()
        elif only or stage.record() is not None or time.monotonic() - quiet_since > GRACE_S:
            return
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
