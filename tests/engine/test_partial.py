"""Partial rollouts: what waits goes on under later weights, in whole groups, and nothing is lost or drawn twice."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine.stages import Recorder, opd, rlvr, run, train

from opdctl.backends.contract import InputSpec, Stopped
from opdctl.engine.batch import Sequence
from opdctl.engine.journal import sampler
from opdctl.engine.loop import Trainer, open_policy, open_tasks, role
from opdctl.engine.partial import PartialRollouts
from opdctl.engine.policy import completion_logprobs
from opdctl.engine.rows import Mixer, Renderer, roll
from opdctl.settings import RlvrSettings

TIS = {"rule": "tis", "cap": 5.0}
PARTIAL = {"done_fraction": 0.6, "max_staleness": 2}
# a model at random writes an end with 1 / vocabulary at each token: lengths vary widely
LONG = {"prompts": 4, "group_size": 2, "max_prompt_tokens": 10, "max_completion_tokens": 100, "partial": PARTIAL}


NEW = InputSpec("init", "model:", "")


def stage(folder, **rollout):
    config = {"rollout": LONG | rollout, "mismatch": TIS, "train": train(8, 8, optimizer={"lr": 1e-2})}
    return replace(rlvr(folder, Path(), **config), inputs=[NEW])


class Steps:
    """The rollouts of a stage without its learning: `step` after `step`, with the weights that the test makes."""

    def __init__(self, folder: Path, **rollout) -> None:
        self.spec = stage(folder, **rollout)
        self.settings = RlvrSettings.model_validate(self.spec.config)
        policy, tokenizer = open_policy(self.spec, role(self.spec, "init")[0])
        self.trainer = Trainer(self.spec, Recorder(), self.settings.train, policy, tokenizer)
        self.mixer = Mixer(open_tasks(self.spec), self.settings.data, "train", 0)
        self.renderer = Renderer(tokenizer, policy.eos_ids)
        self.rollouts = PartialRollouts(self.settings, self.trainer, self.mixer, self.renderer, seed=3)

    def collect(self):
        found = self.rollouts.collect()
        self.trainer.step += self.settings.updates
        return found

    def move(self):
        """Other weights."""
        generator = torch.Generator().manual_seed(self.trainer.step)
        with torch.no_grad():
            for weight in self.trainer.policy.parameters():
                weight += 0.05 * torch.randn(weight.shape, generator=generator)


def test_under_unchanged_weights_every_group_is_written_as_in_plain_rollouts(tmp_path):
    steps = Steps(tmp_path)
    written = {}
    for _ in range(6):
        batch = steps.collect()
        assert len(batch.rows) == 4
        pairs = zip(batch.rollout.completions[::2], batch.rollout.completions[1::2], strict=True)
        written |= dict(zip(batch.numbers, pairs, strict=True))
    waiting = [group.number for group in steps.rollouts.waiting]
    assert sorted([*written, *waiting]) == list(range(steps.trainer.position["rows"]))
    assert len(written) == 24
    assert waiting
    rows = steps.mixer.rows(0, len(written) + len(waiting))
    _, plain = roll(
        sampler(steps.trainer.policy, None, ""), steps.renderer, rows, steps.settings.rollout, seed=3, group_size=2
    )
    for number, pair in written.items():
        assert list(pair) == plain.completions[2 * number : 2 * number + 2]


def test_a_token_keeps_the_version_and_the_probability_of_the_weights_that_drew_it(tmp_path):
    steps = Steps(tmp_path)
    weights, batches = {}, []
    for _ in range(6):
        weights[steps.trainer.step] = {k: v.clone() for k, v in steps.trainer.policy.state_dict().items()}
        batches.append(steps.collect())
        steps.move()
    mixed = 0
    for batch in batches:
        rollout = batch.rollout
        sequences = [Sequence(tuple(batch.prompts[i // 2]), tuple(ids)) for i, ids in enumerate(rollout.completions)]
        for version, state in weights.items():
            steps.trainer.policy.load_state_dict(state)
            logprobs_N = torch.cat(completion_logprobs(steps.trainer.policy, sequences, micro_batch_tokens=4096))
            own_N = batch.versions_N == version
            torch.testing.assert_close(rollout.sampling_logprobs_N[own_N], logprobs_N[own_N], atol=2e-5, rtol=1e-4)
        own = batch.versions_N.split(rollout.counted)
        mixed += sum(len(set(versions.tolist())) > 1 for versions in own)
    assert mixed > 3


def test_nothing_waits_longer_than_the_cap(tmp_path):
    def oldest(cap):
        partial = {"done_fraction": 0.25, "max_staleness": cap}
        steps = Steps(tmp_path / str(cap), partial=partial, prompts=8, group_size=1)
        return max(steps.collect().metrics["staleness_max"] for _ in range(12))

    assert oldest(9) > 2
    assert oldest(1) == 1
    assert oldest(2) == 2


def test_what_waits_comes_first_and_counts(tmp_path):
    steps = Steps(tmp_path)
    first = steps.collect()
    waiting = [group.number for group in steps.rollouts.waiting]
    assert first.metrics["paused"] > 0
    assert first.metrics["staleness_max"] == 0
    second = steps.collect()
    assert second.metrics["resumed"] == first.metrics["paused"]
    assert second.metrics["staleness_max"] == 1
    assert min(second.numbers) == min(waiting)
    assert second.numbers == sorted(second.numbers)


def test_where_all_end_at_once_it_is_a_plain_rollout_to_the_bit(tmp_path):
    undisturbed, waiting = Recorder(), Recorder()
    plain = stage(tmp_path / "plain", partial=None, max_completion_tokens=1)
    same = stage(tmp_path / "partial", max_completion_tokens=1)
    run(plain, undisturbed)
    run(same, waiting)
    assert weights_of(same) == weights_of(plain)
    own = dict.fromkeys(("paused", "resumed", "staleness", "staleness_max"), 0.0)
    assert waiting.events == [(step, found | own) for step, found in undisturbed.events]


def weights_of(spec) -> bytes:
    return Path(spec.output, "model.safetensors").read_bytes()


def distil(folder, start):
    teachers = {(domain, effort): start for domain in ("math", "code") for effort in ("low", "max")}
    rollout = LONG | {"prompts": 8, "group_size": 1}
    spec = opd(folder, Path(), teachers, {"form": "full_vocab"}, rollout=rollout, train=train(6, 8))
    return replace(spec, inputs=[replace(NEW, role="student"), *spec.inputs[1:]])


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> Path:
    spec = stage(tmp_path_factory.mktemp("teacher"), partial=None, max_completion_tokens=1)
    run(spec)
    return Path(spec.output)


@pytest.mark.parametrize("kind", ["rlvr", "rlvr with a journal", "opd"])
def test_a_stopped_stage_ends_as_an_undisturbed_one_with_what_waits(tmp_path, teacher, kind):
    def build(folder):
        journal = {"journal": {"every_tokens": 8}} if "journal" in kind else {}
        return distil(folder, teacher) if kind == "opd" else stage(folder, **journal)

    whole, cut = build(tmp_path / "whole"), build(tmp_path / "cut")
    undisturbed, first, second = Recorder(), Recorder(3), Recorder()
    run(whole, undisturbed)
    with pytest.raises(Stopped):
        run(cut, first)
    run(cut, second)
    assert weights_of(cut) == weights_of(whole)
    assert first.events + second.events == undisturbed.events
    assert max(found["paused"] for _, found in undisturbed.events) > 0
    assert max(found["staleness"] for _, found in undisturbed.events) > 0
