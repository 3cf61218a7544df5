"""All that needs a distribution over the vocabulary, in chunks of tokens: no [N, V] tensor of a batch exists.

Shapes: N completion tokens of a batch, C tokens of a chunk, V vocabulary, D width of the policy, E width of the
teacher, K tokens of a top-k. logits_NV = hidden_ND @ head_VD.T. p is the policy, q the teacher.

Two kinds of function:
- `token_logprobs` gives values that the caller makes a loss of; its backward pass computes each chunk's logits again.
- the distillation losses give a scalar, sum_n weights_n loss_n, and per-token values without gradient. As weights are
  known beforehand, their gradients are made during the forward pass and each chunk's logits are computed once.
  `weights_N` holds all that scales a token: the aggregation (`losses.token_weights`), times a teacher's weight.

Logits come in the dtype of the weights, as a sampler sees them; softmax and sums are at least in float32.
"""

import math
from collections.abc import Callable
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from opdctl.errors import OpdctlError

Rest = Literal["correction", "lumped_tail"]  # what stands for the tokens outside the top-k

CHUNK_BYTES = 48 * 2**20  # of one [C, V] tensor; three exist at a time


def token_logprobs(
    hidden_ND: Tensor, head_VD: Tensor, targets_N: Tensor, *, temperature: float = 1.0, chunk: int | None = None
) -> tuple[Tensor, Tensor]:
    """(logprobs_N, entropy_N) in nats: of the target tokens, differentiable; of the distributions, without gradient.

    Both are of softmax(logits / temperature). `chunk` is in tokens; None: about 48 MiB of logits.
    """
    if len(hidden_ND) <= (chunk or _chunk_tokens(head_VD)):
        return _whole_logprobs(hidden_ND, head_VD, targets_N, temperature)
    pair = _TokenLogprobs.apply(hidden_ND, head_VD, targets_N, temperature, chunk)  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    return cast(tuple[Tensor, Tensor], pair)


