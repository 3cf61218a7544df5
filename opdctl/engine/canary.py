"""The gate's probe, repeated while a stage trains: does a frozen teacher still say what it said at the start?

A teacher that loses its weights on the way (a server that wakes up without them, a file that was replaced) gives a loss
that falls and a student that unlearns (Relax#287).
"""

import math
from collections.abc import Mapping
from collections.abc import Sequence as Items

import torch
from torch import Tensor

from opdctl.engine.batch import Sequence
from opdctl.engine.loop import Metrics, Trainer

EVERY = 4  # optimizer steps from one look to the next, at most
SEQUENCES = 2  # of each teacher: the first that it was asked about
TOKENS = 256  # of each of them
MOVED = 1e-3  # nats: a teacher that moved further is named


class Canary:
    """Fixed tokens, and what each teacher said of them first, are saved and restored with the trainer."""

    def __init__(self, trainer: Trainer, labels: Items[str], updates: int) -> None:
        self._trainer, self._labels, self._updates = trainer, labels, updates

    def due(self, step: int, sequences: Items[Sequence], teachers: Items[int]) -> dict[int, list[Sequence]]:
        """What each teacher of this batch is to read beside its rows; nothing in most steps. `teachers[i]` scores
        `sequences[i]`."""
        if step // EVERY == (step - self._updates) // EVERY:
            return {}
        found = {}
        for number in sorted(set(teachers)):
            if self._key(number, 0) not in self._trainer.extra:
                own = [sequence for sequence, teacher in zip(sequences, teachers, strict=True) if teacher == number]
                for i, sequence in enumerate(own[:SEQUENCES]):
                    ids = [*sequence.prompt, *sequence.completion][:TOKENS]
                    self._trainer.extra[self._key(number, i)] = torch.tensor(ids)
            keys = (self._key(number, i) for i in range(SEQUENCES))
            fixed = [self._trainer.extra[key].tolist() for key in keys if key in self._trainer.extra]
            found[number] = [Sequence((ids[0],), tuple(ids[1:])) for ids in fixed]
        return found

    def metrics(self, said: Mapping[int, Tensor]) -> Metrics:
        """`said`: teacher -> its log-probabilities of the fixed tokens, in nats.

        teacher_canary: how far they are from the first ones, the mean over a teacher's tokens, of the teacher that
        moved most; 0 for a teacher as it was. teacher_off_uniform: how far from -ln V, of the closest; 0 for one that
        knows nothing. Nothing of no teachers.
        """
        if not said:
            return {}
        moved, uniform = {}, -math.log(self._trainer.policy.vocab_size)
        for number, logprobs_N in said.items():
            first_N = self._trainer.extra.setdefault(f"canary.{number}.first", logprobs_N)
            moved[self._labels[number]] = _distance(logprobs_N, first_N)
        named = {f"teacher_canary/{label}": nats for label, nats in moved.items() if nats > MOVED}
        closest = min(_distance(logprobs_N, torch.tensor(uniform)) for logprobs_N in said.values())
        return {"teacher_canary": max(moved.values()), "teacher_off_uniform": closest, **named}

    @staticmethod
    def _key(number: int, i: int) -> str:
        return f"canary.{number}.tokens.{i}"


def _distance(a_N: Tensor, b_N: Tensor) -> float:
    """Mean |a - b|; infinite where one of both is no number."""
    return float((a_N.double() - b_N.double()).abs().mean().nan_to_num(nan=math.inf))
