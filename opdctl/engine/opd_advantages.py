"""What on-policy distillation makes of log-ratios beside clipping them: credit over time, an extrapolated teacher,
calibration by the verifier. Pure functions.

Shapes: N tokens of whole completions, one completion after the other; S completions.
l_t = log pi_T(y_t) - log pi_theta(y_t), the log-ratio of a sampled token, in nats.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


def extrapolated_teacher(teacher_logprobs_N: Tensor, reference_logprobs_N: Tensor, scale: float) -> Tensor:
    """log pi_ref + scale (log pi_T - log pi_ref), not normalised: what G-OPD puts in the place of log pi_T.

    1: the teacher; above 1: beyond it, away from the reference. Source: G-OPD ("ExOPD" at scale 1.25).
    """
    return reference_logprobs_N + scale * (teacher_logprobs_N - reference_logprobs_N)


def discounted_sum(values_N: Tensor, lengths: Sequence[int], discount: float) -> Tensor:
    """sums_N: sum_{j >= t} discount^(j - t) values_j over the tokens of t's own completion, t itself included.

    At 0 the values themselves; at 1 the sum up to the completion's end. `lengths` in tokens.
    Source: the discount of KL rewards in tinker-cookbook.
    """
    columns = list(pad_sequence(values_N.split(list(lengths)), batch_first=True).unbind(1))
    for at in range(len(columns) - 2, -1, -1):
        columns[at] = columns[at] + discount * columns[at + 1]
    sums_ST = torch.stack(columns, 1)
    return torch.cat([row[:length] for row, length in zip(sums_ST, lengths, strict=True)])


def later_mean(values_N: Tensor, lengths: Sequence[int], discount: float) -> Tensor:
    """means_N: the weighted mean of the values of later tokens, sum_{j > t} d^(j-t) values_j / sum_{j > t} d^(j-t); 0
    for the last token of a completion.

    Of log-ratios this is MiniLLM's credit for what a token does to later ones, normalised by length: at discount 1 the
    plain mean over the rest. Source: MiniLLM, arXiv 2306.08543 eq. 5 and section 2.2; the discount as in TRL.
    """
    ones_N = torch.ones_like(values_N)
    means_N = discounted_sum(values_N, lengths, discount) / discounted_sum(ones_N, lengths, discount)
    return torch.cat([torch.cat([row[1:], row.new_zeros(1)]) for row in means_N.split(list(lengths)) if len(row)])


def margin_shifts(scores: Sequence[float], correct: Sequence[bool], margin: float) -> list[float]:
    """What to add to every token's advantage of a group's completions so that mean score(right) - mean score(wrong)
    is at least `margin`: half of what lacks to the right ones, minus half to the wrong ones.

    `scores`: mean log-ratio per token. All 0 where the margin holds, or where all are right or all wrong.
    Source: Uni-OPD, arXiv 2605.03677, margin calibration by shifting both halves, group by group.
    """
    right = [score for score, good in zip(scores, correct, strict=True) if good]
    wrong = [score for score, good in zip(scores, correct, strict=True) if not good]
    if not right or not wrong:
        return [0.0] * len(scores)
    lacking = max(0.0, margin - (sum(right) / len(right) - sum(wrong) / len(wrong)))
    return [lacking / 2 if good else -lacking / 2 for good in correct]


def balanced(correct: Sequence[bool], seed: int) -> list[int]:
    """Indices, ascending, of as many wrong as right completions: the surplus is left out at random. All of them where
    one kind is missing. Source: Uni-OPD, arXiv 2605.03677, online balance 1:1."""
    right = [i for i, good in enumerate(correct) if good]
    wrong = [i for i, good in enumerate(correct) if not good]
    if not right or not wrong:
        return list(range(len(correct)))
    fewer, more = sorted((right, wrong), key=len)
    order = torch.randperm(len(more), generator=torch.Generator().manual_seed(seed)).tolist()
    return sorted([*fewer, *(more[i] for i in order[: len(fewer)])])
