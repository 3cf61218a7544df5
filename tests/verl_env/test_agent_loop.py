"""Episodes that verl's servers draw are those of the embedded engine, token for token."""

import asyncio
import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import datasets
import hydra
import pytest
import torch
import yaml
from engine import stages
from verl.experimental.agent_loop import agent_loop
from verl.trainer import sft_trainer
from verl.trainer.ppo.utils import create_rl_dataset
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.rollout.replica import TokenOutput
from verl_data import chat_model, config_of, on_verl, written

from opdctl.backends.verl.layout import EPISODES, ONE_TURN, SETTINGS_VARIABLE
from opdctl.backends.verl.plugin import agent_loop as ours
from opdctl.backends.verl.plugin.metrics import episodes_metrics
from opdctl.backends.verl.plugin.told import told
from opdctl.engine.checkpoint import load_vocabulary, new_policy, save_policy
from opdctl.engine.episodes import Play, Start, episode_metrics
from opdctl.engine.loop import open_tasks
from opdctl.engine.rows import Mixer, Renderer, stream_seed
from opdctl.engine.sampling import Episode
from opdctl.errors import StageFailed
from opdctl.settings import Mixture, NewModel, Rollout

TOYS = {"math": stages.TASKS["math"], "code": {"task": "lookup"}}
TOOLS = {"sums": {"task": "calculator"}}
WORDS = yaml.safe_load((stages.ROOT / "conf/model/tiny_qwen3_agents.yaml").read_text())
TURNS = {"max_turns": 3, "max_turn_tokens": 120, "max_observation_tokens": 60}
ROLLOUT = {"prompts": 4, "group_size": 2, "max_prompt_tokens": 900, "max_completion_tokens": 400, "turns": TURNS}
LOGPROB = -0.25


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture(params=["words", "chat"])
def model(request, tmp_path):
    """(folder, tasks, efforts)"""
    if request.param == "chat":
        return chat_model(tmp_path / "model"), TOOLS, None
    policy, tokenizer = new_policy(NewModel.model_validate(WORDS), 0)
    save_policy(policy, tokenizer, tmp_path / "model", dtype=torch.float32)
    return tmp_path / "model", TOYS, stages.EFFORTS


def stage_of(folder, kind, model, **rollout):
    path, tasks, efforts = model
    mixture = {"tasks": list(tasks), "efforts": list(efforts["levels"]) if efforts else []}
    if kind == "sft":
        spec, more = stages.sft(folder / kind, steps=1), {"max_tokens": 1200}
    else:
        spec, more = stages.rlvr(folder / kind, path), {"rollout": ROLLOUT | rollout}
    return on_verl(replace(spec, tasks=tasks, efforts=efforts, config=spec.config | {"data": mixture} | more), path)


@pytest.fixture
def verl_of(monkeypatch):
    """(rows as verl reads them, a function that plays one) of a stage."""

    def make(spec):
        monkeypatch.setenv(SETTINGS_VARIABLE, str(written(spec).settings))
        for remembered in (told, ours._task, ours._options, ours._earned, ours._renderer):
            remembered.cache_clear()
        config = config_of(spec)
        trained = omega_conf_to_dataclass(config.actor_rollout_ref.model)
        if trained.custom_chat_template is not None:  # as AgentLoopWorker does
            trained.tokenizer.chat_template = trained.custom_chat_template
        rows = create_rl_dataset(config.data.train_files, config.data, trained.tokenizer, trained.processor)

        async def play(row, server):
            loop = hydra.utils.instantiate(
                config=agent_loop._agent_loop_registry[row["agent_name"]],
                trainer_config=agent_loop.DictConfigWrap(config=config),
                server_manager=server,
                tokenizer=trained.tokenizer,
                processor=trained.processor,
                hf_model_type="qwen3",
                dataset_cls=type(rows),
                data_config=agent_loop.DictConfigWrap(config.data),
                tools=agent_loop.ToolListWrap([]),
            )
            sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "logprobs": True}
            return await loop.run(
                sampling, priority=3, global_steps=1, **{k: v for k, v in row.items() if k != "agent_name"}
            )

        return [rows[i] for i in range(len(rows))], play

    yield make
    told.cache_clear()


class Server:
    """Answers with given turns, one after another."""

    def __init__(self, turns):
        self.turns, self.asked = list(turns), []

    async def generate(self, request_id, *, prompt_ids, sampling_params, priority):
        self.asked.append((request_id, list(prompt_ids), sampling_params, priority))
        ids = self.turns[len(self.asked) - 1]
        versions = {"min_global_steps": len(self.asked), "max_global_steps": len(self.asked)}
        return TokenOutput(token_ids=ids, log_probs=[LOGPROB] * len(ids), extra_fields=versions)


def scripts(task, renderer, shown):
    """Turns of an expert, of one who errs, of one who is cut, and of one who never ends, as token ids."""
    right = renderer.completions([renderer.calls.render(turn.text, turn.calls) for turn in shown.turns])
    wrong, cut = (
        renderer.completions(["<call> get" if renderer.tokenizer.chat_template is None else "<tool_call>{}"])[0],
        right[0][:-1],
    )
    return {"right": right, "errs": [wrong, *right], "cut": [cut], "endless": [right[0]] * 9}


def engine_side(spec):
    tokenizer, eos_ids, _ = load_vocabulary(spec.inputs[0].path)
    tasks, mixture = open_tasks(spec), Mixture.model_validate(spec.config["data"])
    return tasks, Mixer(tasks, mixture, "train", stream_seed(spec.seed, spec.kind)), Renderer(tokenizer, eos_ids)


