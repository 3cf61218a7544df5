"""DeepSeek-V4: many specialists into one student, and an actor that is its own generative reward model."""

from collections.abc import Sequence
from statistics import fmean

from opdctl.engine.scores import Estimate, difference, weighted_sum
from scripts.recipes.claim import Claim, Table, above, percent, points
from scripts.recipes.results import Results

DOMAINS, EFFORTS = ("general", "general_agents", "coding_agents"), ("low", "high", "max")
JUDGES = "judging_branch"  # what those who judge start from
SPECIALISTS = {  # cell -> its teacher
    f"{domain}.{effort}": f"specialist[domain={domain},effort={effort}]" for domain in DOMAINS for effort in EFFORTS
} | {"general.max": "self_judged"}
CHANCE = 0.5  # of a judge that always says the same: half of the graded answers are right
BATCHES = 5  # at either end of a stage that are averaged


def claims(run: Results) -> list[Claim]:
    report, starts = run.report("eval"), run.report("eval_starts")
    teachers = _mean([report.score(teacher, [cell]) for cell, teacher in SPECIALISTS.items()])
    by_rl = [difference(report.score(teacher, [cell]), _branch(run, cell)) for cell, teacher in SPECIALISTS.items()]
    behind = _mean([report.gain("student", teacher, [cell]) for cell, teacher in SPECIALISTS.items()])
    gained = difference(report.score("student"), starts.score("sft"))
    taught = difference(teachers, starts.score("sft"))
    return [
        Claim(
            "Ten teachers and more, each a domain and an effort: SFT in the domain, then RL. No numbers.",
            f"{len(run.named('specialist[*]')) + 2} teachers; of chains, each in its own cell, {points(taught)} over "
            f"the model that all come from; RL alone {points(_mean(by_rl))} over their branches, "
            f"{sum(above(gain) is True for gain in by_rl)} of {len(by_rl)} ahead for certain",
            above(taught),
        ),
        Claim(
            "One student takes the abilities of all of them over, by the exact divergence. The report has no ablation.",
            f"{percent(report.score('student'))}, its teachers {percent(teachers)}: {points(behind)}. The model that "
            f"all come from has {percent(starts.score('sft'))} ({points(gained)}), the student's start "
            f"{percent(report.score('start'))}",
            above(gained),
        ),
        *_judging(run),
        _cost(run),
    ]


def table(run: Results) -> Table:
    report, starts = run.report("eval"), run.report("eval_starts")
    rows = []
    for cell, teacher in SPECIALISTS.items():
        scores = (
            starts.score("sft", [cell]),
            _branch(run, cell),
            *(report.score(m, [cell]) for m in (teacher, "student")),
        )
        rows.append([cell, *map(percent, scores)])
    return Table("Accuracy by domain and effort", ["cell", "all start from", "branch", "specialist", "student"], rows)


def _branch(run: Results, cell: str) -> Estimate:
    """Of the model that the cell's specialist was trained from."""
    own = JUDGES if SPECIALISTS[cell] == "self_judged" else f"branch[domain={cell.partition('.')[0]}]"
    return run.report("eval_starts").score(own, [cell])


def _mean(estimates: Sequence[Estimate]) -> Estimate:
    return weighted_sum([(1 / len(estimates), estimate) for estimate in estimates])


def _judging(run: Results) -> list[Claim]:
    """The actor as its own reward model: what its verdicts made of it, and whether they can be relied on."""
    judged = run.report("eval_judge")
    by_itself = judged.gain("self_judged", JUDGES, ["general.max"])
    right, agreed = (_ends(run, name) for name in ("accuracy", "agreement"))
    graded = {model: judged.score(model, ["grade_general.max"]) for model in judged.models}
    verdicts = [judged.agreement(model, "general.max") for model in (JUDGES, "self_judged", "start", "student")]
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
            f"its branch judges {percent(graded[JUDGES])} of graded answers right, where half would be "
            f"chance; RL on its own verdicts leaves {percent(graded['self_judged'])}, RL on graded answers makes it "
            f"{percent(graded['judge'])}, the student has {percent(graded['student'])} "
            f"(its start {percent(graded['start'])}). Of its own answers it says "
            f"what the rule says in {percent(verdicts[0])} before RL and {percent(verdicts[1])} after it, while it "
            f"trained {agreed}; the student of its own in {percent(verdicts[3])} (its start {percent(verdicts[2])})",
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
