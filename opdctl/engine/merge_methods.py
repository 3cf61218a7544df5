"""Ways to make one model's weights of several, each a function of the parts of one tensor.

A tensor comes and goes in parts, so that memory is bounded whatever its size; a method that needs a number of the whole
tensor first (a threshold, a norm) goes over it more than once. All in
float32, sums of squares in float64.

Shapes: M models, C entries of a part. theta_i = thetas_MC[i], theta_0 = base_C, tau_i = theta_i - theta_0, w_i =
weights_M[i] > 0. A tensor's sign is elected by the sum over the models, 0 counting as +.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

_HALF = 16  # bits of a float32 that one pass of a selection looks at


@dataclass(frozen=True)
class Part:
    """A run of a tensor's entries, in all models."""

    thetas_MC: Tensor
    base_C: Tensor | None

    @property
    def deltas_MC(self) -> Tensor:
        """tau."""
        assert self.base_C is not None, "this method needs a base"
        return self.thetas_MC - self.base_C


@dataclass(frozen=True)
class Parts:
    """A tensor. Its parts are read anew by every loop over it."""

    size: int  # entries
    read: Callable[[], Iterator[Part]]

    def __iter__(self) -> Iterator[Part]:
        return self.read()


def linear(parts: Parts, weights_M: Tensor) -> Iterator[Tensor]:
    """sum_i w_i theta_i / sum_i w_i. Source: model soups, arXiv 2203.05482 (there uniform)."""
    for part in parts:
        yield weights_M @ part.thetas_MC / weights_M.sum()


def convex(parts: Parts, weights_M: Tensor) -> Iterator[Tensor]:
    """sum_i w_i theta_i with sum_i w_i = 1, w_i > 0. Source: UI-TARS-2, arXiv 2509.02544."""
    for part in parts:
        yield weights_M @ part.thetas_MC


def task_arithmetic(parts: Parts, weights_M: Tensor, scale: float) -> Iterator[Tensor]:
    """theta_0 + lambda sum_i w_i tau_i. Source: arXiv 2212.04089 (there all w_i = 1)."""
    for part in parts:
        yield _onto(part, scale * (weights_M @ part.deltas_MC))


def ties(parts: Parts, weights_M: Tensor, density: float, scale: float) -> Iterator[Tensor]:
    """theta_0 + lambda sum_i w_i tau'_i a_i / sum_i w_i a_i, entry by entry.

    tau'_i: the int(density n) largest magnitudes of the n entries of tau_i, at least one, the others 0; equal
    magnitudes are all kept. a_i = 1 where tau'_i has the sign of sum_i w_i tau'_i, else 0. Source: TIES, arXiv
    2306.01708 sec. 4 and algorithm 1 (there all w_i = 1, and magnitudes are ranked over the whole model; here, as in
    mergekit, within a tensor).
    """
    threshold_M = None
    if density < 1:
        wanted = torch.full((len(weights_M),), max(1, int(density * parts.size)))
        threshold_M = kth_largest(lambda: (part.deltas_MC.abs_() for part in parts), wanted)
    for part in parts:
        deltas_MC = part.deltas_MC
        if threshold_M is not None:
            deltas_MC.masked_fill_(deltas_MC.abs() < threshold_M[:, None], 0)
        yield _onto(part, scale * _mean_of_agreeing(deltas_MC, weights_M, weights_M))


def dare(
    parts: Parts,
    weights_M: Tensor,
    drop_rate: float,
    scale: float,
    seeds: Sequence[int],
    *,
    rescale: bool = True,
    sign: Literal["none", "ties"] = "none",
) -> Iterator[Tensor]:
    """theta_0 + lambda sum_i w_i tau'_i, or with sign "ties" the mean of the agreeing tau'_i as in `ties`.

    tau'_i = tau_i b_i / (1 - p), b_i = 0 with probability p = drop_rate, else 1, independent for every entry; without
    `rescale` tau'_i = tau_i b_i. Model i draws from the stream of seeds[i]. Source: DARE, arXiv 2311.03099 eq. 2 and
    sec. 3.2. (mergekit's `rescale` matches the L1 norm of a tensor instead.)
    """
    dropout = Dropout(drop_rate, seeds, rescale=rescale)
    for part in parts:
        deltas_MC = dropout(part.deltas_MC)
        if sign == "ties":
            merged_C = _mean_of_agreeing(deltas_MC, weights_M, weights_M)
        else:
            merged_C = weights_M @ deltas_MC
        yield _onto(part, scale * merged_C)


