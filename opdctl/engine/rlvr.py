"""RL with verifiable rewards: the GRPO family.

One obvious place for each part: what a completion earns is `_Sampler._rewards`, what that makes of a token
is `advantages.group_advantages`, what the policy follows is `losses.policy_loss`.
"""

import math
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from opdctl.backends.contract import Control, StageResult, StageSpec
from opdctl.engine.advantages import annealed_tau, group_advantages, over_budget, soft_overlong_penalty, tied_groups
from opdctl.engine.batch import Sequence, TokenBatch, micro_batches
from opdctl.engine.effort import BudgetEstimator
from opdctl.engine.episodes import episode_metrics
from opdctl.engine.grader import GenerativeReward, open_grader
from opdctl.engine.journal import sampler
from opdctl.engine.loop import Metrics, Trainer, completions_per_call, mean, open_frozen, open_policy, open_tasks, role
from opdctl.engine.losses import aggregate, kl_penalty, policy_loss
from opdctl.engine.partial import PartialRollouts
from opdctl.engine.policy import Policy, completion_logprobs
from opdctl.engine.rows import Mixer, Renderer, Row, judge, roll, stream_seed
from opdctl.engine.sampling import Rollout
from opdctl.engine.teachers import accepted, check_vocabularies
from opdctl.engine.vocab import token_logprobs
from opdctl.settings import LogRatioClip, RlvrSettings


def run(spec: StageSpec, control: Control) -> StageResult:
    """Train `init` with the settings' advantage, surrogate, mismatch rule, aggregation, KL, and effort budget."""
    settings = RlvrSettings.model_validate(spec.config)
    policy, tokenizer = open_policy(spec, role(spec, "init")[0], settings.train.precision)
    others = [*role(spec, "reference"), *role(spec, "budget")]
    check_vocabularies(tokenizer, policy.vocab_size, others, accepted=accepted(spec))
    trainer = Trainer(spec, control, settings.train, policy, tokenizer)
    sampler = _Sampler(spec, settings, trainer)
    updates = settings.updates

    def iteration(step: int) -> Metrics:
        experience, metrics = sampler.collect(step)
        parts = [trainer.update(_losses(experience, part, sampler)) for part in experience.split(updates, spec, step)]
        learning = {name: mean(part[name] for part in parts) for name in parts[0]}
        return {**metrics, **learning, **sampler.statistics()}

    return trainer.fit(iteration, updates=updates)


@dataclass(frozen=True)
class Experience:
    """A rollout batch ready to learn from; sequences are prompt-major, `group_size` a prompt."""

    sequences: list[Sequence]
    advantages: list[float]  # one a sequence, the same for all of its tokens
    old_logprobs: list[Tensor]  # per sequence, the trainer's
    infer_logprobs: list[Tensor]  # per sequence, the sampler's
    in_loss: list[bool]  # masked sequences (overlong) count nowhere
    group_size: int

    def split(self, updates: int, spec: StageSpec, step: int) -> list[list[int]]:
        """Sequence numbers of each optimizer step: whole groups, shuffled by (seed, step)."""
        generator = torch.Generator().manual_seed(stream_seed(spec.seed, "rlvr-split", step))
        groups = len(self.sequences) // self.group_size
        order = torch.randperm(groups, generator=generator).tolist()
        numbers = [group * self.group_size + i for group in order for i in range(self.group_size)]
        size = len(numbers) // updates
        return [numbers[at * size : (at + 1) * size] for at in range(updates)]


