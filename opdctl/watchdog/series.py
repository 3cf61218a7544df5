"""What a rule remembers of a metric: counts and short windows, never the whole curve."""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

DEVIATION = 1.4826  # a normal distribution's standard deviation over its MAD


@dataclass(frozen=True)
class Point:
    """An event of a training step."""

    step: int
    total: int
    metrics: Mapping[str, Any]
    seconds: float | None = None  # since the step before

    def value(self, *names: str) -> float | None:
        """The first of these metrics that the step has, whatever number it is; a backend may tell anything."""
        for name in names:
            found = self.metrics.get(name)
            if isinstance(found, float):
                return found
            if isinstance(found, int):
                try:
                    return float(found)
                except OverflowError:
                    return math.inf
        return None

    def finite(self, *names: str) -> float | None:
        found = self.value(*names)
        return found if found is not None and math.isfinite(found) else None


@dataclass
class Streak:
    """How many steps in a row a condition holds."""

    count: int = 0
    first: int = 0  # the step at which it began

    def add(self, holds: bool, step: int) -> int:
        if not holds:
            self.count = 0
        else:
            self.first = step if self.count == 0 else self.first
            self.count += 1
        return self.count


@dataclass
class Drift:
    """A metric at the start, and of late. Both are medians: single steps are noise."""

    start: int  # values that make the start
    late: int
    first: list[float] = field(default_factory=list)
    recent: deque[float] = field(init=False)
    base: float = math.nan  # median of the start
    deviation: float = 0.0  # of single values there, robust

    def __post_init__(self) -> None:
        self.recent = deque(maxlen=self.late)

    def add(self, value: float | None) -> bool:
        """Is there enough to compare?"""
        if value is None:
            return False
        if len(self.first) < self.start:
            self.first.append(value)
            if len(self.first) == self.start:
                self.base = median(self.first)
                self.deviation = DEVIATION * median(abs(one - self.base) for one in self.first)
            return False
        self.recent.append(value)
        return len(self.recent) == self.late

    @property
    def now(self) -> float:
        return median(self.recent)

    def forget_recent(self) -> None:
        self.recent.clear()


@dataclass
class Jump:
    """A metric in a short window, and in the one before it."""

    before: int
    late: int
    values: deque[float] = field(init=False)

    def __post_init__(self) -> None:
        self.values = deque(maxlen=self.before + self.late)

    def add(self, value: float | None) -> bool:
        """Are both windows full?"""
        if value is not None:
            self.values.append(value)
        return len(self.values) == self.before + self.late

    def medians(self) -> tuple[float, float, float]:
        """(before, its robust deviation, now)"""
        values = list(self.values)
        earlier = values[: self.before]
        base = median(earlier)
        return base, DEVIATION * median(abs(one - base) for one in earlier), median(values[self.before :])

    def forget_recent(self) -> None:
        for _ in range(max(0, len(self.values) - self.before)):
            self.values.pop()


@dataclass(frozen=True)
class Finding:
    evidence: str
    values: dict[str, float]


def since(streak: Streak) -> str:
    return f"for {streak.count} steps, from step {streak.first} on" if streak.count > 1 else f"at step {streak.first}"


def known(**values: float | None) -> dict[str, float]:
    """Those that are finite numbers."""
    return {name: value for name, value in values.items() if value is not None and math.isfinite(value)}
