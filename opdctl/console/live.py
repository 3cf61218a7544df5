"""Progress of a run: redrawn in place on a terminal, plain lines elsewhere. Both go to stderr.

The displays are told by the runner (its `Reporter` protocol) what happens, and never ask the disk.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from opdctl.backends.contract import Event
from opdctl.console import is_live, join, make_console
from opdctl.console.metrics import UNITS, clock, duration, key_metrics, throughput

State = Literal["waiting", "running", "done", "reused", "failed", "paused", "skipped"]
MARKS: Mapping[State, tuple[str, str]] = {
    "waiting": ("·", "dim"),
    "running": ("•", "cyan"),
    "done": ("✓", "green"),
    "reused": ("✓", "blue"),
    "failed": ("✗", "bold red"),
    "paused": ("=", "yellow"),
    "skipped": ("-", "dim"),
}
LINE_EVERY_S = 5.0  # plain lines: at most one progress line of a stage in this time


@dataclass
class Row:
    """What is known of one stage."""

    stage: str
    kind: str
    state: State = "waiting"
    began: float = 0.0
    ended: float = 0.0
    event: Event | None = None
    first: Event | None = None  # of this attempt: what the pace is measured from
    reached: Event | None = None  # the first that told of the step at which it is: others tell how far the next one is
    printed: float = 0.0
    warned: bool = False  # by the gate or the watchdog, in this attempt

    def progress(self, event: Event, now: float) -> None:
        event = event if event.time else Event(event.step, event.total, event.metrics, event.phase, now)
        if self.first is None or self.first.total != event.total or event.step < self.first.step:
            self.first = self.reached = event
        if self.reached is None or self.reached.step != event.step:
            self.reached = event
        self.event = event

    def eta_s(self, now: float) -> float | None:
        """Seconds to the last step at the pace seen so far; None before there is one."""
        if self.reached is None or self.first is None or self.reached.step <= self.first.step:
            return None
        pace = (self.reached.time - self.first.time) / (self.reached.step - self.first.step)
        return max(0.0, pace * (self.reached.total - self.reached.step) - (now - self.reached.time))

    def steps(self) -> str:
        return f"{self.event.step}/{self.event.total}" if self.event else ""

    def numbers(self, limit: int = 2) -> str:
        if self.event is None:
            return ""
        known = key_metrics(self.kind, self.event.metrics, limit)
        phase = self.event.phase if self.event.phase not in ("train", self.kind) else ""
        return join((phase, known), " ")


@dataclass
class Failure:
    stage: str
    message: str
    log_tail: str


@dataclass
class Progress:
    """Keeps one row a stage up to date; the two displays differ in how they draw it. Use as a context manager."""

    kinds: Mapping[str, str]  # stage -> kind, in the order of the plan
    console: Console
    time: Callable[[], float] = time.time
    rows: dict[str, Row] = field(init=False)
    failures: list[Failure] = field(default_factory=list)
    began: float = field(init=False)

    def __post_init__(self) -> None:
        self.rows = {stage: Row(stage, kind) for stage, kind in self.kinds.items()}
        self.began = self.time()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        return None

    def started(self, stage: str, attempt: int) -> None:
        row = self.rows[stage]
        row.state, row.began, row.warned = "running", self.time(), False
        row.first = row.reached = row.event = None
        self.changed(row, "started" if attempt == 1 else f"started, attempt {attempt}")

    def progress(self, stage: str, event: Event) -> None:
        row = self.rows[stage]
        row.progress(event, self.time())
        self.moved(row)

    def finished(self, stage: str, record: Any) -> None:
        row = self.rows[stage]
        row.state, row.ended = "done", self.time()
        steps = f"{record.step} {UNITS.get(row.kind, 'steps')} in {duration(row.ended - row.began)}"
        self.changed(row, join(("done", steps, key_metrics(row.kind, record.metrics, 3))))

    def failed(self, stage: str, message: str, log_tail: str) -> None:
        row = self.rows[stage]
        row.state, row.ended = "failed", self.time()
        self.failures.append(Failure(stage, message, log_tail))
        first, *more = message.splitlines() or [""]
        self.changed(row, f"failed: {first}{' ...' if more else ''}")  # the whole of it comes at the end, once

    def paused(self, stage: str, message: str) -> None:
        row = self.rows[stage]
        row.state, row.ended = "paused", self.time()
        self.changed(row, message)

    def warned(self, stage: str, text: str) -> None:
        self.rows[stage].warned = True
        self.console.print(Text.assemble((stage, "bold"), ": ", (text, "yellow")), soft_wrap=True)

    def reused(self, stage: str, reason: str) -> None:
        row = self.rows[stage]
        row.state = "reused"
        self.changed(row, join(("reused", reason), ": "))

    def message(self, text: str) -> None:
        self.console.print(text, soft_wrap=True)

    def changed(self, row: Row, what: str) -> None:
        """A stage began or ended."""

    def moved(self, row: Row) -> None:
        """A stage made a step."""


class PlainProgress(Progress):
    """One line when a stage starts, at most one every few seconds while it runs, one when it ends."""

    def changed(self, row: Row, what: str) -> None:
        row.printed = self.time()
        style = {"failed": "red", "paused": "yellow", "done": "green"}.get(row.state, "")
        self.console.print(Text.assemble((row.stage, "bold"), ": ", (what, style)), soft_wrap=True)

    def moved(self, row: Row) -> None:
        now = self.time()
        if now - row.printed < LINE_EVERY_S or row.event is None:
            return
        row.printed = now
        eta = row.eta_s(now)
        parts = (row.steps(), row.numbers(3), throughput(row.event.metrics), f"{clock(eta)} left" if eta else "")
        self.console.print(Text.assemble((row.stage, "bold"), ": ", join(parts)), soft_wrap=True)


class LiveProgress(Progress):
    """A row a stage, redrawn four times a second; gone when the run ends (the summary takes its place)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._spinner = Spinner("dots", style="cyan")
        self._live = Live(
            self, console=self.console, refresh_per_second=4, transient=True, redirect_stdout=False, screen=False
        )

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._live.stop()

    def changed(self, row: Row, what: str) -> None:
        if style := {"failed": "red", "paused": "yellow"}.get(row.state):
            self.console.print(Text.assemble((row.stage, "bold"), ": ", (what, style)), soft_wrap=True)

    def __rich__(self) -> RenderableType:
        now = self.time()
        table = Table.grid(padding=(0, 1))
        wide = self.console.width >= 110
        table.add_column(width=1)
        table.add_column(no_wrap=True, overflow="ellipsis", max_width=None if wide else 22)
        table.add_column(width=24 if wide else 10)
        table.add_column(justify="right", no_wrap=True)
        table.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
        table.add_column(justify="right", no_wrap=True)
        table.add_column(justify="right", no_wrap=True)
        table.expand = True
        shown, before, after = visible(list(self.rows.values()), self.console.height - 3)
        if before:
            table.add_row("", Text(before, style="dim"))
        for row in shown:
            table.add_row(*self._cells(row, now, wide))
        if after:
            table.add_row("", Text(after, style="dim"))
        table.add_row("", Text(self._total(now), style="dim"))
        return table

    def _cells(self, row: Row, now: float, wide: bool) -> Sequence[RenderableType]:
        glyph, style = MARKS[row.state]
        mark: RenderableType = self._spinner if row.state == "running" else Text(glyph, style=style)
        if row.warned and row.state in ("running", "done"):
            mark = Text("!", style="bold yellow")
        name = Text(row.stage if wide else short_name(row.stage), style="" if row.state != "waiting" else "dim")
        if row.state == "waiting":
            return (mark, name)
        if row.state in ("reused", "skipped"):
            return (mark, name, Text(row.state, style="dim"))
        bar: RenderableType = ""
        if row.event is not None:
            complete = (
                "green"
                if row.state == "done"
                else "red"
                if row.state == "failed"
                else "yellow"
                if row.state == "paused"
                else "cyan"
            )
            bar = ProgressBar(total=max(1, row.event.total), completed=row.event.step, complete_style=complete)
        rate = throughput(row.event.metrics) if row.event and row.state == "running" else ""
        eta = row.eta_s(now) if row.state == "running" else None
        spent = clock((row.ended or now) - row.began) if row.began else ""  # one that failed to start has none
        left = f"-{clock(eta)}" if eta is not None else spent
        return (mark, name, bar, row.steps(), Text(row.numbers(3 if wide else 2)), Text(rate, style="dim"), left)

    def _total(self, now: float) -> str:
        over = sum(row.state in ("done", "reused") for row in self.rows.values())
        return f"{over}/{len(self.rows)} stages, {clock(now - self.began)}"


