"""From rewards to advantages: group baselines, length penalties, and the token budgets of effort levels.

Shapes: P prompts, G completions of each prompt (its group).
"""

import torch
from torch import Tensor

from opdctl.errors import OpdctlError
from opdctl.settings import Baseline, EffortBudget


def group_advantages(rewards_PG: Tensor, how: Baseline, *, eps: float = 1e-6) -> Tensor:
    """Advantages_PG of completions against their own group. A group of equal rewards gets exactly 0.

    - `mean`: r - mean (Dr. GRPO, arXiv 2503.20783);
    - `mean_std`: (r - mean) / (std + eps), std with G - 1 in the divisor (GRPO, arXiv 2402.03300; `eps` as in verl);
    - `leave_one_out`: r - mean of the other G - 1 (RLOO, arXiv 2402.14740);
    - `leave_one_out_std`: the same / (std of the others + eps), with G - 1 in the divisor; undivided where the others
      are all equal (Nemotron 3 Ultra, arXiv 2606.15007, as NeMo-RL computes it).
    """
    size = rewards_PG.shape[1]
    if size < 2:
        raise OpdctlError(
            f"group_size: {size} gives no baseline for advantage: {how}", hint="set rollout.group_size to 2 or more"
        )
    centred_PG = rewards_PG - rewards_PG.mean(1, keepdim=True)
    # rounding of the mean must not become an advantage of its own once it is divided by a tiny std
    centred_PG = centred_PG.masked_fill(tied_groups(rewards_PG)[:, None], 0.0)
    if how == "mean":
        return centred_PG
    if how == "leave_one_out":
        return centred_PG * (size / (size - 1))
    if how == "leave_one_out_std":
        return centred_PG * (size / (size - 1)) / _std_of_others(rewards_PG, eps)
    return centred_PG / (rewards_PG.std(1, keepdim=True) + eps)


def _std_of_others(rewards_PG: Tensor, eps: float) -> Tensor:
    """Of each completion what its advantage is divided by, H being the G - 1 others of the group."""
    size = rewards_PG.shape[1]
    others_GH = torch.tensor([[j for j in range(size) if j != i] for i in range(size)], device=rewards_PG.device)
    others_PGH = rewards_PG[:, others_GH]
    equal_PG = (others_PGH == others_PGH[..., :1]).all(-1)
    return (others_PGH.std(-1, correction=0) + eps).masked_fill(equal_PG, 1.0)


def tied_groups(rewards_PG: Tensor) -> Tensor:
    """tied_P (bool): all rewards of the group are equal, so it teaches nothing."""
    return (rewards_PG == rewards_PG[:, :1]).all(1)


def soft_overlong_penalty(length: int, max_tokens: int, buffer_tokens: int) -> float:
    """What to add to a reward: 0 up to max_tokens - buffer_tokens, falling linearly to -1 at max_tokens.

    `length` in tokens. Source: DAPO, arXiv 2503.14476 eq. 13.
    """
    return max(-1.0, min(0.0, (max_tokens - buffer_tokens - length) / buffer_tokens))


def over_budget(length: int, tau: float, budget: float) -> bool:
    """T(y) > tau * b0(x), where the reward becomes -1, correct or not; `length` and `budget` in tokens.

    Source: Kimi K3, arXiv 2607.24653, effort levels.
    """
    return length > tau * budget


def annealed_tau(settings: EffortBudget, step: int, max_steps: int) -> float:
    """tau at optimizer step `step` (from 0): `gradual` falls linearly from tau_from to tau over the first
    anneal_fraction * max_steps steps and stays there; `hard` is tau throughout.
    """
    if settings.anneal == "hard" or settings.tau_from is None:
        return settings.tau
    done = min(1.0, step / (settings.anneal_fraction * max_steps))
    return settings.tau_from * (1 - done) + settings.tau * done
