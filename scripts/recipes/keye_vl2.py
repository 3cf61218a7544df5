"""Keye-VL-2.0: thirteen teachers behind a router, and the advantage of the tokens in both top-k sets."""

from scripts.recipes.claim import Claim, above, percent, points
from scripts.recipes.results import Results

OVERLAP, TOPK = "student[loss=overlap]", "student[loss=topk]"


def claims(run: Results) -> list[Claim]:
    report = run.report()
    teachers = [given for given in run.record(OVERLAP).parents if given.role == "teachers"]
    gains = {student: report.gain(student, "general_rl") for student in (OVERLAP, TOPK)}
    kl = {student: run.curve(student, "reverse_kl") for student in (OVERLAP, TOPK)}
    return [
        Claim(
            "One student learns from 13 teachers, each sample from one that a router chooses.",
            f"{len(teachers)} teachers",
            len(teachers) == 13,
        ),
        Claim(
            "Distillation by the overlap's advantage makes the student better than the backbone. The report has no "
            "ablation of it.",
            f"{percent(report.score('general_rl'))} before, {percent(report.score(OVERLAP))} after: "
            f"{points(gains[OVERLAP])}; reverse KL {kl[OVERLAP][0][1]:.2f} -> {kl[OVERLAP][-1][1]:.2f}. The advantage "
            "is the same whichever token is sampled, so that its gradient is 0 in expectation",
            above(gains[OVERLAP]),
        ),
        Claim(
            "The overlap is one of three top-k modes. No numbers compare them.",
            f"the corrected top-k from the same start: {points(gains[TOPK])}; reverse KL {kl[TOPK][0][1]:.2f} -> "
            f"{kl[TOPK][-1][1]:.2f}; over the overlap {points(report.gain(TOPK, OVERLAP))}",
            None,
        ),
    ]
