"""DeepSeek-V4: many specialists into one student, and an actor that is its own generative reward model."""

from scripts.recipes.claim import Claim, Table, above, percent, points
from scripts.recipes.results import Results

EFFORTS = ("low", "high", "max")
SPECIALISTS = {  # domain -> the stages that train it, but for their effort
    "general": "self_judged[",
    "general_agents": "specialist[domain=general_agents,",
    "coding_agents": "specialist[domain=coding_agents,",
    "grade_general": "judge[",
}


def claims(run: Results) -> list[Claim]:
    report, judged = run.report("eval"), run.report("eval_judge")
    routed = {
        f"{domain}.{effort}": f"{stage}effort={effort}]" for domain, stage in SPECIALISTS.items() for effort in EFFORTS
    }
    taught, gained = report.teachers("sft", routed), report.gain("student", "sft")
    own = sum(report.score(teacher, [cell]).value for cell, teacher in routed.items()) / len(routed)
    by_itself = report.gain("self_judged[effort=max]", "sft", ["general.max"])
    verdicts = [judged.agreement(model, "general.max") for model in ("judging_branch", "self_judged[effort=max]")]
    return [
        Claim(
            "More than ten specialists, each a domain and an effort, learn more than the model they start from.",
            f"{len(routed)} teachers, {points(taught)} over the start, each in its own cell",
            above(taught),
        ),
        Claim(
            "One student takes the abilities of all of them over, by the exact divergence. The report has no ablation.",
            f"{points(gained)} over the start: {percent(report.score('student'))}, its teachers {percent(own)}",
            above(gained),
        ),
        Claim(
            "The actor grades itself: no scalar reward model, and its RL improves it.",
            f"general at max effort {points(by_itself)} over the start by its own verdicts",
            above(by_itself),
        ),
        Claim(
            "As a judge it can be relied on. No numbers; LongCat-Flash-Thinking (arXiv 2509.18883) has 94.0 % "
            "of agreement without reasoning and 98.8 % with it.",
            f"of its answers at max effort it judges {percent(verdicts[0])} as the verifier does before that RL, and "
            f"{percent(verdicts[1])} after it",
            None,
        ),
    ]


def table(run: Results) -> Table:
    report = run.report("eval")
    rows = [
        [
            f"{domain}.{effort}",
            *(
                percent(report.score(model, [f"{domain}.{effort}"]))
                for model in ("sft", f"{stage}effort={effort}]", "student")
            ),
        ]
        for domain, stage in SPECIALISTS.items()
        for effort in EFFORTS
    ]
    return Table("Accuracy by domain and effort", ["cell", "start", "specialist", "student"], rows)
