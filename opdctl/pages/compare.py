"""`opdctl compare --html`: the contest of each block, cell by cell, with cost and training curves."""

from collections.abc import Callable, Iterator, Sequence

from opdctl.comparison import COSTS, HEALTH, Block, Comparison, Row, Student, Value
from opdctl.console import plural
from opdctl.console.compare import side
from opdctl.console.fusion import TITLES
from opdctl.console.metrics import amount
from opdctl.pages.charts import Point, curves, dots, scatter, smoothed
from opdctl.pages.page import Cell, Html, bullets, folded, heading, legend, page, paragraph, table

CURVES = {
    "reverse_kl": "reverse KL to the teacher, per token",
    "overlap": "overlap of the top tokens with the teacher's",
    "student_entropy": "entropy of the student",
    "teacher_entropy": "entropy of the teacher on the same tokens",
    "entropy": "entropy",
    "length": "length of the completions, tokens",
    "accuracy": "training accuracy",
    "turns": "turns of an episode",
    "valid_calls": "valid calls of tools, share",
}


def comparison_page(comparison: Comparison) -> str:
    """One self-contained document."""
    title = "Comparison of " + " and ".join(dict.fromkeys(block.name for block in comparison.blocks))
    parts: list[str] = [heading(1, title), paragraph(INTRODUCTION, "dim"), bullets(comparison.notes)]
    for block in comparison.blocks:
        parts += block_parts(block)
    return page(title, parts)


INTRODUCTION = (
    "before: the model that the students started from. teacher: the one that a cell is routed to. best: the best of "
    "all teachers in the cell, chosen on these very answers and so a little too high. Differences are in percentage "
    "points, coloured where their interval excludes 0."
)


def block_parts(block: Block) -> Iterator[Html]:
    counts = f"{plural(len(block.students), 'student')}, {plural(len(block.cells), 'cell')}"
    seeds = f"{plural(len(block.seeds), 'seed')} ({', '.join(map(str, block.seeds))})"
    colours = {student.label: at for at, student in enumerate(block.students)}
    yield heading(2, f"{block.name}: {block.stage}")
    yield paragraph(f"{counts}, {seeds}", "dim")
    yield legend(list(colours))
    for metric, title in TITLES.items():
        scored = [student for student in block.students if metric in student.scores]
        if scored:
            yield from _scores(scored, metric, title, colours)
    yield from _episodes(block.students)
    yield from _costs(block.students)
    yield from _health(block.students, colours)


def _scores(students: Sequence[Student], metric: str, title: str, colours: dict[str, int]) -> Iterator[Html]:
    yield heading(3, f"{title[0].upper()}{title[1:]}, %: mean over the cells")
    titles = [
        "student",
        "before",
        "teacher",
        "best",
        "after",
        "- before",
        "- teacher",
        "- best",
        folded("normalised score"),
    ]
    yield table(
        [*titles, folded("recovery of the mean"), "length"], [_mean_line(student, metric) for student in students]
    )
    yield _charts(students, metric, colours)
    yield heading(3, f"{title[0].upper()}{title[1:]}, %: cell by cell")
    yield paragraph("After, then after - teacher, or after - before where there are no teachers.", "dim")
    names = [Cell(student.label) for student in students]
    yield table(["cell", "before", "teacher", "best", *names], _lines(students, metric), mean_last=True)
    if any(row.recovery for student in students for row in student.scores[metric].rows):
        yield heading(3, f"Recovery rate, {title}")
        yield paragraph("(after - before) / (teacher - before); -: the teacher scored as the student before.", "dim")
        rows = _by_cell(students, metric, lambda row: _ratio(row.recovery))
        yield table(["cell", *names], rows, mean_last=True)


def _mean_line(student: Student, metric: str) -> list[str | Cell]:
    scores = student.scores[metric]
    mean = scores.mean
    levels = [_percent(value) for value in (mean.before, mean.teacher, mean.best, mean.after)]
    gaps = [_gap(value) for value in (mean.gain, mean.delta, mean.delta_best)]
    length = Cell(f"{student.length.value:.2f}", side(student.length, 1, 2))
    return [student.label, *levels, *gaps, _ratio(scores.normalised, 3), _ratio(mean.recovery), length]


def _lines(students: Sequence[Student], metric: str) -> Iterator[list[str | Cell]]:
    """Of the table cell by cell; labels of teachers are told where the pointer rests."""
    for rows in zip(*([*s.scores[metric].rows, s.scores[metric].mean] for s in students), strict=True):
        first = rows[0]
        teachers = [(first.teacher, first.teacher_label), (first.best, first.best_label)]
        known = [_percent(first.before), *(_percent(value, label) for value, label in teachers)]
        yield [first.cell, *known, *(_after(row) for row in rows)]


