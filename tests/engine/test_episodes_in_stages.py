"""Stages on a mixture of tasks in one turn and in several."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from engine.stages import EFFORTS, ROLLOUT, ROOT, TASKS, Recorder, opd, rlvr, run, sft, spec_of
from safetensors.torch import load_file

from opdctl.backends.contract import InputSpec
from opdctl.engine.batch import Sequence
from opdctl.engine.checkpoint import new_policy, save_policy
from opdctl.engine.policy import completion_logprobs
from opdctl.engine.rows import Mixer, Renderer, stream_seed
from opdctl.settings import ChainTask, EffortSettings, LookupTask, Mixture, NewModel
from opdctl.tasks import load_task

MIXED = {"math": TASKS["math"], "code": {"task": "lookup"}}  # by the names that the helpers route
TASKS_OF = {"math": ChainTask.model_validate(MIXED["math"]), "code": LookupTask.model_validate(MIXED["code"])}
MODEL = yaml.safe_load((ROOT / "conf/model/tiny_qwen3_agents.yaml").read_text())
MODEL["shape"] |= {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48}
TURNS = {"max_turns": 5, "max_turn_tokens": 12, "max_observation_tokens": 8}
PLAYED = ROLLOUT | {"max_completion_tokens": 48, "turns": TURNS}
BOTH = {"tasks": ["math", "code"], "efforts": ["low", "max"]}


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A model that has seen a little SFT, and what was noted of it."""
    spec = sft(tmp_path_factory.mktemp("start") / "sft", steps=60, train={"optimizer": {"lr": 1e-2}})
    control = Recorder()
    run(replace(spec, tasks=MIXED, new_model=MODEL), control)
    return Path(spec.output), control.events


def test_sft_learns_what_the_model_writes_alone(start):
    """The loss is the mean over the tokens of the turns, each with all that was read before it."""
    tasks = {name: load_task(name, TASKS_OF[name], EffortSettings.model_validate(EFFORTS)) for name in MIXED}
    policy, tokenizer = new_policy(NewModel.model_validate(MODEL), 0)
    mixer = Mixer(tasks, Mixture.model_validate(BOTH), "train", stream_seed(0, "sft"))
    renderer = Renderer(tokenizer, policy.eos_ids)
    losses = []
    for _, shown in mixer.demonstrations(0, 24):
        [prompt] = renderer.prompts([shown.prompt], 100)
        [(ids, learned)] = renderer.demonstrations([shown], 100)
        [whole] = completion_logprobs(policy, [Sequence(tuple(prompt), tuple(ids))], micro_batch_tokens=4096)
        losses += [-float(whole[i]) for i in range(len(ids)) if learned is None or learned[i]]
    assert start[1][0][1]["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-4)
    assert start[1][-1][1]["loss"] < 0.6 * start[1][0][1]["loss"]


def test_rl_is_rewarded_by_the_environment_and_tells_of_turns_and_calls(tmp_path, start):
    spec = rlvr(tmp_path / "rl", start[0], steps=4, data=BOTH, rollout=PLAYED)
    control = Recorder()
    run(replace(spec, tasks=MIXED, new_model=MODEL), control)
    metrics = control.events[-1][1]
    assert 1 < metrics["turns"] <= 5
    assert 0 < metrics["valid_calls"] <= 1
    assert metrics["observation_tokens"] > 0
    assert 0 <= metrics["reward_per_turn"] < 1
    before, after = (load_file(folder / "model.safetensors") for folder in (start[0], Path(spec.output)))
    assert any(not torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("form", [{"form": "full_vocab"}, {"form": "policy_gradient", "max_advantage": 5.0}])
def test_teachers_score_episodes_alike_from_memory_and_from_disk(tmp_path, start, form):
    other = tmp_path / "other"
    save_policy(*new_policy(NewModel.model_validate(MODEL), 1), other, dtype=torch.float32)
    teachers = {("math", "low"): start[0], ("math", "max"): other, ("code", "low"): other, ("code", "max"): start[0]}
    kept = {}
    for states in ("direct", "cached"):
        rollout = PLAYED | {"prompts": 8, "group_size": 1}
        given = opd(tmp_path / states, start[0], teachers, form, rollout=rollout, resources={"teacher_states": states})
        control = Recorder()
        run(replace(given, tasks=MIXED, new_model=MODEL), control)
        kept[states] = load_file(Path(given.output, "model.safetensors"))
        assert control.events[-1][1]["turns"] > 1
    for name, weight in kept["direct"].items():
        torch.testing.assert_close(weight, kept["cached"][name], atol=1e-5, rtol=1e-4)


def test_evaluation_tells_of_the_turns_of_a_cell(tmp_path, start):
    rollout = PLAYED | {"prompts": 10, "group_size": 2}
    before = InputSpec("models", "sft", str(start[0]))
    spec = spec_of(tmp_path / "eval", "eval", {"data": BOTH, "rollout": rollout}, [before])
    result = run(replace(spec, tasks=MIXED, new_model=MODEL))
    cells = json.loads(Path(spec.output, "report.json").read_text())["models"]["sft"]
    assert cells["math.low"]["episodes"] is None
    assert cells["code.max"]["episodes"]["turns"] > cells["code.low"]["episodes"]["turns"] > 1
    assert result.metrics["sft/code.max/turns"] == cells["code.max"]["episodes"]["turns"]
    assert 0 < result.metrics["sft/code.max/valid_calls"] <= 1
    # lengths are of what the model wrote
    assert cells["code.max"]["length_mean"] < 48 - cells["code.max"]["episodes"]["observation_tokens"]
