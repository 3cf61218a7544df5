"""Stage kinds `eval`, which scores models on held-out prompts, and `select`, which takes the best of them."""

from typing import Annotated, Literal

from pydantic import Field

from opdctl.fields import Count, Positive, Seed, Settings
from opdctl.settings.grading import Grader
from opdctl.settings.train import Budget, Mixture, Rollout


class EvalBudget(Settings):
    """Within-budget accuracy: correct, finished and T(y) <= tau[effort] * b0(x)."""

    tau: dict[str, Positive]
    budget: Budget


class EvalSettings(Settings):
    # our own; opdctl/settings/harness.py has the other. Not in the identity, which had none when there was one only
    harness: Annotated[Literal["opdctl"], Field(exclude=True)] = "opdctl"
    data: Mixture
    rollout: Rollout  # `prompts`: per task; `group_size`: samples per prompt
    whole: bool = False  # all held-out rows of each task, whatever their number; `prompts` of one that has no end
    pass_k: list[Count] = [1]
    within: EvalBudget | None = None
    confidence: Annotated[float, Field(gt=0, lt=1)] = 0.95
    seed: Seed = 99  # of the held-out prompts: the same for every seed of the recipe
    precision: Literal["float32", "bfloat16"] = "float32"  # of the weights while they are asked
    divergence: bool = False  # per-token KL of every student to its routed teachers, on what `before` wrote
    grader: Grader | None = None  # grades beside the verifiers: the report tells how far it agrees with them


class SelectSettings(Settings):
    """Publishes, of the input role `models`, the one that an eval stage (role `report`) scored best."""

    metric: Literal["accuracy", "within_budget", "length_mean"]
    best: Literal["highest", "lowest"] = "highest"
    cells: list[str] = []  # of the report, `task` or `task.effort`; their plain mean decides; empty: all cells
