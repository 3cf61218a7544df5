"""What a stage did step by step: the curves behind a checkpoint, out of the events of its attempts."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from statistics import fmean

from opdctl.backends.contract import Event
from opdctl.backends.events import EventTail
from opdctl.records import Record
from opdctl.store import StageDir

TENTH = 10  # means over the first, the last and a moving tenth of the steps: single steps are noise


@dataclass(frozen=True)
class Curve:
    """A metric over the optimizer steps that reported it."""

    steps: Sequence[int]
    values: Sequence[float]

    @property
    def window(self) -> int:
        return max(1, len(self.values) // TENTH)

    @property
    def first(self) -> float:
        return fmean(self.values[: self.window])

    @property
    def last(self) -> float:
        return fmean(self.values[-self.window :])

    def smooth(self) -> "Curve":
        """Mean over the window that ends at each step; the first ones over what there is."""
        window, values = self.window, self.values
        means = [fmean(values[max(0, at + 1 - window) : at + 1]) for at in range(len(values))]
        return Curve(self.steps, means)

    def reaches(self, share: float) -> int | None:
        """First step at which the mean over a full window is at least `share` of `last`; None unless that is > 0."""
        if self.last <= 0:
            return None
        means = zip(self.steps, self.smooth().values, strict=True)
        full = list(means)[self.window - 1 :]
        return next((step for step, value in full if value >= share * self.last), None)  # None: NaN


def curves(stage: StageDir) -> dict[str, Curve]:
    """Of the stage's checkpoint, wherever it was made; of what is done, while there is none."""
    origin, record = stage.reference() or stage, stage.record()
    seen: dict[int, Event] = {}
    for event in _events(origin):
        if record is None or (event.step <= record.step and event.time <= _published(record)):
            seen[event.step] = event  # what a later attempt says of a step is what counts
    return _by_metric(seen[step] for step in sorted(seen))


def _events(stage: StageDir) -> Iterable[Event]:
    for attempt in stage.attempts():
        yield from EventTail(attempt.events).read()


def _published(record: Record) -> float:
    try:
        return datetime.fromisoformat(record.created).timestamp()
    except ValueError:
        return float("inf")


def _by_metric(events: Iterable[Event]) -> dict[str, Curve]:
    found: dict[str, tuple[list[int], list[float]]] = {}
    for event in events:
        for name, value in event.metrics.items():
            steps, values = found.setdefault(name, ([], []))
            steps.append(event.step)
            values.append(value)
    return {name: Curve(steps, values) for name, (steps, values) in found.items()}
