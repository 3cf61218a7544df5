"""What the gate and the watchdog left beside an attempt, as MLflow is told it: tags to search by, and the files."""

from collections.abc import Iterable
from pathlib import Path

from opdctl.store import Attempt
from opdctl.tracking.names import LONGEST_TAG, cut, fit
from opdctl.verdicts import Verdict, read_verdicts


def state(attempt: Attempt) -> tuple[int, ...]:
    """Changes whenever one of the files does; all zero where there is none."""
    return tuple(number for path in (attempt.gate, attempt.alarms) for number in _stat(path))


def _stat(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_size, found.st_mtime_ns


def files(attempt: Attempt) -> list[Path]:
    return [path for path in (attempt.gate, attempt.alarms) if path.exists()]


def tags(attempt: Attempt) -> dict[str, str]:
    """`gate` = the worst outcome, `gate.CHECK` = what was not simply a go; `watch` = how many alarms, `watch.RULE` =
    the last of that rule."""
    told: dict[str, str] = {}
    verdicts = read_verdicts(attempt.gate)
    if verdicts is not None:
        told["gate"] = _worst(verdicts)
        for verdict in verdicts:
            if verdict.outcome != "go":
                key = fit(f"gate.{verdict.check}")
                text = f"{verdict.subject}: {verdict.told}: {verdict.evidence}"
                told[key] = cut(f"{told[key]}\n{text}" if key in told else text, LONGEST_TAG)
    if alarms := [alarm for alarm in attempt.read_alarms() if "rule" in alarm]:
        told["watch"] = str(len(alarms))
        for alarm in alarms:
            text = f"{alarm.get('action')} at step {alarm.get('step')}: {alarm.get('evidence')}"
            told[fit(f"watch.{alarm['rule']}")] = cut(text, LONGEST_TAG)
    return told


def _worst(verdicts: Iterable[Verdict]) -> str:
    order = ["go", "warn", "accepted, cold start first", "accepted, refuse", "cold start first", "refuse"]
    return max((verdict.told for verdict in verdicts), key=order.index, default="go")
