"""Uni-OPD: guidance that agrees with the verifier, and batches of as many wrong as right completions."""

from statistics import fmean

from scripts.recipes.claim import Claim, Table, above, kept, listed, lowest, percent, points
from scripts.recipes.results import Report, Results

PLAIN, CALIBRATED, BALANCED, BOTH = (f"student[recipe={name}]" for name in ("plain", "calibrated", "balanced", "both"))
BATCHES = 10  # averaged at each end of a curve


def claims(run: Results) -> list[Claim]:
    report = run.report()
    shifted, left_out = _ends(run, CALIBRATED, "margin_shift"), _ends(run, BALANCED, "left_out")
    acts = [value > 0 for _, value in run.curve(CALIBRATED, "margin_shift")]
    misled = {recipe: report.gain(f"misled[recipe={recipe}]", "sft") for recipe in ("plain", "calibrated")}
    saved = report.gain("misled[recipe=calibrated]", "misled[recipe=plain]")
    over = report.gain(PLAIN, "sft")
    teachers = _teachers(report, "high")
    against = {cell: report.gain(BOTH, teacher, [cell]) for cell, teacher in teachers.items()}
    return [
        Claim(
            "A teacher's guidance, summed over a completion, does not keep right ones ahead of wrong ones, and "
            "calibration restores the margin of 0.4.",
            f"advantages are shifted by {shifted[0]:.2f} on average at the start, {shifted[1]:.2f} at the end, in "
            f"{percent(fmean(acts))} of the batches (by 0.20 in a group whose right and wrong ones score the same, by "
            "nothing in a group all right or all wrong)",
            min(shifted) > 0,
        ),
        Claim(
            "Right and wrong completions of a batch are kept at 1:1.",
            f"{percent(left_out[0])} of a batch is left out at the start, {percent(left_out[1])} at the end; the "
            f"student is right in {percent(_ends(run, BALANCED, 'accuracy')[1])} of all then",
            max(value for _, value in run.curve(BALANCED, "left_out")) > 0,
        ),
        Claim(
            "Distillation from several teachers lifts the student (tables are not in the report's repository, here and "
            "below).",
            f"{percent(report.score('sft'))} before, {points(over)} without either of the two",
            above(over),
        ),
        Claim("Calibrated margins make it better.", *_gain(report, CALIBRATED)),
        Claim(
            "They keep an unreliable teacher from leading the student astray.",
            f"teachers of max effort have {_mean(report, _teachers(report, 'max'))} at high effort; by them "
            f"{points(misled['plain'])} over before, {points(misled['calibrated'])} with calibrated margins: "
            f"{points(saved)}",
            above(saved),
        ),
        Claim("Balanced batches make it better.", *_gain(report, BALANCED)),
        Claim("Both together make it better.", *_gain(report, BOTH)),
        Claim(
            "One student takes over what its teachers can.",
            "with both, against each teacher in its own domain " + listed(against),
            kept(lowest(against)),
        ),
    ]


def table(run: Results) -> Table:
    report = run.report()
    rows = [
        ["before", *_row(report, dict.fromkeys(report.cells, "sft")), "", "", ""],
        ["teachers", *_row(report, _teachers(report, "high")), "", "", ""],
        ["unreliable teachers", *_row(report, _teachers(report, "max")), "", "", ""],
    ]
    for student in (PLAIN, CALIBRATED, BALANCED, BOTH, *run.named("misled[*]")):
        end = [f"{_ends(run, student, metric)[1]:.3f}" for metric in ("reverse_kl", "student_entropy")]
        name = student.replace("student[recipe=", "").replace("misled[recipe=", "misled, ").removesuffix("]")
        own = _row(report, dict.fromkeys(report.cells, student))
        rows.append([name, *own, *end, f"{run.cost(student):.0f}"])
    head = ["student", *report.cells, "mean", "KL at the end", "entropy", "CPU seconds"]
    return Table("Accuracy with and without calibrated margins and balanced batches", head, rows)


def _teachers(report: Report, stage: str) -> dict[str, str]:
    """Cell -> the teacher of its domain."""
    return {cell: f"{stage}[domain={cell.partition('.')[0]}]" for cell in report.cells}


def _mean(report: Report, models: dict[str, str]) -> str:
    return _row(report, models)[-1]


def _row(report: Report, models: dict[str, str]) -> list[str]:
    scores = [report.score(model, [cell]).value for cell, model in models.items()]
    return [percent(score) for score in [*scores, fmean(scores)]]


def _gain(report: Report, student: str) -> tuple[str, bool | None]:
    gain = report.gain(student, PLAIN)
    return f"{points(gain)} over the same without", above(gain)


def _ends(run: Results, stage: str, metric: str) -> tuple[float, float]:
    """Means over the first and over the last batches."""
    values = [value for _, value in run.curve(stage, metric)]
    return fmean(values[:BATCHES]), fmean(values[-BATCHES:])
