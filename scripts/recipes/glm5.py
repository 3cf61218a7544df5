"""GLM-5: what a cascade of RL stages forgets, and what cross-stage distillation brings back."""

from scripts.recipes.claim import Claim, Table, above, listed, percent, points
from scripts.recipes.results import Results

STAGES = {"reasoning": "general", "agentic": "coding_agents", "general_rl": "general_agents"}  # -> the domain it trains


def claims(run: Results) -> list[Claim]:
    report = run.report()
    learned = report.teachers("sft", {f"{domain}.max": stage for stage, domain in STAGES.items()})
    earlier = {stage: f"{domain}.max" for stage, domain in STAGES.items() if stage != "general_rl"}
    lost = {stage: report.gain(stage, "general_rl", [cell]) for stage, cell in earlier.items()}
    regained = {stage: report.gain("cross_stage", "general_rl", [cell]) for stage, cell in earlier.items()}
    left = {stage: report.gain("cross_stage", stage, [cell]) for stage, cell in earlier.items()}
    return [
        Claim(
            "Each RL stage teaches the skill that it trains.",
            f"{points(learned)} over SFT, each stage in its own domain",
            above(learned),
        ),
        Claim(
            "Stages in sequence forget what earlier ones taught; the last stage is there to bring it back. No numbers.",
            "at the end of the cascade each had lost " + listed(lost),
            above(max(lost.values(), key=lambda difference: difference.value)),
        ),
        Claim(
            "Cross-stage distillation recovers the skills of the earlier stages.",
            "over the end of the cascade " + listed(regained) + "; against the stage's own checkpoint " + listed(left),
            above(max(regained.values(), key=lambda difference: difference.value)),
        ),
        Claim(
            "It does so quickly.",
            f"{run.cost('cross_stage'):.0f} CPU seconds, against "
            f"{sum(run.cost(stage) for stage in STAGES):.0f} of the three RL stages",
            run.cost("cross_stage") < sum(run.cost(stage) for stage in STAGES),
        ),
    ]


def table(run: Results) -> Table:
    report = run.report()
    models = ["sft", *STAGES, "cross_stage"]
    rows = [
        [domain, *(percent(report.score(model, [f"{domain}.max"])) for model in models)] for domain in STAGES.values()
    ]
    return Table("Accuracy at max effort along the cascade and after its last stage", ["domain", *models], rows)
