"""DeepSeek-V4: many specialists into one student, and an actor that is its own generative reward model."""

from statistics import fmean

from opdctl.engine.scores import weighted_sum
from scripts.recipes.claim import Claim, Table, above, percent, points
from scripts.recipes.results import Results

DOMAINS, EFFORTS = ("general", "general_agents", "coding_agents"), ("low", "high", "max")
SPECIALISTS = {  # cell -> its teacher
    f"{domain}.{effort}": f"specialist[domain={domain},effort={effort}]" for domain in DOMAINS for effort in EFFORTS
} | {"general.max": "self_judged"}
CHANCE = 0.5  # of a judge that always says the same: half of the graded answers are right


BATCHES = 5  # at either end of a stage that are averaged


def claims(run: Results) -> list[Claim]:
    report = run.report("eval")
    taught, gained = report.teachers("sft", SPECIALISTS), report.gain("student", "sft")
    behind = weighted_sum(
        [(1 / len(SPECIALISTS), report.gain("student", teacher, [cell])) for cell, teacher in SPECIALISTS.items()]
    )
    own = sum(report.score(teacher, [cell]).value for cell, teacher in SPECIALISTS.items()) / len(SPECIALISTS)
    return [
        Claim(
            "Ten teachers and more, each a domain and an effort, learn more than the model they start from.",
            f"{len(run.named('specialist[*]')) + 2} teachers; those of chains {points(taught)} over the start, each in "
            f"its own cell; {_ahead(run)} of {len(SPECIALISTS)} are ahead of it for certain",
            above(taught),
        ),
        Claim(
            "One student takes the abilities of all of them over, by the exact divergence. The report has no ablation.",
            f"{points(gained)} over the start: {percent(report.score('student'))}, its teachers {percent(own)}, "
            f"{points(behind)} against them",
            above(gained),
        ),
        *_judging(run),
        _cost(run),
    ]


def table(run: Results) -> Table:
    report = run.report("eval")
    rows = [
        [cell, *(percent(report.score(model, [cell])) for model in ("sft", teacher, "student"))]
        for cell, teacher in SPECIALISTS.items()
    ]
    return Table("Accuracy by domain and effort", ["cell", "start", "specialist", "student"], rows)


def _ahead(run: Results) -> int:
    report = run.report("eval")
    return sum(above(report.gain(teacher, "sft", [cell])) is True for cell, teacher in SPECIALISTS.items())


def _judging(run: Results) -> list[Claim]:
    """The actor as its own reward model: what its verdicts made of it, and whether they can be relied on."""
    judged = run.report("eval_judge")
    by_itself = judged.gain("self_judged", "judging_branch", ["general.max"])
    right, agreed = (_ends(run, name) for name in ("accuracy", "agreement"))
    graded = {model: judged.score(model, ["grade_general.max"]) for model in judged.models}
    verdicts = [judged.agreement(model, "general.max") for model in ("judging_branch", "self_judged")]
    return [
        Claim(
            "The actor grades itself: no scalar reward model, and its RL improves it.",
            f"general at max effort {points(by_itself)} over its branch by its own verdicts; by the rule, which it is "
            f"not shown, {right} of its answers were right while it trained",
            above(by_itself),
        ),
        Claim(
            "As a judge it can be relied on. No numbers; LongCat-Flash-Thinking (arXiv 2509.18883) has 94.0 % "
            "of agreement without reasoning and 98.8 % with it.",
            f"its branch judges {percent(graded['judging_branch'])} of graded answers right, where half would be "
            f"chance; RL on its own verdicts leaves {percent(graded['self_judged'])}, RL on graded answers makes it "
            f"{percent(graded['judge'])}, the student has {percent(graded['student'])}. Of its own answers it says "
            f"what the rule says in {percent(verdicts[0])} before RL and {percent(verdicts[1])} after it, and while "
            f"it trained {agreed}",
            above(graded["self_judged"], CHANCE),
        ),
    ]


def _ends(run: Results, metric: str) -> str:
    values = [value for _, value in run.curve("self_judged", metric)]
    return f"{percent(fmean(values[:BATCHES]))} to {percent(fmean(values[-BATCHES:]))}"


def _cost(run: Results) -> Claim:
    spent = {stage: 1e6 * run.cost(stage) / run.metric(stage, "sampled_tokens") for stage in ("student", "in_memory")}
    return Claim(
        "Teachers on disk, hidden states cached: any number of them at little cost. No numbers.",
        f"{spent['student']:.0f} CPU microseconds a sampled token with cached states, {spent['in_memory']:.0f} with "
        "all teachers in memory, which is possible at this size; what more teachers cost: benchmarks/teachers.py",
        None,
    )
