"""Select stages through `embedded.run`: what they publish, and what they refuse."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from checkpoints import record
from engine.stages import run, spec_of

from opdctl.backends.contract import InputSpec
from opdctl.errors import StageRefused
from opdctl.records import Parent, describe_files, write_json, write_record

CELLS = {  # model -> cell -> accuracy
    "a": {"math.low": 0.5, "math.max": 0.9, "code.low": 0.1, "code.max": 0.1},
    "b": {"math.low": 0.6, "math.max": 0.4, "code.low": 0.7, "code.max": 0.7},
    "c": {"math.low": 0.6, "math.max": 0.4, "code.low": 0.7, "code.max": 0.7},
}


def publish(folder, **more):
    write_record(folder, record(folder.name, files=describe_files(folder), **more))


def model(folder, name):
    """A checkpoint of opdctl."""
    made = folder / f"record-{name}"
    made.mkdir(parents=True)
    for file in ("model.safetensors", "config.json", "tokenizer.json", "selection.json", "notes.bin"):
        (made / file).write_text(f"{file} of {name}")
    publish(made)
    return made


def cell(accuracy):
    within = {"value": accuracy / 2, "low": 0.0, "high": 1.0}
    return {"accuracy": {"value": accuracy, "low": 0.0, "high": 1.0}, "within_budget": within, "length_mean": 8.0}


def report(folder, labels):
    """An eval stage's checkpoint; `labels`: what it calls the models."""
    made = folder / "report"
    made.mkdir()
    scores = {label: {name: cell(value) for name, value in CELLS[own].items()} for own, label in labels.items()}
    body = {"cells": list(CELLS["a"]), "models": scores, "roles": dict.fromkeys(labels.values(), "models")}
    write_json(made / "report.json", body)
    budget = Parent("budget", next(iter(labels.values())), "stage:budget", "record-budget")  # is scored by nobody
    read = [Parent("models", label, f"stage:{own}", f"record-{own}") for own, label in labels.items()]
    write_record(made, replace(record("report", kind="eval", files=describe_files(made)), parents=[*read, budget]))
    return made


@pytest.fixture
def selection(tmp_path):
    """`(config, labels=)` -> a spec over the candidates a, b and c."""

    def made(config, labels=None, candidates="abc"):
        models = {name: model(tmp_path, name) for name in "abc"}
        labels = labels or {name: name for name in "abc"}
        judged = report(tmp_path, labels)
        inputs = [InputSpec("report", "eval", str(judged), source="record-report")]
        inputs += [InputSpec("models", n, str(models[n]), source=f"record-{n}") for n in candidates]
        return spec_of(tmp_path / "chosen", "select", config, inputs)

    return made


def published(spec):
    return {path.name: path.read_text() for path in Path(spec.output).iterdir()}


@pytest.mark.parametrize(
    ("config", "winner", "score"),
    [
        ({"metric": "accuracy"}, "b", 0.6),
        ({"metric": "accuracy", "cells": ["math.max"]}, "a", 0.9),
        ({"metric": "accuracy", "cells": ["math.low", "math.max"]}, "a", 0.7),
        ({"metric": "accuracy", "best": "lowest"}, "a", 0.4),
        ({"metric": "within_budget"}, "b", 0.3),
        ({"metric": "length_mean"}, "a", 8.0),  # all alike: the first
    ],
)
def test_the_mean_over_the_cells_decides_and_of_equal_ones_the_first_wins(selection, config, winner, score):
    spec = selection(config)
    result = run(spec)
    files = published(spec)
    chosen = json.loads(files["selection.json"])
    assert (chosen["winner"], chosen["record"]) == (winner, f"record-{winner}")
    assert chosen["scores"][winner] == pytest.approx(score)
    assert result.metrics["score"] == pytest.approx(score)
    assert result.step == 3
    assert files["model.safetensors"] == f"model.safetensors of {winner}"


def test_the_files_of_a_model_are_published_without_its_record_and_share_its_bytes(selection, tmp_path):
    spec = selection({"metric": "accuracy"})
    run(spec)
    assert published(spec).keys() == {"model.safetensors", "config.json", "tokenizer.json", "selection.json"}
    assert os.path.samefile(f"{spec.output}/model.safetensors", tmp_path / "record-b" / "model.safetensors")
    assert (tmp_path / "record-b" / "selection.json").read_text() == "selection.json of b"


def test_a_folder_of_the_user_is_copied(selection, tmp_path):
    spec = selection({"metric": "accuracy"})
    (tmp_path / "record-b" / "record.json").unlink()
    run(spec)
    copied, source = tmp_path / "chosen" / "out" / "config.json", tmp_path / "record-b" / "config.json"
    assert copied.read_text() == source.read_text()
    assert not os.path.samefile(copied, source)
    assert json.loads(published(spec)["selection.json"])["record"] is None


def test_another_file_system_gets_a_copy(selection, monkeypatch):
    def refuse(source, target):
        raise OSError(18, "Invalid cross-device link")

    spec = selection({"metric": "accuracy"})
    monkeypatch.setattr(os, "link", refuse)
    run(spec)
    assert published(spec)["model.safetensors"] == "model.safetensors of b"


def test_a_candidate_is_found_by_its_checkpoint_whatever_the_report_calls_it(selection):
    spec = selection({"metric": "accuracy"}, labels={"a": "b", "b": "a", "c": "third"})
    run(spec)
    assert json.loads(published(spec)["selection.json"])["winner"] == "b"


def test_a_candidate_that_the_report_does_not_score_is_refused(selection):
    spec = selection({"metric": "accuracy"}, labels={"a": "a", "b": "b"})
    with pytest.raises(StageRefused, match="eval does not score 'c'"):
        run(spec)


def test_an_unknown_cell_is_refused_with_those_there_are(selection):
    with pytest.raises(StageRefused, match=r"no cell 'math\.high' \(cells: math\.low, math\.max"):
        run(selection({"metric": "accuracy", "cells": ["math.high"]}))


def test_a_report_without_the_metric_is_refused(selection, monkeypatch):
    monkeypatch.setitem(globals(), "cell", lambda accuracy: {"accuracy": {"value": accuracy}, "within_budget": None})
    with pytest.raises(StageRefused, match="holds no within_budget of 'a'"):
        run(selection({"metric": "within_budget"}))


def test_a_damaged_report_is_refused(selection, tmp_path):
    spec = selection({"metric": "accuracy"})
    (tmp_path / "report" / "report.json").write_text("{}")
    with pytest.raises(StageRefused, match="damaged"):
        run(spec)
