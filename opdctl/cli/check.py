"""`check`: the gate alone. May the stages of a pipeline start?"""

import sys
from collections.abc import Mapping
from contextlib import chdir, redirect_stdout
from typing import TYPE_CHECKING, Annotated

import typer

from opdctl.cli.carry_out import make
from opdctl.cli.options import (
    HERE,
    AcceptOption,
    JsonOption,
    OnlyOption,
    OverridesArgument,
    PipelineArgument,
    RunOption,
    WorkspaceOption,
)

if TYPE_CHECKING:
    from opdctl.launch import Launcher
    from opdctl.plan import PlannedStage
    from opdctl.verdicts import Verdict


class _Quiet:
    """Stands where a worker's surroundings would be: nothing is written, Ctrl-C ends the command."""

    def stop_requested(self) -> bool:
        return False

    def emit(self, step: int, total: int, metrics: Mapping[str, float], phase: str = "train") -> None:
        return None


def check(
    pipeline: PipelineArgument,
    overrides: OverridesArgument = None,
    run_name: RunOption = None,
    only: OnlyOption = None,
    accept: AcceptOption = None,
    files_only: Annotated[
        bool, typer.Option("--files-only", help="Ask no model, and download none: files alone.")
    ] = False,
    everything: Annotated[bool, typer.Option("--all", help="Also show, one by one, what is in order.")] = False,
    json: JsonOption = False,
    workspace: WorkspaceOption = HERE,
) -> None:
    """Ask whether the stages may start: models that do not fit together, teachers that cannot teach, data that mislead.

    Files are looked at for all stages, finished ones included, models where all that a stage reads is there. Starts
    nothing. Exits 1 where a check refuses and is not accepted.
    """
    from opdctl.console import make_console, plural, print_json
    from opdctl.console.gate import gate_data, gate_view
    from opdctl.errors import ConfigError
    from opdctl.launch import Launcher
    from opdctl.plan import Decision
    from opdctl.preflight import check_data
    from opdctl.verdicts import way_out

    planned = make(pipeline, overrides, run_name, None, only, accept, workspace)
    items = [item for item in planned.stages if item.decision is not Decision.SKIPPED]
    if problems := check_data(planned.pipeline, [item.stage for item in items]):
        raise ConfigError(problems)
    told = make_console(stderr=True)
    launcher = Launcher(planned, items, lambda text: told.print(text, soft_wrap=True), fetch=not files_only)
    judged = dict(launcher.judge_files())
    waiting = [] if files_only else _ask_models(launcher, items, judged)
    remedy = way_out(verdict for verdicts in judged.values() for verdict in verdicts)
    if json:
        print_json({"pipeline": planned.pipeline.settings.name, "run": planned.run.name} | gate_data(judged))
    else:
        notes = []
        if off := [item.stage.name for item in items if item.stage.name not in judged]:
            notes.append(f"gate.enabled is false: {', '.join(off)}")
        gates = {item.stage.name: item.stage.settings.gate for item in items}
        if alone := [name for name, gate in gates.items() if gate and gate.enabled and not gate.models]:
            notes.append(f"gate.models is false, files alone: {', '.join(alone)}")
        if waiting:
            notes.append(
                f"models not asked: {plural(len(waiting), 'stage')} with inputs still to be made; run asks them then"
            )
        if remedy:
            notes.append(remedy)
        title = f"{planned.pipeline.settings.name}, run {planned.run.name}"
        make_console().print(gate_view(title, judged, notes, everything=everything))
    if remedy:
        raise typer.Exit(1)


def _ask_models(launcher: "Launcher", items: "list[PlannedStage]", judged: "dict[str, list[Verdict]]") -> list[str]:
    """Adds what the models say to what is judged. Returns the stages whose inputs are still to be made."""
    from opdctl.errors import StageRefused
    from opdctl.settings import GateSettings
    from opdctl.verdicts import accept

    waiting = []
    for item in items:
        name, spec = item.stage.name, launcher.draft(item)
        settings = GateSettings.model_validate(spec.gate["settings"]) if spec.gate else None
        if settings is None or not settings.models:
            continue
        if spec.gate["missing"]:
            waiting.append(name)
            continue
        from opdctl.engine.gate import check_models  # seconds: PyTorch

        with redirect_stdout(sys.stderr), chdir(spec.workspace):  # what a verifier of the user's own prints, or imports
            try:
                asked = check_models(spec, settings, _Quiet())
            except StageRefused as error:
                raise StageRefused(f"stages.{name}: {error}", hint=error.hint) from error
        judged[name] = [*judged[name], *accept(asked, settings.accept)]
    return waiting
