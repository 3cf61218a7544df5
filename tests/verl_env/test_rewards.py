"""The same completions earn in verl what they earn in the embedded engine."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from engine import stages
from tensordict import TensorDict
from verl import DataProto
from verl.trainer.ppo.reward import load_reward_manager
from verl.utils import hf_tokenizer
from verl_data import config_of, input_of, on_verl, words_model, written

from opdctl.backends.verl.layout import SETTINGS_VARIABLE
from opdctl.backends.verl.plugin.metrics import batch_metrics
from opdctl.backends.verl.plugin.told import told
from opdctl.engine.loop import Trainer, open_policy
from opdctl.engine.rlvr import _Sampler
from opdctl.engine.sampling import Rollout
from opdctl.errors import StageFailed
from opdctl.settings import RlvrSettings

EFFORT = {"tau": 0.6, "anneal": "gradual", "tau_from": 1.4, "anneal_fraction": 0.5, "budget": stages.BUDGET}
SETTINGS = {
    "plain": {"unfinished_reward": 0.0},
    "unfinished": {"unfinished_reward": -0.7},
    "overlong": {"overlong": {"handling": "soft_penalty", "buffer_tokens": 3}},
    "mask": {"overlong": {"handling": "mask"}},
    "effort": {"effort": EFFORT},
    "all": {"unfinished_reward": -0.3, "overlong": {"handling": "soft_penalty", "buffer_tokens": 5}, "effort": EFFORT},
}
EOS = 2


@pytest.fixture
def manager_of(monkeypatch):
    """verl's own way to a reward manager, as the overrides name it."""

    def make(spec):
        files = written(spec)
        monkeypatch.setenv(SETTINGS_VARIABLE, str(files.settings))
        told.cache_clear()
        config = config_of(spec)
        tokenizer = hf_tokenizer(spec.inputs[0].path)
        manager = load_reward_manager(config, tokenizer, reward_router_address=None, reward_model_tokenizer=None)
        return manager, rows_of(files.train)

    yield make
    told.cache_clear()


def rows_of(path: Path):
    import pyarrow.parquet as pq

    return pq.read_table(path).to_pylist()


def completions_for(tokenizer, task, prompt, generator):
    """Right and wrong, ended and cut, short and as long as may be: 4 a prompt."""
    right = tokenizer(task.reference(prompt), add_special_tokens=False)["input_ids"]
    noise = torch.randint(3, len(tokenizer), (6,), generator=generator).tolist()
    return [[*right, EOS], [*right[-2:], EOS], [*noise[:3], EOS], noise]


def in_verl(manager, row, prompt_ids, completion, batch):
    """The manager's answer to what verl's agent loop would send it."""
    ids = torch.tensor([[*prompt_ids, *completion]])
    tensors = {
        "prompts": torch.tensor([prompt_ids]),
        "responses": torch.tensor([completion]),
        "attention_mask": torch.ones_like(ids),
        "input_ids": ids,
        "position_ids": torch.arange(ids.shape[1])[None],
    }
    extra = {name: np.array([value], dtype=object) for name, value in row.items()} | {"global_steps": np.array([batch])}
    data = DataProto(batch=TensorDict(tensors, batch_size=1), non_tensor_batch=extra)
    return asyncio.run(manager.run_single(data))


@pytest.mark.parametrize("name", SETTINGS)
def test_rewards_and_metrics_are_the_engines(tmp_path, manager_of, name):
    model = words_model(tmp_path / "model")
    cold_start = stages.sft(tmp_path / "cold", steps=24)
    stages.run(cold_start)
    spec = stages.rlvr(
        tmp_path / "rlvr", model, inputs=(input_of(Path(cold_start.output), "budget"),), **SETTINGS[name]
    )
    spec = on_verl(spec)
    manager, written_rows = manager_of(spec)
    settings = RlvrSettings.model_validate(spec.config)
    policy, tokenizer = open_policy(spec, spec.inputs[0])
    sampler = _Sampler(spec, settings, Trainer(spec, stages.Recorder(), settings.train, policy, tokenizer))
    generator = torch.Generator().manual_seed(0)
    by_text = {row["prompt"][0]["content"]: row for row in written_rows}
    seen = set()
    for batch in (1, 2, 4):  # of two optimizer steps each
        rows = sampler.mixer.rows(4 * (batch - 1), 4)
        prompts = sampler.renderer.prompts([row.prompt for row in rows], 10)
        completions = [
            completion
            for row in rows
            for completion in completions_for(tokenizer, sampler.tasks["math"], row.prompt, generator)
        ]
        tokens = torch.zeros(sum(map(len, completions)))
        rollout = Rollout(completions, [ids[-1] == EOS for ids in completions], tokens, tokens)
        wanted_PG, wanted_metrics = sampler._rewards(rows, prompts, rollout, 2 * (batch - 1))
        answers = [
            in_verl(manager, by_text[row.prompt.text], prompts[p], completions[4 * p + g], batch)
            for p, row in enumerate(rows)
            for g in range(4)
        ]
        assert [answer["reward_score"] for answer in answers] == wanted_PG.flatten().tolist()
        found = batch_metrics([answer["reward_extra_info"] for answer in answers], [str(i // 4) for i in range(16)])
        same = {key: wanted_metrics[key] for key in found if key != "tied_groups"}
        assert {key: found[key] for key in same} == pytest.approx(same)
        assert {"reward", "accuracy", "length", "truncated"} <= same.keys()
        assert ({"tau", "budget", "over_budget"} <= same.keys()) == ("effort" in SETTINGS[name])
        seen |= {answer["reward_score"] for answer in answers}
    assert len(seen) > 1


def test_tied_groups_are_those_of_equal_rewards():
    reported = [{"earned": earned, "finished": 1.0} for earned in (1.0, 1.0, 0.0, 1.0)]
    assert batch_metrics(reported, ["a", "a", "b", "b"])["tied_groups"] == 0.5


def test_a_failing_verifier_is_told_to_opdctl(tmp_path, manager_of, monkeypatch):
    (tmp_path / "bad_verifier.py").write_text("def verify(completion, answer):\n    raise ValueError('no')\n")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"q": "+1 +1", "a": "1"}) + "\n")
    task = {"task": "file", "path": str(tmp_path / "rows.jsonl"), "prompt": "q", "answer": "a", "held_out": 0.0}
    spec = stages.rlvr(tmp_path / "rlvr", words_model(tmp_path / "model"), data={"tasks": ["own"], "efforts": []})
    tasks = {"own": task | {"verifier": "bad_verifier:verify"}}
    spec = replace(on_verl(spec), tasks=tasks, workspace=str(tmp_path))
    with monkeypatch.context() as patch:
        patch.chdir(tmp_path)  # as a worker does
        manager, rows = manager_of(spec)
    with pytest.raises(StageFailed, match="verifier bad_verifier:verify failed on row 1"):
        in_verl(manager, rows[0], [4, 5], [6, EOS], 1)
    failure = json.loads(Path(told()["failure"]).read_text())
    assert "bad_verifier:verify failed on row 1" in failure["message"]
    assert failure["hint"]
