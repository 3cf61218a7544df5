"""What the rows of one teacher cost in each form of distillation, and how close student and teacher are there.

All forms but `policy_gradient`, `overlap` and MiniLLM's long term hold the samples fixed and are exact at each
position: no credit flows to later tokens.
"""

import math
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch
from torch import Tensor

from opdctl.engine.divergences import forward_kl, generalised_jsd, overlap_advantage
from opdctl.engine.loop import Metrics
from opdctl.engine.losses import opd_advantage, policy_loss
from opdctl.engine.opd_advantages import discounted_sum, later_mean
from opdctl.engine.opd_rollouts import Scored, target_logprobs
from opdctl.engine.vocab import distill_health, full_vocab_reverse_kl, teacher_topk, token_logprobs, topk_reverse_kl
from opdctl.settings import (
    ForwardKlOpd,
    FullVocabOpd,
    JsdOpd,
    MiniLlmOpd,
    OpdSettings,
    OverlapOpd,
    PolicyGradientOpd,
    TopKOpd,
)


@dataclass(frozen=True)
class Piece:
    """The rows of one teacher in a micro-batch: N completion tokens, D and E widths of student and teacher."""

    rows: SequenceOf[Scored]
    hidden_ND: Tensor
    head_VD: Tensor
    targets_N: Tensor
    weights_N: Tensor
    teacher_hidden_NE: Tensor
    teacher_head_VE: Tensor

    @property
    def lengths(self) -> list[int]:
        return [row.sequence.counted for row in self.rows]


class DistillLoss:
    """The loss of a stage's form; notes what is to be watched."""

    def __init__(self, settings: OpdSettings) -> None:
        self.form, self.health_topk = settings.loss, settings.health_topk
        self._noted: list[dict[str, Tensor]] = []

    def __call__(self, piece: Piece) -> Tensor:
        """sum_n weights_n loss_n over the tokens of the piece."""
        pair = piece.hidden_ND, piece.head_VD, piece.teacher_hidden_NE, piece.teacher_head_VE
        weights_N, k = piece.weights_N, self.health_topk
        match self.form:
            case FullVocabOpd():
                loss, noted = full_vocab_reverse_kl(*pair, weights_N=weights_N, health_topk=k)
            case MiniLlmOpd(discount=discount):
                loss, noted = full_vocab_reverse_kl(*pair, weights_N=weights_N, health_topk=k)
                loss = loss + self._long_term(piece, discount) if discount > 0 else loss
            case ForwardKlOpd():
                loss, noted = forward_kl(*pair, weights_N=weights_N, health_topk=k)
            case JsdOpd(beta=beta):
                loss, noted = generalised_jsd(*pair, beta=beta, weights_N=weights_N, health_topk=k)
            case _:
                noted = distill_health(*pair, k=k)
                loss, more = self._sampled(self.form, piece)
                noted |= more
        noted["teacher_entropy_share"] = noted["teacher_entropy"] / math.log(len(piece.teacher_head_VE))
        self._noted.append(noted)
        return loss

    def metrics(self) -> Metrics:
        """Means over the tokens since last asked; of the teacher's entropy also its part of ln V and its deviation, by
        which a teacher that says the same of every token is known."""
        noted, self._noted = self._noted, []
        metrics = {name: float(torch.cat([part[name] for part in noted]).float().mean()) for name in noted[0]}
        metrics.pop("loss", None)  # the trainer's `loss` is the weighted one
        spread = torch.cat([part["teacher_entropy"] for part in noted]).float().std(correction=0)
        metrics["teacher_entropy_std"] = float(spread)
        metrics["entropy_gap"] = abs(metrics["teacher_entropy"] - metrics["student_entropy"])
        return metrics

    def _sampled(
        self, form: TopKOpd | OverlapOpd | PolicyGradientOpd, piece: Piece
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of the forms that look at some tokens only, and what they note."""
        student_head_VD, weights_N = piece.head_VD, piece.weights_N
        if isinstance(form, TopKOpd):
            indices_NK, logprobs_NK = teacher_topk(piece.teacher_hidden_NE, piece.teacher_head_VE, form.k)
            loss, _ = topk_reverse_kl(
                piece.hidden_ND, student_head_VD, indices_NK, logprobs_NK, rest=form.rest, weights_N=weights_N
            )
            return loss, {}
        if isinstance(form, PolicyGradientOpd):
            return self._policy_gradient(form, piece)
        advantages_N, sizes_N = overlap_advantage(
            piece.hidden_ND, student_head_VD, piece.teacher_hidden_NE, piece.teacher_head_VE, k=form.k
        )
        logprobs_N, _ = token_logprobs(piece.hidden_ND, student_head_VD, piece.targets_N)
        noted = {"overlap_size": sizes_N, "overlap_advantage": advantages_N}
        return -(advantages_N * logprobs_N * weights_N).sum(), noted

    def _policy_gradient(self, form: PolicyGradientOpd, piece: Piece) -> tuple[Tensor, dict[str, Tensor]]:
        teacher_N = target_logprobs(piece.teacher_hidden_NE, piece.teacher_head_VE, piece.targets_N, piece.rows, form)
        policy_N, _ = token_logprobs(piece.hidden_ND, piece.head_VD, piece.targets_N)
        bound = form.max_advantage or math.inf
        advantages_N = opd_advantage(teacher_N, policy_N, bound)
        noted = {"clip_fraction": advantages_N.abs() >= bound}
        if form.discount:
            advantages_N = discounted_sum(advantages_N, piece.lengths, form.discount)
        lengths = torch.tensor(piece.lengths, device=policy_N.device)
        if any(row.bonus for row in piece.rows):
            bonus = torch.tensor([row.bonus for row in piece.rows]).to(advantages_N)
            advantages_N = advantages_N + bonus.repeat_interleave(lengths)
        known = [row.old_logprobs for row in piece.rows if row.old_logprobs is not None]
        old_N = torch.cat(known).to(policy_N) if known else policy_N.detach()
        infer_N = torch.cat([row.infer_logprobs for row in piece.rows]).to(policy_N)
        sequence_N = torch.arange(len(piece.rows), device=policy_N.device).repeat_interleave(lengths)
        loss_N, statistics = policy_loss(
            form.surrogate, form.mismatch, policy_N, old_N, infer_N, advantages_N, sequence_N
        )
        noted |= {"ratio_clip_fraction" if name == "clip_fraction" else name: v for name, v in statistics.items()}
        return (loss_N * piece.weights_N).sum(), noted

    def _long_term(self, piece: Piece, discount: float) -> Tensor:
        """MiniLLM: -sum_n weights_n A_n log p(y_n), A the normalised discounted sum of the later log-ratios."""
        teacher_N, _ = token_logprobs(piece.teacher_hidden_NE, piece.teacher_head_VE, piece.targets_N)
        policy_N, _ = token_logprobs(piece.hidden_ND, piece.head_VD, piece.targets_N)
        advantages_N = later_mean((teacher_N - policy_N).detach(), piece.lengths, discount)
        return -(advantages_N * policy_N * piece.weights_N).sum()
