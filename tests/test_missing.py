"""Models that a pipeline names by their folder are looked at before anything starts."""

import errno
import json
import os
import re
from pathlib import Path

import pytest
import toy
from checkpoints import model_folder, safetensors

from opdctl.missing import missing_files


@pytest.fixture
def told(workspace):
    """What is told of a pipeline that begins with the folder `mine`."""
    model_folder(workspace / "mine")

    def look(**more):
        return list(missing_files(toy.pipeline({"base": toy.sft("path:mine", **more)}, folder=workspace)))

    return look


def index(folder, **shards):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))


DAMAGE = {
    "not a whole safetensors file": lambda folder: os.truncate(folder / "model.safetensors", 30),
    "names files that are not in the folder: b": lambda folder: index(folder, w="b"),
    "not an index": lambda folder: index(folder, w=3),
    "no weights": lambda folder: (folder / "model.safetensors").unlink(),
    "no tokenizer": lambda folder: (folder / "tokenizer.json").unlink(),
    "tokenizer.json cannot be read": lambda folder: (folder / "tokenizer.json").write_text("{"),
    "config.json holds no JSON object": lambda folder: (folder / "config.json").write_text("[]"),
    "config.json cannot be read": lambda folder: (folder / "config.json").unlink(),
    "pickled": lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_model_is_told_by_its_key_with_a_remedy(workspace, told, what):
    assert told() == []
    DAMAGE[what](workspace / "mine")
    (line,) = told()
    assert line.startswith("stages.base.inputs.init: ")
    assert what in line
    assert line.endswith(")")


def test_quantized_weights_are_told_where_the_embedded_engine_would_read_them(workspace, told):
    (workspace / "mine" / "model.safetensors").write_bytes(safetensors("layer.weight", dtype="I32", width=4))
    (line,) = told()
    assert "weights that nothing can be computed with: layer.weight (I32)" in line
    assert "vllm" in line
    by_vllm = toy.pipeline(
        {"exam": {**toy.evaluation("path:mine"), "backend": "vllm"}}, folder=workspace, machine={"gpus": 1}
    )
    assert list(missing_files(by_vllm)) == []


@pytest.mark.parametrize("call", ["iterdir", "read_text", "open"])
def test_a_model_that_may_not_be_read_is_told_so(workspace, told, monkeypatch, call):
    def denied(path, *args, **more):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, call, denied)
    (line,) = told()
    assert re.search(r"inputs\.init: \S*mine\S* cannot be read: Permission denied \(", line)
