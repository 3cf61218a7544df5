"""What `opdctl repair` found and did, and the same as plain data for `--json`."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from opdctl.console import plural
from opdctl.repair import Found

MARKS = {"mended": ("✓", "green"), "would mend": ("?", "cyan"), "skipped": ("-", "dim"), "left": ("✗", "bold red")}


def repair_view(found: Sequence[Found], looked: int) -> RenderableType:
    """One entry a thing that was found, then the sum. `looked`: runs that were looked into."""
    lines: list[RenderableType] = []
    for one in found:
        mark, style = MARKS[one.state]
        where = " ".join(part for part in (one.run, one.stage) if part) or "workspace"
        lines.append(Text.assemble((mark, style), " ", (where, "bold"), f": {one.what}\n    {one.told}"))
    counted = {state: sum(one.state == state for one in found) for state in MARKS}
    parts = [f"{count} {state}" for state, count in counted.items() if count]
    lines.append(Text(f"{plural(looked, 'run')}: {', '.join(parts) or 'nothing to mend'}"))
    return Group(*lines)


def repair_data(found: Sequence[Found], looked: int) -> dict[str, Any]:
    return {
        "runs": looked,
        "ok": not any(one.state == "left" for one in found),
        "found": [asdict(one) for one in found],
    }
