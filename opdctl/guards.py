"""What looks after running stages: the watchdog, the gate's verdicts, the free disk. It orders, the runner carries out.

All that it sees is left beside the attempt: `gate.json` by the worker, `alarms.jsonl` here.
"""

import contextlib
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from opdctl.backends.contract import EXIT_STOPPED, Event
from opdctl.memory import GIB
from opdctl.plan import Decision, Plan, PlannedStage
from opdctl.settings import WatchSettings
from opdctl.store import Attempt, StageDir
from opdctl.verdicts import read_verdicts
from opdctl.watchdog import Alarm, Watch
from opdctl.watchdog.history import alarms_of, earlier_events, note_alarm

LOOK_S = 5.0  # between two looks at the disk: its free space, and what was saved
GAP_S = 60.0  # between two turns, at most, that count: in a longer one this process was stopped, or published
TIMING = ("no_progress", "throughput", "save_too_old")  # rules that say nothing of what was trained


@dataclass(frozen=True)
class Order:
    stage: str  # empty: nothing more is to be started
    action: Literal["tell", "pause", "stop"]  # pause: save and end, the next run goes on; stop: the stage has failed
    text: str
    hint: str = ""
    void: bool = False  # what was trained is not to be published, even where the worker got to the end meanwhile
    extra_s: float = 0.0  # that the worker gets to save beyond the usual patience: it finishes its step first

    def outranks(self, known: "Order | None") -> bool:
        """The first order to end a worker is the one that is told, unless a later one makes void what was trained."""
        return known is None or (self.void and not known.void)

    def ends(self, code: int | None) -> bool:
        """Is it this order that a worker ended by, with this exit code? A paused one may have failed by itself."""
        if self.action == "pause":
            return code is None or code < 0 or code == EXIT_STOPPED
        return self.void or code != 0


@dataclass
class _Guarded:
    stage: StageDir
    attempt: Attempt
    watch: Watch
    gate_told: bool = False


class Guards:
    """Of one `execute`."""

    def __init__(self, plan: Plan) -> None:
        self._run, self._disk = plan.run, plan.pipeline.settings.disk
        self._path = plan.run.workspace.path
        self._guarded: dict[str, _Guarded] = {}
        self._turned = time.monotonic()
        self._clock, self._looked = 0.0, -LOOK_S  # seconds of watching: where nobody looks, nothing is seen to hang
        self.refused: set[str] = set()  # stages that the gate did not let through

    def started(self, item: PlannedStage, attempt: Attempt) -> list[Order]:
        """What is known already: state that the watchdog stopped at the last step was not to be published, and no
        step is left that would tell."""
        settings, stage = item.stage.settings, self._run.stage(item.stage.name)
        train = getattr(settings.config, "train", None)
        watch = Watch(settings.kind, settings.watch or WatchSettings(), save_every=train.save_every if train else None)
        one = self._guarded[stage.name] = _Guarded(stage, attempt, watch)
        if item.decision is not Decision.RESUME:
            return []
        watch.go_on(earlier_events(stage, attempt, item.resume_step))
        if item.resume_step is None or item.resume_step < item.total_steps:
            return []
        last = {alarm.rule: watch.still(alarm) for _, alarm in alarms_of(stage) if alarm.step == item.resume_step}
        return [
            self._order(stage.name, one, alarm)
            for alarm in last.values()
            if alarm is not None and alarm.action == "stop" and alarm.rule not in TIMING
        ]

    def seen(self, stage: str, event: Event) -> list[Order]:
        """An event of the stage, in order."""
        one = self._guarded[stage]
        return [self._order(stage, one, alarm) for alarm in one.watch.see(event)]

    def turn(self) -> list[Order]:
        """What no event tells; called some times a second."""
        now = time.monotonic()
        self._clock += min(now - self._turned, GAP_S)
        self._turned, now = now, self._clock
        orders: list[Order] = []
        if look := now - self._looked >= LOOK_S:
            self._looked = now
            orders += self._free()
        for stage, one in self._guarded.items():
            orders += self._gate(stage, one)
            alarms = one.watch.tick(now)
            if look:
                alarms += one.watch.saved(one.stage.state_step(), now)
            orders += [self._order(stage, one, alarm) for alarm in alarms]
        return orders

    def ended(self, stage: str) -> list[Order]:
        """What the worker left to tell."""
        one = self._guarded.pop(stage)
        return list(self._gate(stage, one))

    def _gate(self, stage: str, one: _Guarded) -> Iterator[Order]:
        """Warnings and accepted refusals; a refusal ends the worker, which says so itself."""
        if one.gate_told or (verdicts := read_verdicts(one.attempt.gate)) is None:
            return
        one.gate_told = True
        if any(verdict.stops for verdict in verdicts):
            self.refused.add(stage)
        for verdict in verdicts:
            if verdict.outcome != "go" and not verdict.stops:
                told = f"gate: {verdict.check}, {verdict.subject} ({verdict.told}): {verdict.evidence}"
                yield Order(stage, "tell", f"{told}; {verdict.remedy}" if verdict.remedy else told)

    def _order(self, stage: str, one: _Guarded, alarm: Alarm) -> Order:
        with contextlib.suppress(OSError):  # of a full disk: it is told all the same
            note_alarm(one.attempt, alarm)
        text = f"watchdog: {alarm.rule} at step {alarm.step}: {alarm.evidence}"
        causes = f"likely: {'; '.join(alarm.causes)}; see {alarm.runbook}"
        if alarm.action not in ("pause", "stop"):
            return Order(stage, "tell", f"{text}; {causes}")
        key = f"stages.{stage.partition('[')[0]}.watch.{alarm.rule}.action"  # whatever the pipeline's `watch` says
        hint = f"{causes}; to go on whatever it says: {key}=warn"
        extra_s = 0.0 if alarm.rule == "no_progress" else _extra_s(one.watch)
        if alarm.action == "pause":
            return Order(stage, "pause", text, hint, extra_s=extra_s)
        return Order(stage, "stop", text, hint, void=alarm.rule not in TIMING, extra_s=extra_s)

    def _free(self) -> Iterator[Order]:
        try:
            free = shutil.disk_usage(self._path).free / GIB
        except OSError:  # what cannot be asked for its space may be written to; else the stages say so themselves
            return
        if free >= self._disk.reserve_gib:
            return
        told = f"{free:.2f} GiB are free at {self._path}, less than disk.reserve_gib ({self._disk.reserve_gib:g})"
        hint = "free space: opdctl gc says what can go; then run again (runbooks/disk-full.md)"
        yield Order("", "pause", f"{told}: nothing more is started")
        for stage, one in self._guarded.items():
            yield Order(stage, "pause", f"{told}: it saves and pauses", hint, extra_s=_extra_s(one.watch))


def _extra_s(watch: Watch) -> float:
    """Three steps of the stage, or ten minutes where it has not made two yet."""
    return 600.0 if watch.step_s is None else 3 * watch.step_s
