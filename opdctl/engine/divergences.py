"""Further divergences of a policy p from its teacher q, and Keye's advantage. Shapes and chunks as in `vocab.py`.

Each loss is sum_n weights_n loss_n; per-token values come without gradient, among them those of `distill_health`.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from opdctl.engine.chunks import Scratch, log_softmax, same_vocabulary, split_tokens, weighted
from opdctl.engine.vocab import compare_chunk

# Of a chunk's log-probabilities of the policy and the teacher, which it leaves as they are: loss_C and its gradient in
# the policy's logits, the latter in a buffer of its own; the buffer `work` is overwritten.
_Divergence = Callable[[Tensor, Tensor, Scratch], tuple[Tensor, Tensor]]


def forward_kl(
    hidden_ND: Tensor,
    head_VD: Tensor,
    teacher_hidden_NE: Tensor,
    teacher_head_VE: Tensor,
    *,
    weights_N: Tensor | None = None,
    health_topk: int = 0,
    chunk: int | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Exact forward KL: loss_n = sum_v q_v (log q_v - log p_v). Returns (sum_n weights_n loss_n, values).

    `values`: `loss` is loss_N in nats, the others are of `distill_health`. Gradient: dloss/dlogit_u = p_u - q_u.
    """
    student = hidden_ND, head_VD
    return _loss(_forward_kl, student, (teacher_hidden_NE, teacher_head_VE), weights_N, health_topk, chunk)


