"""`run`, `plan`, `validate`: from a pipeline file to finished stages."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from json import loads as parse
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from opdctl.cli.inspect import record_notes
from opdctl.cli.options import (
    HERE,
    AcceptOption,
    JsonOption,
    OnlyOption,
    OverridesArgument,
    PipelineArgument,
    RerunOption,
    RunOption,
    WorkspaceOption,
)

if TYPE_CHECKING:
    from opdctl.console.live import Failure
    from opdctl.console.tables import StageLine
    from opdctl.plan import Plan, PlannedStage
    from opdctl.runner import Outcome


def run(
    pipeline: PipelineArgument,
    overrides: OverridesArgument = None,
    run_name: RunOption = None,
    rerun: RerunOption = None,
    only: OnlyOption = None,
    accept: AcceptOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done and do nothing.")] = False,
    json: JsonOption = False,
    workspace: WorkspaceOption = HERE,
) -> None:
    """Carry a pipeline out. Run it again to resume: what is finished is reused, what is half-trained goes on.

    The first Ctrl-C finishes the steps in progress and saves; the second stops at once.
    """
    planned = make(pipeline, overrides, run_name, rerun, only, accept, workspace)
    if dry_run:
        _show_plan(planned, {}, json)
        return
    from opdctl.console import make_console
    from opdctl.console.live import progress_display
    from opdctl.runner import execute
    from opdctl.secrets import command_line

    with progress_display({item.stage.name: item.stage.settings.kind for item in planned.stages}) as display:
        outcome = execute(planned, reporter=display)
    _show_outcome(planned, outcome, json)
    _show_failures(display.failures)
    if outcome.interrupted or outcome.failed:
        again = ["opdctl", "run", pipeline, *(overrides or ()), "--run", planned.run.name]
        again += [part for stage in only or () for part in ("--only", stage)]
        again += [part for name in accept or () for part in ("--accept", name)]
        again += ["--workspace", str(workspace)] if workspace != Path.cwd() else []
        again = command_line(again)
        lead = "interrupted, the state is saved; " if outcome.interrupted else ""
        make_console(stderr=True).print(f"{lead}to go on from here: {shlex.join(again)}", soft_wrap=True)
        raise typer.Exit(130 if outcome.interrupted else 1)


def plan(
    pipeline: PipelineArgument,
    overrides: OverridesArgument = None,
    run_name: RunOption = None,
    rerun: RerunOption = None,
    only: OnlyOption = None,
    accept: AcceptOption = None,
    commands: Annotated[
        bool, typer.Option("--commands", help="Also show, and have checked, the commands that start verl's trainers.")
    ] = False,
    json: JsonOption = False,
    workspace: WorkspaceOption = HERE,
) -> None:
    """Show the stages of a pipeline, what a run would do with each and why, and the losses. Changes nothing."""
    planned = make(pipeline, overrides, run_name, rerun, only, accept, workspace)
    _show_plan(planned, _commands(planned) if commands else {}, json)


def validate(
    pipeline: PipelineArgument,
    overrides: OverridesArgument = None,
    json: JsonOption = False,
    workspace: WorkspaceOption = HERE,
) -> None:
    """Check a pipeline file and the data that it names: every problem at once, by its key."""
    from opdctl.config import load_pipeline
    from opdctl.console import make_console, plural, print_json
    from opdctl.errors import ConfigError
    from opdctl.preflight import check_data

    loaded = load_pipeline(pipeline, overrides or (), workspace=workspace)
    if problems := check_data(loaded, loaded.stages.values()):
        raise ConfigError(problems)
    if json:
        print_json(
            {"valid": True, "pipeline": loaded.settings.name, "source": loaded.source, "stages": [*loaded.stages]}
        )
    else:
        make_console().print(f"{loaded.source}: valid, {plural(len(loaded.stages), 'stage')}", soft_wrap=True)


def make(
    pipeline: str,
    overrides: Sequence[str] | None,
    run_name: str | None,
    rerun: Sequence[str] | None,
    only: Sequence[str] | None,
    accept: Sequence[str] | None,
    workspace: Path,
) -> "Plan":
    """The plan that the arguments of a command ask for."""
    from opdctl.config import load_pipeline
    from opdctl.plan import make_plan
    from opdctl.store import Workspace

    loaded = load_pipeline(pipeline, overrides or (), workspace=workspace)
    directory = Workspace(workspace).run(run_name or loaded.settings.name)
    planned = make_plan(loaded, directory, only=only or (), rerun=rerun or ())
    return replace(planned, accept=tuple(accept or ()))


def _commands(planned: "Plan") -> dict[str, str]:
    """Stage -> command line, of the stages that have one; all are checked first."""
    from opdctl.errors import ConfigError
    from opdctl.launch import Launcher

    launcher = Launcher(planned, planned.stages, lambda text: None, fetch=False)
    if problems := launcher.check():
        raise ConfigError(problems)
    return {stage: text for stage, text in launcher.commands().items() if text}


def _show_plan(planned: "Plan", commands: Mapping[str, str], json: bool) -> None:
    from opdctl.console import make_console, print_json
    from opdctl.console.plan import plan_data, plan_view
    from opdctl.plan import Decision

    if json:
        print_json(plan_data(planned) | ({"commands": commands} if commands else {}))
    else:
        make_console().print(plan_view(planned))
        for stage, text in commands.items():  # as it is: Rich would fold lines that are to be pasted
            typer.echo(f"\n# {stage}\n{text}")
    if any(item.decision is Decision.REFUSED for item in planned.stages):
        raise typer.Exit(1)


def _show_outcome(planned: "Plan", outcome: "Outcome", json: bool) -> None:
    from opdctl.console import make_console, print_json
    from opdctl.console.fusion import report_view
    from opdctl.console.tables import stages_data, stages_table

    lines = [_line(item, planned, outcome) for item in planned.stages]
    reports = {item.stage.name: _report(item, planned) for item in planned.stages if _reports(item, outcome)}
    if json:
        print_json(
            {
                "pipeline": planned.pipeline.settings.name,
                "run": planned.run.name,
                "interrupted": outcome.interrupted,
                "failed": dict(outcome.failed),
                "stages": stages_data(lines),
                "evaluations": reports,
            }
        )
    else:
        console = make_console()
        console.print(stages_table(lines))
        for stage, report in reports.items():
            console.print("", report_view(stage, report))


def _show_failures(failures: "Sequence[Failure]") -> None:
    """What failed and the end of its log, on stderr."""
    from rich.text import Text

    from opdctl.console import make_console

    console = make_console(stderr=True)
    for failure in failures:
        console.print(Text(f"\n{failure.stage} failed: {failure.message}", style="bold red"), soft_wrap=True)
        if failure.log_tail:
            console.print(Text("\n".join(f"  {line}" for line in failure.log_tail.splitlines())), soft_wrap=True)


def _line(item: "PlannedStage", planned: "Plan", outcome: "Outcome") -> "StageLine":
    from opdctl.console.tables import StageLine
    from opdctl.plan import Decision

    name, kind, stage = item.stage.name, item.stage.settings.kind, planned.run.stage(item.stage.name)
    record = stage.record() if name in outcome.done else None
    if record is not None:
        state = "reused" if item.decision is Decision.REUSE else "done"
        done = StageLine(name, kind, state, record.step, record.step, record.seconds, record.metrics)
        note = record_notes(stage, item.stage.settings.gates, record)
        return replace(done, checkpoint=str(stage.checkpoint), note=note)
    if name in outcome.failed:
        return StageLine(name, kind, "failed", stage.state_step() or 0, item.total_steps)
    if item.decision is Decision.SKIPPED:
        return StageLine(name, kind, "skipped", note=item.reason)
    step = stage.state_step() or 0
    state = "half-trained" if step else "not run"
    return StageLine(name, kind, state, step, item.total_steps, note=outcome.not_run.get(name, ""))


def _reports(item: "PlannedStage", outcome: "Outcome") -> bool:
    """Has it a report of the models of this run? What an eval stage published of earlier ones would mislead."""
    return item.stage.settings.kind == "eval" and item.stage.name in outcome.done


def _report(item: "PlannedStage", planned: "Plan") -> Mapping[str, Any]:
    report: dict[str, Any] = parse((planned.run.stage(item.stage.name).checkpoint / "report.json").read_text())
    return report
