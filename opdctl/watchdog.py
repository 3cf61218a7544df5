"""The watchdog: rules over a stage's events that tell training from its imitation. Pure; the runner acts."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from opdctl.backends.contract import Event
from opdctl.settings import Action, WatchSettings


@dataclass(frozen=True)
class Alarm:
    rule: str  # its key under `watch`
    action: Action
    step: int
    evidence: str  # the numbers, and over which steps
    causes: tuple[str, ...]  # the likely ones, most likely first
    runbook: str  # "runbooks/entropy-collapse.md#..."
    values: Mapping[str, float] = field(default_factory=dict)


class Watch:
    """Over one attempt of a stage. Every rule tells an alarm once, and again only after it was well in between."""

    def __init__(self, kind: str, settings: WatchSettings, *, started: float) -> None:
        self._kind, self._settings = kind, settings
        self._last = started

    def see(self, event: Event) -> list[Alarm]:
        """Alarms of an event, in the order of the rules. Events of an earlier step are passed over."""
        self._last = event.time
        return []

    def tick(self, now: float) -> list[Alarm]:
        """Alarms that no event raises: no progress, the last save too old. `now`: seconds since the epoch."""
        return []