def generalised_jsd(
    hidden_ND: Tensor,
    head_VD: Tensor,
    teacher_hidden_NE: Tensor,
    teacher_head_VE: Tensor,
    *,
    beta: float,
    weights_N: Tensor | None = None,
    health_topk: int = 0,
    chunk: int | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Generalised Jensen-Shannon divergence, 0 < beta < 1. Returns (sum_n weights_n loss_n, values) as `forward_kl`.

    loss_n = beta KL(q || m) + (1 - beta) KL(p || m), m = beta q + (1 - beta) p.

    loss / beta tends to the forward KL(q || p) as beta tends to 0, loss / (1 - beta) to the reverse KL(p || q) as it
    tends to 1. Gradient: dloss/dlogit_u = (1 - beta) p_u (log(p_u / m_u) - KL(p || m)).
    Source: GKD, arXiv 2306.13649 eq. 1; the arguments' order as in TRL.
    """

    def divergence(student_CV: Tensor, teacher_CV: Tensor, scratch: Scratch) -> tuple[Tensor, Tensor]:
        return _jsd(student_CV, teacher_CV, scratch, beta)

    student = hidden_ND, head_VD
    return _loss(divergence, student, (teacher_hidden_NE, teacher_head_VE), weights_N, health_topk, chunk)


@torch.no_grad()
def overlap_advantage(
    hidden_ND: Tensor,
    head_VD: Tensor,
    teacher_hidden_NE: Tensor,
    teacher_head_VE: Tensor,
    *,
    k: int,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """(advantages_N, sizes_N) of Keye-VL-2.0: A = sum_S pbar_v (log q_v - log p_v), with S the tokens that are in the
    k most likely of both p and q, and pbar = p / sum_S p. Where S is empty A is 0. `sizes_N` (float) is |S|.

    The loss -A log p(y_t) weighs the sampled token by how far the policy is above its teacher on S, whichever token
    that is. As A does not depend on y_t, the gradient is 0 in expectation over y_t: this is no KL's gradient, and a
    policy that is trained by it alone is moved by the noise of its samples.
    At k = V, A is minus the reverse KL. Source: arXiv 2606.10651.
    """
    same_vocabulary(head_VD, teacher_head_VE)
    k = min(k, len(head_VD))
    advantages, sizes = [], []
    chunks, scratch = split_tokens(hidden_ND, head_VD, chunk)
    for rows in chunks:
        own_CV = log_softmax(hidden_ND[rows], head_VD, scratch, "student")
        theirs_CV = log_softmax(teacher_hidden_NE[rows], teacher_head_VE, scratch, "teacher")
        own, theirs = own_CV.topk(k, dim=-1), theirs_CV.topk(k, dim=-1)
        # by a mark on the teacher's tokens: comparing all pairs would take k * k a token
        marked_CV = scratch("work", len(own_CV)).zero_().scatter_(-1, theirs.indices, 1.0)
        shared_CK = marked_CV.gather(-1, own.indices) > 0
        advantages.append(overlap_chunk(own.values, theirs_CV.gather(-1, own.indices), shared_CK))
        sizes.append(shared_CK.sum(-1).to(own_CV.dtype))
    return torch.cat(advantages), torch.cat(sizes)


def overlap_chunk(own_CK: Tensor, theirs_CK: Tensor, shared_CK: Tensor) -> Tensor:
    """A_C of `overlap_advantage` from log p and log q of the policy's top-k; `shared_CK`: in the teacher's too."""
    # softmax takes the largest off, so that a far tail does not vanish before it is renormalised
    mass_CK = own_CK.masked_fill(~shared_CK, -math.inf).softmax(-1)
    mass_CK = torch.nan_to_num(mass_CK)  # softmax of nothing but -inf is nan
    return (mass_CK * (theirs_CK - own_CK).masked_fill(~shared_CK, 0.0)).sum(-1)


def _loss(
    divergence: _Divergence,
    student: tuple[Tensor, Tensor],
    teacher: tuple[Tensor, Tensor],
    weights_N: Tensor | None,
    health_topk: int,
    chunk: int | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """`student` and `teacher`: hidden states and output matrix."""
    same_vocabulary(student[1], teacher[1])

    def form(rows: slice, scratch: Scratch) -> tuple[dict[str, Tensor], Tensor]:
        student_CV = log_softmax(student[0][rows], student[1], scratch, "student")
        teacher_CV = log_softmax(teacher[0][rows], teacher[1], scratch, "teacher")
        loss_C, grad_CV = divergence(student_CV, teacher_CV, scratch)
        values, _ = compare_chunk(student_CV, teacher_CV, health_topk, scratch)
        return values | {"loss": loss_C}, grad_CV

    return weighted(*student, weights_N, form, "loss", chunk)


def _forward_kl(student_CV: Tensor, teacher_CV: Tensor, scratch: Scratch) -> tuple[Tensor, Tensor]:
    tokens = len(student_CV)
    gap_CV = torch.sub(teacher_CV, student_CV, out=scratch("gradient", tokens))
    teacher_probs_CV = torch.exp(teacher_CV, out=scratch("work", tokens))
    loss_C = scratch.expectation(teacher_probs_CV, gap_CV)
    return loss_C, torch.exp(student_CV, out=gap_CV).sub_(teacher_probs_CV)


def _jsd(student_CV: Tensor, teacher_CV: Tensor, scratch: Scratch, beta: float) -> tuple[Tensor, Tensor]:
    tokens = len(student_CV)
    work_CV, gap_CV, mix_CV = (scratch(name, tokens) for name in ("work", "gradient", "mixture"))
    torch.add(student_CV, math.log1p(-beta), out=work_CV)
    torch.add(teacher_CV, math.log(beta), out=gap_CV)
    torch.logaddexp(work_CV, gap_CV, out=mix_CV)
    teacher_C = scratch.expectation(torch.exp(teacher_CV, out=work_CV), torch.sub(teacher_CV, mix_CV, out=gap_CV))
    probs_CV = torch.exp(student_CV, out=work_CV)
    student_C = scratch.expectation(probs_CV, torch.sub(student_CV, mix_CV, out=gap_CV))
    loss_C = beta * teacher_C + (1 - beta) * student_C
    return loss_C, gap_CV.sub_(student_C[:, None]).mul_(probs_CV).mul_(1 - beta)
