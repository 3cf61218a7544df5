"""The report of an eval stage: every model in every cell, and what distillation made of the teachers.

Reads the plain data of `report.json` (`opdctl/engine/eval.py`, `scores.py`). Rates are shown in percent.
"""

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from opdctl.console.agreement import agreement_view, has_agreement
from opdctl.console.live import short_name

Report = Mapping[str, Any]
WIDE = 110  # columns from which whole intervals are shown
TITLES = {"accuracy": "accuracy", "within": "accuracy within the budget"}


class FusionTable:
    """Student before, routed teacher, each student after, cell by cell: the tables of one metric side by side."""

    def __init__(self, tables: Sequence[Report], normalised: Mapping[str, float]) -> None:
        self.tables = tables
        self.normalised = normalised  # MODEL/METRIC -> score

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        first = self.tables[0]
        wide = options.max_width >= WIDE
        table = grid(["cell", "before", "teacher", *(heading(part["model"]) for part in self.tables)], 2 if wide else 1)
        for rows in zip(*([*part["rows"], part["mean"]] for part in self.tables), strict=True):
            cells = [_percent(rows[0]["before"]["value"]), _percent(rows[0]["teacher"]["value"])]
            style = "bold" if rows[0] is first["mean"] else ""
            table.add_row(Text(rows[0]["cell"]), *cells, *(_after(row, wide) for row in rows), style=style)
        scores = [self.normalised.get(f"{part['model']}/{part['metric']}") for part in self.tables]
        if any(score is not None for score in scores):
            table.add_row("normalised score", "0", "1", *("" if score is None else f"{score:.3f}" for score in scores))
        interval = f"{first['confidence'] * 100:g} % interval"
        spread = f"after - teacher with its {interval}" if wide else f"after - teacher ± wider side of {interval}"
        yield Text.assemble((f"{TITLES[first['metric']]}, %", "bold"), (f"   {spread}", "dim"))
        yield table


def grid(titles: Sequence[str], gap: int = 2) -> Table:
    table = Table.grid(padding=(0, gap))
    for at in range(len(titles)):
        table.add_column(justify="right" if at else "left", no_wrap=at > 0, overflow="fold", vertical="bottom")
    table.add_row(*(Text(title, style="bold") for title in titles))
    return table


def heading(model: str) -> str:
    """`mopd[loss=policy_gradient]` -> `policy_` over `gradient`: the axis value, broken where it may be."""
    short = short_name(model).partition("[")[2].rstrip("]") or model
    return short.replace("_", "_\n", 1) if len(short) > 13 else short


def _after(row: Report, wide: bool) -> Text:
    delta = row["delta"]
    low, high, value = delta["low"] * 100, delta["high"] * 100, delta["value"] * 100
    spread = f"[{low:+5.1f}, {high:+5.1f}]" if wide else f"±{max(high - value, value - low):.1f}"
    style = "green" if low > 0 else "red" if high < 0 else ""
    after = _percent(row["after"]["value"])
    return Text.assemble(after, (f" {value:+5.1f} {spread}" if wide else f" {value:+.1f}{spread}", style))


def _percent(value: float) -> str:
    return f"{value * 100:.1f}"


def report_view(stage: str, report: Report) -> RenderableType:
    """The fusion tables where the stage has before, teachers and after, lengths and episodes; else a line a model. Then
    what a grader made of them."""
    fusion = report["fusion"]
    counts = f"{len(report['models'])} models, {len(report['cells'])} cells"
    parts: list[RenderableType] = [Text.assemble((stage, "bold"), f": {counts}"), ""]
    if floor := {cell: rate for cell, rate in report.get("floor", {}).items() if rate > 0}:
        told = ", ".join(f"{cell} {_percent(rate)}" for cell, rate in floor.items())
        parts[1:] = [Text(f"one and the same answer to all prompts would get, %: {told}", style="dim"), ""]
    graded = ["", agreement_view(report)] if has_agreement(report) else []
    if not fusion:
        return Group(*parts, _models_table(report["models"]), *graded)
    for metric in TITLES:
        if tables := [table for table in fusion if table["metric"] == metric]:
            parts += [FusionTable(tables, report["normalised_score"]), ""]
    parts += [Text("mean length, tokens", style="bold"), _lengths_table(report, fusion)]
    if played := [cell for cell in report["cells"] if _played(report["models"].values(), cell)]:
        parts += ["", Text("turns of an episode, and valid calls of tools, %", style="bold")]
        parts.append(_episodes_table(report, fusion, played))
    return Group(*parts, *graded)


def _models_table(models: Mapping[str, Mapping[str, Report]]) -> RenderableType:
    """Plain means over the cells."""
    table = grid(["model", "accuracy", "within", "length", "truncated"])
    for label, cells in models.items():
        table.add_row(label, *_means(list(cells.values())))
    return table


def _means(cells: Sequence[Report]) -> list[str]:
    def rate(key: str) -> str:
        known = [cell[key] / cell["n"] for cell in cells if cell[key] is not None]
        return _percent(fmean(known)) if known else ""

    return [rate("correct"), rate("within"), f"{fmean(map(_length, cells)):.2f}", rate("truncated")]


def _length(cell: Report) -> float:
    return float(cell["length_mean"])


def _played(models: Iterable[Mapping[str, Report]], cell: str) -> bool:
    return any(cells[cell].get("episodes") for cells in models)


def _episodes_table(report: Report, fusion: Sequence[Report], cells: Sequence[str]) -> RenderableType:
    before, teacher, after = _compared(report, fusion)
    table = grid(["cell", "before", "teacher", *map(heading, after)], 1)
    for cell in cells:
        played = [report["models"][label][cell]["episodes"] for label in (before, teacher[cell], *after)]
        table.add_row(cell, *(f"{own['turns']:.2f} {_percent(own['valid_calls']):>5}" for own in played))
    return table


def _compared(report: Report, fusion: Sequence[Report]) -> tuple[str, Mapping[str, str], Sequence[str]]:
    """The student before, each cell's routed teacher, the students after."""
    (before,) = (label for label, role in report["roles"].items() if role == "before")
    teacher = {row["cell"]: row["teacher_label"] for row in fusion[0]["rows"]}
    return before, teacher, list(dict.fromkeys(table["model"] for table in fusion))


def _lengths_table(report: Report, fusion: Sequence[Report]) -> RenderableType:
    """Rows are effort levels; columns the student before, the routed teachers and each student after."""
    models = report["models"]
    before, teacher, after = _compared(report, fusion)
    levels: dict[str, list[str]] = {}  # cells are TASK.EFFORT, or TASK alone
    for cell in report["cells"]:
        levels.setdefault(cell.rpartition(".")[2] if "." in cell else "all", []).append(cell)
    table = grid(["effort", "before", "teacher", *map(heading, after)])
    for level, cells in levels.items():
        columns = [[models[before][cell] for cell in cells], [models[teacher[cell]][cell] for cell in cells]]
        columns += [[models[model][cell] for cell in cells] for model in after]
        table.add_row(level, *(f"{fmean(map(_length, column)):.2f}" for column in columns))
    return table
