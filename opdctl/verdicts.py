"""What the gate found, one verdict a check and subject, and what comes of it: go, warn, cold start first, refuse."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from opdctl.errors import StageRefused
from opdctl.records import read_json, write_json
from opdctl.settings import GateCheck


class Outcome(StrEnum):
    GO = "go"
    WARN = "warn"
    COLD_START = "cold start first"  # the stage would train, and likely diverge: refused, with another remedy
    REFUSE = "refuse"

    @property
    def refuses(self) -> bool:
        return self in (Outcome.COLD_START, Outcome.REFUSE)


@dataclass(frozen=True)
class Verdict:
    check: GateCheck
    subject: str  # "sft -> max[domain=general]", "task chains"
    outcome: Outcome
    evidence: str  # what was seen, with the numbers and the threshold
    remedy: str = ""  # what to do about it; empty for go
    values: Mapping[str, float] = field(default_factory=dict)
    accepted: bool = False  # it refuses, and was accepted by name
    asked: bool = True  # False: the question was not put, or not to the end; `evidence` says why

    @property
    def stops(self) -> bool:
        return self.outcome.refuses and not self.accepted

    @property
    def told(self) -> str:
        """`warn`; `accepted, refuse`"""
        return f"accepted, {self.outcome}" if self.accepted else str(self.outcome)


def unasked(check: GateCheck, subject: str, reason: str, outcome: Outcome = Outcome.GO, remedy: str = "") -> Verdict:
    """Of a question that was not put."""
    return Verdict(check, subject, outcome, f"not asked: {reason}", remedy, asked=False)


def accept(verdicts: Iterable[Verdict], names: Sequence[str]) -> list[Verdict]:
    """With the refusals of these checks marked as accepted."""
    return [
        replace(verdict, accepted=verdict.outcome.refuses and verdict.check in names)  # warnings need no word
        for verdict in verdicts
    ]


def refuse(judged: Mapping[str, Sequence[Verdict]]) -> None:
    """Raises StageRefused with all that stops a stage, by the stage's name; "" for a stage that speaks for itself."""
    stopping = [(stage, verdict) for stage, verdicts in judged.items() for verdict in verdicts if verdict.stops]
    if stopping:
        lines = [
            f"{stage}{': ' if stage else ''}the gate: {one.check}, {one.subject}: {one.outcome}: {one.evidence}; "
            f"{one.remedy}"
            for stage, one in stopping
        ]
        raise StageRefused("\n".join(lines), hint=way_out(verdict for _, verdict in stopping))


def way_out(verdicts: Iterable[Verdict]) -> str:
    """What can be done about those of them that stop a stage; empty where none does."""
    names = dict.fromkeys(verdict.check for verdict in verdicts if verdict.stops)
    return f"mend it, or take it as it is: {' '.join(f'--accept {name}' for name in names)}" if names else ""


def write_verdicts(path: Path, key: str, verdicts: Sequence[Verdict]) -> None:
    """`key` says what was judged: the same verdicts hold for a later attempt with the same key."""
    write_json(path, {"key": key, "verdicts": [asdict(verdict) for verdict in verdicts]})


def read_verdicts(path: Path, key: str | None = None) -> list[Verdict] | None:
    """None where there are none (with that key), or the file was damaged."""
    found = read_json(path, "key", "verdicts")
    if found is None or key not in (None, found["key"]):
        return None
    try:
        return [_verdict(given) for given in found["verdicts"]]
    except (TypeError, ValueError):
        return None


def _verdict(given: Mapping[str, Any]) -> Verdict:
    return Verdict(**{**given, "outcome": Outcome(given["outcome"])})
