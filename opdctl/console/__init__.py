"""What opdctl shows: Rich renderables, and the same facts as plain data for `--json`.

Nothing here reads the disk or decides anything. Results go to stdout, progress and errors to stderr.
"""

import json
import math
import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from opdctl.errors import ConfigError, OpdctlError
from opdctl.secrets import redact

PIPE_WIDTH = 100  # columns where nobody says how wide the reader is; COLUMNS overrides


def make_console(*, stderr: bool = False) -> Console:
    """A console on stdout or stderr: colour on terminals only, unless FORCE_COLOR is set; NO_COLOR wins."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else PIPE_WIDTH
    return Console(file=stream, highlight=False, emoji=False, markup=False, width=width)


def is_live(stream: Any) -> bool:
    """May a display be redrawn in place on this stream? FORCE_COLOR makes a pipe colourful, not redrawable."""
    return bool(stream.isatty()) and os.environ.get("TERM") != "dumb"


def print_json(value: Any) -> None:
    """One JSON document on stdout, in strict JSON: a number that is not finite becomes null."""
    unicode = (sys.stdout.encoding or "").lower() in ("utf-8", "utf8")
    sys.stdout.write(
        json.dumps(_strict(value), indent=2, default=str, ensure_ascii=not unicode, allow_nan=False) + "\n"
    )


def _strict(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_strict(item) for item in value]
    return value


def print_error(error: OpdctlError) -> None:
    """Message in red, one line a problem, then the hint."""
    console = make_console(stderr=True)
    problems = _problems(error)
    heading = "error: " if len(problems) == 1 else f"{len(problems)} errors:\n"
    lines = Text(heading, style="bold red")
    lines.append("\n".join(problems if len(problems) == 1 else [f"  {problem}" for problem in problems]), style="red")
    console.print(lines, soft_wrap=True)
    if error.hint:
        console.print(Text.assemble(("hint: ", "bold"), redact(error.hint)), soft_wrap=True)


def error_data(error: OpdctlError) -> dict[str, Any]:
    told = {"error": redact(str(error)), "problems": _problems(error), "hint": redact(error.hint)}
    return told | {"exit_code": error.exit_code}


def _problems(error: OpdctlError) -> list[str]:
    return [redact(text) for text in (error.problems if isinstance(error, ConfigError) else [str(error)])]


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def join(parts: Iterable[str], separator: str = ", ") -> str:
    return separator.join(part for part in parts if part)
