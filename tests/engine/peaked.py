"""Models at random whose distributions are far from uniform: a student, a teacher close to it, a stranger."""

from collections.abc import Callable
from pathlib import Path

import torch
from engine import stages

from opdctl.engine.checkpoint import new_policy, save_policy
from opdctl.engine.policy import Policy
from opdctl.settings import NewModel

ROUTES = [("math", "low"), ("math", "max"), ("code", "low"), ("code", "max")]


def model(folder: Path, *, seed: int = 0, change: Callable[[Policy], None] | None = None) -> Path:
    """A peaked model at random; another `seed` is a stranger to it."""
    policy, tokenizer = new_policy(NewModel.model_validate(stages.MODEL), seed)
    with torch.no_grad():
        policy.head().mul_(12.0)
        if change:
            change(policy)
    save_policy(policy, tokenizer, folder, dtype=torch.float32)
    return folder


def nudged(policy: Policy) -> None:
    generator = torch.Generator().manual_seed(5)
    for weight in policy.parameters():
        weight.mul_(1 + 0.02 * torch.randn(weight.shape, generator=generator))
