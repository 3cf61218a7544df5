"""Sample stages through `embedded.run`, and SFT on what they publish."""

import hashlib
import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from engine.stages import EFFORTS, Recorder, run, sft, spec_of, train
from safetensors.torch import load_file

from opdctl.backends.contract import InputSpec, Stopped
from opdctl.backends.verl import data
from opdctl.engine import sample
from opdctl.engine.checkpoint import load_tokenizer
from opdctl.engine.loop import open_demonstrations, open_tasks
from opdctl.engine.rows import Mixer, stream_seed
from opdctl.errors import StageFailed, StageRefused
from opdctl.settings import Mixture
from opdctl.tasks.sampled import Sampled, SampledTask

ROLLOUT = {"prompts": 12, "group_size": 4, "max_prompt_tokens": 10, "max_completion_tokens": 6}
DATA = {"tasks": ["math", "code"], "efforts": ["low", "max"]}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """One that has seen a little SFT: some answers end, some are right."""
    spec = sft(tmp_path_factory.mktemp("model") / "sft", steps=120, train={"optimizer": {"lr": 1e-2}})
    run(spec)
    return Path(spec.output)


def sampling(folder, model, **config):
    more = {key: config.pop(key) for key in ("seed", "tasks", "resources") if key in config}
    settings = {"data": DATA, "rollout": ROLLOUT, "save_every": 5, **config}
    return spec_of(folder, "sample", settings, [InputSpec("model", "sft", str(model))], **more)


def rows_of(spec):
    return [json.loads(line) for line in Path(spec.output, "data.jsonl").read_text().splitlines()]


def report_of(spec):
    return json.loads(Path(spec.output, "report.json").read_text())


@pytest.fixture(scope="module")
def sampled(tmp_path_factory, model):
    spec = sampling(tmp_path_factory.mktemp("sampled") / "sample", model, per_prompt=2)
    return spec, run(spec)


def test_every_kept_answer_is_one_that_the_verifier_accepts(sampled):
    spec, _ = sampled
    tasks = open_tasks(spec)
    mixer = Mixer(tasks, Mixture.model_validate(DATA), "train", stream_seed(0, "sample"))
    rows = rows_of(spec)
    assert rows
    for row in rows:
        cell = mixer.cells.index((row["task"], row["effort"]))
        (asked,) = mixer.cell_rows(cell, row["row"], 1)
        assert asked.prompt.text == row["prompt"]
        assert tasks[row["task"]].verify(asked.prompt, row["completion"]).correct
        assert row["correct"] is True
        assert row["columns"] == {"domain": row["task"], "effort": row["effort"]}


def test_no_prompt_has_more_answers_than_asked_for_and_they_are_the_first(sampled, tmp_path, model):
    by_prompt = {}
    for row in rows_of(sampled[0]):
        by_prompt.setdefault((row["task"], row["effort"], row["row"]), []).append(row["sample"])
    assert max(map(len, by_prompt.values())) == 2
    every = sampling(tmp_path / "every", model, per_prompt=4)
    run(every)
    correct = {}
    for row in rows_of(every):
        correct.setdefault((row["task"], row["effort"], row["row"]), []).append(row["sample"])
    assert by_prompt == {key: samples[:2] for key, samples in correct.items()}


def test_keep_all_keeps_what_ends_and_nothing_that_was_cut(tmp_path, model, sampled):
    spec = sampling(tmp_path / "all", model, keep="all", per_prompt=4, rollout=ROLLOUT | {"max_completion_tokens": 4})
    run(spec)
    rows, counts = rows_of(spec), report_of(spec)["counts"]
    assert counts["kept"] == counts["tries"] - counts["truncated"] == len(rows)
    assert counts["truncated"] > 0
    assert sum(row["correct"] for row in rows) == counts["correct"] > 0
    assert any(not row["correct"] for row in rows)


