"""Partial rollouts: a batch does not wait for its longest completions; they pause and go on under the next weights.

A step draws in rounds until `rollout.prompts` groups are whole (all of their completions have ended), and trains on
those, the oldest first. A round continues what waits, fills up with new prompts to as many groups as a batch has, and
ends once `done_fraction` of the completions that it continued or began have ended. Groups begun `max_staleness` batches
ago are drawn to their end in the first round, so no token that is trained on is older. Where all completions of the
first round end at once, the batch is that of plain rollouts, to the bit.

Every token keeps the log-probability under the weights that drew it and, as its version, their optimizer step. The
batches of a young stage favour short completions, for long ones come later; whatever waits at its end is never trained
on. Source: Kimi k1.5, arXiv:2501.12599, section 2.6, which cuts at a budget of tokens instead.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from opdctl.engine.journal import ModelJournal
from opdctl.engine.loop import Metrics, Trainer
from opdctl.engine.rows import Mixer, Renderer, Row
from opdctl.engine.sampling import Draft, Drawing, Rollout, Until, collect, write
from opdctl.settings.train import OnPolicy

_STATE = "partial."  # of the names in the trainer's recovery state


@dataclass(frozen=True)
class WholeGroups:
    """`prompts` groups of the same form as plain rollouts, prompt-major."""

    rows: list[Row]
    numbers: list[int]  # of the prompts, in the order of being begun
    prompts: list[list[int]]
    rollout: Rollout
    versions_N: Tensor  # int64: the optimizer step of the weights that drew the token
    metrics: Metrics


@dataclass(eq=False)
class _Group:
    row: Row
    number: int
    born: int  # the optimizer step at which it was begun
    prompt: list[int]
    drafts: list[Draft]
    versions: list[list[int]]  # of the tokens of each draft

    def note(self, step: int) -> None:
        for draft, versions in zip(self.drafts, self.versions, strict=True):
            versions += [step] * (len(draft.tokens) - len(versions))


class PartialRollouts:
    """The groups of a stage that are whole or wait. They are in the trainer's recovery state."""

    def __init__(self, settings: OnPolicy, trainer: Trainer, mixer: Mixer, renderer: Renderer, seed: int) -> None:
        """`seed` of the random numbers: those of a token are those of plain rollouts."""
        assert settings.rollout.partial is not None
        self.options, self.partial, self.updates = settings.rollout, settings.rollout.partial, settings.updates
        self.trainer, self.mixer, self.renderer = trainer, mixer, renderer
        self.journal = ModelJournal(trainer.journal, "policy") if trainer.journal else None
        limit = self.options.max_completion_tokens
        self.drawing = Drawing(self.options.temperature, self.options.top_p, self.options.top_k, limit, seed)
        self.waiting = self._restored()  # in the order of being begun

    def collect(self) -> WholeGroups:
        """The next batch, drawn with the weights as they are."""
        wanted = self.options.prompts
        resumed = len(self._going(self.waiting))
        while len(whole := [group for group in self.waiting if not self._going([group])]) < wanted:
            going = [group for group in self.waiting if self._going([group])]
            begun = self._begin(wanted - len(going))
            self.waiting += begun
            self._round([*going, *begun])
        chosen = whole[:wanted]
        self.waiting = [group for group in self.waiting if group not in chosen]
        self._save()
        versions_N = torch.tensor([version for group in chosen for own in group.versions for version in own])
        ages_N = (self.trainer.step - versions_N) / self.updates
        metrics = {
            "resumed": float(resumed),
            "paused": float(len(self._going(self.waiting))),
            "staleness": float(ages_N.mean()),
            "staleness_max": float(ages_N.max()),
        }
        rollout = collect([draft for group in chosen for draft in group.drafts], self.trainer.policy.device)
        rows, numbers = [group.row for group in chosen], [group.number for group in chosen]
        return WholeGroups(rows, numbers, [group.prompt for group in chosen], rollout, versions_N, metrics)

    def _going(self, groups: Sequence[_Group]) -> list[Draft]:
        """What has not ended."""
        limit = self.drawing.max_completion_tokens
        return [draft for group in groups for draft in group.drafts if not draft.finished and len(draft.tokens) < limit]

    def _round(self, groups: Sequence[_Group]) -> None:
        step = self.trainer.step
        pressing = [
            step - group.born >= self.partial.max_staleness * self.updates
            for group in groups
            for _ in self._going([group])
        ]
        ended = math.ceil(round(self.partial.done_fraction * len(pressing), 9))  # 0.7 * 10 is above 7
        until = Until(ended, pressing)
        write(self.trainer.policy, self._going(groups), self.drawing, until=until, journal=self.journal)
        for group in groups:
            group.note(step)

    def _begin(self, count: int) -> list[_Group]:
        first = self.trainer.position.get("rows", 0)
        self.trainer.position["rows"] = first + count
        rows = self.mixer.rows(first, count)
        return self._groups(rows, [(number, self.trainer.step) for number in range(first, first + count)])

    def _groups(self, rows: Sequence[Row], known: Sequence[tuple[int, int]]) -> list[_Group]:
        prompts = self.renderer.prompts([row.prompt for row in rows], self.options.max_prompt_tokens) if rows else []
        samples = range(self.options.group_size)
        return [
            _Group(row, number, born, ids, [Draft(ids, row.key, i) for i in samples], [[] for _ in samples])
            for row, ids, (number, born) in zip(rows, prompts, known, strict=True)
        ]

    # ---------------------------------------------------------------------------------------- recovery state

    def _save(self) -> None:
        groups, whole = self.waiting, torch.int64
        drafts = [draft for group in groups for draft in group.drafts]
        known = [[group.row.cell, group.row.index, group.number, group.born] for group in groups]
        tokens = [token for draft in drafts for token in draft.tokens]
        versions = [version for group in groups for own in group.versions for version in own]
        drawn = collect(drafts, torch.device("cpu"))
        state = {
            "groups": torch.tensor(known, dtype=whole).view(-1, 4),
            "lengths": torch.tensor([len(draft.tokens) for draft in drafts], dtype=whole),
            "finished": torch.tensor(drawn.finished, dtype=torch.bool),
            "tokens": torch.tensor(tokens, dtype=whole),
            "versions": torch.tensor(versions, dtype=whole),
            "logprobs": drawn.sampling_logprobs_N,
            "entropies": drawn.entropy_N,
        }
        self.trainer.extra |= {_STATE + name: tensor for name, tensor in state.items()}

    def _restored(self) -> list[_Group]:
        state = {
            name.removeprefix(_STATE): tensor for name, tensor in self.trainer.extra.items() if name.startswith(_STATE)
        }
        if not state:
            return []
        known = [[int(value) for value in group] for group in state["groups"].tolist()]
        rows = [row for cell, index, *_ in known for row in self.mixer.cell_rows(cell, index, 1)]
        groups = self._groups(rows, [(number, born) for *_, number, born in known])
        drafts = [each for group in groups for each in zip(group.drafts, group.versions, strict=True)]
        lengths = [int(length) for length in state["lengths"].tolist()]
        names = ("tokens", "versions", "logprobs", "entropies")
        pieces = [state[name].split(lengths) for name in names]
        for (draft, versions), finished, tokens, own, *values in zip(drafts, state["finished"], *pieces, strict=True):
            draft.extend([int(token) for token in tokens], *values, finished=bool(finished))
            versions += [int(version) for version in own]
        return groups
