"""Going through the vocabulary in chunks of tokens, so that no [N, V] tensor of a batch exists.

Shapes: N completion tokens of a batch, C tokens of a chunk, V vocabulary, D width of the model. What is computed of a
chunk's distributions is in `vocab.py` and `divergences.py`.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from opdctl.errors import OpdctlError

CHUNK_BYTES = 48 * 2**20  # of one [C, V] tensor; three to five exist at a time


class Scratch:
    """Named [C, V] buffers that all chunks share: made anew for each, they would fragment the heap to many times
    their size, and cost a page fault for every 4 KiB.
    """

    def __init__(self, chunk: int, head_VD: Tensor) -> None:
        self._chunk, self._head_VD = chunk, head_VD
        self._dtype = torch.float64 if head_VD.dtype == torch.float64 else torch.float32
        self._made: dict[str, Tensor] = {}
        self._product_CV = self._new(math.ceil(chunk / 8))

    def _new(self, tokens: int) -> Tensor:
        return torch.empty(tokens, len(self._head_VD), dtype=self._dtype, device=self._head_VD.device)

    def __call__(self, name: str, tokens: int) -> Tensor:
        if name not in self._made:
            self._made[name] = self._new(self._chunk)
        return self._made[name][:tokens]

    def expectation(self, probs_CV: Tensor, values_CV: Tensor) -> Tensor:
        """(probs * values).sum(-1), some rows at a time: their products need an eighth of a buffer."""
        rows = len(self._product_CV)
        sums_C = probs_CV.new_empty(len(probs_CV))
        for probs, values, sums in zip(probs_CV.split(rows), values_CV.split(rows), sums_C.split(rows), strict=True):
            torch.sum(torch.mul(probs, values, out=self._product_CV[: len(probs)]), -1, out=sums)
        return sums_C


def chunk_tokens(head_VD: Tensor) -> int:
    return max(1, CHUNK_BYTES // (len(head_VD) * max(head_VD.element_size(), 4)))


def split_tokens(hidden_ND: Tensor, head_VD: Tensor, chunk: int | None) -> tuple[list[slice], Scratch]:
    """Slices of about equal size, at most `chunk` tokens (one, possibly empty, at least), and buffers of that size."""
    tokens = len(hidden_ND)
    parts = max(1, math.ceil(tokens / (chunk or chunk_tokens(head_VD))))
    size = max(1, math.ceil(tokens / parts))
    return [slice(at, min(at + size, tokens)) for at in range(0, max(tokens, 1), size)], Scratch(size, head_VD)


def _logits(hidden_CD: Tensor, head_VD: Tensor, out_CV: Tensor) -> Tensor:
    if out_CV.dtype == head_VD.dtype:
        return torch.mm(hidden_CD, head_VD.T, out=out_CV)
    return out_CV.copy_(hidden_CD @ head_VD.T)


def log_softmax(hidden_CD: Tensor, head_VD: Tensor, scratch: Scratch, name: str, temperature: float = 1.0) -> Tensor:
    """Log-softmax of a chunk, in the buffer `name`; the buffer `work` is overwritten."""
    logits_CV = _logits(hidden_CD, head_VD, scratch("work", len(hidden_CD)))
    if temperature != 1.0:
        logits_CV.div_(temperature)
    return torch.log_softmax(logits_CV, -1, out=scratch(name, len(hidden_CD)))


def same_vocabulary(head_VD: Tensor, teacher_head_VE: Tensor) -> None:
    if len(head_VD) != len(teacher_head_VE):
        raise OpdctlError(
            f"the student has a vocabulary of {len(head_VD)} tokens, the teacher one of {len(teacher_head_VE)}",
            hint="distil between models that share a tokenizer and the size of the output matrix",
        )


def joined(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


_spare: list[Tensor] = []  # at most one gradient of an output matrix that nobody reads any more


@contextmanager
def reusing_gradients() -> Iterator[Callable[[Tensor], None]]:
    """Within the block, the next gradient of an output matrix is written over the one that the function was given last:
    new memory of that size, page by page, takes longer than the product that it is for.
    """

    def give_back(grad_VD: Tensor) -> None:
        _spare[:] = [grad_VD]

    try:
        yield give_back
    finally:
        _spare.clear()


def _fits(head_VD: Tensor, dtype: torch.dtype) -> bool:
    wanted = head_VD.shape, dtype, head_VD.device
    return any((s.shape, s.dtype, s.device) == wanted and s.is_contiguous() for s in _spare)


class Gradients:
    """Gradients of hidden_ND and head_VD, grown chunk by chunk; None for what needs none."""

    def __init__(self, hidden_ND: Tensor, head_VD: Tensor, needs_hidden: bool, needs_head: bool) -> None:
        self._hidden_ND, self._head_VD = hidden_ND, head_VD
        self.hidden_ND = torch.empty_like(hidden_ND) if needs_hidden else None
        self._needs_head = needs_head
        # over chunks, in the dtype of the logits' gradient: bfloat16 would lose the later ones
        self._sum_VD: Tensor | None = None

    def add(self, rows: slice, logits_CV: Tensor) -> None:
        """Take in the gradient of a chunk's logits."""
        if self.hidden_ND is not None:
            self.hidden_ND[rows] = logits_CV.to(self._head_VD.dtype) @ self._head_VD
        if not self._needs_head:
            return
        hidden_CD = self._hidden_ND[rows].to(logits_CV.dtype)
        if self._sum_VD is not None:
            self._sum_VD.addmm_(logits_CV.T, hidden_CD)
        elif _fits(self._head_VD, hidden_CD.dtype):
            self._sum_VD = torch.mm(logits_CV.T, hidden_CD, out=_spare.pop())
        else:
            self._sum_VD = torch.mm(logits_CV.T, hidden_CD)

    @property
    def head_VD(self) -> Tensor | None:
        return None if self._sum_VD is None else self._sum_VD.to(self._head_VD.dtype)


# Of the rows of a chunk: per-token values, and the gradient of one of them in the student's logits.
Form = Callable[[slice, Scratch], tuple[dict[str, Tensor], Tensor]]


def weighted(
    hidden_ND: Tensor, head_VD: Tensor, weights_N: Tensor | None, form: Form, loss: str, chunk: int | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """(sum_n weights_n values[loss]_n, values)."""
    values: dict[str, Tensor] = {}
    total = _WeightedLoss.apply(  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        hidden_ND, head_VD, weights_N, form, loss, chunk, values
    )
    return cast(Tensor, total), values


class _WeightedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        head_VD: Tensor,
        weights_N: Tensor | None,
        form: Form,
        loss: str,
        chunk: int | None,
        values: dict[str, Tensor],
    ) -> Tensor:
        """`values` is filled in."""
        gradients = Gradients(hidden_ND, head_VD, *ctx.needs_input_grad[:2])
        parts = []
        chunks, scratch = split_tokens(hidden_ND, head_VD, chunk)
        for rows in chunks:
            part, grad_CV = form(rows, scratch)
            parts.append(part)
            gradients.add(rows, grad_CV if weights_N is None else grad_CV.mul_(weights_N[rows][:, None]))
        values.update(joined(parts))
        ctx.save_for_backward(gradients.hidden_ND, gradients.head_VD)
        loss_N = values[loss]
        return loss_N.sum() if weights_N is None else (loss_N * weights_N).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # backward() on the loss itself scales by 1, where a product would only cost another [V, D]
        scaled = [None if made is None else (made if grad == 1 else made * grad) for made in ctx.saved_tensors]
        return (*scaled, None, None, None, None, None)
