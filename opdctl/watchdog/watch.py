"""One attempt under watch: events in, alarms out."""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from statistics import median

from opdctl.backends.contract import Event
from opdctl.settings import Action, WatchSettings
from opdctl.settings.watch import NoProgress, Rule, SaveTooOld
from opdctl.watchdog.advice import ADVICE
from opdctl.watchdog.rules import DETECTORS
from opdctl.watchdog.series import Finding, Point

PACE = 16  # steps whose median is the usual time of one


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

    def __init__(self, kind: str, settings: WatchSettings, *, save_every: int | None = None) -> None:
        """`save_every`: optimizer steps between two saves of the recovery state, where the stage has one."""
        self._rules: dict[str, Rule] = settings.rules(kind) if settings.enabled else {}
        self._detectors = {name: DETECTORS[name](rule) for name, rule in self._rules.items() if name in DETECTORS}
        self._save_every = save_every
        self._well: dict[str, int] = {}  # rule that has told -> steps in a row that it was well since
        self._step, self._total = 0, 0
        self._seen_at: float | None = None  # event time of the last step, on the worker's clock
        self._pace: deque[float] = deque(maxlen=PACE)
        self._heard: float | None = None  # when the last event was noticed, on the caller's clock
        self._saved_step = 0
        self._saved_at: float | None = None  # on the caller's clock

    def see(self, event: Event) -> list[Alarm]:
        """Alarms of an event, in the order of the rules. Steps that were seen before are passed over."""
        self._heard = None
        self._well.pop("no_progress", None)
        if event.phase != "train" or event.step <= self._step:
            return []
        seconds = event.time - self._seen_at if self._seen_at is not None and event.time >= self._seen_at else None
        if seconds is not None:
            self._pace.append(seconds)
        self._step, self._total, self._seen_at = event.step, event.total, event.time
        point = Point(event.step, event.total, event.metrics, seconds)
        return [
            alarm
            for name, detector in self._detectors.items()
            if (alarm := self._judge(name, detector.see(point))) is not None
        ]

    @property
    def step_s(self) -> float | None:
        """Seconds that a step usually takes; None before there were two."""
        return median(self._pace) if self._pace else None

    def go_on(self, events: Iterable[Event]) -> None:
        """What earlier attempts of the same curve saw: what was usual at the start is kept, no alarm is told, and a
        fault that is still there is told again once it has held for as long as it takes."""
        for event in events:
            self.see(event)
        for detector in self._detectors.values():
            detector.forget()
        self._well.clear()
        self._pace.clear()
        self._seen_at, self._saved_step = None, self._step

    def still(self, alarm: Alarm) -> Alarm | None:
        """An alarm of an earlier attempt as it would be told now; None where its rule is off."""
        rule = self._rules.get(alarm.rule)
        return None if rule is None else replace(alarm, action=rule.action)

    def saved(self, step: int | None, now: float) -> list[Alarm]:
        """What the disk was found to hold: the recovery state of this step, or none. `now` as of `tick`."""
        if self._saved_at is None or (step is not None and step != self._saved_step):
            self._saved_step, self._saved_at = step or self._saved_step, now
        alarm = self._judge("save_too_old", self._unsaved(now - self._saved_at))
        return [] if alarm is None else [alarm]

    def tick(self, now: float) -> list[Alarm]:
        """Alarms that no event raises. `now`: seconds of a steady clock, of which only differences count: a clock that
        is set must not look like a stage that hangs."""
        if self._heard is None:
            self._heard = now
        alarm = self._judge("no_progress", self._quiet(now))
        return [] if alarm is None else [alarm]

    def _judge(self, name: str, finding: Finding | None) -> Alarm | None:
        rule = self._rules.get(name)
        if rule is None:
            return None
        if finding is None:
            if name in self._well:
                self._well[name] += 1
                if self._well[name] >= 2 * getattr(rule, "steps", 1):  # one good step among bad ones is not well
                    del self._well[name]
            return None
        told, self._well[name] = name in self._well, 0
        if told:
            return None
        advice = ADVICE[name]
        return Alarm(name, rule.action, self._step, finding.evidence, advice.causes, advice.runbook, finding.values)

    def _quiet(self, now: float) -> Finding | None:
        rule = self._rules.get("no_progress")
        if not isinstance(rule, NoProgress) or self._heard is None:
            return None
        quiet, least, pace = now - self._heard, rule.least_s, 0.0
        if quiet <= least:
            return None
        if self.step_s is None or self._step >= self._total:
            least = max(least, rule.start_s)
        else:
            pace = self.step_s
        if quiet <= max(least, rule.times * pace):
            return None
        usual = f"a step takes {pace:.3g} s" if pace else f"before step 2 and after the last {least:g} s are allowed"
        where = f"after step {self._step} of {self._total}" if self._step else "before the first step"
        return Finding(f"no event for {quiet:.0f} s {where}; {usual}", {"quiet_s": quiet, "step_s": pace})

    def _unsaved(self, age: float) -> Finding | None:
        rule, steps = self._rules.get("save_too_old"), self._step - self._saved_step
        if not isinstance(rule, SaveTooOld) or steps <= 0:
            return None
        late = self._save_every is not None and steps > rule.saves * self._save_every
        if not late and age <= rule.age_s:
            return None
        last = f"the last save is of step {self._saved_step}" if self._saved_step else "nothing is saved yet"
        due = "" if self._save_every is None else f" (config.train.save_every: {self._save_every})"
        return Finding(
            f"{last}, {age:.0f} s and {steps} steps ago{due}: so much would be done again after a kill",
            {"age_s": age, "steps": float(steps)},
        )
