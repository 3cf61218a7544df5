"""Losses on the log-probabilities of single tokens: pure functions of tensors.

Shapes: N completion tokens of a batch, in concatenated order; S sequences.
Notation: pi_theta policy, pi_old the trainer at the weights that sampled the tokens, pi_infer the same weights in the
engine that sampled, pi_T teacher, pi_ref reference, y_t sampled token, sg() no gradient.
r = pi_theta / pi_old, k = pi_old / pi_infer, q = pi_theta / pi_infer = r k.
"""

from typing import Literal

import torch
from torch import Tensor

from opdctl.errors import OpdctlError
from opdctl.settings.policy_loss import (
    Aggregation,
    CispoSurrogate,
    ClippedSurrogate,
    Dis,
    IcePop,
    LogRatioClip,
    Mismatch,
    Opsm,
    Reinforce,
    SequenceMask,
    Surrogate,
    Tis,
    weighs_by_current,
)

KlEstimator = Literal["k1", "k2", "k3"]


def policy_loss(
    surrogate: Surrogate,
    mismatch: Mismatch | None,
    policy_logprobs_N: Tensor,
    old_logprobs_N: Tensor,
    infer_logprobs_N: Tensor,
    advantages_N: Tensor,
    sequence_N: Tensor,
) -> tuple[Tensor, dict[str, Tensor]]:
    """loss_N = w_N * surrogate_N: what RL and on-policy distillation minimise, once each token has an advantage A.

    Gradient flows to `policy_logprobs_N` only. `sequence_N` (int64, ascending) tells each token's sequence, of which
    all tokens must be here. The weight w of the mismatch rule is a constant of the loss, and 1 without a rule; a token
    of weight 0 still counts in the divisors of a mean, as in the papers. `infer_logprobs_N` is read by a rule only.

    Also returns statistics of each token, whose mean over tokens is the metric of that name: `clip_fraction` (bool: the
    surrogate cut the ratio), and with a rule `mismatch_fraction` (bool: the weight is cut, or 0) and
    `mismatch_ratio`: q for rules on the current policy (dis, icepop with policy: current, opsm), else k.
    """
    loss_N, clipped_N = _surrogate(surrogate, policy_logprobs_N, old_logprobs_N, advantages_N, sequence_N)
    statistics = {"clip_fraction": clipped_N}
    if mismatch is not None:
        ratio_N, weights_N = mismatch_weights(
            mismatch, policy_logprobs_N, old_logprobs_N, infer_logprobs_N, advantages_N, sequence_N
        )
        loss_N = loss_N * weights_N
        cut_N = weights_N != ratio_N if isinstance(mismatch, Tis) else weights_N == 0
        statistics |= {"mismatch_fraction": cut_N, "mismatch_ratio": ratio_N}
    return loss_N, statistics


# ----------------------------------------------------------------------------------------------------- surrogates


def _surrogate(
    surrogate: Surrogate, policy_logprobs_N: Tensor, old_logprobs_N: Tensor, advantages_N: Tensor, sequence_N: Tensor
) -> tuple[Tensor, Tensor]:
    """(loss_N, cut_N) of a form."""
    match surrogate:
        case ClippedSurrogate(level="sequence"):
            ratio_N = sequence_ratio(policy_logprobs_N, old_logprobs_N, sequence_N)
            return _clipped(ratio_N, advantages_N, surrogate.low, surrogate.high, surrogate.dual)
        case ClippedSurrogate():
            return clipped_policy_loss(
                policy_logprobs_N,
                old_logprobs_N,
                advantages_N,
                low=surrogate.low,
                high=surrogate.high,
                dual=surrogate.dual,
            )
        case CispoSurrogate():
            return cispo_loss(policy_logprobs_N, old_logprobs_N, advantages_N, high=surrogate.high)
        case LogRatioClip():
            return log_ratio_clip_loss(
                policy_logprobs_N,
                old_logprobs_N,
                advantages_N,
                low=surrogate.low,
                high=surrogate.high,
                square=surrogate.square,
            )
        case Reinforce():
            return -policy_logprobs_N * advantages_N.detach(), torch.zeros_like(policy_logprobs_N, dtype=torch.bool)


