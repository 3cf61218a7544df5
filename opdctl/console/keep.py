"""What `gc`, `verify`, `pin` and `import` show, and the same as plain data."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from opdctl.console import is_live, make_console, plural
from opdctl.console.tables import grid
from opdctl.garbage import Found, Sweep
from opdctl.ledger import Pin
from opdctl.verify import Progress as Report
from opdctl.verify import Verified

NOTE = 22  # characters that a reason gets at least: `in force (and 5 more)`
UNITS = ("B", "kB", "MB", "GB", "TB")


def size(count: float) -> str:
    """`512 B`, `1.3 MB`: thousands, as disks count."""
    unit = 0
    while count >= 999.5 and unit < len(UNITS) - 1:
        count, unit = count / 1000, unit + 1
    return f"{count:.0f} {UNITS[unit]}" if unit == 0 or count >= 99.95 else f"{count:.1f} {UNITS[unit]}"


# ------------------------------------------------------------------------------------------------------------- gc


def sweep_view(sweep: Sweep, *, deleted: bool, again: str) -> RenderableType:
    """What goes, what stays and why. `again`: the command that would delete it."""
    parts: list[RenderableType] = []
    if sweep.go:
        parts += [_table("went" if deleted else "goes", sweep.go), ""]
    if sweep.stay:
        parts += [_table("stays", sweep.stay), ""]
    parts += [Text(f"note: {note}", style="yellow") for note in sweep.notes]
    kept = f"{plural(len(sweep.stay), 'checkpoint')} stay"
    if not sweep.go:
        return Group(*parts, Text(f"nothing to delete; {kept}"))
    if deleted:
        return Group(*parts, Text(f"deleted {plural(len(sweep.go), 'item')}: {size(sweep.freed)} freed; {kept}"))
    told = f"{plural(len(sweep.go), 'item')} would go: {size(sweep.freed)} freed; {kept}"
    return Group(*parts, Text(f"{told}\nnothing was deleted: {again}"))


def _table(title: str, found: Sequence[Found]) -> RenderableType:
    table = grid(title, "size", "what", "note", right=("size",))
    table.columns[-1].min_width = NOTE
    table.columns[0].no_wrap, table.columns[0].overflow = False, "fold"  # where it is narrow, a long name gives way
    for item in found:
        place = f"{item.run}:{item.stage}" if item.stage else item.run or str(item.path)
        what = item.path.name if item.what == "checkpoint" else item.what
        more = f" (and {len(item.why) - 1} more)" if len(item.why) > 1 else ""
        table.add_row(place, size(item.size), what, f"{item.why[0]}{more}")
    return table


def sweep_data(sweep: Sweep, *, deleted: bool) -> dict[str, Any]:
    return {
        "deleted": deleted,
        "freed_bytes": sweep.freed,
        "go": [_found_data(item) for item in sweep.go],
        "stay": [_found_data(item) for item in sweep.stay],
        "notes": list(sweep.notes),
    }


def _found_data(item: Found) -> dict[str, Any]:
    return {
        "what": item.what,
        "path": str(item.path),
        "run": item.run,
        "stage": item.stage,
        "record": item.record.id if item.record else None,
        "bytes": item.size,
        "why": list(item.why),
    }


# --------------------------------------------------------------------------------------------------------- verify


@contextmanager
def reading(total: int) -> Iterator[Report]:
    """A bar with the time that is left, on a terminal; nothing elsewhere."""
    console = make_console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not is_live(console.file)) as progress:
        task = progress.add_task("reading", total=total)
        yield lambda name, count: progress.update(task, advance=count, description=name)


def verified_view(found: Verified, checked: str) -> RenderableType:
    lines: list[RenderableType] = []
    for finding in found.findings:
        mark, style = ("✗", "bold red") if finding.problem else ("-", "dim")
        line = Text.assemble((f"{mark} ", style), (finding.subject, "bold"), f"  {finding.told}")
        lines.append(line.append(f"\n  {finding.remedy}", style="dim") if finding.remedy else line)
    told = f"{checked}: {plural(found.checkpoints, 'checkpoint')}, {size(found.bytes_read)} read"
    count = len(found.problems)
    verdict = Text(plural(count, "problem"), style="bold red") if count else Text("all good", style="green")
    return Group(*lines, Text.assemble(f"{told}: ", verdict))


def verified_data(found: Verified) -> dict[str, Any]:
    return {
        "ok": not found.problems,
        "checkpoints": found.checkpoints,
        "bytes_read": found.bytes_read,
        "findings": [asdict(finding) for finding in found.findings],
    }


# ----------------------------------------------------------------------------------------------------------- pins


def pins_view(pins: Mapping[str, Pin]) -> RenderableType:
    table = grid("record", "checkpoint of", "since", "note")
    for pin in pins.values():
        table.add_row(pin.record_id, f"{pin.run}:{pin.stage}", pin.created[:10], pin.reason)
    return table


def pins_data(pins: Mapping[str, Pin]) -> dict[str, Any]:
    return {"pins": [asdict(pin) for pin in pins.values()]}
