"""Thinking Machines: knowledge gained and obedience lost in mid-training, and what self-distillation brings back."""

from scripts.recipes.claim import Claim, Table, above, kept, opposite, percent, points
from scripts.recipes.results import Report, Results, first_step

MODELS = {"sft": "before", "documents": "documents alone", "mixed": "70 % documents"}
INSTRUCTIONS = "general_agents"  # whose chains stand for IF-eval
REACHED = 0.95  # of the accuracy that RL ends with
WINDOW = 3  # rollout batches that a point of a curve is the mean of


def claims(run: Results) -> list[Claim]:
    report = run.report("eval")
    facts, told = _cells(report, "facts"), _cells(report, INSTRUCTIONS)
    learned, lost = report.gain("mixed", "sft", facts), report.gain("mixed", "sft", told)
    more, worse = report.gain("documents", "mixed", facts), report.gain("documents", "mixed", told)
    return [
        Claim(
            "Mid-training on documents with 30 % of chat data teaches them (18 to 36) and costs obedience (85 to 79).",
            f"facts {points(learned)}, instructions {points(lost)}",
            _both(above(learned), opposite(above(lost))),
        ),
        Claim(
            "Documents alone teach more (43) and cost far more (45).",
            f"facts {points(more)}, instructions {points(worse)} against the mixture",
            _both(above(more), opposite(above(worse))),
        ),
        *_restored(run, facts, told),
        _steps(run),
        _one_prompt(run),
    ]


def table(run: Results) -> Table:
    report = run.report("eval")
    names = MODELS | {stage: f"and distilled at a rate of {_rate(run, stage):g}" for stage in run.named("restored[*]")}
    tasks = ["facts", INSTRUCTIONS, *(task for task in run.settings["axes"]["domain"] if task != INSTRUCTIONS)]
    rows = [
        [name, *(percent(report.score(model, _cells(report, task))) for task in tasks)] for model, name in names.items()
    ]
    return Table("Knowledge and obedience", ["model", "facts", "instructions", *tasks[2:]], rows)


def _cells(report: Report, task: str) -> list[str]:
    return [cell for cell in report.cells if cell.startswith(f"{task}.")]


def _rate(run: Results, stage: str) -> float:
    return float(run.settings["stages"][stage]["config"]["train"]["optimizer"]["lr"])


def _restored(run: Results, facts: list[str], told: list[str]) -> list[Claim]:
    """What distillation from the model before brings back, and what it costs, at each rate."""
    report, rows = run.report("eval"), []
    for stage in run.named("restored[*]"):
        regained, missing = report.gain(stage, "mixed", told), report.gain(stage, "sft", told)
        knowledge = report.gain(stage, "mixed", facts)
        rows.append(
            Claim(
                "Distillation from the model before restores obedience nearly (79 to 83 of 85) and costs no knowledge "
                f"(36 to 41); at a rate of {_rate(run, stage):g}.",
                f"instructions {points(regained)}, then {points(missing)} against the model before; facts "
                f"{points(knowledge)}",
                _both(_both(above(regained), kept(missing)), kept(knowledge)),
            )
        )
    return rows


def _steps(run: Results) -> Claim:
    report = run.report("eval_rl")
    bound = REACHED * report.score("rl").value
    steps = {stage: first_step(run.curve(stage, "accuracy"), bound, WINDOW) for stage in ("rl", "distilled")}
    told = []
    for stage, step in steps.items():
        batch = run.settings["stages"][stage]["config"]["train"]["global_batch_size"]
        told.append(f"{stage} never" if step is None else f"{stage} in {step} steps ({step * batch:,} samples)")
    by_rl, by_opd = steps["rl"], steps["distilled"]
    return Claim(
        "Distilling what RL ended at takes fewer steps than RL did (under 10 against 70).",
        f"until {percent(bound)} of {WINDOW} batches are right, {REACHED:.0%} of RL's last policy: {', '.join(told)}; "
        f"both start at {percent(report.score('sft'))} and end at {percent(report.score('rl'))} and "
        f"{percent(report.score('distilled'))}",
        None if by_rl is None else by_opd is not None and by_opd < by_rl,
    )


def _one_prompt(run: Results) -> Claim:
    report = run.report("eval_rl")
    counts = run.settings["axes"]["prompts"]
    one, few = (f"few[prompts={count}]" for count in counts)
    behind = report.gain(one, "distilled")
    return Claim(
        "One prompt, asked again and again, is nearly enough to reach the teacher (20 steps of 256 rollouts).",
        f"one prompt a task {percent(report.score(one))}, as many completions of fresh prompts "
        f"{percent(report.score('distilled'))}: {points(behind)}; the start has {percent(report.score('sft'))}; "
        f"{counts[1]} prompts a task {percent(report.score(few))}",
        kept(behind),
    )


def _both(one: bool | None, other: bool | None) -> bool | None:
    if one is False or other is False:
        return False
    return None if one is None or other is None else True
