"""Models that a pipeline names by their folder are looked at before anything starts."""

import errno
import json
import os
import re
from pathlib import Path

import pytest
import toy
from checkpoints import model_folder, safetensors

from opdctl.gate.folders import Files
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
    "no config.json": lambda folder: (folder / "config.json").unlink(),
    "is no file": lambda folder: (folder / "generation_config.json").symlink_to("nowhere"),
    "generation_config.json is no file": lambda folder: (folder / "generation_config.json").mkdir(),
    "tokenizer_config.json is no file": lambda folder: os.mkfifo(folder / "tokenizer_config.json"),
    "chat_template.jinja cannot be read": lambda folder: (folder / "chat_template.jinja").write_bytes(b"\xff"),
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


@pytest.mark.parametrize("call", ["iterdir", "read_bytes", "open"])
def test_a_model_that_may_not_be_read_is_told_so(workspace, told, monkeypatch, call):
    def denied(path, *args, **more):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, call, denied)
    (line,) = told()
    assert re.search(r"inputs\.init: \S*mine\S* cannot be read: Permission denied \(", line)


ODD = [
    ("config.json", {"vocab_size": "x"}),
    ("config.json", {"vocab_size": [1]}),
    ("config.json", {"text_config": {"vocab_size": "x"}}),
    ("config.json", {"text_config": 5}),
    ("config.json", {"eos_token_id": "2"}),
    ("config.json", {"eos_token_id": 2.5}),
    ("config.json", {"eos_token_id": [[2]]}),
    ("generation_config.json", {"eos_token_id": [2, "a"]}),
    ("generation_config.json", {"eos_token_id": [None]}),
    ("generation_config.json", {"eos_token_id": True}),
    ("generation_config.json", {"pad_token_id": "x"}),
    ("config.json", {"max_position_embeddings": "x"}),
    ("config.json", {"rope_parameters": 5}),
    ("config.json", {"rope_scaling": {"rope_type": "yarn", "factor": "x"}}),
    ("tokenizer_config.json", {"chat_template": [5]}),
    ("tokenizer_config.json", {"chat_template": [{"name": "default"}]}),
    ("tokenizer_config.json", {"eos_token": 3}),
    ("tokenizer_config.json", {"model_max_length": "x"}),
    ("special_tokens_map.json", {"eos_token": ["</s>"]}),
    ("tokenizer.json", {"model": 5}),
    ("tokenizer.json", {"model": {"vocab": {"q": None}}}),
    ("tokenizer.json", {"model": {"vocab": {"q": 4_000_000_000}}}),
    ("tokenizer.json", {"model": {"vocab": {"q": -1000}}}),
    ("tokenizer.json", {"model": {"vocab": {"q": 1e30}}}),
    ("tokenizer.json", {"model": {"vocab": [[]]}}),
    ("tokenizer.json", {"model": {"vocab": {}, "merges": 5}}),
    ("tokenizer.json", {"added_tokens": 5}),
    ("tokenizer.json", {"added_tokens": [{"content": "x"}]}),
    ("tokenizer.json", {"added_tokens": [{"id": 1}]}),
    ("tokenizer.json", {"added_tokens": [{"id": 4_000_000_000, "content": "x"}]}),
]


def write(folder, file, content):
    kept = json.loads((folder / file).read_text()) if (folder / file).exists() else {}
    (folder / file).write_text(json.dumps(kept | content))


@pytest.mark.parametrize(("file", "content"), ODD)
def test_a_value_that_makes_no_sense_is_told_with_its_file_and_key(workspace, told, file, content):
    write(workspace / "mine", file, content)
    (line,) = told()
    assert line.startswith(f"stages.base.inputs.init: {workspace / 'mine' / file}")
    assert next(iter(content)) in line
    assert "copy the file again" in line


USUAL = [
    ("config.json", {"eos_token_id": [1, 2], "pad_token_id": -1, "vocab_size": 8, "rope_scaling": None}),
    ("config.json", {"text_config": {"vocab_size": 8, "rope_parameters": {"full_attention": {"factor": 2.0}}}}),
    ("config.json", {"rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 8}}),
    ("tokenizer_config.json", {"chat_template": [{"name": "default", "template": "x"}], "model_max_length": 10**30}),
    ("tokenizer_config.json", {"eos_token": {"content": "b", "lstrip": False}, "added_tokens_decoder": {}}),
    ("special_tokens_map.json", {"eos_token": {"content": "b"}, "additional_special_tokens": ["c"]}),
    ("tokenizer.json", {"model": {"vocab": [["a", -1.5], ["b", 0]], "unk_id": 0}}),
    ("tokenizer.json", {"model": {"vocab": {"a": 0, "b": 1}, "merges": ["a b", ["a", "b"]]}}),
    ("tokenizer.json", {"model": {"vocab": {"b": 0}}, "added_tokens": [{"id": 1, "content": "c", "special": True}]}),
]


@pytest.mark.parametrize(("file", "content"), USUAL)
def test_what_models_really_have_is_taken_and_the_gate_reads_it(workspace, told, file, content):
    write(workspace / "mine", file, content)
    assert told() == []
    files = Files(workspace / "mine")
    assert files.positions(scaled=True) in (None, 32)
    assert set(files.eos_ids) <= {0, 1, 2}
    assert (files.template, files.vocab_size, files.rows) in ((None, 8, None), (None, None, None), ("x", None, None))
    assert files.vocabulary is None or set(files.vocabulary.ids) <= {"a", "b", "c"}
