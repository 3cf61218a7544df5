"""`compare`, `report`: what came out of runs, for the terminal and as pages. Nothing here changes a run."""

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from opdctl.cli.inspect import find_run, stage_lines
from opdctl.cli.options import HERE, JsonOption, RunArgument, WorkspaceOption, complete_runs


def compare(
    runs: Annotated[
        list[str] | None,
        typer.Argument(metavar="RUN...", help="One or several; the newest if absent.", autocompletion=complete_runs),
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Also write a page with everything, plots included.")
    ] = None,
    metric: Annotated[
        Literal["accuracy", "within"], typer.Option(help="In the terminal: accuracy, or accuracy within the budget.")
    ] = "accuracy",
    json: JsonOption = False,
    workspace: WorkspaceOption = HERE,
) -> None:
    """Hold the students of runs against each other: scores, recovery, cost and training, with intervals.

    Runs that differ in the seed alone are shown as one, with intervals over the seeds.
    """
    from opdctl.comparison import compare as compare_runs
    from opdctl.console import make_console, print_json
    from opdctl.console.compare import comparison_data, comparison_view
    from opdctl.errors import ConfigError

    chosen = [find_run(workspace, name) for name in dict.fromkeys(runs)] if runs else [find_run(workspace, None)]
    found = compare_runs(chosen)
    if not found.blocks:
        raise ConfigError(list(found.notes), hint=f"see how far it is: opdctl status {chosen[0].name}")
    if html is not None:
        from opdctl.pages.compare import comparison_page

        _write(html, comparison_page(found), "--html")
    if json:
        print_json(comparison_data(found))
    else:
        make_console().print(comparison_view(found, metric))


def _write(path: Path, page: str, option: str) -> None:
    from opdctl.console import join, make_console
    from opdctl.errors import OpdctlError
    from opdctl.records import remedy_of, write_text

    path = path.expanduser()
    try:
        if path.is_file() or path.is_dir() or not path.exists():
            write_text(Path(os.path.realpath(path)), page)  # leaves the page that was there, if this one cannot be
        else:  # a pipe, or the terminal
            path.write_text(page, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise OpdctlError(
            f"{option}: cannot write {path}: {error.strerror}",
            hint=join((remedy_of(error), f"name another file: {option} FILE"), "; or "),
        ) from error
    make_console(stderr=True).print(f"wrote {path}", soft_wrap=True)


def report(
    run: RunArgument = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Where to; runs/RUN/report.html if absent.")
    ] = None,
    workspace: WorkspaceOption = HERE,
) -> None:
    """Write a page that tells a run to somebody who was not there: stages, losses, learning, results, cost, lineage."""
    from opdctl.comparison import compare as compare_runs
    from opdctl.pages.report import report_page
    from opdctl.story import tell

    found = find_run(workspace, run)
    page = report_page(tell(found), stage_lines(found), compare_runs([found]))
    _write(out or found.path / "report.html", page, "--out")
