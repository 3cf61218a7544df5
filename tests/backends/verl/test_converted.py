"""Rows for verl are made once for all stages that read the same ones."""

import json
from dataclasses import replace

import pyarrow.parquet as pq
import pytest
import torch
from engine import stages

from opdctl.backends.contract import InputSpec
from opdctl.backends.verl import converted, data
from opdctl.backends.verl.converted import NOTE, publish
from opdctl.backends.verl.layout import layout
from opdctl.engine.checkpoint import new_policy, save_policy
from opdctl.records import sha256
from opdctl.settings import NewModel


@pytest.fixture
def sft(tmp_path):
    """A stage of SFT in a state folder of its own, all in one workspace."""

    def make(name, optimizer=None, **changes):
        spec = replace(stages.sft(tmp_path / name, steps=2), workspace=str(tmp_path))
        train = spec.config["train"] | (
            {"optimizer": spec.config["train"]["optimizer"] | optimizer} if optimizer else {}
        )
        return replace(spec, config=spec.config | {"train": train}, **changes)

    return make


def written(spec):
    return data.write(spec, stages.Recorder())


def note(spec):
    return json.loads(layout(spec).train.with_name(NOTE).read_text())


def test_a_stage_with_another_learning_rate_shares_the_rows(sft, monkeypatch):
    first = written(sft("one"))
    monkeypatch.setattr(data, "_write_rows", None)  # would fail
    second = written(sft("two", {"lr": 0.5}))
    assert first.train != second.train
    assert first.train.resolve() == second.train.resolve()


def test_another_seed_or_task_has_rows_of_its_own(sft):
    first = written(sft("one")).train.resolve()
    assert written(sft("two", seed=5)).train.resolve() != first
    tasks = {name: {**task, "noise": 0.5} for name, task in stages.TASKS.items()}
    assert written(sft("three", tasks=tasks)).train.resolve() != first


def test_a_changed_file_is_another_content(tmp_path, sft):
    def spec(name):
        task = {"task": "file", "path": str(tmp_path / "rows.jsonl"), "prompt": "q", "answer": "a", "verifier": "exact"}
        given = sft(name, tasks={"own": {**task, "held_out": 0.0}}, efforts=None)
        return replace(given, config=given.config | {"data": {"tasks": ["own"]}})

    (tmp_path / "rows.jsonl").write_text('{"q": "w3 w4", "a": "w5"}\n')
    monkey = spec("one")
    words = [f"w{n}" for n in range(3, 9)]
    new = {**monkey.new_model, "tokenizer": {"words": ["<pad>", "<bos>", "<eos>", *words]}}
    first = written(replace(monkey, new_model=new)).train.resolve()
    (tmp_path / "rows.jsonl").write_text('{"q": "w3 w4", "a": "w6"}\n')
    second = written(replace(spec("two"), new_model=new)).train
    assert second.resolve() != first
    assert "w6" in pq.read_table(second).to_pylist()[0]["messages"][1]["content"]


def test_rows_that_were_deleted_are_made_again(sft):
    spec = sft("one")
    before = pq.read_table(written(spec).train)
    layout(spec).train.resolve().unlink()
    assert pq.read_table(written(spec).train).equals(before)


def test_the_checkpoint_says_which_rows_it_was_trained_on(sft, tmp_path):
    spec = sft("one")
    files = written(spec)
    publish(layout(spec), tmp_path)
    told = json.loads((tmp_path / NOTE).read_text())
    assert told == note(spec)
    assert told["sha256"]["train.parquet"] == sha256(files.train)
    assert told["rows"] == pq.read_metadata(files.train).num_rows == 48


def test_rows_that_were_edited_are_made_again(sft):
    spec = sft("one")
    whole = pq.read_table(written(spec).train)
    pq.write_table(whole.slice(1), layout(spec).train.resolve())
    assert pq.read_table(written(sft("two")).train).equals(whole)


def test_stages_that_write_the_same_rows_at_once_do_not_meet(sft, tmp_path, monkeypatch):
    [record] = pq.read_table(written(sft("one")).train).slice(0, 1).to_pylist()

    monkeypatch.setattr(data, "_GROUP_ROWS", 1)

    def batches():
        yield [record]
        yield [record]
        data._write_rows(tmp_path / "rows.parquet", iter([[record]]))
        yield [record]

    data._write_rows(tmp_path / "rows.parquet", batches())
    assert pq.read_metadata(tmp_path / "rows.parquet").num_rows == 3
    assert [path.name for path in tmp_path.glob("*rows*")] == ["rows.parquet"]


def test_budgets_are_drawn_anew_by_a_model_that_changed_in_its_place(sft, tmp_path):
    def content(seed):
        save_policy(*new_policy(NewModel.model_validate(stages.MODEL), seed), tmp_path / "model", dtype=torch.float32)
        given = InputSpec("budget", "start", str(tmp_path / "model"), source="path:model")
        spec = sft("one")
        return converted._content(replace(spec, inputs=[*spec.inputs, given]))

    assert content(0) == content(0) != content(1)
