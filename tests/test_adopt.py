"""Models from outside: what is adopted, what is refused, and that pipelines and gc know them."""

import json
import os
import subprocess
import sys

import pytest
import toy
from checkpoints import model_folder, safetensors
from kept import publish

from opdctl.adopt import adopt
from opdctl.errors import ConfigError, OpdctlError
from opdctl.garbage import survey
from opdctl.lineage import trace
from opdctl.store import Workspace
from opdctl.verify import Verifier


@pytest.fixture
def model(tmp_path):
    folder = model_folder(tmp_path / "outside")
    (folder / "LICENSE").write_text("free")
    return folder


@pytest.fixture
def found(workspace):
    return Workspace(workspace)


def test_a_model_is_adopted_with_its_origin_and_left_where_it_was(found, model):
    (model / "training_args.bin").write_bytes(b"\x80pickle")
    before = {path.name: path.read_bytes() for path in model.iterdir()}
    made = adopt(found, model, "base", ref="hf:org/model@abc", licence="Apache-2.0")
    assert {path.name: path.read_bytes() for path in model.iterdir()} == before
    assert made.made
    assert made.left_out == ("training_args.bin",)
    assert sorted(made.record.files) == ["LICENSE", "config.json", "model.safetensors", "tokenizer.json"]
    nodes = trace(found, [made.stage])
    assert (nodes[made.record.id].kind, nodes[made.record.id].note) == ("import", "licence Apache-2.0")
    assert "hf:org/model@abc" in nodes
    assert Verifier(found).verify().findings == ()
    assert survey(found).go == ()


def test_the_same_model_is_adopted_once_and_another_is_refused_that_name(found, model):
    first = adopt(found, model, "base")
    assert adopt(found, model, "base") == first.__class__(first.stage, first.record, False, ())
    (model / "model.safetensors").write_bytes(safetensors("v"))
    with pytest.raises(ConfigError, match="--as base: another model was imported under this name"):
        adopt(found, model, "base")
    assert adopt(found, model, "new").made


def test_links_share_the_bytes(found, model):
    made = adopt(found, model, "base", link=True)
    assert (made.stage.checkpoint / "model.safetensors").samefile(model / "model.safetensors")
    assert not (made.stage.checkpoint / "model.safetensors").is_symlink()


def test_a_pipeline_reads_it_by_path_and_its_lineage_goes_on_behind_it(found, model):
    made = adopt(found, model, "base", ref="hf:org/model@abc")
    wanted = toy.pipeline({"sft": toy.sft("path:runs/imports/stages/base/checkpoint")}, folder=found.path)
    assert toy.run(wanted, "r").failed == {}
    nodes = trace(found, [found.run("r").stage("sft")])
    assert {made.record.id, "hf:org/model@abc"} < set(nodes)
    assert Verifier(found).verify().findings == ()
    assert [run.name for run in found.runs()] == ["r", "imports"], "an import is never the newest run"


def test_of_one_model_under_two_names_the_lineage_names_the_one_that_was_read(found, model):
    made = {name: adopt(found, model, name).record.id for name in ("one", "two")}
    stages = {name: toy.sft(f"path:runs/imports/stages/{name}/checkpoint") for name in made}
    assert toy.run(toy.pipeline(stages, folder=found.path), "r").failed == {}
    for name, record_id in made.items():
        nodes = trace(found, [found.run("r").stage(name)])
        assert [node.title for node in nodes.values() if node.kind == "import"] == [name]
        assert record_id in nodes


def test_a_checkpoint_of_opdctl_keeps_its_ancestors(found, model):
    base = publish(found, "a", "sft", at=0)
    checkpoint = found.run("a").stage("sft").checkpoint
    for path in model.iterdir():
        (checkpoint / path.name).write_bytes(path.read_bytes())
    assert base.id in trace(found, [adopt(found, checkpoint, "again").stage])


