"""What the gate found: what stops or warns one by one, what is in order by its count, and all of it as data."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from opdctl.console import join, plural
from opdctl.verdicts import Outcome, Verdict

Judged = Mapping[str, Sequence[Verdict]]  # by stage
MARKS = {Outcome.GO: ("✓", "green"), Outcome.WARN: ("!", "yellow")}
STOPS = ("✗", "bold red")
UNASKED = ("-", "dim")  # nothing against the stage: a question that was not put
ORDER = [Outcome.REFUSE, Outcome.COLD_START, Outcome.WARN, Outcome.GO]
NAMED = 3  # stages that share a finding


def gate_view(title: str, judged: Judged, notes: Sequence[str], *, everything: bool) -> RenderableType:
    """`notes` say what was not asked; `everything` shows verdicts that are in order too.
    A question that was not put is always shown."""
    lines: list[RenderableType] = []
    for verdict, stages in _grouped(judged):
        if everything or verdict.outcome is not Outcome.GO or not verdict.asked:
            lines += _finding(verdict, stages)
    fine = Counter(v.check for verdicts in judged.values() for v in verdicts if v.outcome is Outcome.GO and v.asked)
    if fine and not everything:
        told = ", ".join(f"{check} {count}" for check, count in fine.items())
        lines += [Text.assemble(("✓ ", "green"), f"in order: {told}")]
    dim: list[RenderableType] = [Text(note, style="dim") for note in notes]
    return Group(Text.assemble((title, "bold"), f": {summary(judged)}"), "", *lines, *(["", *dim] if dim else []))


def summary(judged: Judged) -> str:
    """`14 stages, 210 verdicts: 208 go, 1 warn, 1 refuse`."""
    outcomes = Counter(verdict.outcome for verdicts in judged.values() for verdict in verdicts)
    counts = join(f"{outcomes[outcome]} {outcome}" for outcome in Outcome if outcomes[outcome])
    accepted = sum(verdict.accepted for verdicts in judged.values() for verdict in verdicts)
    told = f"{plural(len(judged), 'stage')}, {plural(outcomes.total(), 'verdict')}{f': {counts}' if counts else ''}"
    return f"{told} ({accepted} accepted)" if accepted else told


def gate_data(judged: Judged) -> dict[str, Any]:
    return {
        "ok": not any(verdict.stops for verdicts in judged.values() for verdict in verdicts),
        "stages": {
            stage: [asdict(verdict) | {"outcome": str(verdict.outcome), "stops": verdict.stops} for verdict in verdicts]
            for stage, verdicts in judged.items()
        },
    }


def _grouped(judged: Judged) -> list[tuple[Verdict, list[str]]]:
    """The same finding of several stages once, with these; what stops comes first."""
    found: dict[tuple[str, ...], tuple[Verdict, list[str]]] = {}
    for stage, verdicts in judged.items():
        for verdict in verdicts:
            key = (verdict.check, verdict.subject, verdict.outcome, verdict.evidence)
            found.setdefault(key, (verdict, []))[1].append(stage)
    return sorted(found.values(), key=lambda entry: ORDER.index(entry[0].outcome))


def _finding(verdict: Verdict, stages: Sequence[str]) -> list[RenderableType]:
    mark, style = STOPS if verdict.stops else MARKS.get(verdict.outcome, ("!", "yellow"))
    if verdict.outcome is Outcome.GO and not verdict.asked:
        mark, style = UNASKED
    outcome = f"{verdict.outcome}, accepted" if verdict.accepted else str(verdict.outcome)
    named = ", ".join(dict.fromkeys(stages[:NAMED])) + (
        f" and {len(stages) - NAMED} more" if len(stages) > NAMED else ""
    )
    head = Text.assemble(
        (f"{mark} ", style),
        (verdict.check, "bold"),
        f"  {verdict.subject}: ",
        (outcome, style),
        (f"  ({named})", "dim"),
    )
    lines: list[RenderableType] = [head, Padding(Text(verdict.evidence), (0, 0, 0, 2))]
    if verdict.remedy and verdict.outcome is not Outcome.GO:
        lines.append(Padding(Text(verdict.remedy, style="dim"), (0, 0, 0, 2)))
    return lines
