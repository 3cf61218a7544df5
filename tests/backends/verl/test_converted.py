"""Rows for verl are made once for all stages that read the same ones."""

import json
from dataclasses import replace

import pyarrow.parquet as pq
import pytest
from engine import stages

from opdctl.backends.verl import data
from opdctl.backends.verl.converted import NOTE, publish
from opdctl.backends.verl.layout import layout
from opdctl.records import sha256


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
