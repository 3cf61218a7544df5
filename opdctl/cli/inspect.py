"""`status`, `lineage`, `runs`: what the disk says. Nothing here starts, stops or changes anything."""

import shlex
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from opdctl.cli.options import (
    HERE,
    JsonOption,
    RunArgument,
    RunOption,
    WorkspaceOption,
    complete_stages,
)

if TYPE_CHECKING:
    from opdctl.console.tables import RunLine, StageLine
    from opdctl.settings import Gate
    from opdctl.store import Attempt, Record, RunDir, StageDir, Workspace


def status(run: RunArgument = None, json: JsonOption = False, workspace: WorkspaceOption = HERE) -> None:
    """Say how far each stage of a run is."""
    from opdctl.console import make_console, plural, print_json
    from opdctl.console.tables import stages_data, stages_table

    found = find_run(workspace, run)
    lines = stage_lines(found)
    if json:
        print_json({"run": found.name, "busy": found.busy(), "info": dict(found.info), "stages": stages_data(lines)})
        return
    console = make_console()
    over = sum(line.state in ("done", "reused") for line in lines)
    console.print(
        f"run {found.name}: {over} of {plural(len(lines), 'stage')} done{', working' if found.busy() else ''}"
    )
    console.print(stages_table(lines))


def runs(json: JsonOption = False, workspace: WorkspaceOption = HERE) -> None:
    """List the runs of the workspace, the newest first."""
    from opdctl.console import make_console, print_json
    from opdctl.console.tables import runs_table
    from opdctl.store import Workspace

    lines = [_run_line(found) for found in Workspace(workspace).runs()]
    if json:
        print_json({"workspace": str(workspace), "runs": [asdict(line) for line in lines]})
    elif lines:
        make_console().print(runs_table(lines))
    else:
        make_console(stderr=True).print(f"no runs in {workspace}", soft_wrap=True)


def lineage(
    checkpoint: Annotated[
        str | None,
        typer.Argument(
            metavar="CHECKPOINT",
            help="A stage's address or the path of a checkpoint; the last stages of the run if absent.",
            autocompletion=complete_stages,
        ),
    ] = None,
    run_name: RunOption = None,
    json: JsonOption = False,
    mermaid: Annotated[bool, typer.Option("--mermaid", help="A Mermaid flow chart.")] = False,
    workspace: WorkspaceOption = HERE,
) -> None:
    """Show where a checkpoint came from, back to the base model."""
    from opdctl.console import make_console, print_json
    from opdctl.console.lineage import lineage_data, lineage_mermaid, lineage_tree
    from opdctl.lineage import trace
    from opdctl.store import Workspace

    found = Workspace(workspace)
    stages = _roots(found, checkpoint, run_name)
    nodes = trace(found, stages)
    roots = [record.id for stage in stages if (record := stage.record())]
    if json:
        print_json(lineage_data(nodes, roots))
    elif mermaid:
        typer.echo(lineage_mermaid(nodes))
    else:
        for tree in lineage_tree(nodes, roots):
            make_console().print(tree)


def _roots(workspace: "Workspace", checkpoint: str | None, run_name: str | None) -> list["StageDir"]:
    """The stages whose ancestors are asked for, all of them finished."""
    from opdctl.errors import ConfigError

    if checkpoint is not None and Path(checkpoint).expanduser().is_dir():
        return [at_path(workspace, Path(checkpoint).expanduser().resolve())]
    run = find_run(workspace.path, run_name)
    if checkpoint is not None:
        return [finished_stage(run, checkpoint)[0]]
    finished = {stage.name: record for stage in run.stages() if (record := stage.record())}
    read = {parent.record_id for record in finished.values() for parent in record.parents}
    last = [run.stage(name) for name, record in finished.items() if record.id not in read]
    if not last:
        raise ConfigError(f"no stage of run {run.name} has finished yet", hint=f"opdctl status {run.name}")
    return last


def at_path(workspace: "Workspace", path: Path) -> "StageDir":
    """The stage that published the checkpoint in a folder of this workspace."""
    from opdctl.errors import ConfigError
    from opdctl.records import read_record

    record = read_record(path)
    if isinstance(record, str):
        hint = "name a stage, or a folder such as runs/RUN/stages/sft/checkpoint"
        raise ConfigError(f"{path} is not a checkpoint of opdctl: {record}", hint=hint)
    stage = workspace.checkpoint(record.id)
    if stage is None:
        raise ConfigError(f"{path} belongs to another workspace", hint="name that one with --workspace")
    return stage


def find_run(workspace: Path, name: str | None) -> "RunDir":
    """The run of that name, or the newest; refused where there is none."""
    from difflib import get_close_matches

    from opdctl.errors import ConfigError
    from opdctl.store import Workspace

    found = Workspace(workspace)
    known = found.runs()
    if name is None:
        if not known:
            raise ConfigError(f"no runs in {workspace}", hint="start one: opdctl run PIPELINE; or give --workspace")
        return known[0]
    run = found.run(name)
    if not run.path.is_dir():
        names = [other.name for other in known]
        close = get_close_matches(name, names, n=1)
        hint = f"did you mean {close[0]}?" if close else f"runs here: {', '.join(names) or 'none'}"
        raise ConfigError(f"no run '{name}' in {workspace}", hint=hint)
    if run.damaged:
        hint = f"the command that made it writes it anew: opdctl {shlex.join(run.info.get('argv', ['', 'run'])[1:])}"
        raise ConfigError(f"run {name}: pipeline.yaml is damaged", hint=hint)
    return run


