"""Runs side by side in the terminal: scores, cells, recovery rates, costs and training of each block's students."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from opdctl.comparison import Block, Comparison, Row, Student, Value
from opdctl.console import plural
from opdctl.console.fusion import TITLES, grid, heading
from opdctl.console.metrics import amount, number

WIDE = 110  # columns from which costs and health are shown in full
HEALTH = {  # heading -> metrics, of which a student has one
    "reverse KL": ("reverse_kl",),
    "overlap": ("overlap",),
    "entropy": ("student_entropy", "entropy"),
    "length": ("length",),
    "accuracy": ("accuracy",),
}
NARROW_COSTS = {"sampled_tokens": "tokens", "cpu_seconds": "CPU s", "gpu_seconds": "GPU s", "steps_to_95": "to 95 %"}
WIDE_COSTS = {"sampled_completions": "completions", "seconds": "wall s", "steps": "steps", "peak_memory_gib": "GiB"}
ALL_COSTS = {"all_sampled_tokens": "tokens", "all_cpu_seconds": "CPU s", "all_gpu_seconds": "GPU s"}


def comparison_view(comparison: Comparison, metric: str) -> RenderableType:
    """Every block in turn, then what is not comparable and what the intervals are."""
    parts: list[RenderableType] = []
    for block in comparison.blocks:
        parts += [_title(block), "", *_block(block, metric)]
    return Group(*parts, *(Text(note, style="dim") for note in comparison.notes))


def comparison_data(comparison: Comparison) -> dict[str, Any]:
    """`blocks` and `notes`: the fields of `opdctl.comparison.Comparison`."""
    return asdict(comparison)


def _title(block: Block) -> Text:
    counts = ", ".join(
        plural(len(found), noun)
        for found, noun in ((block.students, "student"), (block.cells, "cell"), (block.seeds, "seed"))
    )
    return Text.assemble((block.name, "bold"), f", {block.stage}: {counts}")


def _block(block: Block, metric: str) -> Iterator[RenderableType]:
    scored = [student for student in block.students if metric in student.scores]
    if not scored:
        yield Text(f"no {TITLES[metric]} in this evaluation\n", style="yellow")
        return
    yield _Means(scored, metric)
    yield ""
    yield _Cells(f"{TITLES[metric]}, %   after, and after - teacher", scored, metric, _after, before=True)
    yield ""
    if any(row.recovery for student in scored for row in student.scores[metric].rows):
        what = "recovery rate, (after - before) / (teacher - before)"
        yield _Cells(what, scored, metric, lambda row: Text(_ratio(row.recovery)), before=False)
        yield ""
    yield _Costs(block.students)
    yield ""
    if any(student.health for student in block.students):
        yield _Health(block.students)
        yield ""


class _Means:
    """The contest: a line a student."""

    def __init__(self, students: Sequence[Student], metric: str) -> None:
        self.students, self.metric = students, metric

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide = options.max_width >= WIDE
        titles = ["student", "before", "teacher", "after", *(["- before"] if wide else []), "- teacher"]
        table = grid([*titles, *(["- best"] if wide else []), "normalised", "length"], 1)
        for student in self.students:
            scores = student.scores[self.metric]
            mean = scores.mean
            cells = [_percent(mean.before), _percent(mean.teacher), _percent(mean.after)]
            cells += [_signed(mean.gain)] if wide else []
            cells += [_signed(mean.delta), *([_signed(mean.delta_best)] if wide else [])]
            table.add_row(student.label, *cells, _ratio(scores.normalised), f"{student.length.value:.2f}")
        yield Text.assemble((f"{TITLES[self.metric]}, %: mean over the cells", "bold"))
        yield table


class _Cells:
    """A line a cell, a column a student, in as many tables as the width asks for."""

    def __init__(
        self, title: str, students: Sequence[Student], metric: str, read: Callable[[Row], Text], *, before: bool
    ) -> None:
        self.title, self.students, self.metric, self.read, self.before = title, students, metric, read, before

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        rows = {s.label: [*s.scores[self.metric].rows, s.scores[self.metric].mean] for s in self.students}
        titles = headings([student.label for student in self.students])
        cells = {label: [self.read(row) for row in rows[label]] for label in rows}
        fixed = max(len(row.cell) for row in next(iter(rows.values()))) + (16 if self.before else 1)
        yield Text(self.title, style="bold")
        waiting = list(rows)
        while waiting:
            taken: list[str] = []
            room = options.max_width - fixed
            while waiting and (not taken or room >= self._width(titles[waiting[0]], cells[waiting[0]])):
                room -= self._width(titles[waiting[0]], cells[waiting[0]])
                taken.append(waiting.pop(0))
            table = grid(
                ["cell", *(["before", "teacher"] if self.before else []), *(titles[name] for name in taken)], 1
            )
            for at, row in enumerate(rows[taken[0]]):
                first = [_percent(row.before), _percent(row.teacher)] if self.before else []
                table.add_row(row.cell, *first, *(cells[name][at] for name in taken), style=_style(row))
            yield table
            if waiting:
                yield ""

    @staticmethod
    def _width(title: str, cells: Sequence[Text]) -> int:
        return 1 + max([len(line) for line in title.split("\n")] + [cell.cell_len for cell in cells])


class _Costs:
    def __init__(self, students: Sequence[Student]) -> None:
        self.students = students

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide = options.max_width >= WIDE
        own = {**NARROW_COSTS, **(WIDE_COSTS if wide else {})}
        shown = [name for name in own if name != "gpu_seconds" or self._any(name)]
        in_all = [name for name in ALL_COSTS if name != "all_gpu_seconds" or self._any(name)]
        titles = [*(own[name] for name in shown), *(f"all\n{ALL_COSTS[name]}" for name in in_all)]
        table = grid(["student", *titles], 1)
        for student in self.students:
            table.add_row(student.label, *(_plain(student.cost.get(name)) for name in [*shown, *in_all]))
        yield Text.assemble(("cost", "bold"), ("   all: with everything the student was made from; -: not told", "dim"))
        yield table

    def _any(self, name: str) -> bool:
        return any(student.cost.get(name) for student in self.students)


class _Health:
    """First and last tenth of the training."""

    def __init__(self, students: Sequence[Student]) -> None:
        self.students = students

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        known = {name for student in self.students for name in student.health}
        shown = [heading for heading, names in HEALTH.items() if known & set(names)]
        if options.max_width < WIDE:
            shown = [heading for heading in shown if heading != "accuracy"]
        table = grid(["student", *shown], 1)
        for student in self.students:
            if student.health:
                table.add_row(student.label, *(self._change(student, HEALTH[heading]) for heading in shown))
        yield Text.assemble(("training", "bold"), ("   mean of the first tenth of the steps, and of the last", "dim"))
        yield table

    @staticmethod
    def _change(student: Student, names: Sequence[str]) -> str:
        found = next((student.health[name] for name in names if name in student.health), None)
        return f"{number(found.first.value)} {number(found.last.value)}" if found else "-"


def headings(labels: Sequence[str]) -> dict[str, str]:
    """The values of the axes alone where all students are instances of one stage, else below its name."""
    short = {label: heading(label) for label in labels}
    if len({label.partition("[")[0] for label in labels}) == 1 and len(set(short.values())) == len(labels):
        return short
    return {label: f"{label.partition('[')[0]}\n{short[label]}" if "[" in label else short[label] for label in labels}


def _style(row: Row) -> str:
    return "bold" if row.cell == "mean" else ""


def _after(row: Row) -> Text:
    delta = row.delta or row.gain
    if delta is None:
        return Text(_percent(row.after))
    style = {1: "green", -1: "red", 0: ""}[delta.sign]
    return Text.assemble(_percent(row.after), (f" {_signed(delta)}", style))


def _percent(value: Value | None) -> str:
    return "-" if value is None else f"{value.value * 100:.1f}"


def _signed(value: Value | None) -> str:
    """With the wider side of its interval."""
    return "-" if value is None else f"{value.value * 100:+z.1f}{side(value, 100, 1)}"


def _ratio(value: Value | None) -> str:
    return "-" if value is None else f"{value.value:z.2f}{side(value, 1, 2)}"


def side(value: Value, scale: float, digits: int) -> str:
    """`±2.1`: the wider side of its interval, or nothing."""
    if value.low is None or value.high is None:
        return ""
    return f"±{max(value.high - value.value, value.value - value.low) * scale:.{digits}f}"


def _plain(value: Value | None) -> str:
    return "-" if value is None else amount(value.value)