def full_vocab_reverse_kl(
    hidden_ND: Tensor,
    head_VD: Tensor,
    teacher_hidden_NE: Tensor,
    teacher_head_VE: Tensor,
    *,
    weights_N: Tensor | None = None,
    health_topk: int = 0,
    chunk: int | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Exact reverse KL: loss_n = sum_v p_v (log p_v - log q_v). Returns (sum_n weights_n loss_n, health).

    `health`: detached per-token values as of `distill_health`, of which `reverse_kl` is loss_N; the overlap entries
    are there if `health_topk` > 0. `weights_N` defaults to 1.

    Gradient: dloss/dlogit_u = p_u (log p_u - log q_u - loss_n). The rollout is held fixed: no credit flows to later
    tokens. Source: DeepSeek-V4, arXiv 2606.19348 eq. 29 (with one routed teacher per token).
    """
    _same_vocabulary(head_VD, teacher_head_VE)

    def form(rows: slice, scratch: _Scratch) -> tuple[dict[str, Tensor], Tensor]:
        student_CV = _logprobs(hidden_ND[rows], head_VD, scratch, "student")
        teacher_CV = _logprobs(teacher_hidden_NE[rows], teacher_head_VE, scratch, "teacher")
        return _compare(student_CV, teacher_CV, health_topk, scratch)

    return _weighted(hidden_ND, head_VD, weights_N, form, "reverse_kl", chunk)


def topk_reverse_kl(
    hidden_ND: Tensor,
    head_VD: Tensor,
    indices_NK: Tensor,
    teacher_logprobs_NK: Tensor,
    *,
    rest: Rest,
    weights_N: Tensor | None = None,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Reverse KL on the teacher's top-k set S. Returns (sum_n weights_n loss_n, loss_N without gradient).

    p comes from the full softmax, nothing is renormalised. With a_v = log p_v - log q_v:
    - correction:  loss = sum_S p_v a_v + C_k,  C_k = sum_S (q_v - p_v), the generalised KL of two measures on S.
      C_k carries gradient: without it the policy would be pushed off S even where p = q.
    - lumped_tail: loss = sum_S p_v a_v + P log(P / Q), P = 1 - sum_S p, Q = 1 - sum_S q: all other tokens are one
      outcome. Tails below the precision of the dtype count as that precision in the logarithm.
    Both are >= 0, have zero gradient at p = q, and equal the full reverse KL at K = V.

    Gradient: dloss/dlogit_u = p_u (c_u - sum_v p_v c_v), c = a on S, and off S 0 or log(P / Q).
    Source: MOPD, arXiv 2606.30406 (correction, k = 64); the lumped tail is a variant of this project.
    """

    def form(rows: slice, scratch: _Scratch) -> tuple[dict[str, Tensor], Tensor]:
        logprobs_CV = _logprobs(hidden_ND[rows], head_VD, scratch, "student")
        work_CV = scratch("work", len(logprobs_CV))
        loss_C, grad_CV = topk_chunk(logprobs_CV, indices_NK[rows], teacher_logprobs_NK[rows], work_CV, rest=rest)
        return {"loss": loss_C}, grad_CV

    total, values = _weighted(hidden_ND, head_VD, weights_N, form, "loss", chunk)
    return total, values["loss"]


def topk_chunk(
    logprobs_CV: Tensor, indices_CK: Tensor, teacher_logprobs_CK: Tensor, work_CV: Tensor, *, rest: Rest
) -> tuple[Tensor, Tensor]:
    """(loss_C, its gradient in the logits_CV) of `topk_reverse_kl`, for tokens whose distributions are known.

    `logprobs_CV` (at least float32) becomes the gradient; `work_CV`, of the same shape, is overwritten.
    """
    teacher_CK = teacher_logprobs_CK.to(logprobs_CV.dtype)
    gap_CK = logprobs_CV.gather(-1, indices_CK) - teacher_CK
    probs_CV = torch.exp(logprobs_CV, out=work_CV)
    probs_CK = probs_CV.gather(-1, indices_CK)
    loss_C = mean_C = (probs_CK * gap_CK).sum(-1)
    costs_CV = logprobs_CV.zero_()
    if rest == "correction":
        loss_C = mean_C + (teacher_CK.exp() - probs_CK).sum(-1)
    elif indices_CK.shape[-1] < logprobs_CV.shape[-1]:  # else there is no tail
        tail_C = probs_CV.scatter_(-1, indices_CK, 0.0).sum(-1)
        probs_CV.scatter_(-1, indices_CK, probs_CK)
        tail_gap_C = _tail_gap(tail_C, teacher_CK)
        loss_C = mean_C = mean_C + tail_C * tail_gap_C
        costs_CV += tail_gap_C[:, None]
    costs_CV.scatter_(-1, indices_CK, gap_CK)
    return loss_C, costs_CV.sub_(mean_C[:, None]).mul_(probs_CV)


@torch.no_grad()
def teacher_topk(
    teacher_hidden_NE: Tensor, teacher_head_VE: Tensor, k: int, *, chunk: int | None = None
) -> tuple[Tensor, Tensor]:
    """(indices_NK, logprobs_NK) of the k most likely tokens, most likely first; logprobs of the full softmax."""
    if k > len(teacher_head_VE):
        raise OpdctlError(
            f"k: {k} is more than the vocabulary of {len(teacher_head_VE)} tokens", hint="lower config.loss.k"
        )
    indices, logprobs = [], []
    chunks, scratch = _split(teacher_hidden_NE, teacher_head_VE, chunk)
    for rows in chunks:
        top = _logprobs(teacher_hidden_NE[rows], teacher_head_VE, scratch, "teacher").topk(k, dim=-1)
        indices.append(top.indices)
        logprobs.append(top.values)
    return torch.cat(indices), torch.cat(logprobs)


@torch.no_grad()
def distill_health(
    hidden_ND: Tensor,
    head_VD: Tensor,
    teacher_hidden_NE: Tensor,
    teacher_head_VE: Tensor,
    *,
    k: int,
    chunk: int | None = None,
) -> dict[str, Tensor]:
    """Per-token signs of a healthy distillation, without gradient; each [N].

    reverse_kl, student_entropy, teacher_entropy: nats. overlap: |top-k(p) and top-k(q)| / k. overlap_mass_student,
    overlap_mass_teacher: probability that each gives to the tokens in both top-k sets. Source of the overlap
    metrics: arXiv 2604.13016. `k` above V counts as V.
    """
    _same_vocabulary(head_VD, teacher_head_VE)
    parts = []
    chunks, scratch = _split(hidden_ND, head_VD, chunk)
    for rows in chunks:
        student_CV = _logprobs(hidden_ND[rows], head_VD, scratch, "student")
        teacher_CV = _logprobs(teacher_hidden_NE[rows], teacher_head_VE, scratch, "teacher")
        parts.append(_compare(student_CV, teacher_CV, k, scratch)[0])
    return _joined(parts)


# ------------------------------------------------------------------------------------------------------- chunks


class _Scratch:
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


def _chunk_tokens(head_VD: Tensor) -> int:
    return max(1, CHUNK_BYTES // (len(head_VD) * max(head_VD.element_size(), 4)))


def _split(hidden_ND: Tensor, head_VD: Tensor, chunk: int | None) -> tuple[list[slice], _Scratch]:
    """Slices of about equal size, at most `chunk` tokens (one, possibly empty, at least), and buffers of that size."""
    tokens = len(hidden_ND)
    parts = max(1, math.ceil(tokens / (chunk or _chunk_tokens(head_VD))))
    size = max(1, math.ceil(tokens / parts))
    return [slice(at, min(at + size, tokens)) for at in range(0, max(tokens, 1), size)], _Scratch(size, head_VD)


def _logits(hidden_CD: Tensor, head_VD: Tensor, out_CV: Tensor) -> Tensor:
    if out_CV.dtype == head_VD.dtype:
        return torch.mm(hidden_CD, head_VD.T, out=out_CV)
    return out_CV.copy_(hidden_CD @ head_VD.T)


def _logprobs(hidden_CD: Tensor, head_VD: Tensor, scratch: _Scratch, name: str, temperature: float = 1.0) -> Tensor:
    """Log-softmax of a chunk, in the buffer `name`; the buffer `work` is overwritten."""
    logits_CV = _logits(hidden_CD, head_VD, scratch("work", len(hidden_CD)))
    if temperature != 1.0:
        logits_CV.div_(temperature)
    return torch.log_softmax(logits_CV, -1, out=scratch(name, len(hidden_CD)))


def _same_vocabulary(head_VD: Tensor, teacher_head_VE: Tensor) -> None:
    if len(head_VD) != len(teacher_head_VE):
        raise OpdctlError(
            f"the student has a vocabulary of {len(head_VD)} tokens, the teacher one of {len(teacher_head_VE)}",
            hint="distil between models that share a tokenizer and the size of the output matrix",
        )


def _joined(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _compare(student_CV: Tensor, teacher_CV: Tensor, k: int, scratch: _Scratch) -> tuple[dict[str, Tensor], Tensor]:
    """Health values of a chunk from log-probabilities, and the gradient of `reverse_kl` in the student's logits.

    The gradient is in the student's buffer; the buffer `work` is overwritten.
    """
    probs_CV = torch.exp(student_CV, out=scratch("work", len(student_CV)))
    values = _overlap(student_CV, teacher_CV, k) if k > 0 else {}
    values["student_entropy"] = -scratch.expectation(probs_CV, student_CV)
    gap_CV = student_CV.sub_(teacher_CV)
    values["reverse_kl"] = scratch.expectation(probs_CV, gap_CV)
    grad_CV = gap_CV.sub_(values["reverse_kl"][:, None]).mul_(probs_CV)
    teacher_probs_CV = torch.exp(teacher_CV, out=probs_CV)
    values["teacher_entropy"] = -scratch.expectation(teacher_probs_CV, teacher_CV)
    return values, grad_CV


def _overlap(student_CV: Tensor, teacher_CV: Tensor, k: int) -> dict[str, Tensor]:
    k = min(k, student_CV.shape[-1])
    own, theirs = student_CV.topk(k, dim=-1), teacher_CV.topk(k, dim=-1)
    same_CKK = own.indices[:, :, None] == theirs.indices[:, None, :]
    return {
        "overlap": same_CKK.any(-1).float().mean(-1),
        "overlap_mass_student": (own.values.exp() * same_CKK.any(-1)).sum(-1),
        "overlap_mass_teacher": (theirs.values.exp() * same_CKK.any(-2)).sum(-1),
    }


def _tail_gap(tail_C: Tensor, teacher_CK: Tensor) -> Tensor:
    """log(P / Q) of the probability outside the top-k."""
    floor = torch.finfo(tail_C.dtype).eps
    teacher_tail_C = -torch.expm1(teacher_CK.logsumexp(-1))
    return tail_C.clamp(min=floor).log() - teacher_tail_C.clamp(min=floor).log()


# ----------------------------------------------------------------------------------------- gradients by chunks


def _whole_logprobs(hidden_ND: Tensor, head_VD: Tensor, targets_N: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """A single chunk: the distributions are kept for the backward pass."""
    logits_NV = hidden_ND @ head_VD.T
    logits_NV = logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()
    logprobs_NV = (logits_NV / temperature).log_softmax(-1)
    known_NV = logprobs_NV.detach()
    entropy_N = -(known_NV.exp() * known_NV).sum(-1)
    return logprobs_NV.gather(-1, targets_N[:, None])[:, 0], entropy_N


class _Gradients:
    """Gradients of hidden_ND and head_VD, grown chunk by chunk; None for what needs none."""

    def __init__(self, hidden_ND: Tensor, head_VD: Tensor, needs_hidden: bool, needs_head: bool) -> None:
        self._hidden_ND, self._head_VD = hidden_ND, head_VD
        self.hidden_ND = torch.empty_like(hidden_ND) if needs_hidden else None
        # a sum over chunks: bfloat16 would lose the later ones
        wide = head_VD.dtype if head_VD.dtype == torch.float64 else torch.float32
        self._sum_VD = torch.zeros_like(head_VD, dtype=wide) if needs_head else None

    def add(self, rows: slice, logits_CV: Tensor) -> None:
        """Take in the gradient of a chunk's logits."""
        if self.hidden_ND is not None:
            self.hidden_ND[rows] = logits_CV.to(self._head_VD.dtype) @ self._head_VD
        if self._sum_VD is not None:
            self._sum_VD.addmm_(logits_CV.T, self._hidden_ND[rows].to(logits_CV.dtype))

    @property
    def head_VD(self) -> Tensor | None:
        return None if self._sum_VD is None else self._sum_VD.to(self._head_VD.dtype)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, head_VD: Tensor, targets_N: Tensor, temperature: float, chunk: int | None
    ) -> tuple[Tensor, Tensor]:
        logprobs, entropies = [], []
        chunks, scratch = _split(hidden_ND, head_VD, chunk)
        for rows in chunks:
            logprobs_CV = _logprobs(hidden_ND[rows], head_VD, scratch, "student", temperature)
            probs_CV = torch.exp(logprobs_CV, out=scratch("work", len(logprobs_CV)))
            logprobs.append(logprobs_CV.gather(-1, targets_N[rows, None])[:, 0])
            entropies.append(-scratch.expectation(probs_CV, logprobs_CV))
        ctx.save_for_backward(hidden_ND, head_VD, targets_N)
        ctx.temperature, ctx.chunk = temperature, chunk
        entropy_N = torch.cat(entropies)
        ctx.mark_non_differentiable(entropy_N)
        return torch.cat(logprobs), entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor, _entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden_ND, head_VD, targets_N = ctx.saved_tensors
        gradients = _Gradients(hidden_ND, head_VD, *ctx.needs_input_grad[:2])
        chunks, scratch = _split(hidden_ND, head_VD, ctx.chunk)
        for rows in chunks:
            probs_CV = _logprobs(hidden_ND[rows], head_VD, scratch, "student", ctx.temperature).exp_()
            scale_C1 = (grad_N[rows, None] / ctx.temperature).to(probs_CV.dtype)
            grad_CV = probs_CV.mul_(-scale_C1)
            gradients.add(rows, grad_CV.scatter_add_(-1, targets_N[rows, None], scale_C1))
        return gradients.hidden_ND, gradients.head_VD, None, None, None


# Of the rows of a chunk: per-token values, and the gradient of one of them in the student's logits.
_Form = Callable[[slice, _Scratch], tuple[dict[str, Tensor], Tensor]]


def _weighted(
    hidden_ND: Tensor, head_VD: Tensor, weights_N: Tensor | None, form: _Form, loss: str, chunk: int | None
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
        form: _Form,
        loss: str,
        chunk: int | None,
        values: dict[str, Tensor],
    ) -> Tensor:
        """`values` is filled in."""
        gradients = _Gradients(hidden_ND, head_VD, *ctx.needs_input_grad[:2])
        parts = []
        chunks, scratch = _split(hidden_ND, head_VD, chunk)
        for rows in chunks:
            part, grad_CV = form(rows, scratch)
            parts.append(part)
            gradients.add(rows, grad_CV if weights_N is None else grad_CV.mul_(weights_N[rows][:, None]))
        values.update(_joined(parts))
        ctx.save_for_backward(gradients.hidden_ND, gradients.head_VD)
        loss_N = values[loss]
        return loss_N.sum() if weights_N is None else (loss_N * weights_N).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # backward() on the loss itself scales by 1, where a product would only cost another [V, D]
        scaled = [None if made is None else (made if grad == 1 else made * grad) for made in ctx.saved_tensors]
        return (*scaled, None, None, None, None, None)
