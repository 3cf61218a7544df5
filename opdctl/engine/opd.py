"""On-policy distillation from many teachers: the student samples, each row's teacher scores its tokens.

Who samples what is in `opd_rollouts.py`, what a teacher's rows cost in `opd_loss.py`; here they become optimizer steps.
"""

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from functools import partial

import torch
from torch import Tensor

from opdctl.backends.contract import Control, StageResult, StageSpec
from opdctl.engine.batch import TokenBatch, micro_batches
from opdctl.engine.loop import Metrics, Trainer, mean, open_policy, role
from opdctl.engine.losses import token_weights
from opdctl.engine.opd_loss import DistillLoss, Piece
from opdctl.engine.opd_rollouts import Sampler, Scored, by_teacher
from opdctl.engine.policy import Policy
from opdctl.engine.rows import stream_seed
from opdctl.engine.streamed import Term, streamed
from opdctl.engine.teacher_states import States, open_states
from opdctl.engine.teachers import accepted, check_vocabularies
from opdctl.engine.update_extrapolation import Extrapolation, held_out_accuracy
from opdctl.settings import OpdSettings


def run(spec: StageSpec, control: Control) -> StageResult:
    """Train `student` to follow, row by row, the teacher that the row's columns route to, on its own rollouts or, with
    `sampled_by: teacher`, on the teacher's."""
    settings = OpdSettings.model_validate(spec.config)
    policy, tokenizer = open_policy(spec, role(spec, "student")[0], settings.train.precision)
    teachers = role(spec, "teachers")
    check_vocabularies(tokenizer, policy.vocab_size, [*teachers, *role(spec, "reference")], accepted=accepted(spec))
    trainer = Trainer(spec, control, settings.train, policy, tokenizer)
    updates = settings.updates
    states = open_states(spec, teachers, settings.train.precision, policy)
    try:
        sampler = Sampler(spec, settings, trainer, states)
        distiller = _Distiller(spec, settings, policy, states)
        extrapolation: Extrapolation | None = None
        if (given := settings.extrapolation) is not None:
            extrapolation = Extrapolation(given, trainer, held_out_accuracy(settings, trainer, given.prompts))

        def iteration(step: int) -> Metrics:
            rows, metrics = sampler.collect(step)
            parts: list[Metrics] = []
            stretched: Metrics = {}
            for part in _split(rows, updates, spec.seed, step):
                parts.append(trainer.update(distiller.losses(part)))
                stretched |= extrapolation.after_update() if extrapolation else {}
            learning = {name: mean(part[name] for part in parts) for name in parts[0]}
            watched = sampler.canary.metrics(states.said())
            return {**metrics, **learning, **stretched, **distiller.loss.metrics(), **watched}

        return trainer.fit(iteration, updates=updates)
    finally:
        states.close()


def _split(rows: list[Scored], updates: int, seed: int, step: int) -> Iterator[list[Scored]]:
    """The rows of each optimizer step, ordered by teacher so that each is fetched once a step."""
    order = torch.randperm(
        len(rows), generator=torch.Generator().manual_seed(stream_seed(seed, "opd-split", step))
    ).tolist()
    for part in range(updates):
        chosen = order[len(rows) * part // updates : len(rows) * (part + 1) // updates]
        yield sorted((rows[i] for i in chosen), key=lambda row: (row.teacher, row.index))


class _Distiller:
    """Makes the micro-batch losses of an optimizer step."""

    def __init__(self, spec: StageSpec, settings: OpdSettings, student: Policy, states: States) -> None:
        self.settings, self.student, self.states = settings, student, states
        self.weights = [teacher.weight for teacher in role(spec, "teachers")]
        self.micro_batch_tokens = int(spec.resources["micro_batch_tokens"])
        # many teachers' losses would each keep a gradient of the output matrix until the backward pass
        self.streams = spec.resources["teacher_states"] == "cached"
        self.loss = DistillLoss(settings)

    def losses(self, rows: SequenceOf[Scored]) -> Iterator[tuple[Tensor, TokenBatch]]:
        """Of one optimizer step; `rows` are ordered by teacher.

        The student reads a micro-batch at once, each teacher its own rows of it.
        """
        total_tokens = sum(row.sequence.counted for row in rows)
        parts = [
            [rows[i] for i in part] for part in micro_batches([row.sequence for row in rows], self.micro_batch_tokens)
        ]
        order = [run[0].teacher for part in parts for run in by_teacher(part)]
        following = iter([*order[1:], None])
        for part in parts:
            batch = self.student.batch([row.sequence for row in part])
            weights_N = token_weights(
                batch.sequence_N,
                how=self.settings.aggregation,
                total_tokens=total_tokens,
                total_sequences=len(rows),
            )
            hidden_ND, head_VD = self.student.hidden(batch), self.student.head()
            terms = self._terms(part, batch, weights_N, following)
            if self.streams:
                yield streamed(hidden_ND, head_VD, terms), batch
            else:
                yield torch.stack([term(hidden_ND[tokens], head_VD) for tokens, term in terms]).sum(), batch

    def _terms(
        self, part: list[Scored], batch: TokenBatch, weights_N: Tensor, following: Iterator[int | None]
    ) -> Iterator[Term]:
        """The loss of each teacher's rows in a micro-batch; `following` tells the teacher after each."""
        start = 0
        for own in by_teacher(part):
            tokens = slice(start, start + sum(row.sequence.counted for row in own))
            # named nowhere, so that a teacher's output matrix is gone once its loss is
            yield (
                tokens,
                partial(
                    self._weighted,
                    own,
                    batch.targets_N[tokens],
                    weights_N[tokens],
                    self.states.get(own[0].teacher, [row.index for row in own], then=next(following)),
                ),
            )
            start = tokens.stop

    def _weighted(
        self,
        own: list[Scored],
        targets_N: Tensor,
        weights_N: Tensor,
        states: tuple[Tensor, Tensor],
        hidden_ND: Tensor,
        head_VD: Tensor,
    ) -> Tensor:
        return self.weights[own[0].teacher] * self.loss(Piece(own, hidden_ND, head_VD, targets_N, weights_N, *states))
