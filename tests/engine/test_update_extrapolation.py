"""Extrapolated updates: which candidates are tried and kept, from where; a killed stage finds its base again."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine.models import tiny_policy
from engine.stages import ROLLOUT, Recorder, opd, run, sft, train
from torch import nn

from opdctl.backends.contract import InputSpec
from opdctl.engine.batch import Sequence, collate
from opdctl.engine.loop import Trainer, open_policy
from opdctl.engine.update_extrapolation import Extrapolation, held_out_accuracy
from opdctl.engine.vocab import token_logprobs
from opdctl.errors import StageRefused
from opdctl.settings import Mixture, OpdSettings, Train, UpdateExtrapolation

torch.set_num_threads(1)


def settings(steps=(1,), scales=(2.0, 4.0, 8.0)):
    return UpdateExtrapolation(steps=list(steps), scales=list(scales), prompts=5)


def trainer_of(folder, precision="float32", max_steps=4, control=None):
    policy, tokenizer = tiny_policy()
    options = Train.model_validate(train(max_steps, 1, save_every=2, precision=precision))
    policy.to(torch.bfloat16 if precision == "bfloat16" else torch.float32)
    return Trainer(sft(folder), control or Recorder(), options, policy, tokenizer)


def losses(trainer):
    """A step that depends on the weights and on the step's number."""
    batch = collate([Sequence((3, 4), (5 + trainer.step % 3, 2))], share_prefixes=True, pad_id=0)
    logprobs_N, _ = token_logprobs(trainer.policy.hidden(batch), trainer.policy.head(), batch.targets_N)
    yield -logprobs_N.sum(), batch


def copied(trainer):
    return {name: weight.clone() for name, weight in trainer.optimizer.weights().items()}


def scores(*given):
    """A score that is told beforehand, and the list of what is left."""
    left = list(given)
    return (lambda: left.pop(0)), left


def close(found, wanted):
    return all(torch.allclose(found[name], wanted[name], atol=1e-6) for name in wanted)


@pytest.mark.parametrize(
    ("given", "kept", "left"),
    [
        ((0.5, 0.6, 0.6, 0.7), 8.0, 0),  # as good counts as not worse
        ((0.5, 0.6, 0.5, 0.9), 2.0, 1),  # the first that is worse ends it
        ((0.5, 0.4, 0.9, 0.9), 1.0, 2),
    ],
)
def test_the_last_scale_that_is_not_worse_is_kept(tmp_path, given, kept, left):
    trainer = trainer_of(tmp_path / "sft")
    base = copied(trainer)
    score, remaining = scores(*given)
    extrapolation = Extrapolation(settings(), trainer, score)
    trainer.update(losses(trainer))
    own = copied(trainer)
    metrics = extrapolation.after_update()
    assert metrics == {
        "extrapolation_scale": kept,
        "extrapolation_before": 0.5,
        "extrapolation_after": max(given[: 4 - left][:-1] if left else given),
        "extrapolation_prompts": 5.0 * (4 - left),
    }
    assert len(remaining) == left
    assert close(copied(trainer), {name: base[name] + kept * (own[name] - base[name]) for name in base})


def test_rejected_candidates_leave_no_trace(tmp_path):
    trainer = trainer_of(tmp_path / "sft")
    extrapolation = Extrapolation(settings(), trainer, scores(0.5, 0.4)[0])
    trainer.update(losses(trainer))
    before, moments = copied(trainer), {k: v.clone() for k, v in trainer.optimizer.state_tensors().items()}
    extrapolation.after_update()
    after = copied(trainer)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert all(torch.equal(value, moments[name]) for name, value in trainer.optimizer.state_tensors().items())


def test_the_optimizer_is_untouched_by_an_accepted_candidate(tmp_path):
    trainer = trainer_of(tmp_path / "sft")
    extrapolation = Extrapolation(settings(), trainer, scores(0, 1, 2, 3)[0])
    trainer.update(losses(trainer))
    moments = {k: v.clone() for k, v in trainer.optimizer.state_tensors().items()}
    extrapolation.after_update()
    assert all(torch.equal(value, moments[name]) for name, value in trainer.optimizer.state_tensors().items())


def test_the_next_base_is_what_was_kept(tmp_path):
    trainer = trainer_of(tmp_path / "sft")
    extrapolation = Extrapolation(settings(steps=(1, 3), scales=(2.0,)), trainer, scores(0, 1, 0, 1)[0])
    trainer.update(losses(trainer))
    extrapolation.after_update()
    base = copied(trainer)
    for _ in range(2):
        trainer.update(losses(trainer))
        own = copied(trainer)
        metrics = extrapolation.after_update()
    assert metrics["extrapolation_scale"] == 2.0
    assert close(copied(trainer), {name: base[name] + 2.0 * (own[name] - base[name]) for name in base})


