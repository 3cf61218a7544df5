"""Group advantages of `opdctl.engine` inside verl 0.9.1, as `algorithm.adv_estimator=opdctl_mean_std` and so on.

verl's own `grpo` and `rloo` (verl/trainer/ppo/core_algos.py) have the same formulas, but give a group of equal rewards
the rounding error of its mean over a standard deviation as small; here such a group gets exactly 0.
"""

from typing import Any, get_args

import torch
from torch import Tensor
from verl.trainer.ppo.core_algos import register_adv_est

from opdctl.backends.verl.plugin.told import told
from opdctl.engine.advantages import group_advantages
from opdctl.settings import Baseline


def register() -> None:
    """Make the estimators known to verl. Once `verl.trainer.ppo.core_algos` is imported."""
    for how in get_args(Baseline):
        register_adv_est(f"opdctl_{how}")(_estimator(how))


def _estimator(how: Baseline) -> Any:
    def estimate(token_level_rewards: Tensor, response_mask: Tensor, index: Any, **_: Any) -> tuple[Tensor, Tensor]:
        """(advantages_BR, returns_BR), the same, from rewards_BR; `index` [B] names each completion's group."""
        rewards_B = token_level_rewards.double().sum(-1)
        # verl fills a batch up with copies of a row that have no token to learn from: not part of the group
        real_B = response_mask.sum(-1) > 0
        groups: dict[Any, list[int]] = {}
        for number in real_B.nonzero()[:, 0].tolist():
            groups.setdefault(index[number], []).append(number)
        advantages_B = torch.zeros_like(rewards_B)
        for numbers in groups.values():
            advantages_B[numbers] = group_advantages(rewards_B[numbers][None], how)[0]
        bound = told().get("max_advantage")
        if bound is not None:
            advantages_B = advantages_B.clamp(-bound, bound)
        advantages_BR = advantages_B.to(token_level_rewards.dtype)[:, None] * response_mask
        return advantages_BR, advantages_BR

    return estimate
