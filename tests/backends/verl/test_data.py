"""verl reads the rows that the embedded engine would deal, in its order; what cannot be right is refused before."""

import json
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from engine import stages
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AddedToken, PreTrainedTokenizerFast

from opdctl.backends.contract import InputSpec, StageSpec, Stopped
from opdctl.backends.verl import budgets, data
from opdctl.backends.verl.judge import unpack
from opdctl.backends.verl.layout import layout
from opdctl.engine import gate_large
from opdctl.engine.checkpoint import encode, load_policy, load_tokenizer, new_policy, save_policy
from opdctl.engine.gate import check_models
from opdctl.engine.loop import open_tasks
from opdctl.engine.rlvr import Experience
from opdctl.engine.rows import Mixer, Renderer, stream_seed
from opdctl.errors import StageRefused
from opdctl.settings import GateSettings, Mixture, NewModel
from opdctl.verdicts import Verdict

POLICY_GRADIENT = {"form": "policy_gradient", "max_advantage": 5.0}
ROUTES = [("math", "low"), ("math", "max"), ("code", "low"), ("code", "max")]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three trained models, all different."""
    folder = tmp_path_factory.mktemp("checkpoints")
    made = []
    for seed in range(3):
        spec = stages.sft(folder / str(seed), steps=24, seed=seed)
        stages.run(spec)
        made.append(Path(spec.output))
    return made


@pytest.fixture
def rlvr(tmp_path: Path, checkpoints: list[Path]):
    def make(**config) -> StageSpec:
        inputs = (InputSpec("budget", "cold start", str(checkpoints[1])),) if "effort" in config else ()
        return stages.rlvr(tmp_path / "rlvr", checkpoints[0], inputs=inputs, **config)

    return make


@pytest.fixture
def opd(tmp_path: Path, checkpoints: list[Path]):
    def make(routes=ROUTES, teacher: Path | None = None, **config) -> StageSpec:
        given = {route: teacher or checkpoints[1 + number % 2] for number, route in enumerate(routes)}
        return stages.opd(tmp_path / "opd", checkpoints[0], given, POLICY_GRADIENT, **config)

    return make


def write(spec: StageSpec, control: stages.Recorder | None = None) -> list[dict]:
    return pq.read_table(data.write(spec, control or stages.Recorder()).train).to_pylist()


def mixer_of(spec: StageSpec, name: str) -> Mixer:
    return Mixer(open_tasks(spec), Mixture.model_validate(spec.config["data"]), "train", stream_seed(spec.seed, name))


# ------------------------------------------------------------------------------------------------------------ rows


@pytest.mark.parametrize("ratios", [{}, {"code": 5}], ids=str)
def test_demonstrations_are_the_engines_in_its_order(tmp_path, ratios):
    spec = stages.sft(tmp_path / "sft", steps=3)
    spec = replace(spec, config=spec.config | {"data": spec.config["data"] | {"ratios": ratios}})
    rows = write(spec)
    shown = [shown for step in range(3) for _, shown in mixer_of(spec, "sft").demonstrations(24 * step, 24)]
    assert [[message["content"] for message in row["messages"]] for row in rows] == [
        [demonstration.prompt.text, demonstration.completion + "<eos>"] for demonstration in shown
    ]
    assert {tuple(message["role"] for message in row["messages"]) for row in rows} == {("user", "assistant")}


def test_prompts_are_the_engines_split_into_its_optimizer_steps(rlvr):
    spec = rlvr(rollout=stages.ROLLOUT | {"prompts": 6}, train=stages.train(6, 8))
    rows = write(spec)
    wanted = []
    for step in (0, 3):  # 3 optimizer steps a rollout batch
        dealt = mixer_of(spec, "rlvr").rows(2 * step, 6)
        numbers = [0] * (6 * 4)
        splits = Experience(*[numbers] * 5, group_size=4).split(3, spec, step)
        wanted += [dealt[split[at] // 4].prompt.text for split in splits for at in (0, 4)]
    assert [row["prompt"] for row in rows] == [[{"role": "user", "content": text}] for text in wanted]
    assert [row["extra_info"]["index"] for row in rows] == list(range(12))


def test_dynamic_sampling_has_rows_for_every_round(rlvr):
    plain, dynamic = write(rlvr()), write(rlvr(dynamic_sampling={"max_rounds": 3}))
    assert (len(plain), len(dynamic)) == (4 * 4, 3 * 4 * 4)


def test_the_last_steps_have_rows_where_batches_do_not_divide_them(rlvr):
    assert len(write(rlvr(train=stages.train(7, 8)))) == 4 * 4


def test_a_row_holds_what_its_verifier_needs(rlvr):
    spec = rlvr()
    for row in write(spec):
        task = open_tasks(spec)[row["extra_info"]["task"]]
        prompt = unpack(row["reward_model"]["ground_truth"], task.settings)
        assert prompt.columns == {"domain": "math", "effort": "max"}
        assert task.verify(prompt, task.reference(prompt)).correct
        assert row["data_source"] == "math"


def test_routes_are_the_engines(opd):
    spec = opd()
    rows = write(spec)
    keys = {route: f"t{number}" for number, route in enumerate(ROUTES)}
    columns = [json.loads(row["reward_model"]["ground_truth"])["columns"] for row in rows]
    assert [row["route"] for row in rows] == [keys[given["domain"], given["effort"]] for given in columns]


def test_no_optimizer_step_sees_one_teacher_only(opd):
    spec = opd(rollout=stages.ROLLOUT | {"prompts": 32, "group_size": 1}, train=stages.train(16, 8))
    routes = [row["route"] for row in write(spec)]
    assert all(len(set(routes[at : at + 8])) > 1 for at in range(0, len(routes), 8))
    assert max(len(list(run)) for _, run in groupby(routes)) < 8


def test_rows_without_a_route_go_to_the_default_teacher(opd):
    spec = opd(routes=[("math", "low"), ("math", "max")], default_teacher="low[domain=math]")
    by_task = {(row["data_source"], row["route"]) for row in write(spec)}
    assert by_task == {("math", "t0"), ("math", "t1"), ("code", "t0")}


def test_a_row_without_a_teacher_is_refused_by_its_columns(opd):
    with pytest.raises(StageRefused, match="no teacher for domain=code"):
        write(opd(routes=[("math", "low"), ("math", "max")]))


def test_validation_rows_are_a_whole_batch(tmp_path):
    files = data.write(stages.sft(tmp_path / "sft"), stages.Recorder())
    assert pq.read_table(files.validation).equals(pq.read_table(files.train).slice(0, 24))


def test_a_chat_prompt_is_rendered_by_the_models_own_template(tmp_path, checkpoints):
    efforts = stages.EFFORTS | {"by": "system_prompt"}
    template = "{% for m in messages %}{{ m['content'] }} {% endfor %}{% if add_generation_prompt %}<bos>{% endif %}"
    tokenizer: PreTrainedTokenizerFast = load_tokenizer(checkpoints[0])
    tokenizer.chat_template = template
    save_policy(load_policy(checkpoints[0]), tokenizer, tmp_path / "chat", dtype=torch.float32)
    spec = replace(stages.rlvr(tmp_path / "rlvr", tmp_path / "chat"), efforts=efforts)
    texts = [row["prompt"][0]["content"] for row in write(spec)]
    assert all(text.startswith("<max> <math>") and text.endswith("<bos>") for text in texts)


def test_rows_are_written_once(rlvr):
    spec = rlvr()
    times = []
    for _ in range(2):
        files = data.write(spec, stages.Recorder())
        times.append([path.stat().st_mtime_ns for path in (files.train, files.validation)])
    assert times[0] == times[1]


def test_other_settings_get_other_rows(rlvr):
    assert len(write(rlvr())) == 16
    assert len(write(rlvr(train=stages.train(16, 8)))) == 32


def test_more_steps_go_on_where_fewer_ended(rlvr):
    few, many = write(rlvr()), write(rlvr(train=stages.train(16, 8)))
    assert many[: len(few)] == few


def test_rows_cut_short_do_not_count(rlvr, monkeypatch):
    spec = rlvr()

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(data, "_record", killed)
        with pytest.raises(KeyboardInterrupt):
            write(spec)
    assert not layout(spec).train.exists()
    assert len(write(spec)) == 16


def test_a_row_that_is_refused_late_leaves_no_file(tmp_path):
    rows = [{"q": f"w{3 + i // 10} w{3 + i % 10}", "a": "w3"} for i in range(50)] + [{"q": "w3 " * 6, "a": "w3"}]
    spec = replace(stages.rlvr(tmp_path / "rlvr", _words_model(tmp_path)), tasks=_file_task(tmp_path, rows))
    spec = replace(spec, config=spec.config | {"data": {"tasks": ["own"]}, "train": stages.train(64, 16)})
    spec = replace(spec, config=spec.config | {"rollout": stages.ROLLOUT | {"max_prompt_tokens": 5}})
    with pytest.raises(StageRefused, match="a prompt has 6 tokens"):
        write(spec)
    assert not layout(spec).train.exists()


def test_rows_are_written_in_groups(rlvr, monkeypatch):
    monkeypatch.setattr(data, "_GROUP_ROWS", 5)
    files = data.write(rlvr(), stages.Recorder())
    metadata = pq.ParquetFile(files.train).metadata
    assert [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)] == [8, 8]


def test_the_plugin_is_told_again_at_every_start(rlvr):
    spec = rlvr()
    data.write(spec, stages.Recorder())
    data.write(replace(spec, workspace="/elsewhere"), stages.Recorder())
    told = json.loads(layout(spec).settings.read_text())
    assert told["workspace"] == "/elsewhere"
    assert told["eos_ids"] == [2]
    assert told["reward"]["unfinished_reward"] == -1.0


# -------------------------------------------------------------------------------------------------------- budgets

EFFORT = {"tau": 1.0, "anneal": "hard", "budget": stages.BUDGET}


def test_budgets_are_the_engines(rlvr, checkpoints):
    from functools import partial

    from opdctl.engine.effort import BudgetEstimator
    from opdctl.engine.sampling import sample
    from opdctl.settings import Budget, Rollout

    spec = rlvr(effort=EFFORT)
    rows = write(spec)
    mixer = mixer_of(spec, "rlvr")
    tokenizer, policy = load_tokenizer(checkpoints[1]), load_policy(checkpoints[1])
    estimator = BudgetEstimator(
        partial(sample, policy),
        mixer,
        Renderer(tokenizer, policy.eos_ids),
        Budget.model_validate(stages.BUDGET),
        Rollout.model_validate(stages.ROLLOUT),
    )
    dealt = mixer.rows(0, 16)
    wanted = dict(zip([row.prompt.text for row in dealt], estimator.budgets(dealt, batch=64), strict=True))
    assert {row["prompt"][0]["content"]: row["extra_info"]["budget"] for row in rows} == wanted
    assert len(set(wanted.values())) > 1


def test_budgets_are_told_of_without_a_step(rlvr):
    told = []

    class Control(stages.Recorder):
        def emit(self, step, total, metrics, phase="train"):
            told.append((step, total, dict(metrics), phase.partition(":")[0]))

    write(rlvr(effort=EFFORT), Control())
    assert told == [(0, 8, {}, "budgets")] * len(told)
    assert told


def test_a_stop_is_heard_between_budgets(rlvr):
    class Control(stages.Recorder):
        def stop_requested(self):
            return True

    with pytest.raises(Stopped):
        write(rlvr(effort=EFFORT), Control())


def test_a_large_cold_start_model_is_asked_in_vllm(rlvr, monkeypatch):
    asked = []

    class Offline:
        def __init__(self, spec, control, rollout, resources):
            asked.append((rollout.max_completion_tokens, resources.tensor_parallel))

        def __enter__(self):
            return self

        def __exit__(self, *_):
            asked.append("closed")

        def open(self, given):
            raise StageRefused(f"vLLM for {given.label}")

    monkeypatch.setattr(budgets, "OWN_ENGINE_BYTES", 0)
    monkeypatch.setattr(budgets, "Offline", Offline)
    spec = rlvr(effort=EFFORT)
    spec = replace(spec, resources={**spec.resources, "verl": {"rollout_tensor_parallel": 2}})
    with pytest.raises(StageRefused, match="vLLM for cold start"):
        write(spec)
    assert asked == [(6, 2), "closed"]


# ------------------------------------------------------------------------------------------------------- refusals


def test_a_demonstration_that_is_too_long_is_refused(tmp_path):
    spec = stages.sft(tmp_path / "sft")
    with pytest.raises(StageRefused, match="a demonstration has .* tokens and config.max_tokens is 9"):
        write(replace(spec, config=spec.config | {"max_tokens": 9}))


def test_a_teacher_with_a_permuted_vocabulary_is_refused_by_name(tmp_path, opd, checkpoints):
    tokenizer = load_tokenizer(checkpoints[1])
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary = content["model"]["vocab"]
    vocabulary["+1"], vocabulary["-1"] = vocabulary["-1"], vocabulary["+1"]
    save_policy(load_policy(checkpoints[1]), tokenizer, tmp_path / "swapped", dtype=torch.float32)
    (tmp_path / "swapped" / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(StageRefused, match=r"teacher max\[domain=math\] has another vocabulary"):
        write(_with_teacher(opd(), tmp_path / "swapped"))


@pytest.mark.parametrize("small", [gate_large.SMALL, -1], ids=["asked", "norms"])
def test_a_teacher_that_was_never_trained_is_refused_by_name(tmp_path, opd, monkeypatch, small):
    monkeypatch.setattr(gate_large, "SMALL", small)
    policy, tokenizer = new_policy(NewModel.model_validate(stages.MODEL), 7)
    save_policy(policy, tokenizer, tmp_path / "random", dtype=torch.float32)
    found = gate(_with_teacher(opd(), tmp_path / "random"))
    refused = [verdict.subject for verdict in found if verdict.check == "random_teacher" and verdict.stops]
    assert refused == ["sft -> max[domain=math]"]


def test_large_teachers_that_were_trained_pass(opd, monkeypatch):
    monkeypatch.setattr(gate_large, "SMALL", -1)
    assert not any(verdict.stops for verdict in gate(opd()))


def gate(spec: StageSpec) -> list[Verdict]:
    return check_models(replace(spec, backend="verl"), GateSettings(), stages.Recorder())


def _with_teacher(spec: StageSpec, path: Path) -> StageSpec:
    inputs = [replace(given, path=str(path)) if given.label == "max[domain=math]" else given for given in spec.inputs]
    return replace(spec, inputs=inputs)


@pytest.mark.parametrize("named", [[5], 5, None])
def test_an_eos_at_which_rollouts_would_not_stop_is_refused(tmp_path, named):
    folder = _words_model(tmp_path)
    content = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(content | {"eos_token_id": named}))
    with pytest.raises(StageRefused, match="rollouts by vLLM would not stop at EOS 2"):
        write(stages.rlvr(tmp_path / "rlvr", folder))


def test_without_a_generation_config_rollouts_stop_at_the_eos_of_the_config(rlvr, tmp_path, checkpoints):
    save_policy(load_policy(checkpoints[0]), load_tokenizer(checkpoints[0]), tmp_path / "bare", dtype=torch.float32)
    (tmp_path / "bare" / "generation_config.json").unlink()
    assert write(stages.rlvr(tmp_path / "rlvr", tmp_path / "bare"))


def test_an_eos_that_no_text_gives_is_refused(tmp_path):
    tokenizer = load_tokenizer(_words_model(tmp_path))
    assert encode(tokenizer, data.eos_text(tokenizer, 2)) == [2]
    with pytest.raises(StageRefused, match="does not read"):
        data.eos_text(_Deaf(tokenizer), 2)


@pytest.mark.parametrize("swallows", [False, True])
def test_a_completion_whose_end_reads_otherwise_is_refused(swallows):
    backend = Tokenizer(models.BPE({letter: i for i, letter in enumerate(pre_tokenizers.ByteLevel.alphabet())}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    eos = AddedToken("<eos>", special=True, lstrip=swallows)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos)
    completions = Renderer(tokenizer, (tokenizer.eos_token_id,)).completions(["it is 7 "])
    if not swallows:
        data._check_end([{"content": "it is 7 <eos>"}], completions[0], tokenizer)
        return
    with pytest.raises(StageRefused, match="with EOS as text"):
        data._check_end([{"content": "it is 7 <eos>"}], completions[0], tokenizer)


class _Deaf:
    """A tokenizer that has an EOS and does not find it in text."""

    backend_tokenizer = None
    unk_token_id = None
    name_or_path = "deaf"

    def __init__(self, tokenizer) -> None:
        self.convert_ids_to_tokens = tokenizer.convert_ids_to_tokens

    def __call__(self, texts, **_):
        return {"input_ids": [[5, 6] for _ in texts]}


def _words_model(folder: Path) -> Path:
    from engine.models import tiny_policy

    policy, tokenizer = tiny_policy()
    save_policy(policy, tokenizer, folder / "words", dtype=torch.float32)
    return folder / "words"


def _file_task(folder: Path, rows: list[dict]) -> dict:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = {"task": "file", "path": str(folder / "rows.jsonl"), "prompt": "q", "answer": "a"}
    return {"own": given | {"verifier": "exact", "held_out": 0.0}}