def sce(parts: Parts, select: float) -> Iterator[Tensor]:
    """theta_0 + sum_i eta_i tau'_i a_i / sum_i eta_i a_i, entry by entry.

    Select: tau'_i = tau_i at those int(select n) of the n entries with a variance over the models above 0 whose
    variance is largest (equal ones all), else 0. Calculate: eta_i = mean tau'_i^2 / sum_j mean tau'_j^2, over the
    entries of the tensor. Erase: a_i = 1 where tau'_i has the sign of sum_i tau'_i, else 0. Source: FuseChat, arXiv
    2408.07990 sec. 3.3. Where all tau' are 0 the result is theta_0; mergekit also takes equal eta_i where the sum of
    mean squares is below 1e-6, as for most fine-tuned models: here never.
    """
    threshold = None
    if select < 1:
        differing = sum(int(torch.count_nonzero(_variance(part))) for part in parts)
        wanted = int(select * differing)
        if wanted == 0:
            yield from (_onto(part, torch.zeros_like(part.thetas_MC[0])) for part in parts)
            return
        threshold = kth_largest(lambda: (_variance(part)[None] for part in parts), torch.tensor([wanted]))

    def selected(part: Part) -> Tensor:
        deltas_MC = part.deltas_MC
        return deltas_MC if threshold is None else deltas_MC.mul_(_variance(part) >= threshold)

    squares_M = sum(selected(part).double().square().sum(1) for part in parts)
    total = torch.as_tensor(squares_M).sum()
    eta_M = (torch.as_tensor(squares_M) / total).float() if total > 0 else None
    for part in parts:
        deltas_MC = selected(part)
        if eta_M is None:
            yield _onto(part, torch.zeros_like(deltas_MC[0]))
            continue
        yield _onto(part, _mean_of_agreeing(deltas_MC, eta_M, torch.ones_like(eta_M)))


def longcat_fusion(
    parts: Parts,
    weights_M: Tensor,
    norms_M: Tensor,
    drop_rate: float,
    scale: float,
    seeds: Sequence[int],
    *,
    rescale: bool,
    combine: Literal["sum", "mean"],
) -> Iterator[Tensor]:
    """theta_0 + lambda sum_i w_i tau'_i a_i; with combine "mean" divided by sum_i w_i a_i, entry by entry.

    Normalise: tau_i mean_j(norms_j) / norms_i. Drop: as `dare` does, giving tau'_i. Erase: a_i = 1 where tau'_i has
    the sign of sum_i w_i tau'_i, else 0. `norms_M`: of the task vectors, of this tensor or of the whole model, see
    `task_norms`. Source: LongCat-Flash-Thinking, arXiv 2509.18883, "model fusion", which names these three steps and
    gives neither norm nor rate; that the common norm is the mean of all is our choice, so that lambda keeps its scale.
    """
    dropout = Dropout(drop_rate, seeds, rescale=rescale)
    factor_M = torch.where(norms_M > 0, norms_M.mean() / norms_M, torch.ones_like(norms_M)).float()
    for part in parts:
        deltas_MC = dropout(part.deltas_MC.mul_(factor_M[:, None]))
        if combine == "mean":
            merged_C = _mean_of_agreeing(deltas_MC, weights_M, weights_M)
        else:
            kept_MC, sign_C = _erased(deltas_MC, weights_M)
            merged_C = (weights_M @ kept_MC) * sign_C
        yield _onto(part, scale * merged_C)


