"""verl's own readers make of opdctl's rows the token ids, masks and order that the embedded engine has."""

import json
from dataclasses import replace

import datasets
import pytest
import torch
from engine import stages
from verl.experimental.agent_loop import agent_loop
from verl.trainer import sft_trainer
from verl.trainer.ppo.utils import create_rl_dataset, create_rl_sampler
from verl.utils.config import omega_conf_to_dataclass
from verl_data import chat_model, config_of, on_verl, words_model, written

from opdctl.engine.checkpoint import load_vocabulary
from opdctl.engine.loop import open_tasks
from opdctl.engine.rows import Mixer, Renderer, stream_seed
from opdctl.settings import Mixture


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Not the user's: verl copies what it reads."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


ROWS = [{"q": f"what is {a}+{b}=", "a": str(a + b), "c": f"{a + b} is it "} for a in range(8) for b in range(4)]


def file_tasks(folder, template):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    given = {"task": "file", "path": str(path), "prompt": "q", "answer": "a", "completion": "c", "verifier": "exact"}
    system = {"system": "Answer in few words."} if template == "chat" else {}
    return {"sums": {**given, "template": template, "held_out": 0.0, **system}}


@pytest.fixture(params=["words", "bpe raw", "bpe chat"])
def model_and_tasks(request, tmp_path):
    """(folder of a model, tasks, efforts)"""
    if request.param == "words":
        return words_model(tmp_path / "model"), stages.TASKS, stages.EFFORTS
    return chat_model(tmp_path / "model"), file_tasks(tmp_path, request.param.split()[1]), None


def stage_of(tmp_path, kind, model_and_tasks):
    folder, tasks, efforts = model_and_tasks
    mixture = {"tasks": list(tasks), "efforts": list(efforts["levels"]) if efforts else []}
    if kind == "sft":
        spec, limits = stages.sft(tmp_path / kind, steps=2), {"max_tokens": 100}
    else:
        spec, limits = stages.rlvr(tmp_path / kind, folder), {"rollout": stages.ROLLOUT | {"max_prompt_tokens": 80}}
    spec = replace(spec, tasks=tasks, efforts=efforts, config=spec.config | {"data": mixture} | limits)
    return on_verl(spec, folder)


def engine_side(spec, name):
    tokenizer, eos_ids, _ = load_vocabulary(spec.inputs[0].path)
    mixture = Mixture.model_validate(spec.config["data"])
    return Mixer(open_tasks(spec), mixture, "train", stream_seed(spec.seed, name)), Renderer(tokenizer, eos_ids)


def sft_dataset(spec):
    written(spec)
    config = config_of(spec)
    tokenizer = omega_conf_to_dataclass(config.model).tokenizer
    return sft_trainer.create_sft_dataset(config.data.train_files, config.data, tokenizer, None)


def test_demonstrations_become_the_engines_ids_and_targets(tmp_path, model_and_tasks):
    spec = stage_of(tmp_path, "sft", model_and_tasks)
    dataset = sft_dataset(spec)
    mixer, renderer = engine_side(spec, "sft")
    shown = [shown for step in range(2) for _, shown in mixer.demonstrations(24 * step, 24)]
    prompts = renderer.prompts([demonstration.prompt for demonstration in shown], 100)
    completions = renderer.completions([demonstration.completion for demonstration in shown])
    assert len(dataset) == len(shown) == 48
    for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        item = dataset[i]
        assert item["input_ids"].tolist() == prompt + completion
        assert item["loss_mask"].tolist() == [0] * len(prompt) + [1] * len(completion)
        assert item["position_ids"].tolist() == list(range(len(prompt) + len(completion)))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_global_batch_of_sft_is_the_engines(tmp_path, ranks):
    dataset = sft_dataset(stage_of(tmp_path, "sft", (words_model(tmp_path / "model"), stages.TASKS, stages.EFFORTS)))
    dealt = []
    for rank in range(ranks):
        # as the trainer makes it
        sampler = sft_trainer.DistributedSampler(dataset, shuffle=True, num_replicas=ranks, rank=rank, drop_last=True)
        sampler.set_epoch(0)
        dealt.append(list(sampler))
    size = 24 // ranks
    for step in range(2):
        batch = {row for rows in dealt for row in rows[step * size : (step + 1) * size]}
        assert batch == set(range(24 * step, 24 * (step + 1)))


def test_prompts_become_the_engines_ids(tmp_path, model_and_tasks):
    spec = stage_of(tmp_path, "rlvr", model_and_tasks)
    written(spec)
    config = config_of(spec)
    model = omega_conf_to_dataclass(config.actor_rollout_ref.model)
    dataset = create_rl_dataset(config.data.train_files, config.data, model.tokenizer, model.processor)
    loop = Loop(model, config)
    mixer, renderer = engine_side(spec, "rlvr")
    rows = [dataset[i] for i in create_rl_sampler(config.data, dataset)]
    assert [row["index"] for row in rows] == list(range(16))
    found = [loop.prompt_ids(row["raw_prompt"]) for row in rows]
    for at in range(0, 16, 4):
        wanted = renderer.prompts([row.prompt for row in mixer.rows(at, 4)], 80)
        assert sorted(found[at : at + 4]) == sorted(wanted)


def test_completions_are_merged_as_they_are(tmp_path, model_and_tasks):
    spec = stage_of(tmp_path, "rlvr", model_and_tasks)
    written(spec)
    config = config_of(spec)
    loop = Loop(omega_conf_to_dataclass(config.actor_rollout_ref.model), config)
    assert loop.builder.merge_assistant_tokens([5, 6], [7, 2]).token_ids == [5, 6, 7, 2]


class Loop:
    """What verl's agent loop does with a prompt, by the builder that it makes for the model."""

    def __init__(self, model, config):
        assert model.hf_config.model_type == "qwen3"
        self.builder = agent_loop.create_continuous_token_builder(
            model.tokenizer,
            hf_model_type=model.hf_config.model_type,
            chat_template_kwargs=config.data.get("apply_chat_template_kwargs", {}),
            mm_processor_kwargs={},
            processor=model.processor,
        )

    def prompt_ids(self, messages):
        return self.builder.build_initial_tokens([dict(message) for message in messages])


def test_routes_reach_verl_as_a_column(tmp_path):
    folder = words_model(tmp_path / "model")
    trained = stages.sft(tmp_path / "trained", steps=24)
    stages.run(trained)
    teachers = {(d, e): tmp_path / "trained" / "out" for d in ("math", "code") for e in ("low", "max")}
    spec = on_verl(stages.opd(tmp_path / "opd", folder, teachers, {"form": "policy_gradient", "max_advantage": 5.0}))
    written(spec)
    config = config_of(spec)
    model = omega_conf_to_dataclass(config.actor_rollout_ref.model)
    dataset = create_rl_dataset(config.data.train_files, config.data, model.tokenizer, None)
    key = config.distillation.teacher_key
    taught = {teacher.key for teacher in config.distillation.teacher_models.values() if teacher.get("key")}
    assert {dataset[i][key] for i in range(len(dataset))} == {"t0", "t1", "t2", "t3"} <= taught
    assert torch.equal(dataset[0]["dummy_tensor"], torch.tensor([0], dtype=torch.uint8))
