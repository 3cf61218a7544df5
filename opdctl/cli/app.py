"""The commands by name, and the boundary where errors become messages and exit codes.

0 done; 1 a stage failed or was refused; 2 the configuration or the command line is wrong; 3 a bug; 130 interrupted.
"""

import os
import sys
import tempfile
import traceback
from collections.abc import Sequence
from datetime import datetime
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated

import typer

from opdctl.cli import carry_out, check, compare, data, fetch, inspect, keep, logs, repair, surroundings
from opdctl.cli.options import Invocation

app = typer.Typer(
    name="opdctl",
    help="LLM post-training recipes as one file: SFT, RLVR specialists, on-policy distillation, evaluation.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # importing Rich for a help text would cost more than all the rest
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(value: bool) -> None:
    if value:
        from opdctl import __version__

        typer.echo(f"opdctl {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """LLM post-training recipes as one file: SFT, RLVR specialists, on-policy distillation, evaluation."""


for _command in (
    carry_out.run,
    carry_out.plan,
    carry_out.validate,
    check.check,
    inspect.status,
    logs.logs,
    inspect.lineage,
    inspect.runs,
    compare.compare,
    compare.report,
    repair.repair,
    keep.gc,
    keep.verify,
    keep.pin,
    keep.unpin,
    surroundings.init,
    surroundings.export,
    surroundings.ui,
    surroundings.doctor,
):
    app.command()(_command)
app.add_typer(data.app, name="data")
app.add_typer(fetch.app, name="model")
data.app.command("fetch")(fetch.fetch_data)
app.command("import")(keep.import_model)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: every error ends here."""
    from opdctl.errors import OpdctlError
    from opdctl.records import disk_errors

    _settle_streams()
    invocation = Invocation()
    try:
        with disk_errors(Path("the output")):
            app(args=None if arguments is None else list(arguments), obj=invocation, prog_name="opdctl")
    except OpdctlError as error:
        from opdctl.console import error_data, print_error, print_json

        print_error(error)
        if invocation.json:
            print_json(error_data(error))
        raise SystemExit(error.exit_code) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except Exception:  # the boundary: what nobody foresaw is a bug, and is kept for its report
        path = _keep_traceback(invocation.workspace, traceback.format_exc())
        typer.echo(f"opdctl: unexpected error, a bug: the traceback is in {path}", err=True)
        if invocation.json:
            typer.echo(f'{{"error": "unexpected error", "exit_code": 3, "traceback": "{path}"}}')
        raise SystemExit(3) from None


def _settle_streams() -> None:
    """Output that was closed goes nowhere, and letters that its encoding lacks are written as codes."""
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115  # lives as long as the process
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115  # the same
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _keep_traceback(workspace: Path, text: str) -> Path:
    """Beside the runs if there are any and they can be written to, else in the temporary folder."""
    from opdctl import __version__, secrets

    runs = workspace / "runs"
    folder = runs if runs.is_dir() and os.access(runs, os.W_OK) else Path(tempfile.gettempdir())
    path = folder / f"crash-{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}.txt"
    command = " ".join(secrets.command_line())
    path.write_text(f"opdctl {__version__}, Python {sys.version}\n{command}\n\n{secrets.redact(text)}")
    return path
