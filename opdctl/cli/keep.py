"""`gc`, `pin`, `unpin`, `verify`, `import`: what a workspace keeps, whether it is whole, what is adopted into it."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from opdctl.cli.options import HERE, JsonOption, RunOption, WorkspaceOption, complete_runs

if TYPE_CHECKING:
    from opdctl.store import StageDir, Workspace

CheckpointArgument = Annotated[
    str,
    typer.Argument(
        metavar="RUN:STAGE|PATH|RECORD", help="A checkpoint: in force, by folder, or by record id. With --run a STAGE."
    ),
]


def gc(
    delete: Annotated[bool, typer.Option("--delete", help="Do it; without, nothing is changed.")] = False,
    runs: Annotated[
        list[str] | None,
        typer.Option("--run", metavar="NAME", help="Of this run only. Repeatable.", autocompletion=complete_runs),
    ] = None,
    json: JsonOption = False,
    workspace: WorkspaceOption = HERE,
) -> None:
    """Say which checkpoints and remains nothing needs, or delete them.

    Replaced checkpoints stay as `retention` of their stage says, and whatever it says: those in force or referred to in
    any run, pinned ones, and all that any of these was made from. Runs at work are left alone.
    """
    from opdctl.cli.inspect import find_run
    from opdctl.console import make_console, print_json
    from opdctl.console.keep import sweep_data, sweep_view
    from opdctl.garbage import collect, survey
    from opdctl.store import Workspace

    names = [find_run(workspace, name).name for name in dict.fromkeys(runs or ())]
    sweep = (collect if delete else survey)(Workspace(workspace), names)
    if json:
        print_json(sweep_data(sweep, deleted=delete))
    else:
        again = " ".join(["opdctl gc --delete", *(f"--run {name}" for name in names)])
        make_console().print(sweep_view(sweep, deleted=delete, again=again))


def verify(
    run: Annotated[
        str | None, typer.Argument(metavar="RUN", help="All runs if absent.", autocompletion=complete_runs)
    ] = None,
    json: JsonOption = False,
    workspace: WorkspaceOption = HERE,
) -> None:
    """Read every checkpoint and compare: digests, records, lineage, links, pins. Exits 1 if anything is wrong."""
    from opdctl.cli.inspect import find_run
    from opdctl.console import make_console, print_json
    from opdctl.console.keep import reading, verified_data, verified_view
    from opdctl.store import Workspace
    from opdctl.verify import Verifier

    verifier = Verifier(Workspace(workspace), None if run is None else [find_run(workspace, run)])
    with reading(verifier.bytes_to_read) as progress:
        found = verifier.verify(progress)
    if json:
        print_json(verified_data(found))
    else:
        make_console().print(verified_view(found, "workspace" if run is None else f"run {run}"), soft_wrap=True)
    if found.problems:
        raise typer.Exit(1)


def pin(
    checkpoint: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN:STAGE|PATH|RECORD",
            help="A checkpoint: in force, by folder, or by record id. With --run a STAGE. If absent, pins are listed.",
        ),
    ] = None,
    run_name: RunOption = None,
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why it has to stay.")] = "",
    json: JsonOption = False,
    workspace: WorkspaceOption = HERE,
) -> None:
    """Pin a checkpoint, so that gc leaves it and all that it was made from; or list what is pinned."""
    from datetime import datetime
    from getpass import getuser

    from opdctl.console import make_console, print_json
    from opdctl.console.keep import pins_data, pins_view
    from opdctl.ledger import Pin
    from opdctl.store import Workspace

    found = Workspace(workspace)
    if checkpoint is not None:
        with found.ledger.steady():
            stage = find_checkpoint(found, checkpoint, run_name)
            since = datetime.now().astimezone().isoformat(timespec="seconds")
            found.ledger.pin(Pin(stage.pinned, stage.run, stage.name, reason, since, getuser()))
    pins = found.ledger.pins()
    if json:
        print_json(pins_data(pins))
    elif pins:
        make_console().print(pins_view(pins))
    else:
        make_console(stderr=True).print(f"nothing is pinned in {workspace}", soft_wrap=True)


def unpin(checkpoint: CheckpointArgument, run_name: RunOption = None, workspace: WorkspaceOption = HERE) -> None:
    """Take a pin away: gc may delete the checkpoint then, if nothing else needs it."""
    from opdctl.console import make_console
    from opdctl.errors import ConfigError
    from opdctl.store import Workspace

    found = Workspace(workspace)
    known = found.ledger.pins()
    stage = None if checkpoint in known else find_checkpoint(found, checkpoint, run_name)
    record_id = checkpoint if stage is None else stage.pinned
    if not found.ledger.unpin(record_id):
        own = [pin.record_id for pin in known.values() if stage and (pin.run, pin.stage) == (stage.run, stage.name)]
        others = f"pinned of {stage.run}:{stage.name} is another checkpoint" if stage and own else ""
        hint = f"{others}: {'; '.join(f'opdctl unpin {one}' for one in own)}" if others else "opdctl pin lists what is"
        raise ConfigError(f"{checkpoint} is not pinned (record {record_id})", hint=hint)
    make_console().print(f"{record_id} is pinned no more", soft_wrap=True)


def find_checkpoint(workspace: "Workspace", text: str, run_name: str | None = None) -> "StageDir":
    """The stage with the checkpoint that a RUN:STAGE, a folder or a record id means; with a run the name of a stage."""
    from opdctl.cli.inspect import at_path, find_run, finished_stage
    from opdctl.errors import ConfigError
    from opdctl.fields import NAME_PATTERN

    if run_name is None and Path(text).expanduser().is_dir():
        return at_path(workspace, Path(text).expanduser().resolve())
    run, colon, stage = (run_name, ":", text) if run_name is not None else text.partition(":")
    if colon:
        found, record = finished_stage(find_run(workspace.path, run), stage)
        return (found.reference() or found).at(record.id)
    if re.fullmatch(NAME_PATTERN, text) and (known := workspace.checkpoint(text)) is not None:
        return known
    raise ConfigError(
        f"'{text}' is no checkpoint of {workspace.path}",
        hint="name RUN:STAGE, a folder with a record.json, or a record id (opdctl lineage --json)",
    )


def import_model(
    folder: Annotated[Path, typer.Argument(metavar="PATH", help="A folder in Hugging Face format, with safetensors.")],
    name: Annotated[str, typer.Option("--as", metavar="NAME", help="What it is called in the workspace.")],
    ref: Annotated[
        str, typer.Option("--from-ref", metavar="TEXT", help="What it is: hf:REPO@COMMIT, an address.")
    ] = "",
    licence: Annotated[str, typer.Option("--licence", metavar="TEXT", help="Its licence, for the record.")] = "",
    link: Annotated[
        bool, typer.Option("--link", help="Hard links instead of copies: for files that nobody changes in place.")
    ] = False,
    json: JsonOption = False,
    workspace: WorkspaceOption = HERE,
) -> None:
    """Adopt a model from outside, with a record of where it came from; pipelines then read it by path:."""
    from opdctl.adopt import adopt
    from opdctl.console import make_console, print_json
    from opdctl.secrets import command_line
    from opdctl.store import Workspace

    source = folder.expanduser()
    found = adopt(Workspace(workspace), source, name, ref=ref, licence=licence, link=link, argv=command_line())
    reference = f"path:{(found.stage.path / 'checkpoint').relative_to(workspace.absolute())}"
    if json:
        told = {"record": found.record.id, "made": found.made, "left_out": list(found.left_out)}
        print_json(told | {"reference": reference, "checkpoint": str(found.stage.checkpoint)})
        return
    state = "imported" if found.made else "there already, and the same"
    left = f"\nnot taken: {', '.join(found.left_out)}" if found.left_out else ""
    make_console().print(
        f"{source}: {state}, record {found.record.id}. In a pipeline: {reference}{left}", soft_wrap=True
    )
