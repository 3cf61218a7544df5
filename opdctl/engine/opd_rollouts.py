"""Rollout batches of on-policy distillation: who samples, which teacher scores a row, what the verifier adds to it."""

import math
from collections import Counter
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from opdctl.backends.contract import StageSpec
from opdctl.engine.advantages import group_advantages
from opdctl.engine.batch import Sequence, micro_batches
from opdctl.engine.canary import Canary
from opdctl.engine.episodes import episode_metrics
from opdctl.engine.journal import sampler
from opdctl.engine.loop import Metrics, Trainer, mean, open_frozen, open_tasks, role
from opdctl.engine.losses import opd_advantage
from opdctl.engine.opd_advantages import balanced, extrapolated_teacher, margin_shifts
from opdctl.engine.partial import PartialRollouts
from opdctl.engine.policy import Policy, completion_logprobs
from opdctl.engine.rows import Mixer, Renderer, Row, judge, roll, stream_seed
from opdctl.engine.sampling import Episode, Rollout
from opdctl.engine.teacher_states import States
from opdctl.engine.teachers import Router
from opdctl.engine.vocab import token_logprobs
from opdctl.settings import OpdSettings, PolicyGradientOpd


@dataclass(frozen=True)
class Drawn:
    """One completion as it was sampled."""

    prompt: int  # its number in the rollout batch
    sequence: Sequence
    teacher: int
    logprobs: Tensor  # under the distribution the tokens were drawn from
    finished: bool
    correct: bool
    reward: float
    episode: Episode | None


@dataclass(frozen=True)
class Scored:
    """One completion as the loss reads it."""

    index: int  # by which its teacher's states are asked for
    sequence: Sequence
    teacher: int
    infer_logprobs: Tensor  # as it was drawn
    old_logprobs: Tensor | None  # of the student before the batch's updates; None: those of the update itself
    reference_logprobs: Tensor | None
    bonus: float  # added to the advantage of each token: the verifier's word