def test_the_report_counts_what_the_file_holds(sampled):
    spec, result = sampled
    report, rows = report_of(spec), rows_of(spec)
    assert report["sha256"] == hashlib.sha256(Path(spec.output, "data.jsonl").read_bytes()).hexdigest()
    assert report["counts"]["kept"] == len(rows)
    assert report["counts"]["prompts"] == result.step == 12 * 4
    assert report["counts"]["tries"] == 4 * 48
    assert result.metrics["accepted"] == report["counts"]["correct"] / 192
    for name, cell in report["cells"].items():
        own = [row for row in rows if f"{row['task']}.{row['effort']}" == name]
        assert cell["kept"] == len(own)
        assert cell["kept_length_sum"] == sum(row["tokens"] for row in own)
        assert cell["solved"] == len({row["row"] for row in own}) / 12
        assert result.metrics[f"{name}/accepted"] == cell["accepted"]


def test_neither_blocks_nor_batches_change_the_answers(tmp_path, model, sampled):
    for name, more in {"blocks": {"save_every": 7}, "batches": {"resources": {"micro_batch_tokens": 64}}}.items():
        other = sampling(tmp_path / name, model, per_prompt=2, **more)
        run(other)
        assert rows_of(other) == rows_of(sampled[0])


def test_another_seed_asks_and_draws_anew(tmp_path, model, sampled):
    other = sampling(tmp_path / "other", model, per_prompt=2, seed=1)
    run(other)
    assert {row["prompt"] for row in rows_of(other)} != {row["prompt"] for row in rows_of(sampled[0])}


def without_cost(result):
    return {name: value for name, value in result.metrics.items() if name not in ("cpu_seconds", "peak_memory_gib")}


@pytest.mark.parametrize("stop_at", [5, 12, 20])
def test_a_stopped_stage_ends_as_an_undisturbed_one_and_asks_nothing_twice(
    tmp_path, model, sampled, stop_at, monkeypatch
):
    spec = sampling(tmp_path / "cut", model, per_prompt=2)
    first, second = Recorder(stop_at), Recorder()
    with pytest.raises(Stopped):
        run(spec, first)
    assert json.loads(Path(spec.state, "step.json").read_text()) == {"step": first.events[-1][0]}
    result = run(spec, second)
    assert result.step == sampled[1].step
    assert without_cost(result) == without_cost(sampled[1])
    assert Path(spec.output, "data.jsonl").read_bytes() == Path(sampled[0].output, "data.jsonl").read_bytes()
    steps = [step for step, _ in first.events + second.events]
    assert steps == [5, 10, 12, 17, 22, 24, 29, 34, 36, 41, 46, 48]


def test_damaged_state_is_refused(tmp_path, model):
    spec = sampling(tmp_path / "cut", model)
    with pytest.raises(Stopped):
        run(spec, Recorder(5))
    next(Path(spec.state).glob("cell-*.json")).write_text("{")
    with pytest.raises(StageRefused, match="the saved state cannot be read"):
        run(spec)


def test_a_stage_that_keeps_nothing_fails_and_says_why(tmp_path, model):
    spec = sampling(tmp_path / "cut", model, rollout=ROLLOUT | {"max_completion_tokens": 1})
    with pytest.raises(StageFailed, match=r"no answer was kept: of 192 tries 19\d were cut short and 0 correct"):
        run(spec)


def test_more_prompts_than_a_file_has_are_refused(tmp_path, model):
    words = [word for word in load_tokenizer(model).get_vocab() if word.startswith("s")][:1] or ["<pad>"]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"q": words[0] + " " * n + words[0], "a": "x"}) + "\n" for n in range(1, 4)))
    rows = {"task": "file", "path": str(path), "prompt": "q", "answer": "a", "verifier": "exact", "held_out": 0.0}
    spec = sampling(tmp_path / "few", model, tasks={"own": rows}, data={"tasks": ["own"]})
    with pytest.raises(StageRefused, match="task own has 3 training rows and config.rollout.prompts asks for 12"):
        run(spec)


def test_an_injected_engine_draws_in_place_of_ours(tmp_path, model, sampled):
    asked = []

    def opener(given):
        from contextlib import contextmanager

        from opdctl.settings import Rollout

        @contextmanager
        def opened():
            with sample.in_this_process(spec, Rollout.model_validate(ROLLOUT))(given) as candidate:
                asked.append(given.label)
                yield candidate

        return opened()

    spec = sampling(tmp_path / "injected", model, per_prompt=2)
    sample.run(spec, Recorder(), opener)
    assert asked == ["sft"]
    assert rows_of(spec) == rows_of(sampled[0])