def find_stage(run: "RunDir", name: str) -> "StageDir":
    """A stage of the run's pipeline; refused with the near ones if it has none of that name."""
    from difflib import get_close_matches

    from opdctl.errors import ConfigError

    known = stage_kinds(run)
    if name in known:
        return run.stage(name)
    instances = [other for other in known if other.partition("[")[0] == name]
    close = get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f"name one: {', '.join(instances or close or known)}" if known else "the run has not started"
    raise ConfigError(f"run {run.name} has no stage '{name}'", hint=hint)


def finished_stage(run: "RunDir", name: str) -> tuple["StageDir", "Record"]:
    from opdctl.errors import ConfigError

    stage = find_stage(run, name)
    record = stage.record()
    if record is None:
        why = stage.damage() or "it has not finished"
        raise ConfigError(f"stage {name} of run {run.name} has no checkpoint: {why}", hint=f"opdctl status {run.name}")
    return stage, record


def stage_kinds(run: "RunDir") -> dict[str, str]:
    """Stages of the run's pipeline and their kinds, in order."""
    return {name: str(stage.get("kind", "")) for name, stage in run.read_pipeline().get("stages", {}).items()}


def stage_lines(run: "RunDir") -> list["StageLine"]:
    from opdctl.watchdog.history import alarms_of

    stages = run.read_pipeline().get("stages", {})
    lines = [(run.stage(name), kind, stages[name].get("gates")) for name, kind in stage_kinds(run).items()]
    return [
        replace(_stage_line(stage, kind, gates), alarms=[alarm for _, alarm in alarms_of(stage)])
        for stage, kind, gates in lines
    ]


def record_notes(stage: "StageDir", gates: "Sequence[Gate]", record: "Record") -> str:
    """What a finished stage has to say beside its metrics: the model it chose, the checks that were overruled, the
    gates it did not pass."""
    from opdctl.console import join
    from opdctl.gates import broken
    from opdctl.records import SELECTION, read_json

    selection = read_json(stage.checkpoint / SELECTION, "winner") or {}
    told = (f"gate: {found.text} ({found.action})" for found in broken(gates, record.metrics))
    accepted = f"accepted: {', '.join(record.accepted)}" if record.accepted else ""
    return join((f"is {selection['winner']}" if selection else "", accepted, *told), "; ")


def _gates(plain: Any) -> "list[Gate]":
    """As the run's file has them; none where it was damaged."""
    from opdctl.settings import Gate
    from opdctl.validation import validate

    found = [validate(Gate, gate)[0] for gate in plain] if isinstance(plain, list) else []
    return [gate for gate in found if gate is not None]


def _stage_line(stage: "StageDir", kind: str, gates: Any) -> "StageLine":
    """What the files of a stage say, the most telling first."""
    from opdctl.backends.events import EventTail
    from opdctl.console import join
    from opdctl.console.tables import StageLine

    attempts = stage.attempts()
    if attempts and attempts[-1].lives():
        seen = EventTail(attempts[-1].events).read()[-1:]
        step, total, metrics = (seen[0].step, seen[0].total, seen[0].metrics) if seen else (0, 0, {})
        return StageLine(stage.name, kind, "running", step, total, None, metrics, f"attempt {attempts[-1].number}")
    if record := stage.record():
        origin = stage.reference()
        state, note = ("reused", f"from {origin.run}:{origin.name}") if origin else ("done", _since(stage, attempts))
        note = join((note, record_notes(stage, _gates(gates), record)), "; ")
        done = StageLine(stage.name, kind, state, record.step, record.step, record.seconds, record.metrics, note)
        return replace(done, checkpoint=str(stage.checkpoint))
    if damage := stage.damage():
        return StageLine(stage.name, kind, "damaged", note=damage)
    if not attempts:
        return StageLine(stage.name, kind, "not started")
    step = stage.state_step() or 0
    if reason := failure(attempts[-1]):
        return StageLine(stage.name, kind, "failed", step, note=reason)
    return StageLine(stage.name, kind, "half-trained" if step else "stopped", step)


def _since(stage: "StageDir", attempts: Sequence["Attempt"]) -> str:
    """What came of an attempt that is later than the checkpoint in force: one with other settings or inputs."""
    if attempts and (reason := failure(attempts[-1])):
        return f"attempt {attempts[-1].number}, later, failed: {reason}"
    step = stage.state_step()
    return f"attempt {attempts[-1].number}, later, stopped at step {step}" if attempts and step else ""


def failure(attempt: "Attempt") -> str:
    """Why an attempt failed; empty if it was stopped, or killed together with who would have noticed."""
    from opdctl.records import read_json
    from opdctl.supervisor import error_file

    told = read_json(error_file(attempt), "message")
    return str(told["message"]) if told else ""


def _run_line(run: "RunDir") -> "RunLine":
    from opdctl.console.tables import RunLine

    kinds = stage_kinds(run)
    done = sum(run.stage(name).record() is not None for name in kinds)
    info = run.info
    created = str(info.get("created", ""))[:16].replace("T", " ")
    return RunLine(run.name, str(info.get("pipeline", "")), created, done, len(kinds), run.busy(), str(run.path))
