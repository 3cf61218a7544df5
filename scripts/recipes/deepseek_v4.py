"""DeepSeek-V4: many specialists into one student, and an actor that is its own generative reward model."""

from scripts.recipes.claim import Claim, Table, above, percent, points
from scripts.recipes.results import Results

DOMAINS, EFFORTS = ("general", "general_agents", "coding_agents"), ("low", "high", "max")
SPECIALISTS = {  # cell -> its teacher
    f"{domain}.{effort}": f"specialist[domain={domain},effort={effort}]" for domain in DOMAINS for effort in EFFORTS
} | {"general.max": "self_judged"}
CHANCE = 0.5  # of a judge that always says the same: half of the graded answers are right


def claims(run: Results) -> list[Claim]:
    report, judged = run.report("eval"), run.report("eval_judge")
    taught, gained = report.teachers("sft", SPECIALISTS), report.gain("student", "sft")
    own = sum(report.score(teacher, [cell]).value for cell, teacher in SPECIALISTS.items()) / len(SPECIALISTS)
    by_itself = report.gain("self_judged", "sft", ["general.max"])
    graded = judged.score("judging_branch", ["grade_general.max"])
    verdicts = [judged.agreement(model, "general.max") for model in ("judging_branch", "self_judged")]
    return [
        Claim(
            "Ten teachers and more, each a domain and an effort, learn more than the model they start from.",
            f"{len(run.named('specialist[*]')) + 2} teachers; those of chains {points(taught)} over the start, each in "
            "its own cell",
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
            f"it judges {percent(graded)} of graded answers right, where half would be chance; of its own at max "
            f"effort {percent(verdicts[0])} as the verifier does before that RL, and {percent(verdicts[1])} after it",
            above(graded, CHANCE),
        ),
    ]


def table(run: Results) -> Table:
    report = run.report("eval")
    rows = [
        [cell, *(percent(report.score(model, [cell])) for model in ("sft", teacher, "student"))]
        for cell, teacher in SPECIALISTS.items()
    ]
    return Table("Accuracy by domain and effort", ["cell", "start", "specialist", "student"], rows)
