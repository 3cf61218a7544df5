"""Token by token through a key-value cache, with counter-based random numbers and exact probabilities.

Legend: B rows, A rows still in the cache, T steps, M draws, E EOS ids, N tokens of all rows, D hidden size, V
vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from opdctl.engine.policy import Policy

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_DENSE = 0.75  # finished rows are dropped once fewer than this share is alive: dropping copies the cache
_CHUNK = 1 << 24  # logits multiplied in one go, and looked at by a GPU in float64: 128 MiB
_CACHED = 1 << 20  # looked at by a CPU: larger buffers are mapped anew each time, which doubles the time


class Part(NamedTuple):
    """What some steps drew, row by row: as much of a completion as was drawn in them."""

    completions: list[list[int]]  # the EOS token included
    finished: list[bool]  # by EOS
    logprobs_N: Tensor  # float32
    entropy_N: Tensor  # float32, nats


@dataclass(frozen=True)
class Distribution:
    """How logits become the distribution that is drawn from: temperature, then top-k, then top-p of what is left."""

    temperature: float
    top_p: float
    top_k: int

    def logprobs(self, logits_BV: Tensor) -> Tensor:
        """float32 at least, [B, V]; -inf where truncated."""
        wide_BV = logits_BV if logits_BV.dtype == torch.float64 else logits_BV.float()
        logprobs_BV = (wide_BV if self.temperature == 1 else wide_BV / self.temperature).log_softmax(-1)
        if self.top_p >= 1 and not 0 < self.top_k < logprobs_BV.shape[1]:
            return logprobs_BV
        sorted_BV, order_BV = logprobs_BV.exp().sort(stable=True, dim=-1, descending=True)
        if self.top_k:
            sorted_BV[:, self.top_k :] = 0
        before_BV = sorted_BV.cumsum(-1) - sorted_BV
        dropped_BV = (sorted_BV == 0) | (before_BV >= self.top_p * sorted_BV.sum(-1, keepdim=True))
        dropped_BV = torch.zeros_like(dropped_BV).scatter_(-1, order_BV, dropped_BV)
        return logprobs_BV.masked_fill_(dropped_BV, float("-inf")).log_softmax(-1)


def draw(
    policy: Policy,
    contexts: Sequence[Sequence[int]],
    context_B: Sequence[int],
    distribution: Distribution,
    uniforms_BT: Tensor | None,
    steps: int,
    *,
    spare: int = 0,
    pressing: Sequence[bool] = (),
) -> Part:
    """At most `steps` tokens more for every row b, which goes on from contexts[context_B[b]]; fewer once only `spare`
    rows are left and none of them presses. Without uniform numbers the likeliest tokens."""
    pressing_B = torch.tensor(pressing, device=policy.device) if any(pressing) else None
    drawn = _draw(policy, contexts, context_B, distribution, uniforms_BT, steps, spare, pressing_B)
    # tensors made in inference mode take no part in a loss; those put together here do
    return _collect(drawn, len(context_B), torch.tensor(policy.eos_ids, device=policy.device))


_Drawn = list[tuple[Tensor, Tensor, Tensor, Tensor]]  # a step's rows, tokens, log-probabilities, entropies


@torch.inference_mode()  # spares a tenth of a small step against no_grad
def _draw(
    policy: Policy,
    contexts: Sequence[Sequence[int]],
    context_B: Sequence[int],
    distribution: Distribution,
    uniforms_AT: Tensor | None,
    steps: int,
    spare: int,
    pressing_B: Tensor | None,
) -> _Drawn:
    """A = rows still in the cache; those that ended are drawn for until they are dropped."""
    ends_V = torch.zeros(policy.vocab_size, dtype=torch.bool, device=policy.device)
    ends_V[[token for token in policy.eos_ids if 0 <= token < policy.vocab_size]] = True
    hidden_BD, cache = policy.prefill(*_pad_left(contexts, policy), steps)
    if len(contexts) < len(context_B):
        rows_B = torch.tensor(context_B, device=policy.device)
        cache.keep(rows_B)
        hidden_BD = hidden_BD[rows_B]
    row_A = torch.arange(len(hidden_BD), device=policy.device)
    ended_A = torch.zeros_like(row_A, dtype=torch.bool)
    drawn: _Drawn = []
    for step in range(steps):
        uniform_A = None if uniforms_AT is None else uniforms_AT[:, step]
        tokens_A, logprobs_A, entropy_A = _choose(hidden_BD, policy.head(), distribution, uniform_A)
        drawn.append((row_A, tokens_A, logprobs_A, entropy_A))
        ended_A = ended_A | ends_V[tokens_A]
        alive = len(ended_A) - int(ended_A.sum())
        pressed = pressing_B is not None and bool((pressing_B[row_A] & ~ended_A).any())
        if (alive <= spare and not pressed) or step + 1 == steps:
            break
        if alive < _DENSE * len(row_A):
            kept_A = (~ended_A).nonzero()[:, 0]
            cache.keep(kept_A)
            row_A, tokens_A, ended_A = (x[kept_A] for x in (row_A, tokens_A, ended_A))
            uniforms_AT = None if uniforms_AT is None else uniforms_AT[kept_A]
        hidden_BD = policy.decode(tokens_A, cache)
    return drawn


def _collect(drawn: _Drawn, rows: int, eos_E: Tensor) -> Part:
    """Put the steps together, each row up to and with its first EOS: rows that ended are drawn for until dropped."""
    row_M, tokens_M, logprobs_M, entropy_M = (torch.cat(column) for column in zip(*drawn, strict=True))
    step_M = torch.repeat_interleave(torch.tensor([len(step[0]) for step in drawn])).to(row_M.device)
    tokens_BT, logprobs_BT, entropy_BT = (
        torch.zeros(rows, len(drawn), dtype=values.dtype, device=values.device).index_put_((row_M, step_M), values)
        for values in (tokens_M, logprobs_M, entropy_M)
    )
    drawn_BT = torch.zeros_like(tokens_BT, dtype=torch.bool).index_put_((row_M, step_M), row_M >= 0)
    eos_BT = drawn_BT & torch.isin(tokens_BT, eos_E)
    written_BT = drawn_BT & (eos_BT.cumsum(-1) - eos_BT.long() == 0)
    lengths = written_BT.sum(-1).tolist()
    completions = [row[:length] for row, length in zip(tokens_BT.tolist(), lengths, strict=True)]
    return Part(completions, eos_BT.any(-1).tolist(), logprobs_BT[written_BT], entropy_BT[written_BT])


def uniforms(
    seed: int, keys_B: Sequence[int], samples_B: Sequence[int], first_B: Sequence[int], steps: int
) -> np.ndarray:
    """float64 in [0, 1), [B, steps]: a hash of (seed, key, sample, token), the tokens of row b from first_B[b] on."""
    wrap = 2**64 - 1
    state_B = _mix(np.array([seed & wrap], np.uint64))
    for part_B in (keys_B, samples_B):
        state_B = _mix(state_B ^ _mix(np.array([part & wrap for part in part_B], np.uint64) + _GOLDEN))
    token_BT = np.array(first_B, np.uint64)[:, None] + np.arange(1, steps + 1, dtype=np.uint64)
    # 52 bits: then u * total rounds below `total`, and the inverse of a cumulative sum always exists.
    uniforms_BT: np.ndarray = (_mix(state_B[:, None] + token_BT * _GOLDEN) >> np.uint64(12)) * 2.0**-52
    return uniforms_BT


def _mix(x: np.ndarray) -> np.ndarray:
    """The output function of SplitMix64 (Steele, Lea and Flood, 2014): a bijection of 64-bit words."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    mixed: np.ndarray = x ^ (x >> np.uint64(31))
    return mixed