def short_name(stage: str) -> str:
    """`max[domain=general,effort=low]` -> `max[general,low]`: for narrow displays only, not an address."""
    base, bracket, axes = stage.partition("[")
    if not bracket:
        return stage
    return f"{base}[{','.join(axis.partition('=')[2] for axis in axes.rstrip(']').split(','))}]"


def visible(rows: Sequence[Row], height: int) -> tuple[list[Row], str, str]:
    """The rows to draw in `height` lines, with a line for what is left out before and after them.

    Finished ones give way first, the oldest first, then those that wait, the last first; running and failed ones stay.
    """
    if len(rows) <= height:
        return list(rows), "", ""
    excess = len(rows) - max(1, height - 2)
    over = [row for row in rows if row.state in ("done", "reused", "skipped")][:excess]
    waiting = [row for row in rows if row.state == "waiting"]
    waiting = waiting[len(waiting) - min(len(waiting), excess - len(over)) :]
    hidden = {row.stage for row in (*over, *waiting)}
    shown = [row for row in rows if row.stage not in hidden]
    before = f"{len(over)} finished" if over else ""
    return shown, before, f"{len(waiting)} waiting" if waiting else ""


def progress_display(kinds: Mapping[str, str]) -> Progress:
    """The display that suits stderr."""
    console = make_console(stderr=True)
    return (LiveProgress if is_live(console.file) else PlainProgress)(kinds, console)
