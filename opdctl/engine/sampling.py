"""Batched generation with a key-value cache, and the exact probabilities of what was drawn.

Legend: B rows (prompt-major), A rows still in the cache, P prompt columns, T steps, M draws, E EOS ids, N tokens of
all completions, D hidden size, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from opdctl.engine.policy import Policy
from opdctl.errors import OpdctlError

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_DENSE = 0.75  # finished rows are dropped once fewer than this share is alive: dropping copies the cache
_CHUNK = 1 << 24  # logits looked at in one go, in float64: 128 MiB


@dataclass(frozen=True)
class Completions:
    """Prompt-major; the N axis is their concatenation."""

    completions: list[list[int]]  # the EOS token included
    finished: list[bool]  # ended by EOS, not by the limit
    sampling_logprobs_N: Tensor  # float32: under the distribution the token was drawn from


@dataclass(frozen=True)
class Rollout(Completions):
    entropy_N: Tensor  # float32, nats: of the distribution the token was drawn from


Drawn_co = TypeVar("Drawn_co", bound=Completions, covariant=True)


class Generate(Protocol[Drawn_co]):
    """A model that draws completions: `sample` with its policy given, or another engine in its place.

    `group_size` completions for every prompt; those of a prompt depend on the seed and the prompt's key, never on the
    other prompts.
    """

    def __call__(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        group_size: int,
        max_completion_tokens: int,
        temperature: float,
        top_p: float,
        top_k: int,
        seed: int,
        keys: Sequence[int],
    ) -> Drawn_co: ...


@dataclass(frozen=True)
class _Distribution:
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


def sample(
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    *,
    group_size: int,
    max_completion_tokens: int,
    temperature: float,
    top_p: float,
    top_k: int,
    seed: int,
    keys: Sequence[int],
    greedy: bool = False,
) -> Rollout:
    """`group_size` completions for every prompt.

    Token t of sample g of the prompt with key k depends on (seed, k, g, t) and its distribution alone: a
    counter-based uniform number picks it from the cumulative distribution. So neither the order nor the company of
    the prompts changes a rollout. `greedy` takes the most probable token; probabilities and entropy stay those of the
    distribution that would be drawn from.

    Raises OpdctlError for an empty prompt and for more tokens than the policy has positions.
    """
    if not prompts or not all(len(prompt) for prompt in prompts):
        raise OpdctlError(
            "generation needs at least one prompt, and every prompt at least one token",
            hint="begin prompts with a begin-of-sequence token, or drop rows without a prompt",
        )
    uniforms_BT = torch.from_numpy(uniforms(seed, keys, group_size, max_completion_tokens)).to(policy.device)
    distribution = _Distribution(temperature, top_p, top_k)
    drawn = _draw(policy, prompts, group_size, distribution, uniforms_BT, greedy=greedy)
    # tensors made in inference mode take no part in a loss; those put together here do
    return _collect(drawn, len(uniforms_BT), torch.tensor(policy.eos_ids, device=policy.device))


_Drawn = list[tuple[Tensor, Tensor, Tensor, Tensor]]  # a step's rows, tokens, log-probabilities, entropies


@torch.inference_mode()  # spares a tenth of a small step against no_grad
def _draw(
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    group_size: int,
    distribution: _Distribution,
    uniforms_BT: Tensor,
    *,
    greedy: bool,
) -> _Drawn:
    """Token by token until every row has ended or has its share of uniforms_BT. A = rows still in the cache."""
    max_new = uniforms_BT.shape[1]
    ends_V = torch.zeros(policy.vocab_size, dtype=torch.bool, device=policy.device)
    ends_V[[token for token in policy.eos_ids if 0 <= token < policy.vocab_size]] = True
    hidden_BD, cache = policy.prefill(*_pad_left(prompts, policy), max_new)
    if group_size > 1:
        cache.repeat(group_size)
        hidden_BD = hidden_BD.repeat_interleave(group_size, 0)
    row_A = torch.arange(len(hidden_BD), device=policy.device)
    ended_A = torch.zeros_like(row_A, dtype=torch.bool)
    drawn: _Drawn = []
    for step in range(max_new):
        uniform_A = None if greedy else uniforms_BT[:, step]
        tokens_A, logprobs_A, entropy_A = _choose(hidden_BD, policy.head(), distribution, uniform_A)
        drawn.append((row_A, tokens_A, logprobs_A, entropy_A))
        ended_A = ended_A | ends_V[tokens_A]
        alive = len(ended_A) - int(ended_A.sum())
        if alive == 0 or step + 1 == max_new:
            break
        if alive < _DENSE * len(row_A):
            kept_A = (~ended_A).nonzero()[:, 0]
            cache.keep(kept_A)
            row_A, tokens_A, ended_A, uniforms_BT = (x[kept_A] for x in (row_A, tokens_A, ended_A, uniforms_BT))
        hidden_BD = policy.decode(tokens_A, cache)
    return drawn


def _collect(drawn: _Drawn, rows: int, eos_E: Tensor) -> Rollout:
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
    return Rollout(completions, eos_BT.any(-1).tolist(), logprobs_BT[written_BT], entropy_BT[written_BT])


def uniforms(seed: int, keys: Sequence[int], group_size: int, steps: int) -> np.ndarray:
    """float64 in [0, 1), [len(keys) * group_size, steps]: a hash of (seed, key, sample, step)."""
    wrap = 2**64 - 1
    keys_B = np.array([key & wrap for key in keys], np.uint64).repeat(group_size)
    samples_B = np.tile(np.arange(group_size, dtype=np.uint64), len(keys))
    state_B = _mix(np.array([seed & wrap], np.uint64))
    for part_B in (keys_B, samples_B):
        state_B = _mix(state_B ^ _mix(part_B + _GOLDEN))
    steps_T = np.arange(1, steps + 1, dtype=np.uint64) * _GOLDEN
    # 52 bits: then u * total rounds below `total`, and the inverse of a cumulative sum always exists.
    uniforms_BT: np.ndarray = (_mix(state_B[:, None] + steps_T) >> np.uint64(12)) * 2.0**-52
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
    hidden_BD: Tensor, head_VD: Tensor, distribution: _Distribution, uniform_B: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Token, its log-probability and the distribution's entropy for every row; without `uniform_B` the likeliest."""
    parts = []
    rows = max(1, _CHUNK // head_VD.shape[0])
    for start in range(0, len(hidden_BD), rows):
        logprobs_BV = distribution.logprobs(hidden_BD[start : start + rows] @ head_VD.T)
        probs_BV = logprobs_BV.exp()
        if uniform_B is None:
            token_B1 = logprobs_BV.argmax(-1, keepdim=True)
        else:
            cumulative_BV = probs_BV.cumsum(-1, dtype=torch.float64)  # the end of a long float32 sum is coarse
            target_B1 = uniform_B[start : start + rows, None] * cumulative_BV[:, -1:]
            token_B1 = torch.searchsorted(cumulative_BV, target_B1, right=True)
        logprob_B = logprobs_BV.gather(-1, token_B1)[:, 0]
        entropy_B = -(probs_BV * logprobs_BV.clamp_min(-1e9)).sum(-1)  # 0 log 0 is 0
        parts.append((token_B1[:, 0], logprob_B.float(), entropy_B.float()))
    if len(parts) == 1:
        return parts[0]
    tokens, logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(tokens), torch.cat(logprobs), torch.cat(entropies)
