"""What is on disk of a stage's attempts: their events, and the alarms that were told."""

import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict

from opdctl.backends.contract import Event
from opdctl.backends.events import EventTail
from opdctl.store import Attempt, StageDir
from opdctl.watchdog.watch import Alarm


def note_alarm(attempt: Attempt, alarm: Alarm) -> None:
    """One JSON object a line, with the `time` (seconds since the epoch). Raises OSError on a full disk."""
    with attempt.alarms.open("a") as stream:
        stream.write(json.dumps({**asdict(alarm), "time": time.time()}) + "\n")


def alarms_of(stage: StageDir) -> list[tuple[int, Alarm]]:
    """(attempt, alarm) of the attempts that made the stage's curve, oldest first; damaged lines are passed over."""
    attempts = stage.attempts()
    if not any(attempt.alarms.exists() for attempt in attempts):  # events are long
        return []
    return [(attempt.number, alarm) for attempt in _curve(attempts) for alarm in _read(attempt)]


def earlier_events(stage: StageDir, attempt: Attempt, resume_step: int | None) -> Iterator[Event]:
    """The steps that a resumed attempt goes on from; what a later attempt says of a step is what counts."""
    until = math.inf if resume_step is None else resume_step
    parts: list[tuple[Attempt, float]] = []
    for before in reversed(_curve([one for one in stage.attempts() if one.number < attempt.number])):
        parts.append((before, until))
        until = min(until, _first_step(before) - 1)
    for before, until in reversed(parts):
        yield from (event for event in _steps(before) if event.step <= until)


def _curve(attempts: list[Attempt]) -> list[Attempt]:
    """The last attempt that began at the first step, and those after it."""
    begun = {one.number: step for one in attempts if (step := _first_step(one)) < math.inf}
    if not begun:
        return attempts[-1:]
    start = max(number for number, step in begun.items() if step == min(begun.values()))
    return [one for one in attempts if one.number >= start]


def _first_step(attempt: Attempt) -> float:
    """Infinite where there is none."""
    return next((event.step for event in _steps(attempt)), math.inf)


def _steps(attempt: Attempt) -> Iterator[Event]:
    """Read in pieces: a long stage's events are as large as its model."""
    return (event for part in EventTail(attempt.events).parts() for event in part if event.phase == "train")


def _read(attempt: Attempt) -> Iterator[Alarm]:
    for given in attempt.read_alarms():
        given.pop("time", None)
        try:
            yield Alarm(**{**given, "causes": tuple(given["causes"])})
        except (TypeError, KeyError):
            continue
