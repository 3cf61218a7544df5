"""Exposure bias: one distillation on the student's and on the teacher's own samples."""

from itertools import product

from scripts.recipes.claim import Claim, above, percent, points
from scripts.recipes.results import Results

PLANTED = "planted"  # chains that stop right after an error


def claims(run: Results) -> list[Claim]:
    report = run.report()
    rows = [
        Claim(
            "The teacher is right more often than the SFT model, so a student makes errors that its teacher's samples "
            "hardly hold.",
            f"whole chains {percent(report.score('sft', ['chains']))} and "
            f"{percent(report.score('teacher', ['chains']))}, planted errors made good "
            f"{percent(report.score('sft', [PLANTED]))} and {percent(report.score('teacher', [PLANTED]))}",
            above(report.gain("teacher", "sft", ["chains"])),
        )
    ]
    axes = run.settings["axes"]
    for steps, form in product(axes["steps"], axes["loss"]):
        own, lent = (f"distilled[steps={steps},sampler={sampler},loss={form}]" for sampler in ("student", "teacher"))
        for cell, what in (("chains", "on whole chains"), (PLANTED, "on errors to be made good")):
            lead = report.gain(own, lent, [cell])
            measured = (
                f"{percent(report.score(own, [cell]))} against {percent(report.score(lent, [cell]))}: {points(lead)}"
            )
            rows.append(
                Claim(
                    f"With {form} for {steps} steps the student's own samples teach more than its teacher's, {what}.",
                    measured,
                    above(lead),
                )
            )
    return rows
