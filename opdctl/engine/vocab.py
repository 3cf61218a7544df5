"""What is asked of a distribution over the vocabulary: a token's log-probability, the reverse KL, how close two are.

All goes in chunks of tokens (`chunks.py`); the other divergences are in `divergences.py`.

Shapes: N completion tokens of a batch, C tokens of a chunk, V vocabulary, D width of the policy, E width of the
teacher, K tokens of a top-k. logits_NV = hidden_ND @ head_VD.T. p is the policy, q the teacher.

Two kinds of function:
- `token_logprobs` gives values that the caller makes a loss of; its backward pass computes each chunk's logits again.
- the distillation losses give a scalar, sum_n weights_n loss_n, and per-token values without gradient. As weights are
  known beforehand, their gradients are made during the forward pass and each chunk's logits are computed once.
  `weights_N` holds all that scales a token: the aggregation (`losses.token_weights`), times a teacher's weight.

Logits come in the dtype of the weights, as a sampler sees them; softmax and sums are at least in float32.
"""

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from opdctl.engine.chunks import (
    Gradients,
    Scratch,
    chunk_tokens,
    joined,
    log_softmax,
    same_vocabulary,
    split_tokens,
    weighted,
)
from opdctl.errors import OpdctlError
from opdctl.settings.opd import Rest


def token_logprobs(
    hidden_ND: Tensor, head_VD: Tensor, targets_N: Tensor, *, temperature: float = 1.0, chunk: int | None = None
) -> tuple[Tensor, Tensor]:
    """(logprobs_N, entropy_N) in nats: of the target tokens, differentiable; of the distributions, without gradient.

    Both are of softmax(logits / temperature). `chunk` is in tokens; None: about 48 MiB of logits.
    """
    if len(hidden_ND) <= (chunk or chunk_tokens(head_VD)):
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
    same_vocabulary(head_VD, teacher_head_VE)

    def form(rows: slice, scratch: Scratch) -> tuple[dict[str, Tensor], Tensor]:
        student_CV = log_softmax(hidden_ND[rows], head_VD, scratch, "student")
        teacher_CV = log_softmax(teacher_hidden_NE[rows], teacher_head_VE, scratch, "teacher")
        return compare_chunk(student_CV, teacher_CV, health_topk, scratch)

    return weighted(hidden_ND, head_VD, weights_N, form, "reverse_kl", chunk)


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

    def form(rows: slice, scratch: Scratch) -> tuple[dict[str, Tensor], Tensor]:
        logprobs_CV = log_softmax(hidden_ND[rows], head_VD, scratch, "student")
        work_CV = scratch("work", len(logprobs_CV))
        loss_C, grad_CV = topk_chunk(logprobs_CV, indices_NK[rows], teacher_logprobs_NK[rows], work_CV, rest=rest)
        return {"loss": loss_C}, grad_CV

    total, values = weighted(hidden_ND, head_VD, weights_N, form, "loss", chunk)
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
    chunks, scratch = split_tokens(teacher_hidden_NE, teacher_head_VE, chunk)
    for rows in chunks:
        top = log_softmax(teacher_hidden_NE[rows], teacher_head_VE, scratch, "teacher").topk(k, dim=-1)
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
    same_vocabulary(head_VD, teacher_head_VE)
    parts = []
    chunks, scratch = split_tokens(hidden_ND, head_VD, chunk)
    for rows in chunks:
        student_CV = log_softmax(hidden_ND[rows], head_VD, scratch, "student")
        teacher_CV = log_softmax(teacher_hidden_NE[rows], teacher_head_VE, scratch, "teacher")
        parts.append(compare_chunk(student_CV, teacher_CV, k, scratch)[0])
    return joined(parts)


def compare_chunk(student_CV: Tensor, teacher_CV: Tensor, k: int, scratch: Scratch) -> tuple[dict[str, Tensor], Tensor]:
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


def _whole_logprobs(hidden_ND: Tensor, head_VD: Tensor, targets_N: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """A single chunk: the distributions are kept for the backward pass."""
    logits_NV = hidden_ND @ head_VD.T
    logits_NV = logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()
    logprobs_NV = (logits_NV / temperature).log_softmax(-1)
    known_NV = logprobs_NV.detach()
    entropy_N = -(known_NV.exp() * known_NV).sum(-1)
    return logprobs_NV.gather(-1, targets_N[:, None])[:, 0], entropy_N


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, head_VD: Tensor, targets_N: Tensor, temperature: float, chunk: int | None
    ) -> tuple[Tensor, Tensor]:
        logprobs, entropies = [], []
        chunks, scratch = split_tokens(hidden_ND, head_VD, chunk)
        for rows in chunks:
            logprobs_CV = log_softmax(hidden_ND[rows], head_VD, scratch, "student", temperature)
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
        gradients = Gradients(hidden_ND, head_VD, *ctx.needs_input_grad[:2])
        chunks, scratch = split_tokens(hidden_ND, head_VD, ctx.chunk)
        for rows in chunks:
            probs_CV = log_softmax(hidden_ND[rows], head_VD, scratch, "student", ctx.temperature).exp_()
            scale_C1 = (grad_N[rows, None] / ctx.temperature).to(probs_CV.dtype)
            grad_CV = probs_CV.mul_(-scale_C1)
            gradients.add(rows, grad_CV.scatter_add_(-1, targets_N[rows, None], scale_C1))
        return gradients.hidden_ND, gradients.head_VD, None, None, None