def task_norms(parts: Parts, norm: Literal["l1", "l2"]) -> Tensor:
    """[M], float64: sum |tau_i| or sum tau_i^2 over a tensor. Those of several tensors add up; l2 is then its root."""
    sums_M = sum(
        (part.deltas_MC.double().abs() if norm == "l1" else part.deltas_MC.double().square()).sum(1) for part in parts
    )
    return torch.as_tensor(sums_M)


# ---------------------------------------------------------------------------------------------------------- parts


class Dropout:
    """Drops entries at random. A tensor's parts have to come in order; how it is cut into parts changes nothing."""

    def __init__(self, rate: float, seeds: Sequence[int], *, rescale: bool) -> None:
        self._rate = rate
        self._factor = 1 / (1 - rate) if rescale else 1.0
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def __call__(self, deltas_MC: Tensor) -> Tensor:
        """In place."""
        for delta_C, generator in zip(deltas_MC, self._generators, strict=True):
            dropped_C = torch.rand(len(delta_C), generator=generator) < self._rate
            delta_C.masked_fill_(dropped_C, 0).mul_(self._factor)
        return deltas_MC


def kth_largest(rows: Callable[[], Iterator[Tensor]], k_R: Tensor) -> Tensor:
    """[R]: the k-th largest value of each row, k >= 1; `rows` gives [R, C] parts of values >= 0, anew at every call.

    Exact, in two passes and with memory of a part: floats >= 0 are ordered as their bits are, so one pass counts their
    upper halves, the next one the lower halves of those that share the upper half of the value looked for.
    """
    upper_R, left_R = _digit(rows, k_R, None)
    lower_R, _ = _digit(rows, left_R, upper_R)
    return ((upper_R << _HALF) | lower_R).to(torch.int32).view(torch.float32)


def _digit(rows: Callable[[], Iterator[Tensor]], k_R: Tensor, upper_R: Tensor | None) -> tuple[Tensor, Tensor]:
    """The half of the bits of each row's k-th largest value, and which largest it is of those with the same half."""
    counts_RB = torch.zeros(len(k_R), 1 << _HALF, dtype=torch.int64)
    for values_RC in rows():
        for number, bits_C in enumerate(values_RC.contiguous().view(torch.int32)):
            if upper_R is None:
                digits = bits_C >> _HALF
            else:
                digits = bits_C[(bits_C >> _HALF) == upper_R[number]] & ((1 << _HALF) - 1)
            counts_RB[number] += torch.bincount(digits, minlength=1 << _HALF)
    above_RB = counts_RB.flip(1).cumsum(1)  # of the largest digit, of the two largest, ...
    at_R = torch.searchsorted(above_RB, k_R[:, None].contiguous())[:, 0]
    before_R = torch.where(at_R > 0, above_RB.gather(1, (at_R - 1).clamp(min=0)[:, None])[:, 0], 0)
    return (1 << _HALF) - 1 - at_R, k_R - before_R


def _variance(part: Part) -> Tensor:
    return part.deltas_MC.var(0, unbiased=False)


def _erased(deltas_MC: Tensor, electing_M: Tensor) -> tuple[Tensor, Tensor]:
    """(kept_MC, sign_C): the sign of the weighted sum over the models, and the magnitudes of the entries that have it,
    0 in the place of the others."""
    sign_C = torch.where(electing_M @ deltas_MC >= 0, 1.0, -1.0)
    return (deltas_MC * sign_C).clamp_(min=0), sign_C


def _mean_of_agreeing(deltas_MC: Tensor, weights_M: Tensor, electing_M: Tensor) -> Tensor:
    kept_MC, sign_C = _erased(deltas_MC, electing_M)
    return _divided(weights_M @ kept_MC, weights_M @ (kept_MC > 0).float()) * sign_C


def _divided(sum_C: Tensor, weight_C: Tensor) -> Tensor:
    """0 where nothing agrees."""
    return torch.where(weight_C > 0, sum_C / weight_C, torch.zeros_like(sum_C))


def _onto(part: Part, merged_C: Tensor) -> Tensor:
    assert part.base_C is not None, "this method needs a base"
    return part.base_C + merged_C
