"""On-policy distillation from many teachers: the student samples, each row's teacher scores its tokens.

The three forms of the reverse KL differ in what they ask of a teacher, and only in `_Distiller.loss`.
"""

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from opdctl.backends.contract import Control, StageResult, StageSpec
from opdctl.engine.batch import Sequence, TokenBatch, collate, micro_batches
from opdctl.engine.loop import Metrics, Trainer, mean, open_frozen, open_policy, open_tasks, role
from opdctl.engine.losses import clipped_policy_loss, opd_advantage, token_weights
from opdctl.engine.policy import Policy
from opdctl.engine.rows import Mixer, Renderer, judge, roll, stream_seed
from opdctl.engine.sampling import sample
from opdctl.engine.teachers import Router, TeacherPool, check_vocabularies
from opdctl.engine.vocab import (
    distill_health,
    full_vocab_reverse_kl,
    teacher_topk,
    token_logprobs,
    topk_reverse_kl,
)
from opdctl.settings import ClippedSurrogate, FullVocabOpd, OpdSettings, PolicyGradientOpd, TopKOpd


def run(spec: StageSpec, control: Control) -> StageResult:
    """Train `student` on its own rollouts to follow, row by row, the teacher that the row's columns route to."""
    settings = OpdSettings.model_validate(spec.config)
    policy, tokenizer = open_policy(spec, role(spec, "student")[0], settings.train.precision)
    check_vocabularies(tokenizer, policy.vocab_size, role(spec, "teachers"))
    trainer = Trainer(spec, control, settings.train, policy, tokenizer)
    distiller = _Distiller(spec, settings, trainer)
    sequences_per_batch = settings.rollout.prompts * settings.rollout.group_size
    updates = sequences_per_batch // settings.train.global_batch_size

    def iteration(step: int) -> Metrics:
        rows, metrics = distiller.collect(step)
        order = torch.randperm(
            len(rows), generator=torch.Generator().manual_seed(stream_seed(spec.seed, "opd-split", step))
        ).tolist()
        size = settings.train.global_batch_size
        parts = []
        for at in range(0, len(order), size):
            # ordered by teacher, so that each is fetched once a step
            chosen = sorted(order[at : at + size], key=lambda i: (rows[i].teacher, i))
            parts.append(trainer.update(distiller.losses([rows[i] for i in chosen])))
        learning = {name: mean(part[name] for part in parts) for name in parts[0]}
        return {**metrics, **learning, **distiller.health()}

    try:
        return trainer.fit(iteration, updates=updates)
    finally:
        distiller.pool.close()


@dataclass(frozen=True)
class Scored:
    """One completion of the student and the teacher that scores it."""

    sequence: Sequence
    sampling_logprobs: Tensor
    teacher: int


@dataclass(frozen=True)
class _Piece:
    """The rows of one teacher in a micro-batch, with the student's side of them."""

    rows: SequenceOf[Scored]
    hidden_ND: Tensor
    targets_N: Tensor
    weights_N: Tensor