def _pad_left(prompts: Sequence[Sequence[int]], policy: Policy) -> tuple[Tensor, Tensor]:
    lengths = [len(prompt) for prompt in prompts]
    longest = max(lengths)
    padded = [[policy.pad_id] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    # by NumPy: four times as fast as torch.tensor on nested lists
    return torch.from_numpy(np.array(padded)).to(policy.device), torch.tensor(lengths, device=policy.device)


def _choose(
    hidden_BD: Tensor, head_VD: Tensor, distribution: Distribution, uniform_B: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Token, its log-probability and the distribution's entropy for every row; without `uniform_B` the likeliest."""
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    rows, few = (max(1, most // head_VD.shape[0]) for most in (_CHUNK, _CACHED if head_VD.is_cpu else _CHUNK))
    for start in range(0, len(hidden_BD), rows):
        logits_BV = hidden_BD[start : start + rows] @ head_VD.T
        uniforms = [None] * len(logits_BV) if uniform_B is None else uniform_B[start : start + rows].split(few)
        parts += [
            _choose_some(logits, distribution, u) for logits, u in zip(logits_BV.split(few), uniforms, strict=False)
        ]
    if len(parts) == 1:
        return parts[0]
    tokens, logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(tokens), torch.cat(logprobs), torch.cat(entropies)


def _choose_some(
    logits_BV: Tensor, distribution: Distribution, uniform_B: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    logprobs_BV = distribution.logprobs(logits_BV)
    probs_BV = logprobs_BV.exp()
    if uniform_B is None:
        token_B1 = logprobs_BV.argmax(-1, keepdim=True)
    else:
        cumulative_BV = probs_BV.cumsum(-1, dtype=torch.float64)  # the end of a long float32 sum is coarse
        target_B1 = uniform_B[:, None] * cumulative_BV[:, -1:]
        token_B1 = torch.searchsorted(cumulative_BV, target_B1, right=True)
    logprob_B = logprobs_BV.gather(-1, token_B1)[:, 0]
    entropy_B = -probs_BV.mul_(logprobs_BV.clamp_min_(-1e9)).sum(-1)  # 0 log 0 is 0
    return token_B1[:, 0], logprob_B.float(), entropy_B.float()
