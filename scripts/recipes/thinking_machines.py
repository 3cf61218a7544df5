"""Thinking Machines: knowledge gained and obedience lost in mid-training, and what self-distillation brings back."""

from scripts.recipes.claim import Claim, Table, above, kept, percent, points
from scripts.recipes.results import Report, Results

MODELS = {
    "sft": "before",
    "documents": "documents alone",
    "mixed": "70 % documents",
    "restored": "and distilled from the model before",
}
REACHED = 0.95  # of the way from where a curve starts to where RL ends


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
    start, end = (run.report("eval_rl").score(model).value for model in ("sft", "rl"))
    bound = start + REACHED * (end - start)
    steps = {
        stage: next((step for step, value in run.curve(stage, "accuracy") if value >= bound), None)
        for stage in ("rl", "distilled")
    }
    by_rl, by_opd = steps["rl"], steps["distilled"]
    told = [f"{name} {'does not' if step is None else f'in {step}'}" for name, step in steps.items()]
    return Claim(
        "Distilling what RL ended at takes fewer steps than RL did (under 10 against 70).",
        f"steps until {percent(bound)} of a batch are right: {', '.join(told)}; at the end {percent(end)} by RL, "
        f"{percent(run.report('eval_rl').score('distilled'))} by distillation",
        None if by_rl is None else by_opd is not None and by_opd < by_rl,
    )


def _opposite(verdict: bool | None) -> bool | None:
    return None if verdict is None else not verdict


def _both(one: bool | None, other: bool | None) -> bool | None:
    if one is False or other is False:
        return False
    return None if one is None or other is None else True