class _Sampler:
    """Rollouts, their rewards and their advantages."""

    def __init__(self, spec: StageSpec, settings: RlvrSettings, trainer: Trainer) -> None:
        self.spec, self.settings, self.trainer = spec, settings, trainer
        self.policy: Policy = trainer.policy
        self.generate = sampler(self.policy, trainer.journal, "policy")
        self.tasks = open_tasks(spec)
        self.mixer = Mixer(self.tasks, settings.data, "train", stream_seed(spec.seed, "rlvr"))
        self.renderer = Renderer(trainer.tokenizer, self.policy.eos_ids)
        self.seed = stream_seed(spec.seed, "rlvr-sample")
        self.partial: PartialRollouts | None = None
        if settings.rollout.partial is not None:
            self.partial = PartialRollouts(settings, trainer, self.mixer, self.renderer, self.seed)
        self.micro_batch_tokens = int(spec.resources["micro_batch_tokens"])
        self.logprobs = partial(
            completion_logprobs,
            micro_batch_tokens=self.micro_batch_tokens,
            temperature=settings.rollout.temperature,  # as tokens are drawn
        )
        self.reference = open_frozen(spec, role(spec, "reference")[0]) if settings.kl.estimator != "none" else None
        self.budgets: BudgetEstimator | None = None
        if settings.effort is not None:
            cold_start = open_frozen(spec, role(spec, "budget")[0])
            self.budgets = BudgetEstimator(
                sampler(cold_start, trainer.journal, "budget"),
                self.mixer,
                self.renderer,
                settings.effort.budget,
                settings.rollout,
            )
        self.grader: GenerativeReward | None = None
        if settings.grader is not None:
            self.grader = open_grader(spec, settings.grader, self.tasks, self.generate, self.renderer)
        self.noted: list[dict[str, Tensor]] = []

    def statistics(self) -> Metrics:
        """Means of `policy_loss`'s statistics over the tokens since last asked."""
        noted, self.noted = self.noted, []
        names = noted[0] if noted else {}
        means = {name: float(torch.cat([part[name] for part in noted]).float().mean()) for name in names}
        none = {"clip_fraction": 0.0} | ({"mismatch_fraction": 0.0} if self.settings.mismatch else {})
        return {**none, **means}  # without tokens there is no mean of a ratio

    def collect(self, step: int) -> tuple[Experience, Metrics]:
        """One rollout batch; with dynamic sampling, groups with equal rewards are replaced by further prompts."""
        wanted, rounds = self.settings.rollout.prompts, 0
        limit = self.settings.dynamic_sampling.max_rounds if self.settings.dynamic_sampling else 1
        kept: list[_Group] = []
        tied: list[_Group] = []
        seen: list[Metrics] = []
        while len(kept) < wanted and rounds < limit:
            groups, metrics = self._round(step)
            seen.append(metrics)
            rounds += 1
            for group in groups:
                (tied if self.settings.dynamic_sampling and group.tied else kept).append(group)
        # a batch keeps its size: if too few groups disagree, tied ones (advantage 0) fill it
        chosen = (kept + tied)[:wanted]
        # a round may have no episode, and nothing to say of them
        metrics = {name: mean(part[name] for part in seen if name in part) for name in seen[0]}
        metrics["tokens"] = sum(part["tokens"] for part in seen)
        if self.settings.dynamic_sampling:
            metrics["sampling_rounds"] = float(rounds)
        return self._experience(chosen), metrics

    def _round(self, step: int) -> tuple[list["_Group"], Metrics]:
        options = self.settings.rollout
        rows, numbers, prompts, rollout, waited = self._draw()
        rewards_PG, metrics = self._rewards(rows, prompts, rollout, step)
        bound = self.settings.max_advantage or math.inf
        advantages = group_advantages(rewards_PG, self.settings.advantage).clamp(-bound, bound).flatten().tolist()
        equal = tied_groups(rewards_PG).tolist()
        sampled = list(rollout.sampling_logprobs_N.split(rollout.counted))
        size = options.group_size
        groups = [
            _Group(
                [rollout.sequence(i, prompts[p], 1 + numbers[p]) for i in members],
                [advantages[i] for i in members],
                [sampled[i] for i in members],
                [rollout.finished[i] for i in members],
                bool(equal[p]),
            )
            for p in range(len(rows))
            for members in [range(p * size, (p + 1) * size)]
        ]
        metrics["tied_groups"] = mean(float(group.tied) for group in groups)
        return groups, metrics | waited

    def _draw(self) -> tuple[list[Row], SequenceOf[int], list[list[int]], Rollout, Metrics]:
        """Prompts, their numbers and ids, what was written to them, and how long it waited."""
        options = self.settings.rollout
        if self.partial is not None:
            whole = self.partial.collect()
            return whole.rows, whole.numbers, whole.prompts, whole.rollout, whole.metrics
        start = self.trainer.position.get("rows", 0)
        self.trainer.position["rows"] = start + options.prompts
        rows, size = self.mixer.rows(start, options.prompts), options.group_size
        prompts, rollout = roll(self.generate, self.renderer, rows, options, seed=self.seed, group_size=size)
        return rows, range(start, start + len(rows)), prompts, rollout, {}

    def _rewards(
        self, rows: list[Row], prompts: list[list[int]], rollout: Rollout, step: int
    ) -> tuple[Tensor, Metrics]:
        """What each completion earns, shape [P, G], and how the batch did."""
        settings, size = self.settings, self.settings.rollout.group_size
        texts = self.renderer.texts(rollout.completions)
        verdicts = judge(self.tasks, rows, texts, size, rollout.episodes)
        finished = torch.tensor(rollout.finished)
        lengths = torch.tensor(rollout.counted)
        correct = torch.tensor([verdict.correct for verdict in verdicts]) & finished
        earned = [verdict.reward for verdict in verdicts]
        metrics: Metrics = {}
        if self.grader is not None:
            graded = self.grader.grade(rows, texts, size)
            earned = [graded.rewards.get(i, reward) for i, reward in enumerate(earned)]
            metrics |= graded.metrics(correct.tolist())
        rewards = torch.tensor(earned, dtype=torch.float64)
        rewards = rewards.where(finished, settings.unfinished_reward)
        if settings.overlong.handling == "soft_penalty":
            limit, buffer = settings.rollout.max_completion_tokens, settings.overlong.buffer_tokens
            taken = map(len, rollout.completions)  # an episode's observations use up its limit too
            rewards = rewards + torch.tensor([soft_overlong_penalty(n, limit, buffer) for n in taken])
        if settings.kl.placement == "reward" and self.reference is not None:
            penalties = self._reward_kl(prompts, rollout)
            rewards = rewards - settings.kl.coef * penalties
            metrics["reference_kl"] = float(penalties.sum() / lengths.sum())
        if settings.effort is not None and self.budgets is not None:
            tau = annealed_tau(settings.effort, step, settings.train.max_steps)
            b0 = self.budgets.budgets(rows, batch=completions_per_call(self.spec, settings.rollout))
            over = torch.tensor([over_budget(n, tau, b0[i // size]) for i, n in enumerate(lengths.tolist())])
            rewards = rewards.masked_fill(over, -1.0)  # the budget overrides correctness (Kimi K3)
            metrics |= {"tau": tau, "budget": mean(b0), "over_budget": float(over.float().mean())}
        metrics |= {
            "reward": float(rewards.mean()),
            "accuracy": float(correct.float().mean()),
            "length": float(lengths.float().mean()),
            "truncated": 1.0 - float(finished.float().mean()),
            "entropy": float(rollout.entropy_N.mean()),
            "tokens": float(lengths.sum()),
        }
        metrics |= episode_metrics(rollout.episodes)
        return rewards.view(len(rows), size), metrics

    def _reward_kl(self, prompts: list[list[int]], rollout: Rollout) -> Tensor:
        """Sum over each completion's tokens of the KL estimate towards the reference."""
        size = self.settings.rollout.group_size
        sequences = [rollout.sequence(i, prompts[i // size], 1 + i // size) for i in range(len(rollout.completions))]
        assert self.reference is not None
        reference_N = torch.cat(self.logprobs(self.reference, sequences))
        penalty_N = self.kl(rollout.sampling_logprobs_N, reference_N)
        return torch.stack([part.sum() for part in penalty_N.split(rollout.counted)]).double()

    def kl(self, policy_logprobs_N: Tensor, reference_logprobs_N: Tensor) -> Tensor:
        estimator = self.settings.kl.estimator
        assert estimator != "none"
        return kl_penalty(policy_logprobs_N, reference_logprobs_N, estimator)

    def _experience(self, groups: list["_Group"]) -> Experience:
        sequences = [sequence for group in groups for sequence in group.sequences]
        sampled = [logprobs for group in groups for logprobs in group.sampling_logprobs]
        options = self.settings.rollout
        # sampling_logprobs stand for the trainer's where nobody asks how far both are apart; those of a cut
        # distribution never do
        separate = self.settings.mismatch is not None or options.top_p < 1 or options.top_k > 0
        old = self.logprobs(self.policy, sequences) if separate else sampled
        masked = self.settings.overlong.handling == "mask"
        in_loss = [done or not masked for group in groups for done in group.finished]
        advantages = [advantage for group in groups for advantage in group.advantages]
        return Experience(sequences, advantages, old, sampled, in_loss, options.group_size)


@dataclass(frozen=True)
class _Group:
    """One prompt's completions."""

    sequences: list[Sequence]
    advantages: list[float]
    sampling_logprobs: list[Tensor]
    finished: list[bool]
    tied: bool


def _losses(experience: Experience, numbers: list[int], sampler: _Sampler) -> Iterator[tuple[Tensor, TokenBatch]]:
    """Micro-batch losses of one optimizer step over the sequences `numbers`."""
    settings, policy = sampler.settings, sampler.policy
    counted = [i for i in numbers if experience.in_loss[i]]
    total = sum(experience.sequences[i].counted for i in counted)
    kl_in_loss = sampler.reference is not None and settings.kl.placement == "loss"
    # advantage 0 moves nothing: such sequences count in the means and are not computed, unless a penalty needs them
    penalised = kl_in_loss or (isinstance(settings.surrogate, LogRatioClip) and settings.surrogate.square > 0)
    live = [i for i in counted if penalised or experience.advantages[i] != 0.0]
    sequences = [experience.sequences[i] for i in live]
    for part in micro_batches(sequences, sampler.micro_batch_tokens):
        chosen = [live[i] for i in part]
        batch = policy.batch([experience.sequences[i] for i in chosen])
        policy_logprobs_N, _ = token_logprobs(
            policy.hidden(batch), policy.head(), batch.targets_N, temperature=settings.rollout.temperature
        )
        old_N = torch.cat([experience.old_logprobs[i] for i in chosen]).to(policy_logprobs_N)
        infer_N = torch.cat([experience.infer_logprobs[i] for i in chosen]).to(policy_logprobs_N)
        advantages_N = torch.tensor([experience.advantages[i] for i in chosen]).to(old_N)[batch.sequence_N]
        loss_N, noted = policy_loss(
            settings.surrogate, settings.mismatch, policy_logprobs_N, old_N, infer_N, advantages_N, batch.sequence_N
        )
        if kl_in_loss and sampler.reference is not None:
            reference_N = torch.cat(sampler.logprobs(sampler.reference, [experience.sequences[i] for i in chosen]))
            penalty_N = sampler.kl(policy_logprobs_N, reference_N)
            noted["reference_kl"] = penalty_N.detach()
            loss_N = loss_N + settings.kl.coef * penalty_N
        sampler.noted.append(noted)
        yield (
            aggregate(
                loss_N,
                batch.sequence_N,
                how=settings.aggregation,
                total_tokens=total,
                total_sequences=len(counted),
                constant=float(settings.rollout.max_completion_tokens),
            ),
            batch,
        )
