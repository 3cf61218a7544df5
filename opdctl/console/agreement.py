"""A judge beside the rules: what the grader of an eval stage makes of each model's completions. Rates in percent.

Reads the plain data of `report.json` (`opdctl/engine/eval.py`, `grader.py`). In the manner of LongCat-Flash-Thinking's
comparison of verifiers (arXiv 2509.18883), with the rule as what is right.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

Report = Mapping[str, Any]


def has_agreement(report: Report) -> bool:
    return any(cell.get("grader") for cells in report["models"].values() for cell in cells.values())


def agreement_view(report: Report) -> RenderableType:
    """A line for every model and cell that was graded."""
    table = Table.grid(padding=(0, 2))
    titles = ("cell", "model", "agree", "false\naccepts", "false\nrejects", "unparsed", "score")
    for at in range(len(titles)):
        table.add_column(justify="right" if at > 1 else "left", no_wrap=at > 1, overflow="fold", vertical="bottom")
    table.add_row(*(Text(title, style="bold") for title in titles))
    for cell, model, graded in _lines(report):
        unparsed = graded["unparsed"]
        table.add_row(
            cell,
            model,
            _rate(graded["agreement"]),
            _rate(graded["false_accept_rate"]),
            _rate(graded["false_reject_rate"]),
            Text(f"{unparsed / graded['verdicts'] * 100:.1f}", style="yellow" if unparsed else ""),
            f"{graded['score']:.3f}",
        )
    interval = f"± wider side of the {report['confidence'] * 100:g} % interval"
    return Group(Text.assemble(("grader beside the verifier, %", "bold"), (f"   {interval}", "dim")), table)


def _lines(report: Report) -> Iterator[tuple[str, str, Report]]:
    for cell in report["cells"]:
        for model, cells in report["models"].items():
            if cells[cell].get("grader"):
                yield cell, model, cells[cell]["grader"]


def _rate(estimate: Mapping[str, float] | None) -> str:
    """Empty where nothing could be told: no answer was right, or none was wrong."""
    if estimate is None:
        return ""
    value, low, high = (estimate[key] * 100 for key in ("value", "low", "high"))
    return f"{value:.1f}±{max(high - value, value - low):.1f}"
