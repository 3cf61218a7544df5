"""Nemotron 3 Ultra: a warm-up, then distillation twice, measured by recovery."""

from scripts.recipes.claim import Claim, Table, above, percent, points
from scripts.recipes.results import Report, Results

FIRST, SECOND, COLD = "mopd[round=1]", "mopd[round=2]", "cold[round=2]"


def claims(run: Results) -> list[Claim]:
    report = run.report()
    gain, again = report.gain(SECOND, "rlvr"), report.gain(SECOND, FIRST)
    warm = report.gain(SECOND, COLD)
    recovered = {cell: _recovery(report, cell, SECOND) for cell in report.cells}
    known = [share for share in recovered.values() if share is not None]
    return [
        Claim(
            "Distillation lifts the RLVR checkpoint on most benchmarks: SWE-bench Verified 65.8 -> 71.7, tau2 telecom "
            "82.7 -> 92.9, BrowseComp 31.0 -> 44.4.",
            f"{percent(report.score('rlvr'))} before, {percent(report.score(SECOND))} after two rounds: {points(gain)}",
            above(gain),
        ),
        Claim(
            "Recovery differs by benchmark, from 17 % (HLE) over 88 % (SWE-bench Verified) to more than all (173 %).",
            "; ".join(f"{cell} {_shown(share)}" for cell, share in recovered.items()),
            min(known) > 0 if known else None,
        ),
        Claim(
            "The second round adds on most benchmarks, and takes on some (LiveCodeBench 90.0 -> 89.0).",
            points(again),
            above(again),
        ),
        Claim(
            "The warm-up helps where the student is far from its teachers: GDPVal 46.7 with and 35.3 without, "
            "BrowseComp 44.4 and 33.0; HLE 26.7 and 26.3.",
            f"{points(warm)} by the warm-up after two rounds; reverse KL at the first step "
            f"{_first(run, FIRST):.2f} with, {_first(run, 'cold[round=1]'):.2f} without",
            above(warm),
        ),
    ]


def table(run: Results) -> Table:
    report = run.report()
    models = ["sft", "rlvr", FIRST, SECOND]
    rows = []
    for cell in report.cells:
        teacher = f"teacher[domain={cell.partition('.')[0]}]"
        scores = [percent(report.score(model, [cell])) for model in (*models, teacher)]
        rows.append([cell, *scores, _shown(_recovery(report, cell, SECOND))])
    return Table("Accuracy and recovery", ["cell", "SFT", "RLVR", "round 1", "round 2", "teacher", "recovery"], rows)


def _first(run: Results, stage: str) -> float:
    return run.curve(stage, "reverse_kl")[0][1]


def _shown(share: float | None) -> str:
    return "not defined" if share is None else percent(share)


def _recovery(report: Report, cell: str, student: str) -> float | None:
    """(student - RLVR) / (teacher - RLVR) in one cell, as the report has it; None where the teacher gained nothing."""
    teacher = report.score(f"teacher[domain={cell.partition('.')[0]}]", [cell]).value
    before, after = report.score("rlvr", [cell]).value, report.score(student, [cell]).value
    return (after - before) / (teacher - before) if teacher != before else None
