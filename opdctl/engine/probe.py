"""A student and its teachers before training: what both say of the same tokens, and how both do on the same prompts.

Every teacher is asked about its own prompts: those that the stage routes to it. The student is in memory, and teachers
one after another, read as the stage will read them (`teacher_states.open_states`).

Legend: N completion tokens of a teacher's sequences, V vocabulary.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from functools import partial
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from opdctl.backends.contract import Control, InputSpec, StageSpec, Stopped
from opdctl.engine.batch import Sequence, collate, micro_batches
from opdctl.engine.checkpoint import Tokenizer
from opdctl.engine.loop import completions_per_call, open_policy, open_tasks, role
from opdctl.engine.policy import Policy
from opdctl.engine.rows import Mixer, Renderer, Row, judge, roll, stream_seed
from opdctl.engine.sampling import Rollout, sample
from opdctl.engine.teacher_states import States, open_states
from opdctl.engine.teachers import Router
from opdctl.engine.vocab import distill_health, token_logprobs
from opdctl.errors import OpdctlError
from opdctl.settings import GateSettings, OpdSettings
from opdctl.tasks import Task

TOP_K = 16  # tokens of the overlap, or the whole vocabulary (arXiv:2604.13016)
ALONE = 8  # sequences that are read one by one
FEW = 12  # of each teacher's completions, that the other teachers read too
PATIENCE = 8  # times as many rows as are wanted of a teacher are looked through for them
_TREE = 4  # completions of a prompt, at most: enough that they share a row where the stage's do


@dataclass(frozen=True)
class Score:
    """How a model did on a teacher's prompts."""

    asked: int
    right: int  # finished and correct
    cut: int  # at the limit


@dataclass(frozen=True)
class Reading:
    """What was seen of one pair. Means are over the student's tokens; nats per token."""

    number: int  # of the teacher in the stage's list
    teacher: InputSpec
    student: str  # label
    rollouts: int
    tokens: int
    vocabulary: int
    reverse_kl: float  # KL(student || teacher), the whole vocabulary summed
    kl_error: float  # its standard error, tokens taken as independent
    student_entropy: float
    teacher_entropy: float
    overlap: float  # share of the top k in both
    k: int
    logprobs_N: Tensor  # the teacher's, of all tokens that it was shown: the student's and reference answers
    student_N: Tensor  # the student's, of the same tokens
    repeats_N: Tensor  # which of them are their predecessor again
    again: float  # largest difference between two readings of the same tokens
    alone: float  # mean difference from sequences read one by one
    student_score: Score
    teacher_score: Score
    moved: Mapping[int, float]  # reverse KL on a few of the prompts of each teacher, this one among them


@dataclass(frozen=True)
class _Shown:
    """A teacher's sequences."""

    rows: Items[Row]
    prompts: Items[Items[int]]
    rollouts: list[Sequence]
    answers: list[Sequence]
    score: Score  # the student's

    @property
    def sequences(self) -> list[Sequence]:
        return [*self.rollouts, *self.answers]


def read_pairs(
    spec: StageSpec, settings: GateSettings, control: Control, numbers: Items[int] | None = None
) -> Iterator[Reading]:
    """A reading of each teacher (or of those of these numbers) that rows are routed to.

    Nothing of the stage is touched: its state folder is another, random numbers are named and not drawn from a state.
    """
    probe = _Probe(spec, settings)
    wanted = range(len(probe.teachers)) if numbers is None else numbers
    found = probe.rows(wanted)
    with TemporaryDirectory(prefix="opdctl-gate-") as folder:
        states = open_states(replace(spec, state=folder), probe.teachers, probe.own.train.precision, probe.student)
        try:
            shown = {}
            for number in (number for number in wanted if found[number]):
                if control.stop_requested():
                    raise Stopped
                shown[number] = probe.show(found[number])
            for number in shown:
                if control.stop_requested():
                    raise Stopped
                yield probe.read(states, number, shown)
        finally:
            states.close()