def in_engine(task, renderer, prompt, prompt_ids, turns, options):
    with closing(task.environment(prompt, renderer.calls)) as environment:
        play = Play(Start(prompt, prompt_ids, task, 0, 0), environment)
        for ids in turns:
            if play.over:
                break
            play.wrote(ids, ended=ids[-1] in renderer.eos_ids)
            if not play.over:
                play.heard(environment.step(renderer.texts([ids])[0]), renderer, options)
        return play, environment.verdict()


def test_an_episode_is_the_engines(tmp_path, model, verl_of):
    spec = stage_of(tmp_path, "rlvr", model)
    rows, play = verl_of(spec)
    tasks, mixer, renderer = engine_side(spec)
    options = Rollout.model_validate(spec.config["rollout"])
    name = list(model[1])[-1]
    row = next(row for row in rows if row["extra_info"]["task"] == name)
    dealt = [one for one in mixer.rows(0, 4) if one.task == name]
    prompts = renderer.prompts([one.prompt for one in dealt], 900)
    [shown] = tasks[name].demonstrations(0, 0, 1, mixer.mixture.efforts)
    seen = set()
    for title, turns in scripts(tasks[name], renderer, shown).items():
        server = Server(turns)
        output = asyncio.run(play(row, server))
        [at] = [i for i, ids in enumerate(prompts) if ids == output.prompt_ids]
        wanted, verdict = in_engine(tasks[name], renderer, dealt[at].prompt, prompts[at], turns, options)
        assert output.response_ids == wanted.written, title
        assert output.response_mask == [int(learned) for learned in wanted.learned]
        assert output.response_logprobs == [LOGPROB if learned else 0.0 for learned in wanted.learned]
        assert output.reward_score == (verdict.reward if wanted.finished else -1.0)
        assert output.extra_fields["episode"] == dict(wanted.counts)
        assert output.extra_fields["reward_extra_info"]["length"] == sum(wanted.learned)
        asked = server.asked
        assert len({request for request, *_ in asked}) == 1
        assert all(ids == [*prompts[at], *wanted.written[: len(ids) - len(prompts[at])]] for _, ids, *_ in asked)
        assert {sampling["max_tokens"] for *_, sampling, _ in asked} == {120}
        assert {priority for *_, priority in asked} == {3}
        assert (output.extra_fields["min_global_steps"], output.extra_fields["max_global_steps"]) == (1, len(asked))
        assert output.num_turns == 2 * len(asked)
        field = output.as_dict()
        assert field["rm_scores"].sum() == pytest.approx(output.reward_score)
        assert len(field["responses"]) == len(field["rollout_log_probs"]) == len(field["response_mask"])
        seen.add((len(asked), wanted.finished))
    assert {finished for _, finished in seen} == {True, False}
    assert len(seen) > 2


def test_rows_of_one_turn_are_left_to_verls_own_loop(tmp_path, model, verl_of):
    rows, _ = verl_of(stage_of(tmp_path, "rlvr", model))
    named = {row["extra_info"]["task"]: row["agent_name"] for row in rows}
    assert named == {task: ONE_TURN if task == "math" else EPISODES for task in model[1]}


def test_a_right_answer_earns_its_reward(tmp_path, verl_of):
    spec = stage_of(tmp_path, "rlvr", (chat_model(tmp_path / "model"), TOOLS, None))
    rows, play = verl_of(spec)
    _, _, renderer = engine_side(spec)
    value = json.loads(rows[0]["reward_model"]["ground_truth"])["answer"]["value"]
    outputs = [
        asyncio.run(play(rows[0], Server(renderer.completions([f"Answer: {answer}"])))) for answer in (value, "no")
    ]
    assert [output.reward_score for output in outputs] == [1.0, 0.0]
    assert [output.extra_fields["reward_extra_info"]["accuracy"] for output in outputs] == [1.0, 0.0]


def test_an_environment_that_fails_is_told_to_opdctl(tmp_path, verl_of, monkeypatch):
    rows, play = verl_of(stage_of(tmp_path, "rlvr", (chat_model(tmp_path / "model"), TOOLS, None)))

    def refuse(*_, **__):
        raise StageFailed("no more")

    monkeypatch.setattr(Play, "wrote", refuse)
    with pytest.raises(StageFailed, match="no more"):
        asyncio.run(play(rows[0], Server([[5, 6]])))
    assert json.loads(Path(told()["failure"]).read_text())["message"] == "no more"


def test_the_batchs_episodes_are_described_as_the_engine_does():
    counts = [{"turns": 3.0, "calls": 2.0, "valid_calls": 1.0, "turn_reward": 1.0}, {"turns": 1.0}]
    assert episodes_metrics(counts) == episode_metrics([Episode(None, one) for one in counts])
    assert episodes_metrics([]) == {}


def test_demonstrations_of_episodes_become_the_engines_ids_and_targets(tmp_path, model):
    spec = stage_of(tmp_path, "sft", model)
    written(spec)
    config = config_of(spec)
    tokenizer = omega_conf_to_dataclass(config.model).tokenizer
    dataset = sft_trainer.create_sft_dataset(config.data.train_files, config.data, tokenizer, None)
    _, mixer, renderer = engine_side(spec)
    shown = [one for _, one in mixer.demonstrations(0, 24)]
    prompts = renderer.prompts([one.prompt for one in shown], 1200)
    completions = renderer.demonstrations(shown, 1200)
    assert any(not all(learned) for _, learned in completions if learned is not None)
    for i, (prompt, (ids, learned)) in enumerate(zip(prompts, completions, strict=True)):
        item = dataset[i]
        assert item["input_ids"].tolist() == [*prompt, *ids]
        assert item["loss_mask"].tolist() == [0] * len(prompt) + [int(own) for own in learned or [True] * len(ids)]