# ---------------------------------------------------------------------------------------------------- SFT on it


def learning(folder, spec, model=None, **more):
    inputs = [InputSpec("init", "init", str(model or "")), InputSpec("data", "sample", spec.output)]
    config = {"data": more.pop("data", DATA), "train": train(4, 24)}
    return spec_of(folder, "sft", config, inputs, **more)


def test_sft_reads_the_sampled_answers_and_nothing_else(sampled, tmp_path):
    spec = learning(tmp_path / "sft", sampled[0])
    mixer = Mixer(open_demonstrations(spec), Mixture.model_validate(DATA), "train", 0)
    shown = {(task, d.prompt.text, d.completion) for task, d in mixer.demonstrations(0, 2000)}
    assert shown == {(row["task"], row["prompt"], row["completion"]) for row in rows_of(sampled[0])}


def test_sft_on_sampled_answers_trains_and_differs_from_sft_on_demonstrations(sampled, tmp_path, model):
    given = learning(tmp_path / "sampled", sampled[0], model)
    plain = spec_of(tmp_path / "plain", "sft", {"data": DATA, "train": train(4, 24)}, given.inputs[:1])
    run(given)
    run(plain)
    first, second = (load_file(Path(spec.output) / "model.safetensors") for spec in (given, plain))
    assert any(not (first[name] == second[name]).all() for name in first)


def test_a_stopped_sft_on_sampled_answers_ends_as_an_undisturbed_one(sampled, tmp_path, model):
    whole, cut = learning(tmp_path / "whole", sampled[0], model), learning(tmp_path / "cut", sampled[0], model)
    run(whole)
    with pytest.raises(Stopped):
        run(cut, Recorder(2))
    run(cut)
    assert Path(cut.output, "model.safetensors").read_bytes() == Path(whole.output, "model.safetensors").read_bytes()


def test_a_task_that_was_not_sampled_is_refused(sampled, tmp_path):
    tasks = {**sampled[0].tasks, "third": sampled[0].tasks["math"]}
    spec = learning(tmp_path / "sft", sampled[0], data=DATA | {"tasks": ["third"]}, tasks=tasks)
    with pytest.raises(StageRefused, match="the sampled data has no row for task third"):
        run(spec)


def sampled_task(efforts):
    rows = [
        Sampled("t", effort, n, 0, f"p{n}", [], f"{effort}{n}", {}, 1, True)
        for effort, count in efforts.items()
        for n in range(count)
    ]
    return SampledTask("t", None, rows)


def test_rows_ask_for_the_efforts_in_turn_and_an_epoch_shows_each_row_once():
    shown = sampled_task({"low": 6, "max": 3}).demonstrations(0, 0, 9, ["low", "low", "max"])
    completions = [demonstration.completion for demonstration in shown]
    assert [text[:3] for text in completions] == ["low", "low", "max"] * 3
    assert len(set(completions)) == 9


def test_the_next_epoch_is_in_another_order_and_a_later_start_sees_the_same_rows():
    task = sampled_task({"": 20})
    first, second = ([d.completion for d in task.demonstrations(3, start, 20)] for start in (0, 20))
    assert sorted(first) == sorted(second)
    assert first != second
    assert [d.completion for d in task.demonstrations(3, 15, 10)] == first[15:] + second[:5]


def test_an_effort_without_rows_is_refused():
    with pytest.raises(StageRefused, match="no row for task t at effort max"):
        sampled_task({"low": 3}).demonstrations(0, 0, 2, list(EFFORTS["levels"]))


def test_verl_is_given_the_same_sampled_answers(sampled, tmp_path):
    spec = learning(tmp_path / "sft", sampled[0])
    written = [row["messages"] for row in pq.read_table(data.write(spec, Recorder()).train).to_pylist()]
    mixer = Mixer(open_demonstrations(spec), Mixture.model_validate(DATA), "train", stream_seed(0, "sft"))
    shown = [shown for step in range(4) for _, shown in mixer.demonstrations(24 * step, 24)]
    assert [[message["content"] for message in row] for row in written] == [
        [demonstration.prompt.text, demonstration.completion + "<eos>"] for demonstration in shown
    ]
