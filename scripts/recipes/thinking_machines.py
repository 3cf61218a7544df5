"""Thinking Machines: knowledge gained and obedience lost in mid-training, and what self-distillation brings back."""

from collections.abc import Sequence
from statistics import fmean

from scripts.recipes.claim import Claim, Table, above, kept, percent, points
from scripts.recipes.results import Report, Results

MODELS = {
    "sft": "before",
    "documents": "documents alone",
    "mixed": "70 % documents",
    "restored": "and distilled from the model before",
}
REACHED = 0.95  # of the accuracy that RL ends with
WINDOW = 3  # rollout batches that a point of a curve is the mean of


def claims(run: Results) -> list[Claim]:
    report = run.report("eval")
    facts, chains = _cells(report)
    learned = report.gain("mixed", "sft", facts)
    lost = report.gain("mixed", "sft", chains)
    regained = report.gain("restored", "mixed", chains)
    remaining = report.gain("restored", "sft", chains)
    knowledge = report.gain("restored", "mixed", facts)
    return [
        Claim(
            "Mid-training on documents with 30 % of chat data teaches them (18 to 36) and costs obedience (85 to 79).",
            f"facts {points(learned)}, chains {points(lost)}",
            _both(above(learned), _opposite(above(lost))),
        ),
        Claim(
            "Documents alone teach more (43) and cost far more (45).",
            f"facts {points(report.gain('documents', 'mixed', facts))}, "
            f"chains {points(report.gain('documents', 'mixed', chains))} against the mixture",
            _opposite(above(report.gain("documents", "mixed", chains))),
        ),
        Claim(
            "Distillation from the model before restores obedience nearly (83 of 85) ...",
            f"chains {points(regained)}, and {points(remaining)} against the model before",
            _both(above(regained), kept(remaining)),
        ),
        Claim("... without losing the knowledge (36 to 41).", f"facts {points(knowledge)}", kept(knowledge)),
        _steps(run),
        _one_prompt(run),
    ]


def table(run: Results) -> Table:
    report = run.report("eval")
    facts, chains = _cells(report)
    rows = [
        [name, percent(report.score(model, facts)), percent(report.score(model, chains))]
        for model, name in MODELS.items()
    ]
    return Table("Knowledge and obedience", ["model", "facts", "chains at three efforts"], rows)


def _cells(report: Report) -> tuple[list[str], list[str]]:
    facts = [cell for cell in report.cells if cell.startswith("facts.")]
    return facts, [cell for cell in report.cells if cell not in facts]


def _steps(run: Results) -> Claim:
    report = run.report("eval_rl")
    bound = REACHED * report.score("rl").value
    steps = {stage: _first(run.curve(stage, "accuracy"), bound) for stage in ("rl", "distilled")}
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


def _first(curve: Sequence[tuple[int, float]], bound: float) -> int | None:
    """The step at which the mean of the last batches is as high."""
    return next(
        (
            step
            for at, (step, _) in enumerate(curve)
            if at + 1 >= WINDOW and fmean(value for _, value in curve[at + 1 - WINDOW : at + 1]) >= bound
        ),
        None,
    )


def _one_prompt(run: Results) -> Claim:
    report = run.report("eval_rl")
    behind = report.gain("one_prompt", "distilled")
    return Claim(
        "One prompt, asked again and again, is nearly enough to reach the teacher (20 steps of 256 rollouts).",
        f"one prompt a task {percent(report.score('one_prompt'))}, as many completions of fresh prompts "
        f"{percent(report.score('distilled'))}: {points(behind)}; the start has {percent(report.score('sft'))}",
        kept(behind),
    )


def _opposite(verdict: bool | None) -> bool | None:
    return None if verdict is None else not verdict


def _both(one: bool | None, other: bool | None) -> bool | None:
    if one is False or other is False:
        return False
    return None if one is None or other is None else True