def test_other_steps_are_left_alone(tmp_path):
    trainer = trainer_of(tmp_path / "sft")
    extrapolation = Extrapolation(settings(steps=(2,)), trainer, scores()[0])
    trainer.update(losses(trainer))
    assert extrapolation.after_update() == {}


def test_masters_of_low_precision_weights_are_stretched(tmp_path):
    """The weights alone would be forgotten at the next step."""
    trainer = trainer_of(tmp_path / "sft", precision="bfloat16")
    base = copied(trainer)
    extrapolation = Extrapolation(settings(scales=(4.0,)), trainer, scores(0, 1)[0])
    trainer.update(losses(trainer))
    own = copied(trainer)
    extrapolation.after_update()
    masters = copied(trainer)
    assert close(masters, {name: base[name] + 4.0 * (own[name] - base[name]) for name in base})
    assert all(
        torch.equal(weight, masters[name].to(torch.bfloat16)) for name, weight in trainer.policy.named_parameters()
    )


@pytest.mark.parametrize("killed_at", [1, 2, 3])
def test_a_killed_stage_finds_its_base_to_the_bit(tmp_path, killed_at):
    """Killed before and after the saves; the score depends on the weights, as a real one does."""

    class Killed(BaseException):
        pass

    def trained(folder, die_at=None):
        trainer = trainer_of(folder)

        def score():
            (loss, _) = next(losses(trainer))
            return -float(loss.detach())

        extrapolation = Extrapolation(settings(steps=(1, 2, 4), scales=(1.5, 2.0)), trainer, score)

        def iteration(step):
            if step == die_at:
                raise Killed
            learning = trainer.update(losses(trainer))
            more = extrapolation.after_update()
            stretched.append(more.get("extrapolation_scale", 1.0) > 1)
            return {**learning, **more}

        stretched = []
        trainer.fit(iteration)
        assert any(stretched)
        return (folder / "out" / "model.safetensors").read_bytes()

    whole = trained(tmp_path / "whole")
    with pytest.raises(Killed):
        trained(tmp_path / "cut", die_at=killed_at)
    assert trained(tmp_path / "cut") == whole


@pytest.fixture
def distilled(tmp_path):
    """The trainer of an untrained student that is asked held-out prompts, and the settings of its stage."""
    loss = {"form": "full_vocab"}
    spec = opd(tmp_path / "opd", Path(), {}, loss, rollout=ROLLOUT | {"temperature": 0.5})
    config = OpdSettings.model_validate(spec.config)
    policy, tokenizer = open_policy(spec, InputSpec("student", "model:", ""))
    return Trainer(spec, Recorder(), config.train, policy, tokenizer), config


def test_held_out_scores_are_paired_and_cost_what_they_sample(distilled):
    trainer, config = distilled
    accuracy = held_out_accuracy(config, trainer, 40)
    first, tokens = accuracy(), trainer.position["tokens"]
    assert accuracy() == first
    assert trainer.position == {"tokens": 2 * tokens, "held_out": 80}
    assert 40 <= tokens <= 40 * ROLLOUT["max_completion_tokens"]


def test_held_out_scores_do_not_depend_on_how_many_are_drawn_at_once(distilled):
    trainer, config = distilled
    whole = held_out_accuracy(config, trainer, 12)()
    trainer.spec.resources["micro_batch_tokens"] = 40
    assert held_out_accuracy(config, trainer, 12)() == whole


def test_a_better_model_scores_higher(distilled, tmp_path):
    trainer, config = distilled
    taught = sft(tmp_path / "sft", steps=80, train={"optimizer": {"lr": 1e-2}})
    run(taught)
    before = held_out_accuracy(config, trainer, 40)()
    policy, _ = open_policy(taught, InputSpec("student", "sft", taught.output))
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(policy.parameters()), trainer.policy.parameters())
    assert held_out_accuracy(config, trainer, 40)() > before


def test_too_few_held_out_rows_for_a_tasks_share_are_refused(distilled):
    trainer, config = distilled
    trainer.spec = replace(trainer.spec, tasks=trainer.spec.tasks | {"facts": {"task": "facts", "facts": 10}})
    mixture = Mixture(tasks=["math", "facts"], ratios={"facts": 3})
    told = r"facts has 10 held-out rows and config.extrapolation.prompts asks for 12"
    with pytest.raises(StageRefused, match=told):
        held_out_accuracy(config.model_copy(update={"data": mixture}), trainer, 16)
    held_out_accuracy(config.model_copy(update={"data": mixture}), trainer, 13)
