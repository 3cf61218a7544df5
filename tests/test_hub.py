"""Models of the Hugging Face hub: the library's own client against a server on this machine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import toy
from checkpoints import safetensors
from hub_server import Hub, Repository, serve
from huggingface_hub import constants

from opdctl.errors import StageRefused
from opdctl.fetch import hub_commit, hub_folder
from opdctl.launch import Launcher
from opdctl.plan import make_plan
from opdctl.store import Workspace

OLD, NEW = "a" * 40, "b" * 40
FILES = {
    "config.json": b'{"model_type": "toy"}',
    "model.safetensors": safetensors("w"),
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "pytorch_model.bin": b"pickled",
    "modeling_evil.py": b"code",
    "original/consolidated.safetensors": b"the same weights",
    "consolidated.safetensors": b"the same weights",
}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """With an empty cache. What the library reads from the environment, it reads once: set as it would be."""
    everything = Repository({OLD: FILES, NEW: FILES | {"model.safetensors": safetensors("v")}}, {"main": OLD})
    pickled = Repository({OLD: {"config.json": b"{}", "pytorch_model.bin": b"pickled"}}, {"main": OLD})
    gated = Repository({OLD: FILES}, {"main": OLD}, gated=True)
    with serve(Hub({"org/model": everything, "org/pickled": pickled, "org/gated": gated})) as served:
        monkeypatch.setattr(constants, "ENDPOINT", served.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{served.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield served


@pytest.fixture
def offline(hub, monkeypatch):
    def switch():
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        hub.asked.clear()

    return switch


def test_only_what_makes_a_model_is_downloaded(hub):
    folder = hub_folder(f"org/model@{OLD}")
    assert sorted(path.name for path in folder.iterdir()) == [
        "chat_template.jinja", "config.json", "model.safetensors", "tokenizer.json",
    ]  # fmt: skip
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]


def test_a_downloaded_commit_needs_no_network(hub, offline):
    folder = hub_folder(f"org/model@{OLD}")
    offline()
    assert hub_folder(f"org/model@{OLD}") == folder
    assert hub.asked == []


def test_a_branch_is_the_commit_that_the_hub_says_and_offline_the_one_it_said_last(hub, offline):
    assert hub_commit("org/model@main") == OLD
    hub.repositories["org/model"].branches["main"] = NEW
    assert hub_commit("org/model@main") == NEW
    hub.repositories["org/model"].branches["main"] = OLD
    offline()
    assert hub_commit("org/model@main") == NEW
    assert hub_commit("org/never-seen@main") is None


def test_a_hub_that_is_down_is_as_good_as_offline(hub, monkeypatch):
    folder = hub_folder(f"org/model@{OLD}")
    assert hub_commit("org/model@main") == OLD
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # between the library's attempts
    assert (hub_commit("org/model@main"), hub_commit("org/other@main")) == (OLD, None)
    assert hub_folder(f"org/model@{OLD}") == folder
    with pytest.raises(StageRefused, match="hf:org/gated@") as caught:
        hub_folder(f"org/gated@{OLD}")
    assert "the hub was not reached" in caught.value.hint


@pytest.mark.parametrize(
    ("target", "told", "hint"),
    [
        (f"org/nothing@{OLD}", "no such repository", "HF_TOKEN"),
        (f"org/model@{'c' * 40}", "no revision", "commits/main"),
        (f"org/gated@{OLD}", "licence must be accepted", "/org/gated, then set HF_TOKEN"),
        (f"org/pickled@{OLD}", "no weights as safetensors", "refs/pr/N"),
        ("org/model@main", "is no commit", "40 digits"),
    ],
)
def test_what_cannot_be_had_is_refused_with_what_to_do(hub, target, told, hint):
    with pytest.raises(StageRefused, match=told) as caught:
        hub_folder(target)
    assert hint in caught.value.hint


def test_what_was_never_downloaded_is_refused_offline_with_the_command(hub, offline):
    offline()
    with pytest.raises(StageRefused, match="HF_HUB_OFFLINE is set") as caught:
        hub_folder(f"org/model@{OLD}")
    assert f"hf download org/model --revision {OLD}" in caught.value.hint


def planned(workspace, ref):
    pipeline = toy.pipeline({"sft": toy.sft(ref), "eval": toy.evaluation(ref, "stage:sft")}, folder=workspace)
    return make_plan(pipeline, Workspace(workspace).run("r"))


def test_a_plan_and_all_that_comes_of_it_has_the_commit_of_a_branch(hub, workspace):
    plan = planned(workspace, "hf:org/model@main")
    assert plan.pins == {"hf:org/model@main": OLD}
    sft, evaluation = plan.stages
    assert sft.fingerprint == planned(workspace, f"hf:org/model@{OLD}").stages[0].fingerprint
    assert [parent.ref for parent in sft.parents] == [f"hf:org/model@{OLD}"]
    assert evaluation.parents[0].label == "hf:org/model@main"
    launcher = Launcher(plan, plan.stages, lambda text: None)
    assert Path(launcher.spec(evaluation, [], None).inputs[0].path).name == OLD
    hub.repositories["org/model"].branches["main"] = NEW
    assert planned(workspace, "hf:org/model@main").stages[0].fingerprint != sft.fingerprint


def test_a_branch_that_nobody_can_tell_can_be_planned_and_not_run(hub, offline, workspace):
    offline()
    plan = planned(workspace, "hf:org/model@main")
    assert plan.pins == {"hf:org/model@main": None}
    with pytest.raises(StageRefused, match="'main' is no commit"):
        Launcher(plan, plan.stages, lambda text: None)


@pytest.mark.parametrize(
    ("file", "content", "told"),
    [
        ("model.safetensors", safetensors("layer.weight", dtype="I32", width=4), "nothing can be computed with"),
        ("model.safetensors", FILES["model.safetensors"][:-1], "not a whole safetensors file"),
        ("tokenizer.json", b"{", "tokenizer.json cannot be read"),
        ("config.json", b"[]", "config.json holds no JSON object"),
    ],
)
def test_what_is_no_model_is_refused_before_anything_starts(hub, workspace, file, content, told):
    hub.repositories["org/model"].commits[OLD] = FILES | {file: content}
    plan = planned(workspace, f"hf:org/model@{OLD}")
    with pytest.raises(StageRefused, match=told) as caught:
        Launcher(plan, plan.stages, lambda text: None)
    assert str(caught.value).startswith(f"hf:org/model@{OLD}: ")


def test_plan_shows_the_commit(hub, tmp_path, workspace):
    """As a user calls it, with the library's own settings in the environment."""
    hub.repositories["Qwen/Qwen3-VL-8B-Instruct"] = hub.repositories["org/model"]
    surroundings = os.environ | {
        "HF_ENDPOINT": hub.url,
        "HF_HUB_OFFLINE": "0",
        "HF_HOME": str(tmp_path / "home"),
        "COLUMNS": "120",
    }
    command = [sys.executable, "-m", "opdctl", "plan", "kimi_k3_verl_smoke", "scale=h200x8", "model=qwen3_vl_8b"]
    for online in ("0", "1"):
        surroundings["HF_HUB_OFFLINE"] = online
        done = subprocess.run(command, env=surroundings, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert f"hf:Qwen/Qwen3-VL-8B-Instruct@main: commit {OLD}" in done.stdout
