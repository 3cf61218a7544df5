"""The table of all drills, docs/drills.md."""

import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from drills.drill import Verdict

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "docs" / "drills.md"
INTERRUPTED = "interrupted"
FOLDER = re.compile(r"\S*/drills-[^/\s]+/")  # of the drills: another each time
HEAD = """# Failure drills

Written by `make drills` (seed {seed}; `tests/drills`) at commit {commit}. Each drill runs a small pipeline (SFT, two
specialists of RL, distillation, evaluation) by the command line, strikes it with a fault, and runs it again to the end.
It is survived if then all weights and reports equal those of an undisturbed run, every file of every checkpoint has the
sha256 of its record, every parent is there, no half-trained state, process or lock is left, no run told of a bug,
`opdctl verify` and `opdctl repair` find nothing, and MLflow (in the {tracked} drills of {count} that are tracked) has
every point of every metric once, with the undisturbed value (but for times and memory), and every run finished. {toy}
drills train by hashing, where start-up and the moments between two stages weigh more; {engine} with the real engine.

Healed: the next run went on by itself. Remedied: it refused first, and went on after what its message said to do
(`--rerun STAGE`). `make drills ONLY=17` repeats drill 17.

"""


@dataclass(frozen=True)
class How:
    """Under what circumstances the drills were carried out."""

    seed: int
    commit: str
    seconds: float
    jobs: int  # drills at a time
    loads: Sequence[float]  # load averages of a minute, one a drill


def table(verdicts: Sequence[Verdict], how: How) -> str:
    rows: dict[str, list[Verdict]] = {}
    for one in sorted(verdicts, key=lambda one: one.drill.number):
        rows.setdefault(one.drill.kind.row, []).append(one)
    lines = [
        "| fault | drills | carried out | survived | healed | remedied | seconds, mean |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [_row(name, rows[name]) for name in _in_order(rows)]
    lines.append(_row("**all**", verdicts))
    count = {name: sum(one.drill.subject == name for one in verdicts) for name in ("toy", "engine")}
    tracked = sum(one.drill.tracked for one in verdicts)
    head = HEAD.format(seed=how.seed, commit=how.commit, tracked=tracked, count=len(verdicts), **count)
    load = f"a load average of {min(how.loads):.0f} to {max(how.loads):.0f}"
    end = f"{how.seconds / 60:.0f} minutes in all, {how.jobs} at a time on {os.cpu_count()} cores with {load}."
    return f"{head}{chr(10).join(lines)}\n\n{_rest(verdicts)}{end}\n"


def commit() -> str:
    """Of the code; `+` where it has changed since."""
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty=+", "--exclude=*"], cwd=ROOT, capture_output=True, text=True
    )
    return done.stdout.strip() or "unknown"


def _in_order(rows: dict[str, list[Verdict]]) -> list[str]:
    from drills.faults import KINDS

    return [name for name in dict.fromkeys(kind.row for kind in KINDS) if name in rows]


def _row(name: str, verdicts: Sequence[Verdict]) -> str:
    ran = [one for one in verdicts if not one.skipped]
    survived = [one for one in ran if one.survived]
    remedied = sum(bool(one.remedies) for one in survived)
    mean = f"{sum(one.seconds for one in ran) / len(ran):.0f}" if ran else ""
    cells = [len(verdicts), len(ran), len(survived), len(survived) - remedied, remedied, mean]
    return f"| {name} | {' | '.join(str(cell) for cell in cells)} |"


def _rest(verdicts: Sequence[Verdict]) -> str:
    """Those that were not survived or not carried out."""
    lost = [
        f"- not survived: drill {one.drill.name}: {'; '.join(one.problems[:3])}" for one in verdicts if one.problems
    ]
    left = [
        f"- not carried out: drill {one.drill.name}: {one.skipped}"
        for one in verdicts
        if one.skipped not in ("", INTERRUPTED)
    ]
    if cut := sum(one.skipped == INTERRUPTED for one in verdicts):
        left.append(f"- not carried out: {cut} drills, for it was interrupted")
    lines = [FOLDER.sub(".../", line.replace("\n", " ")) for line in (*lost, *left)]
    return "\n".join(lines) + "\n\n" if lines else ""