def clipped_policy_loss(
    policy_logprobs_N: Tensor,
    old_logprobs_N: Tensor,
    advantages_N: Tensor,
    *,
    low: float,
    high: float,
    dual: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Token-level clipped surrogate: loss_N = -min(r A, clip(r, 1 - low, 1 + high) A), r = pi_theta / pi_old.

    With `dual`, the loss of a token with A < 0 is at most -dual A, so that no ratio above `dual` has a gradient.
    Also returns clipped_N (bool): tokens whose gradient the clip removed. No gradient flows to `old_logprobs_N` and
    `advantages_N`. With `policy_logprobs_N` equal to `old_logprobs_N` the gradient is -A grad log pi_theta.

    Source: PPO, arXiv 1707.06347 eq. 7, on tokens; separate `low` and `high` from DAPO, arXiv 2503.14476; `dual` from
    arXiv 1912.09729 eq. 5, which is the outer maximum of LongCat-Flash-Thinking's triplet, arXiv 2509.18883, where that
    is taken for A < 0 only: as printed it would also make a large positive advantage's term a constant.
    """
    ratio_N = torch.exp(policy_logprobs_N - old_logprobs_N.detach())
    return _clipped(ratio_N, advantages_N, low, high, dual)


def _clipped(
    ratio_N: Tensor, advantages_N: Tensor, low: float, high: float, dual: float | None
) -> tuple[Tensor, Tensor]:
    advantages_N = advantages_N.detach()
    free_N = ratio_N * advantages_N
    held_N = ratio_N.clamp(1 - low, 1 + high) * advantages_N
    kept_N, cut_N = torch.minimum(free_N, held_N), held_N < free_N
    if dual is not None:
        floor_N = torch.where(advantages_N < 0, dual * advantages_N, -torch.inf)
        kept_N, cut_N = torch.maximum(kept_N, floor_N), cut_N | (kept_N < floor_N)
    return -kept_N, cut_N.detach()


def sequence_ratio(policy_logprobs_N: Tensor, old_logprobs_N: Tensor, sequence_N: Tensor) -> Tensor:
    """s_N: of each token its sequence's ratio s = exp(mean over its tokens of log r), the geometric mean of r.

    The gradient is that of GSPO-token: s grad log pi_theta(y_t) at token t. Where A and the weight of a token are one
    number a sequence, the sum over its tokens is the gradient of s itself times their number; where they differ, each
    token keeps its own. Source: GSPO, arXiv 2507.18071 eq. 7 and 14.
    """
    log_ratio_N = (policy_logprobs_N - old_logprobs_N).detach()
    return torch.exp(policy_logprobs_N - policy_logprobs_N.detach() + _sequence_means(log_ratio_N, sequence_N))


def cispo_loss(
    policy_logprobs_N: Tensor, old_logprobs_N: Tensor, advantages_N: Tensor, *, high: float
) -> tuple[Tensor, Tensor]:
    """loss_N = -sg(min(r, 1 + high)) A log pi_theta. Also returns cut_N (bool): r > 1 + high.

    No token loses its gradient. There is no lower bound. Source: MiniMax-M1, arXiv 2506.13585 eq. 4 and 5.
    """
    ratio_N = torch.exp(policy_logprobs_N - old_logprobs_N).detach()
    return -ratio_N.clamp(max=1 + high) * advantages_N.detach() * policy_logprobs_N, ratio_N > 1 + high


def log_ratio_clip_loss(
    policy_logprobs_N: Tensor,
    old_logprobs_N: Tensor,
    advantages_N: Tensor,
    *,
    low: float,
    high: float,
    square: float,
) -> tuple[Tensor, Tensor]:
    """loss_N = -exp(clip(log r, low, high)) A + square (log r)^2. Also returns cut_N (bool): log r outside.

    Outside [low, high] the first term has no gradient whatever A's sign, while the square pulls r back to 1.
    Source: Kimi K2.5, arXiv 2602.02276, its RL objective, with the square on the log-ratio.
    """
    log_ratio_N = policy_logprobs_N - old_logprobs_N.detach()
    held_N = log_ratio_N.clamp(low, high)
    cut_N = (log_ratio_N < low) | (log_ratio_N > high)
    return -held_N.exp() * advantages_N.detach() + square * log_ratio_N.square(), cut_N


def _sequence_means(values_N: Tensor, sequence_N: Tensor) -> Tensor:
    """Of each token the mean over its sequence."""
    lengths_S = torch.bincount(sequence_N)
    sums_S = torch.segment_reduce(values_N, "sum", lengths=lengths_S, unsafe=True)  # in order: the same on every run
    return (sums_S / lengths_S.clamp(min=1))[sequence_N]


# ------------------------------------------------------------------------------------- KL, advantage, aggregation


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


# ------------------------------------------------------------------------------------------------------- mismatch
# Corrections for a sampler and a trainer that give one token different probabilities.


def mismatch_weights(
    mismatch: Mismatch,
    policy_logprobs_N: Tensor,
    old_logprobs_N: Tensor,
    infer_logprobs_N: Tensor,
    advantages_N: Tensor,
    sequence_N: Tensor,
) -> tuple[Tensor, Tensor]:
    """(ratio_N, weights_N): the ratio that a rule reads, and the weight it gives each token; constants of the loss.

    - `tis`: clamp(k, floor, cap);
    - `icepop`: k inside [low, high], else 0 (Ring-1T, arXiv 2510.18855); `policy: current`: q in the place of k
      (MiMo-V2-Flash, arXiv 2601.02780 eq. 7 to 9);
    - `dis`: q inside (1 - low, 1 + high), else 0;
    - `opsm`: 0 for a sequence of mean A < 0 whose mean log(1/q) is above delta, else 1. Source: DeepSeek-V3.2, arXiv
      2512.02556 eq. 9, whose pi_old is what the inference engine returned;
    - `sequence_mask`: 1 where the geometric mean of k over the sequence is inside [low, high], else 0.
    """
    current = weighs_by_current(mismatch) or isinstance(mismatch, Opsm)
    log_ratio_N = ((policy_logprobs_N if current else old_logprobs_N) - infer_logprobs_N).detach()
    ratio_N = log_ratio_N.exp()
    match mismatch:
        case Tis():
            return ratio_N, tis_weight(ratio_N, mismatch.cap, mismatch.floor)
        case IcePop():
            return ratio_N, icepop_weight(ratio_N, mismatch.low, mismatch.high)
        case Dis():
            return ratio_N, dis_weight(ratio_N, mismatch.low, mismatch.high)
        case Opsm():
            moved_N = -_sequence_means(log_ratio_N, sequence_N)
            bad_N = _sequence_means(advantages_N.detach(), sequence_N) < 0
            return ratio_N, (~(bad_N & (moved_N > mismatch.delta))).to(ratio_N)
        case SequenceMask():
            mean_N = _sequence_means(log_ratio_N, sequence_N).exp()
            return ratio_N, ((mean_N >= mismatch.low) & (mean_N <= mismatch.high)).to(ratio_N)


def icepop_weight(ratio: Tensor, low: float, high: float) -> Tensor:
    """IcePop: the ratio itself inside [low, high], ends included, else 0. Source: Ring-1T, arXiv 2510.18855."""
    return torch.where((ratio >= low) & (ratio <= high), ratio, 0.0).detach()


def tis_weight(ratio: Tensor, cap: float, floor: float = 0.0) -> Tensor:
    """Truncated importance sampling: clamp(ratio, floor, cap)."""
    return ratio.clamp(floor, cap).detach()


def dis_weight(ratio: Tensor, low: float, high: float) -> Tensor:
    """The ratio strictly between 1 - low and 1 + high, else 0, whatever the advantage's sign.

    Source: GLM-5, arXiv 2602.15763, agentic RL ("DIS" in later work), where the ends are open.
    """
    return torch.where((ratio > 1 - low) & (ratio < 1 + high), ratio, 0.0).detach()
