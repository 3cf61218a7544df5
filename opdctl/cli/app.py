"""The commands by name, and the boundary where errors become messages and exit codes.

0 done; 1 a stage failed or was refused; 2 the configuration or the command line is wrong; 3 a bug; 130 interrupted.
"""

import contextlib
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from opdctl.cli import carry_out, check, compare, data, fetch, inspect, keep, logs, repair, surroundings
from opdctl.cli.options import Invocation

if TYPE_CHECKING:
    from opdctl.errors import OpdctlError

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
    from opdctl.errors import ConfigError, OpdctlError
    from opdctl.records import disk_errors

    _settle_streams()
    given = sys.argv[1:] if arguments is None else list(arguments)
    invocation = Invocation(json="--json" in given)  # looked for here: what cannot be parsed is answered in JSON too
    try:
        with disk_errors(Path("the output")):
            code = app(args=given, obj=invocation, prog_name="opdctl", standalone_mode=False)
            sys.stdout.flush()  # a disk without space shows itself here
    except OpdctlError as error:
        _end(error.exit_code, *_tellers(error, invocation.json))
    except BrokenPipeError:
        _end(1)
    except KeyboardInterrupt:
        _end(130)
    except _USAGE as error:
        told = ConfigError(error.format_message(), hint=_help_of(error))
        _end(error.exit_code, error.show, *_tellers(told, invocation.json)[1:])
    except Exception:  # the boundary: what nobody foresaw is a bug, and is kept for its report
        kept = _keep_traceback(invocation.workspace, traceback.format_exc())
        where = str(kept or "no file, for none can be written: it stands above")
        document = json.dumps({"error": "unexpected error", "exit_code": 3, "traceback": where})
        says = [lambda: typer.echo(f"opdctl: unexpected error, a bug: the traceback is in {where}", err=True)]
        _end(3, *says, *([lambda: typer.echo(document)] if invocation.json else []))
    _end(code if isinstance(code, int) else 0)


# `UsageError`, of click in older versions of typer, and of typer itself in newer ones
_USAGE: type[typer.BadParameter] = typer.BadParameter.__bases__[0]


def _help_of(error: typer.BadParameter) -> str:
    return f"{error.ctx.command_path if error.ctx else 'opdctl'} --help"


def _tellers(error: "OpdctlError", as_json: bool) -> list[Callable[[], None]]:
    """What says the error to people, and if it was asked for, to programs."""
    from opdctl.console import error_data, print_error, print_json

    people: Callable[[], None] = partial(print_error, error)
    return [people, partial(print_json, error_data(error))] if as_json else [people]


def _end(code: int, *says: Callable[[], None]) -> NoReturn:
    """Exit after saying what the streams take: one that is full or closed must not change the exit code."""
    for say in says:
        with contextlib.suppress(OSError):
            say()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # what is left in it would fail again while Python ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    raise SystemExit(code) from None


def _settle_streams() -> None:
    """Output that was closed goes nowhere, and letters that its encoding lacks are written as codes."""
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115  # lives as long as the process
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115  # the same
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _keep_traceback(workspace: Path, text: str) -> Path | None:
    """Beside the runs if there are any, else in the temporary folder; told on stderr where neither can be written."""
    from opdctl import __version__, secrets

    name = f"crash-{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}.txt"
    command = " ".join(secrets.command_line())
    told = f"opdctl {__version__}, Python {sys.version}\n{command}\n\n{secrets.redact(text)}"
    for folder in (workspace / "runs", Path(tempfile.gettempdir())):
        path = folder / name
        try:
            path.write_text(told, encoding="utf-8", errors="backslashreplace")
        except OSError:
            with contextlib.suppress(OSError):  # half of it helps nobody
                path.unlink()
        else:
            return path
    with contextlib.suppress(OSError):
        typer.echo(told, err=True)
    return None