class _Distiller:
    """Rollouts, teachers and losses of one stage."""

    def __init__(self, spec: StageSpec, settings: OpdSettings, trainer: Trainer) -> None:
        self.spec, self.settings, self.trainer = spec, settings, trainer
        self.student: Policy = trainer.policy
        self.generate = partial(sample, self.student)
        self.tasks = open_tasks(spec)
        self.mixer = Mixer(self.tasks, settings.data, "train", stream_seed(spec.seed, "opd"))
        self.renderer = Renderer(trainer.tokenizer, self.student.eos_ids)
        self.teachers = role(spec, "teachers")
        self.router = Router(self.teachers, settings.route_by, settings.default_teacher)
        self.micro_batch_tokens = int(spec.resources["micro_batch_tokens"])
        self.pool = TeacherPool(
            lambda number: open_frozen(spec, self.teachers[number], settings.train.precision),
            resident=int(spec.resources["resident_teachers"]),
        )
        self._health: list[dict[str, Tensor]] = []
        self._clipped: list[Tensor] = []

    def collect(self, step: int) -> tuple[list[Scored], Metrics]:
        """One rollout batch of the student, each completion with its teacher."""
        options = self.settings.rollout
        start = self.trainer.position.get("rows", 0)
        self.trainer.position["rows"] = start + options.prompts
        rows = self.mixer.rows(start, options.prompts)
        routed = [self.router.teacher(row.prompt.columns) for row in rows]
        seed = stream_seed(self.spec.seed, "opd-sample")
        prompts, rollout = roll(self.generate, self.renderer, rows, options, seed=seed, group_size=options.group_size)
        lengths = [len(completion) for completion in rollout.completions]
        logprobs = rollout.sampling_logprobs_N.split(lengths)
        size = options.group_size
        scored = [
            Scored(
                Sequence(tuple(prompts[i // size]), tuple(completion), 1 + i // size), logprobs[i], routed[i // size]
            )
            for i, completion in enumerate(rollout.completions)
        ]
        verdicts = judge(self.tasks, rows, self.renderer.texts(rollout.completions), size)
        metrics = {
            "accuracy": mean(float(v.correct and f) for v, f in zip(verdicts, rollout.finished, strict=True)),
            "length": mean(map(float, lengths)),
            "truncated": 1.0 - mean(map(float, rollout.finished)),
            "tokens": float(sum(lengths)),
        }
        return scored, metrics

    def losses(self, rows: SequenceOf[Scored]) -> Iterator[tuple[Tensor, TokenBatch]]:
        """Micro-batch losses of one optimizer step; `rows` are ordered by teacher.

        The student reads a micro-batch at once, each teacher its own rows of it.
        """
        total_tokens = sum(len(row.sequence.completion) for row in rows)
        parts = [
            [rows[i] for i in part] for part in micro_batches([row.sequence for row in rows], self.micro_batch_tokens)
        ]
        order = [segment[0].teacher for part in parts for segment in _segments(part)]
        at = 0
        for part in parts:
            batch = self._batch(self.student, part)
            weights_N = token_weights(
                batch.sequence_N,
                how=self.settings.aggregation,
                total_tokens=total_tokens,
                total_sequences=len(rows),
            )
            hidden_ND = self.student.hidden(batch)
            losses, start = [], 0
            for segment in _segments(part):
                teacher = self.pool.get(order[at], then=order[at + 1] if at + 1 < len(order) else None)
                end = start + sum(len(row.sequence.completion) for row in segment)
                piece = _Piece(segment, hidden_ND[start:end], batch.targets_N[start:end], weights_N[start:end])
                losses.append(self.teachers[order[at]].weight * self.loss(piece, teacher))
                at, start = at + 1, end
            yield torch.stack(losses).sum(), batch

    def loss(self, piece: "_Piece", teacher: Policy) -> Tensor:
        """Loss of the rows of one teacher in the stage's form, weighted by token; its health is noted."""
        form, k, student_head_VD = self.settings.loss, self.settings.health_topk, self.student.head()
        with torch.no_grad():
            teacher_hidden_NE, teacher_head_VE = teacher.hidden(self._batch(teacher, piece.rows)), teacher.head()
        if isinstance(form, FullVocabOpd):
            loss, health = full_vocab_reverse_kl(
                piece.hidden_ND,
                student_head_VD,
                teacher_hidden_NE,
                teacher_head_VE,
                weights_N=piece.weights_N,
                health_topk=k,
            )
            self._health.append(health)
            return loss
        self._health.append(distill_health(piece.hidden_ND, student_head_VD, teacher_hidden_NE, teacher_head_VE, k=k))
        if isinstance(form, TopKOpd):
            indices_NK, logprobs_NK = teacher_topk(teacher_hidden_NE, teacher_head_VE, form.k)
            return topk_reverse_kl(
                piece.hidden_ND, student_head_VD, indices_NK, logprobs_NK, rest=form.rest, weights_N=piece.weights_N
            )[0]
        # the teacher scores at temperature 1, whatever the student samples at
        teacher_logprobs_N, _ = token_logprobs(teacher_hidden_NE, teacher_head_VE, piece.targets_N)
        assert isinstance(form, PolicyGradientOpd)
        return self._policy_gradient(form, piece, teacher_logprobs_N)

    def _policy_gradient(self, form: PolicyGradientOpd, piece: "_Piece", teacher_logprobs_N: Tensor) -> Tensor:
        policy_logprobs_N, _ = token_logprobs(piece.hidden_ND, self.student.head(), piece.targets_N)
        bound = form.max_advantage or float("inf")
        advantages_N = opd_advantage(teacher_logprobs_N, policy_logprobs_N, bound)
        self._clipped.append(advantages_N.abs() >= bound)
        options = self.settings.rollout
        if options.temperature == 1.0 and options.top_p == 1.0 and options.top_k == 0:
            old_N = torch.cat([row.sampling_logprobs for row in piece.rows]).to(policy_logprobs_N)
        else:
            # drawn from another distribution than the policy's own: the ratio starts at 1
            old_N = policy_logprobs_N.detach()
        assert isinstance(form.surrogate, ClippedSurrogate)
        low, high = form.surrogate.low, form.surrogate.high
        loss_N, _ = clipped_policy_loss(policy_logprobs_N, old_N, advantages_N, low=low, high=high)
        return (loss_N * piece.weights_N).sum()

    def health(self) -> Metrics:
        """Means over the tokens since last asked."""
        parts, self._health = self._health, []
        clipped, self._clipped = self._clipped, []
        metrics = {name: float(torch.cat([part[name] for part in parts]).mean()) for name in parts[0]}
        metrics["entropy_gap"] = abs(metrics["teacher_entropy"] - metrics["student_entropy"])
        if clipped:
            metrics["clip_fraction"] = float(torch.cat(clipped).float().mean())
        return metrics

    @staticmethod
    def _batch(policy: Policy, rows: SequenceOf[Scored]) -> TokenBatch:
        return collate(
            [row.sequence for row in rows],
            share_prefixes=policy.shares_prefixes,
            pad_id=policy.pad_id,
            device=policy.device,
        )


def _segments(rows: SequenceOf[Scored]) -> list[list[Scored]]:
    segments: list[list[Scored]] = []
    for row in rows:
        if not segments or segments[-1][0].teacher != row.teacher:
            segments.append([])
        segments[-1].append(row)
    return segments