def _by_cell(students: Sequence[Student], metric: str, read: Callable[[Row], Cell]) -> Iterator[list[str | Cell]]:
    for rows in zip(*([*s.scores[metric].rows, s.scores[metric].mean] for s in students), strict=True):
        yield [rows[0].cell, *map(read, rows)]


def _charts(students: Sequence[Student], metric: str, colours: dict[str, int]) -> Html:
    means = {student.label: _point(student.scores[metric].mean.after, 100) for student in students}
    mean = students[0].scores[metric].mean
    marks = [value.value * 100 for value in (mean.before, mean.teacher) if value is not None]
    told = " (lines: before, teacher)" if len(marks) == 2 else ""
    drawn = [dots(f"mean over the cells, %{told}", means, colours, marks)]
    normalised = {s.label: _point(found) for s in students if (found := s.scores[metric].normalised) is not None}
    if normalised:
        drawn.append(dots("normalised score (0: before, 1: teachers)", normalised, colours, (0.0, 1.0)))
    for name in ("sampled_tokens", "all_cpu_seconds"):
        spent = {s.label: (cost.value, means[s.label]) for s in students if (cost := s.cost.get(name)) is not None}
        if spent:
            drawn.append(scatter("score beside cost", spent, colours, COSTS[name]))
    return Html(f'<div class="charts">{"".join(drawn)}</div>')


def _episodes(students: Sequence[Student]) -> Iterator[Html]:
    cells = dict.fromkeys(cell for student in students for cell in student.episodes)
    if not cells:
        return
    yield heading(3, "Turns of an episode, and valid calls of tools, %")
    rows: list[list[str | Cell]] = []
    for cell in cells:
        played = [student.episodes.get(cell) for student in students]
        shown = [f"{of['turns']:.2f}, {of['valid_calls'] * 100:.1f}" if of else "-" for of in played]
        rows.append([cell, *shown])
    yield table(["cell", *(Cell(student.label) for student in students)], rows)


def _costs(students: Sequence[Student]) -> Iterator[Html]:
    shown = [name for name in COSTS if "gpu" not in name or any(student.cost.get(name) for student in students)]
    yield heading(3, "Cost")
    yield paragraph("-: a stage's backend does not tell it, or there is none, as for a merge.", "dim")
    rows: list[list[str | Cell]] = [
        [student.label, student.kind, *(_amount(student.cost.get(name)) for name in shown)] for student in students
    ]
    yield table(["student", "kind", *(folded(COSTS[name], 10) for name in shown)], rows)


def _health(students: Sequence[Student], colours: dict[str, int]) -> Iterator[Html]:
    drawn: list[Html] = []
    for name in HEALTH:
        series = {
            student.label: [smoothed(curve) for curve in found.curves.values()]
            for student in students
            if (found := student.health.get(name)) is not None
        }
        if series:
            drawn.append(curves(CURVES[name], series, colours))
    if drawn:
        yield heading(3, "Training")
        yield paragraph(
            "By optimizer step, averaged over a moving tenth of the steps; faint lines are single seeds.", "dim"
        )
        yield Html(f'<div class="charts">{"".join(drawn)}</div>')


def _point(value: Value, scale: float = 1.0) -> Point:
    ends = [None if end is None else end * scale for end in (value.low, value.high)]
    return Point(value.value * scale, *ends)


def _percent(value: Value | None, title: str = "") -> Cell:
    return Cell("-") if value is None else Cell(f"{value.value * 100:.1f}", title=title)


def _gap(value: Value | None) -> Cell:
    if value is None:
        return Cell("-")
    return Cell(f"{value.value * 100:+z.1f}", side(value, 100, 1), _verdict(value))


def _after(row: Row) -> Cell:
    gap = row.delta or row.gain
    if gap is None:
        return _percent(row.after)
    note = f"{gap.value * 100:+z.1f} {side(gap, 100, 1)}"
    return Cell(f"{row.after.value * 100:.1f}", note, _verdict(gap))


def _verdict(value: Value) -> str:
    return {1: "good", -1: "bad", 0: ""}[value.sign]


def _ratio(value: Value | None, digits: int = 2) -> Cell:
    return Cell("-") if value is None else Cell(f"{value.value:z.{digits}f}", side(value, 1, digits), title=_of(value))


def _amount(value: Value | None) -> Cell:
    return Cell("-") if value is None else Cell(amount(value.value), title=_of(value))


def _of(value: Value) -> str:
    return f"of {plural(value.seeds, 'seed')}"