def test_a_sharded_model_is_taken_whole(found, model):
    (model / "model.safetensors").unlink()
    (model / "model-1.safetensors").write_bytes(safetensors("a", "b"))
    (model / "model-2.safetensors").write_bytes(safetensors("c"))
    shards = {"a": "model-1.safetensors", "b": "model-1.safetensors", "c": "model-2.safetensors"}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    assert len(adopt(found, model, "base").record.files) == 6


def deep(path):
    path.write_bytes(b"[" * 200_000)


REFUSED = {
    "config.json cannot be read: recursion limit exceeded": lambda folder: deep(folder / "config.json"),
    "no such folder": lambda folder: os.rename(folder, folder.with_name("moved")),
    "no config.json": lambda folder: (folder / "config.json").unlink(),
    "config.json holds no JSON object": lambda folder: (folder / "config.json").write_text("[]"),
    "tokenizer.json cannot be read": lambda folder: (folder / "tokenizer.json").write_text("{"),
    "generation_config.json holds no JSON object": lambda folder: (folder / "generation_config.json").write_text("3"),
    "names no model_type": lambda folder: (folder / "config.json").write_text("{}"),
    "no tokenizer": lambda folder: (folder / "tokenizer.json").unlink(),
    "the weights are pickled": lambda folder: os.rename(folder / "model.safetensors", folder / "pytorch_model.bin"),
    "no weights": lambda folder: os.rename(folder / "model.safetensors", folder / "adapter_model.safetensors"),
    "not a whole safetensors file": lambda folder: os.truncate(folder / "model.safetensors", 60),
    "lacks tensors": lambda folder: _index(folder, {"w": "a.safetensors", "lost": "a.safetensors"}),
}


def _index(folder, shards):
    os.rename(folder / "model.safetensors", folder / "a.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))


@pytest.mark.parametrize("why", REFUSED)
def test_what_is_no_whole_model_is_refused_and_nothing_is_left(found, model, why):
    REFUSED[why](model)
    with pytest.raises(OpdctlError, match=why):
        adopt(found, model, "base")
    assert not (found.path / "runs").exists()


def test_a_folder_that_is_not_there_is_a_wrong_command_line(found, tmp_path):
    with pytest.raises(ConfigError, match="no such folder"):
        adopt(found, tmp_path / "nowhere", "base")


IMPORT = """
import resource, sys
from opdctl.cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
main(["import", sys.argv[1], "--as", "base", "--workspace", sys.argv[2]])
"""


def test_a_disk_that_takes_only_a_part_of_a_file_publishes_nothing(found, model):
    (model / "README.md").write_bytes(b"x" * 30_000)  # of a file as large as may be, the kernel writes what fits
    done = subprocess.run([sys.executable, "-c", IMPORT, model, found.path], capture_output=True, text=True)
    assert done.returncode == 1
    assert "README.md: File too large" in done.stderr
    assert "ulimit -f" in done.stderr
    assert not found.run("imports").stage("base").linked


def test_a_copy_that_is_not_what_was_read_is_not_published(found, model, monkeypatch):
    monkeypatch.setattr("opdctl.adopt.sha256", lambda path: "of other bytes")
    with pytest.raises(OpdctlError, match="is not what was read from"):
        adopt(found, model, "base")
    assert not found.run("imports").stage("base").linked


@pytest.mark.parametrize("name", ["", "..", "../x", "a/b", ".hidden", "a[x=1]"])
def test_a_name_cannot_leave_the_folder(found, model, name):
    with pytest.raises(ConfigError, match="cannot name a model"):
        adopt(found, model, name)


def test_a_run_of_a_pipeline_called_imports_is_left_alone(found, model):
    found.run("imports").write_pipeline({"name": "imports", "stages": {"sft": {"kind": "sft"}}})
    with pytest.raises(ConfigError, match="is a run of a pipeline"):
        adopt(found, model, "base")
