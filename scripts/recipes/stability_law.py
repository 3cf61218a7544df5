"""The stability law: a near and a distant teacher, three forms of the loss."""

from statistics import fmean

from scripts.recipes.claim import Claim, Table, percent
from scripts.recipes.results import Results

FORMS = ("policy_gradient", "topk", "full_vocab")
TEACHERS = ("near", "distant")
BATCHES = 5  # averaged at the end of a curve


def claims(run: Results) -> list[Claim]:
    kl = {teacher: fmean(_ends(run, teacher, form, "reverse_kl")[0] for form in FORMS) for teacher in TEACHERS}
    report = run.report()
    near = [_ends(run, "near", form, "reverse_kl") for form in FORMS]
    scores = {(teacher, form): _score(run, teacher, form) for teacher in TEACHERS for form in FORMS}
    before, after = _ends(run, "distant", "policy_gradient", "student_entropy")
    first, last = _ends(run, "distant", "topk", "reverse_kl")
    return [
        Claim(
            "The teacher of the student's own origin starts near it, a foreign one far: 0.04, 0.19 nats a token.",
            f"{kl['near']:.2f} against {kl['distant']:.2f} nats, {kl['distant'] / kl['near']:.1f} times as far; the "
            f"teachers have {percent(report.score('near'))} and {percent(report.score('distant'))}",
            kl["distant"] >= 3 * kl["near"],
        ),
        Claim(
            "From the near teacher every form learns: KL falls, and the student ends close to its teacher.",
            "; ".join(
                f"{form} KL {start:.2f} -> {end:.3f}, score {scores['near', form]:.2f}"
                for form, (start, end) in zip(FORMS, near, strict=True)
            ),
            all(end < 0.2 * start for start, end in near) and min(scores["near", form] for form in FORMS) > 0.9,
        ),
        Claim(
            "From the distant teacher the sampled token gets a part of the way, its entropy shrinking: score 0.600, "
            "entropy 0.30 -> 0.21.",
            f"score {scores['distant', 'policy_gradient']:.2f}, entropy {before:.2f} -> {after:.2f}",
            0 < scores["distant", "policy_gradient"] < 0.9 and after < before,
        ),
        Claim(
            "From the distant teacher top-k diverges: score -1.19.",
            f"score {scores['distant', 'topk']:.2f}, KL {first:.2f} -> {last:.2f}",
            scores["distant", "topk"] < 0 and last > first,
        ),
        Claim(
            "Distance decides, not the loss: no form does as well with the distant teacher as with the near one.",
            "; ".join(f"{form} {scores['near', form]:.2f} and {scores['distant', form]:.2f}" for form in FORMS),
            all(scores["distant", form] < scores["near", form] for form in FORMS),
        ),
    ]


def table(run: Results) -> Table:
    report, rows = run.report(), []
    for teacher in TEACHERS:
        for form in FORMS:
            student = f"student[teacher={teacher},loss={form}]"
            ends = [_ends(run, teacher, form, name) for name in ("reverse_kl", "student_entropy", "overlap")]
            shown = [f"{start:.3f} -> {end:.3f}" for start, end in ends]
            length = f"{report.length(student, report.cells[0]):.1f}"
            rows.append(
                [teacher, form, *shown, percent(report.score(student)), f"{_score(run, teacher, form):.2f}", length]
            )
    head = ["teacher", "form", "KL", "entropy", "overlap", "accuracy", "score", "tokens"]
    return Table("The first batch and the mean of the last ones; score: 0 as before, 1 as the near teacher", head, rows)


def _ends(run: Results, teacher: str, form: str, metric: str) -> tuple[float, float]:
    """Means over the first batch alone, before anything is learnt, and over the last ones."""
    values = [value for _, value in run.curve(f"student[teacher={teacher},loss={form}]", metric)]
    return values[0], fmean(values[-BATCHES:])


def _score(run: Results, teacher: str, form: str) -> float:
    report = run.report()
    before, top = report.score("sft").value, report.score("near").value
    return (report.score(f"student[teacher={teacher},loss={form}]").value - before) / (top - before)