class Sampler:
    """Deals prompts, has them completed, and prepares the completions for the loss."""

    def __init__(self, spec: StageSpec, settings: OpdSettings, trainer: Trainer, states: States) -> None:
        self.spec, self.settings, self.trainer, self.states = spec, settings, trainer, states
        self.student: Policy = trainer.policy
        self.tasks = open_tasks(spec)
        self.mixer = Mixer(self.tasks, settings.data, "train", stream_seed(spec.seed, "opd"))
        self.router = Router(role(spec, "teachers"), settings.route_by, settings.default_teacher)
        self.canary = Canary(trainer, [teacher.label for teacher in role(spec, "teachers")], settings.updates)
        self.seed = stream_seed(spec.seed, "opd-sample")
        self.partial: PartialRollouts | None = None
        if settings.rollout.partial is not None:
            renderer = Renderer(trainer.tokenizer, self.student.eos_ids)
            self.partial = PartialRollouts(settings, trainer, self.mixer, renderer, self.seed)
        self.micro_batch_tokens = int(spec.resources["micro_batch_tokens"])
        self.logprobs = partial(completion_logprobs, micro_batch_tokens=self.micro_batch_tokens)
        self.form = settings.loss if isinstance(settings.loss, PolicyGradientOpd) else None
        scaled = self.form is not None and self.form.teacher_scale != 1.0
        self.reference = open_frozen(spec, role(spec, "reference")[0], settings.train.precision) if scaled else None

    def collect(self, step: int) -> tuple[list[Scored], Metrics]:
        """One rollout batch, prompt-major, without the surplus that `balance` leaves out."""
        drawn, waited = self._draw()
        outcome = self._outcome(drawn)
        kept = list(range(len(drawn)))
        if self.settings.balance:
            kept = balanced([one.correct for one in drawn], stream_seed(self.spec.seed, "opd-balance", step))
        metrics = self._metrics(drawn, kept) | waited
        if self.form is not None and self.form.outcome_weight:
            metrics["outcome_advantage"] = mean(map(abs, outcome))
        drawn, bonuses = [drawn[i] for i in kept], [outcome[i] for i in kept]
        sequences = [one.sequence for one in drawn]
        teachers = [one.teacher for one in drawn]
        rows_of = {n: [i for i, own in enumerate(teachers) if own == n] for n in set(teachers)}
        self.states.begin(sequences, rows_of, self.canary.due(step, sequences, teachers))
        old = self._old(drawn)
        reference = self.logprobs(self.reference, sequences) if self.reference else [None] * len(drawn)
        rows = [
            Scored(i, one.sequence, one.teacher, one.logprobs, old[i], reference[i], bonuses[i])
            for i, one in enumerate(drawn)
        ]
        if self.form is not None and self.form.margin is not None:
            shifts = self._shifts(drawn, rows, self.form, self.form.margin.margin)
            rows = [Scored(**(vars(row) | {"bonus": row.bonus + shifts[row.index]})) for row in rows]
            metrics["margin_shift"] = mean(map(abs, shifts))
        return rows, metrics

    def _draw(self) -> tuple[list[Drawn], Metrics]:
        """Completions of the student, or of each row's teacher, prompt-major, and how long they waited."""
        if self.partial is not None:
            whole = self.partial.collect()
            numbers, renderer = range(len(whole.rows)), self.partial.renderer
            return self._judged(renderer, whole.rows, numbers, whole.prompts, whole.rollout), whole.metrics
        start, count = self.trainer.position.get("rows", 0), self.settings.rollout.prompts
        self.trainer.position["rows"] = start + count
        rows = self.mixer.rows(start, count)
        if self.settings.sampled_by == "student":
            return self._complete(self.student, "policy", rows, range(count)), {}
        teachers = [self.router.teacher(row.prompt.columns) for row in rows]
        drawn: list[Drawn] = []
        for number in sorted(set(teachers)):
            own = [i for i, teacher in enumerate(teachers) if teacher == number]
            drawn += self._complete(self.states.policy(number), f"teacher-{number}", rows, own)
        return sorted(drawn, key=lambda one: one.prompt), {}

    def _complete(self, policy: Policy, name: str, rows: list[Row], numbers: SequenceOf[int]) -> list[Drawn]:
        """What the policy writes to the rows of these numbers."""
        options, size = self.settings.rollout, self.settings.rollout.group_size
        renderer = Renderer(self.trainer.tokenizer, policy.eos_ids)
        asked = [rows[number] for number in numbers]
        generate = sampler(policy, self.trainer.journal, name)
        prompts, rollout = roll(generate, renderer, asked, options, seed=self.seed, group_size=size)
        return self._judged(renderer, asked, numbers, prompts, rollout)

    def _judged(
        self,
        renderer: Renderer,
        asked: list[Row],
        numbers: SequenceOf[int],
        prompts: list[list[int]],
        rollout: Rollout,
    ) -> list[Drawn]:
        """`asked[k]` is row `numbers[k]` of the batch."""
        size = self.settings.rollout.group_size
        teachers = [self.router.teacher(row.prompt.columns) for row in asked]
        verdicts = judge(self.tasks, asked, renderer.texts(rollout.completions), size, rollout.episodes)
        logprobs = rollout.sampling_logprobs_N.split(rollout.counted)
        return [
            Drawn(
                numbers[i // size],
                rollout.sequence(i, prompts[i // size], 1 + numbers[i // size]),
                teachers[i // size],
                logprobs[i],
                rollout.finished[i],
                verdicts[i].correct and rollout.finished[i],
                verdicts[i].reward if rollout.finished[i] else 0.0,
                rollout.episodes[i] if rollout.episodes else None,
            )
            for i in range(len(rollout.completions))
        ]

    def _outcome(self, drawn: list[Drawn]) -> list[float]:
        """alpha times the advantage of the verifier's reward within the group. Source: MiMo-V2-Flash, 2601.02780."""
        if self.form is None or not self.form.outcome_weight:
            return [0.0] * len(drawn)
        rewards = torch.tensor([one.reward for one in drawn], dtype=torch.float64)
        advantages_PG = group_advantages(
            rewards.view(-1, self.settings.rollout.group_size), self.form.outcome_advantage
        )
        return [self.form.outcome_weight * advantage for advantage in advantages_PG.flatten().tolist()]

    def _old(self, drawn: list[Drawn]) -> SequenceOf[Tensor | None]:
        """What the surrogate's ratio compares with: the student as it is now."""
        options, train = self.settings.rollout, self.settings.train
        if self.form is None:
            return [None] * len(drawn)
        own = options.temperature == 1.0 and options.top_p == 1.0 and options.top_k == 0
        if own and self.form.mismatch is None:
            return [one.logprobs for one in drawn]
        if self.form.mismatch is None and options.prompts * options.group_size == train.global_batch_size:
            return [None] * len(drawn)  # the only update starts here: no need to read the batch twice
        return self.logprobs(self.student, [one.sequence for one in drawn])

    def _shifts(self, drawn: list[Drawn], rows: list[Scored], form: PolicyGradientOpd, margin: float) -> list[float]:
        """Margin calibration within each group, on the log-ratios as they are clipped."""
        own = self.logprobs(self.student, [row.sequence for row in rows])
        theirs = self._teachers_logprobs(rows, form)
        scores = [
            float(opd_advantage(a, b, form.max_advantage or math.inf).mean()) for a, b in zip(theirs, own, strict=True)
        ]
        shifts: list[float] = []
        for prompt in dict.fromkeys(one.prompt for one in drawn):
            group = [i for i, one in enumerate(drawn) if one.prompt == prompt]
            shifts += margin_shifts([scores[i] for i in group], [drawn[i].correct for i in group], margin)
        return shifts

    @torch.no_grad()
    def _teachers_logprobs(self, rows: list[Scored], form: PolicyGradientOpd) -> list[Tensor]:
        """Of the tokens, under what stands for each row's teacher."""
        ordered = sorted(rows, key=lambda row: row.teacher)
        parts = micro_batches([row.sequence for row in ordered], self.micro_batch_tokens)
        segments = [segment for part in parts for segment in by_teacher([ordered[i] for i in part])]
        found: dict[int, Tensor] = {}
        for segment, after in zip(segments, [*segments[1:], None], strict=True):
            then = after[0].teacher if after else None
            hidden_NE, head_VE = self.states.get(segment[0].teacher, [row.index for row in segment], then=then)
            targets_N = torch.tensor([token for row in segment for token in row.sequence.targets])
            logprobs_N = target_logprobs(hidden_NE, head_VE, targets_N.to(hidden_NE.device), segment, form)
            parts_N = logprobs_N.split([row.sequence.counted for row in segment])
            found |= {row.index: part_N for row, part_N in zip(segment, parts_N, strict=True)}
        return [found[row.index] for row in rows]

    def _metrics(self, drawn: list[Drawn], kept: list[int]) -> Metrics:
        """Of the whole batch, whatever is left out of the loss."""
        metrics = {
            "accuracy": mean(float(one.correct) for one in drawn),
            "reward": mean(one.reward for one in drawn),
            "length": mean(float(one.sequence.counted) for one in drawn),
            "truncated": 1.0 - mean(float(one.finished) for one in drawn),
            "tokens": float(sum(one.sequence.counted for one in drawn)),
        }
        metrics |= episode_metrics(one.episode for one in drawn)
        if len(role(self.spec, "teachers")) > 1:  # rows of one teacher after another are seen by these
            (most, count), *_ = Counter(one.teacher for one in drawn).most_common(1)
            metrics |= {"teacher_share": count / len(drawn), "teacher_most": float(most)}
        return metrics | ({"left_out": 1.0 - len(kept) / len(drawn)} if self.settings.balance else {})


def by_teacher(rows: SequenceOf[Scored]) -> list[list[Scored]]:
    """Runs of adjacent rows of one teacher."""
    runs: list[list[Scored]] = []
    for row in rows:
        if not runs or runs[-1][0].teacher != row.teacher:
            runs.append([])
        runs[-1].append(row)
    return runs


def target_logprobs(
    hidden_NE: Tensor, head_VE: Tensor, targets_N: Tensor, rows: SequenceOf[Scored], form: PolicyGradientOpd
) -> Tensor:
    """log pi_T of the tokens at temperature 1, whatever the student samples at; beyond it with `teacher_scale`."""
    logprobs_N, _ = token_logprobs(hidden_NE, head_VE, targets_N)
    known = [row.reference_logprobs for row in rows if row.reference_logprobs is not None]
    return extrapolated_teacher(logprobs_N, torch.cat(known), form.teacher_scale) if known else logprobs_N
