"""`repair`: what a crash left is finished or undone."""

from typing import Annotated

import typer

from opdctl.cli.options import HERE, JsonOption, WorkspaceOption, complete_runs


def repair(
    run: Annotated[
        str | None, typer.Argument(metavar="RUN", help="All runs if absent.", autocompletion=complete_runs)
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done and do nothing.")] = False,
    stop: Annotated[
        bool, typer.Option("--stop", help="End workers that outlived their orchestrator; they save their state first.")
    ] = False,
    json: JsonOption = False,
    workspace: WorkspaceOption = HERE,
) -> None:
    """Finish or undo what a crash left, and tell MLflow what it was not told. Runs that somebody works in are skipped.

    Exit code 1 where something is left that only you can mend: the line says how.
    """
    from opdctl import repair as repairs
    from opdctl.console import make_console, print_json
    from opdctl.console.repair import repair_data, repair_view
    from opdctl.errors import ConfigError
    from opdctl.store import Workspace

    place = Workspace(workspace)
    runs = place.runs()
    if run is not None:
        chosen = place.run(run)
        if not chosen.path.is_dir():
            names = ", ".join(other.name for other in runs) or "none"
            raise ConfigError(f"no run '{run}' in {workspace}", hint=f"runs here: {names}")
        runs = [chosen]
    found = list(repairs.repair(place, runs, dry_run=dry_run, stop=stop))
    if json:
        print_json(repair_data(found, len(runs)))
    else:
        make_console().print(repair_view(found, len(runs)), soft_wrap=True)
    if any(one.state == "left" for one in found):
        raise typer.Exit(1)
