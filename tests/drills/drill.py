"""One drill from the fault to the verdict."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from drills import inject, survival
from drills.faults import Drill, Kind
from drills.scene import Lost, Missed, Rehearsal, Scene, scene

TRIES = 8  # until the fault strikes while something runs; each is drawn anew, for another moment

REPAIRED = 5  # one drill of so many is repaired before it goes on


@dataclass
class Verdict:
    drill: Drill
    problems: list[str] = field(default_factory=list)  # empty: survived
    remedies: list[str] = field(default_factory=list)  # that a run asked for and got
    skipped: str = ""
    seconds: float = 0.0
    story: str = ""  # of a failure
    struck: list[str] = field(default_factory=list)  # of a chain: the faults that found something to strike

    @property
    def survived(self) -> bool:
        return not self.problems and not self.skipped


def carry_out(drill: Drill, known: Rehearsal, folder: Path, seed: int) -> Verdict:
    """The fault, runs until the end, and what does not hold then."""
    verdict, began, at = Verdict(drill), time.monotonic(), drill.at
    for attempt in range(TRIES):
        draw = inject.drawn(seed, drill.number, attempt)
        with scene(known, drill.subject, folder / f"drill-{drill.number}", draw, at, drill.tracked) as made:
            try:
                getattr(inject, drill.kind.inject)(made, **drill.kind.how)
                if made.verdict is None:
                    judge(made)
            except Missed as missed:
                at = (at + 1) / 2 if missed.early else at * 0.75
                continue
            except inject.Unavailable as why:
                verdict.skipped = str(why)
            except Lost as lost:
                verdict.problems.append(str(lost))
            verdict.problems += made.verdict or []
            verdict.remedies += made.remedies
            if verdict.problems:
                verdict.story = survival.note(made)
            break
    else:
        verdict.skipped = "the fault found nothing to strike"
    verdict.seconds = time.monotonic() - began
    return verdict


def carry_out_chain(kinds: Sequence[Kind], known: Rehearsal, folder: Path, seed: int, number: int) -> Verdict:
    """One fault after the other in runs of one workspace, then runs until the end."""
    drill = Drill(number, kinds[0], "toy", 0.0, False)
    verdict, draw = Verdict(drill), inject.drawn(seed, number)
    with scene(known, "toy", folder / f"chain-{number}", draw, 0.0, False) as made:
        for kind in kinds:
            made.at = draw.uniform(0.1, 0.5)
            try:
                getattr(inject, kind.inject)(made, **kind.how)
                verdict.struck.append(kind.row)
            except (Missed, inject.Unavailable) as why:
                made.notes.append(f"{kind.row}: {why}")
        try:
            judge(made)
        except Lost as lost:
            verdict.problems.append(str(lost))
        verdict.problems += made.verdict or []
        verdict.story = survival.note(made)
    return verdict


def judge(made: Scene) -> None:
    """Go on to the end, in one of `REPAIRED` after `opdctl repair`, then look. Raises Lost."""
    if made.draw.random() * REPAIRED < 1:
        made.repair()
    made.go_on()
    made.verdict = survival.problems(made)