class _Probe:
    def __init__(self, spec: StageSpec, settings: GateSettings) -> None:
        self.spec, self.settings = spec, settings
        self.own = OpdSettings.model_validate(spec.config)
        self.teachers = role(spec, "teachers")
        [self.given] = role(spec, "student")
        self.student, self.tokenizer = _frozen(spec, self.given, self.own.train.precision)
        self.tasks = open_tasks(spec)
        size = min(self.own.rollout.group_size, _TREE)
        self.rollout = self.own.rollout.model_copy(
            update={
                "group_size": size,
                "prompts": math.ceil(settings.rollouts / size),
                "max_completion_tokens": min(self.own.rollout.max_completion_tokens, settings.max_completion_tokens),
                "partial": None,
                "journal": None,
            }
        )
        self.seed = stream_seed(spec.seed, "gate-sample")
        self.budget = int(spec.resources["micro_batch_tokens"])
        self.renderer = Renderer(self.tokenizer, self.student.eos_ids)

    def rows(self, numbers: Items[int]) -> Mapping[int, list[Row]]:
        """Prompts of each teacher, evenly from the cells (task x effort) that it serves."""
        router = Router(self.teachers, self.own.route_by, self.own.default_teacher)
        mixer = Mixer(self.tasks, self.own.data, "train", stream_seed(self.spec.seed, "gate"))
        wanted = self.rollout.prompts
        dealt: dict[int, dict[int, list[Row]]] = defaultdict(lambda: defaultdict(list))
        for block in range(PATIENCE):
            for cell in range(len(mixer.cells)):
                for row in mixer.cell_rows(cell, block * wanted, wanted):
                    dealt[router.teacher(row.prompt.columns)][cell].append(row)
            if all(sum(map(len, dealt[number].values())) >= wanted for number in numbers):
                break
        return {number: _evenly(list(dealt[number].values()), wanted) for number in numbers}

    def show(self, rows: list[Row]) -> _Shown:
        """What the student writes to the rows, and their reference answers."""
        prompts, rollouts, score = self.answer(self.student, self.renderer, rows)
        answers = reference_answers(self.tasks, rows, self.renderer, self.rollout.max_completion_tokens)
        size = self.rollout.group_size
        written = [
            part.sequence(i, own[i // size], 1 + first + i // size)
            for first, own, part in zip(_firsts(prompts), prompts, rollouts, strict=True)
            for i in range(len(part.completions))
        ]
        return _Shown(rows, [ids for own in prompts for ids in own], written, answers, score)

    def answer(
        self, policy: Policy, renderer: Renderer, rows: list[Row]
    ) -> tuple[list[list[list[int]]], list[Rollout], Score]:
        """(prompts, completions) in as many calls as memory asks for, and how right they are."""
        size = self.rollout.group_size
        at_once = max(1, completions_per_call(self.spec, self.rollout) // size)
        prompts: list[list[list[int]]] = []
        rollouts: list[Rollout] = []
        right = cut = 0
        for start in range(0, len(rows), at_once):
            part = rows[start : start + at_once]
            ids, drawn = roll(partial(sample, policy), renderer, part, self.rollout, seed=self.seed, group_size=size)
            verdicts = judge(self.tasks, part, renderer.texts(drawn.completions), size, drawn.episodes)
            right += sum(v.correct and ended for v, ended in zip(verdicts, drawn.finished, strict=True))
            cut += drawn.finished.count(False)
            prompts.append(ids)
            rollouts.append(drawn)
        return prompts, rollouts, Score(len(rows) * size, right, cut)

    @torch.no_grad()
    def read(self, states: States, number: int, everywhere: Mapping[int, _Shown]) -> Reading:
        teacher, shown = self.teachers[number], everywhere[number]
        sequences = shown.sequences
        logprobs_N = self._logprobs(states, number, sequences)
        again_N = self._logprobs(states, number, sequences)
        health = self._health(states, number, shown.rollouts)  # the first of the sequences
        model = states.policy(number)
        alone = _alone(model, sequences[:ALONE])
        together_N = logprobs_N[: len(alone)]
        _, _, score = self.answer(model, Renderer(self.tokenizer, model.eos_ids), list(shown.rows))
        means = {name: float(values_N.double().mean()) for name, values_N in health.items()}
        targets_N, before_N = _tokens(sequences)
        return Reading(
            number,
            teacher,
            self.given.label,
            len(shown.rollouts),
            len(health["reverse_kl"]),
            self.student.vocab_size,
            means["reverse_kl"],
            float(health["reverse_kl"].double().std(correction=0)) / math.sqrt(len(health["reverse_kl"])),
            means["student_entropy"],
            means["teacher_entropy"],
            means["overlap"],
            min(TOP_K, self.student.vocab_size),
            logprobs_N,
            self._student_logprobs(sequences),
            targets_N == before_N,
            _apart(logprobs_N, again_N).max().item(),
            _apart(alone, together_N).mean().item(),
            shown.score,
            score,
            self._moved(states, number, everywhere) if len(everywhere) > 1 else {},
        )

    def _moved(self, states: States, number: int, everywhere: Mapping[int, _Shown]) -> dict[int, float]:
        """How far the teacher is from the student on the prompts of each teacher."""
        found = {}
        for other, shown in everywhere.items():
            few = shown.rollouts[:FEW]
            states.begin(few, {number: range(len(few))})
            found[other] = float(self._health(states, number, few)["reverse_kl"].double().mean())
        return found

    def _logprobs(self, states: States, number: int, sequences: list[Sequence]) -> Tensor:
        """Of all tokens, as the stage would read the teacher."""
        states.begin(sequences, {number: range(len(sequences))})
        found = []
        for part in micro_batches(sequences, self.budget):
            hidden_NE, head_VE = states.get(number, part)
            targets_N = torch.tensor([token for i in part for token in sequences[i].targets], device=hidden_NE.device)
            found.append(token_logprobs(hidden_NE, head_VE, targets_N)[0].float().cpu())
        return torch.cat(found)

    def _student_logprobs(self, sequences: list[Sequence]) -> Tensor:
        found = []
        for part in micro_batches(sequences, self.budget):
            batch = self.student.batch([sequences[i] for i in part])
            found.append(token_logprobs(self.student.hidden(batch), self.student.head(), batch.targets_N)[0])
        return torch.cat(found).float().cpu()

    def _health(self, states: States, number: int, sequences: list[Sequence]) -> dict[str, Tensor]:
        """Per-token values of `distill_health` on sequences that `states` has begun with."""
        parts = []
        for part in micro_batches(sequences, self.budget):
            batch = self.student.batch([sequences[i] for i in part])
            own = self.student.hidden(batch), self.student.head()
            parts.append(distill_health(*own, *states.get(number, part), k=TOP_K))
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def reference_answers(tasks: Mapping[str, Task], rows: Items[Row], renderer: Renderer, limit: int) -> list[Sequence]:
    """The rows' own answers after their prompts, where a task knows them and the model can write them within `limit`
    tokens; of tasks in turns none."""
    found = []
    for row in rows:
        text = None if row.environment is not None else tasks[row.task].reference(row.prompt)
        if text is None:
            continue
        try:
            [prompt], [answer] = renderer.prompts([row.prompt], 1 << 62), renderer.completions([text])
        except OpdctlError:  # words that the model does not have: the check of graders says so
            continue
        if len(answer) <= limit:
            found.append(Sequence(tuple(prompt), tuple(answer)))
    return found


def _frozen(spec: StageSpec, given: InputSpec, precision: str) -> tuple[Policy, Tokenizer]:
    policy, tokenizer = open_policy(spec, given, precision)
    return policy.requires_grad_(False).eval(), tokenizer


def _firsts(prompts: Items[Items[object]]) -> list[int]:
    """Number of the first prompt of each call."""
    firsts = [0]
    for own in prompts[:-1]:
        firsts.append(firsts[-1] + len(own))
    return firsts


def _evenly(cells: Items[list[Row]], wanted: int) -> list[Row]:
    """In turn one row of each cell, until there are as many as wanted; ordered by cell."""
    taken: list[tuple[int, Row]] = []
    for at in range(max(map(len, cells), default=0)):
        taken += [(number, rows[at]) for number, rows in enumerate(cells) if at < len(rows)]
    return [row for _, row in sorted(taken[:wanted], key=lambda pair: pair[0])]


def _tokens(sequences: Items[Sequence]) -> tuple[Tensor, Tensor]:
    """(target_N, the token before it) in the order of an N axis."""
    targets, before = [], []
    for own in sequences:
        ids, learned = (*own.prompt[-1:], *own.completion), own.learned or (True,) * len(own.completion)
        for at, counts in enumerate(learned):
            if counts:
                targets.append(ids[at + 1])
                before.append(ids[at])
    return torch.tensor(targets), torch.tensor(before)


def _alone(model: Policy, sequences: Items[Sequence]) -> Tensor:
    """Log-probabilities of the tokens, every sequence in a forward pass of its own."""
    found = []
    for sequence in sequences:
        batch = collate([sequence], share_prefixes=False, pad_id=model.pad_id, device=model.device)
        logits_NV = (model.hidden(batch) @ model.head().T).float()
        found.append(logits_NV.log_softmax(-1).gather(-1, batch.targets_N[:, None])[:, 0].cpu())
    return torch.cat(found)


def _apart(a_N: Tensor, b_N: Tensor) -> Tensor:
    """|a - b| in nats; infinite where one of both is no number."""
    return (a_N.double() - b_N.double()).abs().nan_to_num(nan=math.inf)
