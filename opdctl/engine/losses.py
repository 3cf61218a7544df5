"""Losses on the log-probabilities of single tokens: pure functions of tensors.

Shapes: N completion tokens of a batch, in concatenated order.
Notation: pi_theta policy, pi_old policy that sampled the tokens, pi_T teacher, pi_ref reference, y_t sampled token.
"""

from typing import Literal

import torch
from torch import Tensor

from opdctl.errors import OpdctlError

Aggregation = Literal["sequence_mean", "token_mean", "constant"]
KlEstimator = Literal["k1", "k2", "k3"]


def clipped_policy_loss(
    policy_logprobs_N: Tensor, old_logprobs_N: Tensor, advantages_N: Tensor, *, low: float, high: float
) -> tuple[Tensor, Tensor]:
    """Token-level clipped surrogate: loss_N = -min(r A, clip(r, 1 - low, 1 + high) A), r = pi_theta / pi_old.

    Also returns clipped_N (bool): tokens whose gradient the clip removed. No gradient flows to `old_logprobs_N` and
    `advantages_N`. With `policy_logprobs_N` equal to `old_logprobs_N` the gradient is -A grad log pi_theta.

    Source: PPO, arXiv 1707.06347 eq. 7, on tokens; separate `low` and `high` from DAPO, arXiv 2503.14476.
    """
    advantages_N = advantages_N.detach()
    ratio_N = torch.exp(policy_logprobs_N - old_logprobs_N.detach())
    free_N = ratio_N * advantages_N
    held_N = ratio_N.clamp(1 - low, 1 + high) * advantages_N
    return -torch.minimum(free_N, held_N), (held_N < free_N).detach()


def kl_penalty(policy_logprobs_N: Tensor, reference_logprobs_N: Tensor, estimator: KlEstimator) -> Tensor:
    """Estimate of KL(pi_theta || pi_ref) from tokens of pi_theta, with x = log pi_theta - log pi_ref:

    k1 = x,  k2 = x^2 / 2,  k3 = exp(-x) - 1 + x.  k1 and k3 are unbiased in value; k2 is unbiased in gradient.

    Differentiable in `policy_logprobs_N` only. Source: J. Schulman, "Approximating KL divergence" (2020); k3 is
    DeepSeekMath, arXiv 2402.03300 eq. 4.
    """
    log_ratio_N = policy_logprobs_N - reference_logprobs_N.detach()
    if estimator == "k1":
        return log_ratio_N
    if estimator == "k2":
        return log_ratio_N.square() / 2
    return torch.expm1(-log_ratio_N) + log_ratio_N


def opd_advantage(teacher_logprobs_N: Tensor, policy_logprobs_N: Tensor, max_advantage: float) -> Tensor:
    """Token advantage of on-policy distillation: A = clip(log pi_T - log pi_theta, -A_max, A_max), without gradient.

    Unclipped, the expectation over y_t of -A grad log pi_theta is the gradient of the reverse KL of that position.
    Source: MOPD, arXiv 2606.30406; Kimi K3, arXiv 2607.24653 eq. 15 (A_max is its R_max).
    """
    return (teacher_logprobs_N - policy_logprobs_N).detach().clamp(-max_advantage, max_advantage)


def token_weights(
    sequence_N: Tensor, *, how: Aggregation, total_tokens: int, total_sequences: int, constant: float | None = None
) -> Tensor:
    """weights_N (float32) such that (loss_N * weights_N).sum(), added up over micro-batches, is the batch's loss.

    - `sequence_mean`: mean over sequences of the mean over their tokens (GRPO): 1 / (sequences * tokens of its own);
    - `token_mean`: mean over all tokens (DAPO): 1 / tokens;
    - `constant`: sum over tokens by a fixed budget, mean over sequences (Dr. GRPO, arXiv 2503.20783):
      1 / (sequences * constant), `constant` usually being the most completion tokens allowed.

    `sequence_N` (int64) tells each token's sequence; a sequence must lie in one micro-batch. `total_tokens` and
    `total_sequences` count the whole optimizer batch over all micro-batches and ranks, without what is left out of
    the loss. Sequences without tokens weigh nothing, but count in `total_sequences` if the caller counts them.
    """
    tokens, sequences = max(total_tokens, 1), max(total_sequences, 1)
    if how == "sequence_mean":
        lengths_N = torch.bincount(sequence_N)[sequence_N]
        return 1.0 / (lengths_N.float() * sequences)
    if how == "token_mean":
        divisor = float(tokens)
    elif constant is not None and constant > 0:
        divisor = sequences * constant
    else:
        raise OpdctlError(f"aggregation: constant needs a positive constant, got {constant}")
    return torch.full(sequence_N.shape, 1.0 / divisor, device=sequence_N.device)


def aggregate(
    loss_N: Tensor,
    sequence_N: Tensor,
    *,
    how: Aggregation,
    total_tokens: int,
    total_sequences: int,
    constant: float | None = None,
    weights_N: Tensor | None = None,
) -> Tensor:
    """Scalar share of the optimizer batch's loss: (loss_N * token_weights(...) [* weights_N]).sum().

    `weights_N` are further factors, such as a teacher's weight, or 0 for tokens left out of the loss.
    """
    shares_N = token_weights(
        sequence_N, how=how, total_tokens=total_tokens, total_sequences=total_sequences, constant=constant
    )
    if weights_N is not None:
        shares_N = shares_N * weights_N
    return (loss_N * shares_N).sum()


# Corrections for a sampler and a trainer that give one token different probabilities. `ratio` is pi_train / pi_infer
# with the same weights (IcePop, TIS) or pi_theta / pi_rollout (DIS); the weights are constants of the loss.


def icepop_weight(ratio: Tensor, low: float, high: float) -> Tensor:
    """IcePop: the ratio itself inside [low, high], ends included, else 0. Source: Ring-1T, arXiv 2510.18855."""
    return torch.where((ratio >= low) & (ratio <= high), ratio, 0.0).detach()


def tis_weight(ratio: Tensor, cap: float) -> Tensor:
    """Truncated importance sampling: min(ratio, cap)."""
    return ratio.clamp(max=cap).detach()


def dis_weight(ratio: Tensor, low: float, high: float) -> Tensor:
    """The ratio strictly between 1 - low and 1 + high, else 0, whatever the advantage's sign.

    Source: GLM-5, arXiv 2602.15763, agentic RL ("DIS" in later work), where the ends are open.
    """
    return torch.where((ratio > 1 - low) & (ratio < 1 + high), ratio, 0.0).detach()
