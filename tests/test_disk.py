"""The forecast of a plan, held against what a run writes, and what becomes of a plan that does not fit."""

import json
import os
import threading
import time

import pytest
import toy
import toy_backend

from opdctl import disk
from opdctl.backends import BACKENDS
from opdctl.errors import StageRefused
from opdctl.memory import GIB
from opdctl.pipeline import expand
from opdctl.plan import make_plan
from opdctl.runner import Silent, execute
from opdctl.settings import NewModel
from opdctl.store import Workspace

WIDE = {
    "num_hidden_layers": 2,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
TRAIN = {"max_steps": 4, "global_batch_size": 2, "save_every": 1, "optimizer": {"lr": 0.01}}


def real(folder, *, precision="float32", **more):
    """An SFT stage of the embedded engine with a model of half a million weights."""
    from opdctl.config import load_pipeline

    chains = load_pipeline("kimi_k3").resolved
    model = {**chains["model"], "shape": WIDE | {"max_position_embeddings": 128}}
    tree = {
        "name": "real",
        "model": model,
        "tasks": {"general": {"task": "chain", "domain": "math"}},
        "machine": {"slots": 1, "cpus": 1},
        "tracking": {"enabled": False},
        "gate": {"enabled": False},
        "stages": {
            "sft": {
                "kind": "sft",
                "backend": "embedded",
                "inputs": {"init": "model:"},
                "config": {
                    "data": {"tasks": ["general"]},
                    "max_tokens": 128,
                    "train": TRAIN | {"precision": precision},
                },
            }
        },
        **more,
    }
    return expand(tree, folder=folder)


def plan_of(wanted):
    return make_plan(wanted, Workspace(wanted.folder).run("r"))


def size_of(folder) -> int:
    """Bytes of all files; those that go while they are looked at count nothing."""
    total = 0
    for above, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(above, name)).st_size
            except FileNotFoundError:
                continue
    return total


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_run_writes_at_most_what_was_forecast_and_not_much_less(tmp_path, precision):
    plan = plan_of(real(tmp_path, precision=precision))
    found = disk.forecast(plan)
    most, over = [0], threading.Event()

    def watch():
        while not over.is_set():
            most[0] = max(most[0], size_of(tmp_path))
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        assert execute(plan, reporter=Silent()).done == ["sft"]
    finally:
        over.set()
        watcher.join()
    kept = size_of(tmp_path)
    assert 0.8 * found.kept <= kept <= found.kept
    assert 0.5 * found.needed <= most[0] <= found.needed  # a save beside a save lasts milliseconds: it may be missed
    assert disk.forecast(plan_of(real(tmp_path, precision=precision))).needed == 0  # nothing is left to run


# ------------------------------------------------------------------------------------------------- by arithmetic


def weights(found, name="sft"):
    return found.stages[name]


def test_saves_hold_weights_and_two_moments_twice(tmp_path):
    found = weights(disk.forecast(plan_of(real(tmp_path))))
    size = disk.size_of_new(NewModel.model_validate(real(tmp_path).resolved["model"]))
    assert found.passing == 2 * (12 * size.weights + size.beside)
    low = weights(disk.forecast(plan_of(real(tmp_path, precision="bfloat16"))))
    assert low.passing == 2 * (14 * size.weights + size.beside)  # 2 + 8, and masters of 4
    assert found.kept - low.kept == 2 * size.weights


def test_what_passes_counts_for_as_many_stages_as_run_at_once(tmp_path):
    stages = {"a": toy.sft(), "b": toy.sft(seed=1), "c": toy.sft(seed=2)}
    one, three = (
        disk.forecast(plan_of(toy.pipeline(stages, folder=tmp_path, machine={"slots": slots, "cpus": 9})))
        for slots in (1, 3)
    )
    assert one.kept == three.kept
    assert three.passing == 3 * one.passing
    assert one.needed == one.kept + one.passing


def test_the_size_of_a_folder_is_that_of_its_files(tmp_path):
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(bytes(4000))
    (tmp_path / "model-00002-of-00002.safetensors").write_bytes(bytes(4000))
    (tmp_path / "config.json").write_text(json.dumps({"dtype": "bfloat16", "num_experts": 8}))
    (tmp_path / "tokenizer.json").write_text("x" * 500)
    (tmp_path / "optimizer.bin").write_bytes(bytes(9999))
    found = disk.size_of_folder(tmp_path)
    assert found.weights == 4000
    assert found.beside == 500 + (tmp_path / "config.json").stat().st_size
    assert disk.size_of_folder(tmp_path / "nowhere") is None


def test_a_model_that_is_not_here_yet_is_said_to_be_unknown(tmp_path):
    wanted = toy.pipeline({"sft": toy.sft("hf:org/model@" + "0" * 40)}, folder=tmp_path)
    found = disk.forecast(plan_of(wanted))
    assert found.unknown == ["sft"]
    assert "not counted, for their models are not here yet: sft" in disk.describe(found)


def test_finished_stages_write_nothing(tmp_path, monkeypatch):
    monkeypatch.setitem(BACKENDS, "embedded", toy_backend)
    wanted = toy.pipeline({"sft": toy.sft(), "more": toy.sft("stage:sft", seed=1)}, folder=tmp_path)
    assert list(disk.forecast(plan_of(wanted)).stages) == ["sft", "more"]
    toy.run(wanted, only=["sft"])
    assert list(disk.forecast(plan_of(wanted)).stages) == ["more"]


# ------------------------------------------------------------------------------------------------- what comes of it

FULL = {"reserve_gib": 10**9}


def test_what_does_not_fit_is_refused_before_anything_starts(tmp_path):
    wanted = toy.pipeline({"sft": toy.sft()}, folder=tmp_path, disk=FULL)
    with pytest.raises(StageRefused, match=r"disk: writes up to .*: too little, with .* to stay free") as caught:
        toy.run(wanted)
    assert "disk.forecast: warn" in caught.value.hint
    assert not toy.stage(wanted, "sft").path.exists()


@pytest.mark.parametrize(("forecast", "lines"), [("warn", 1), ("off", 0)])
def test_or_warned_of_or_not_looked_at(tmp_path, forecast, lines, monkeypatch):
    notes = toy.Notes()
    plan = plan_of(toy.pipeline({"sft": toy.sft()}, folder=tmp_path, disk=FULL | {"forecast": forecast}))
    disk.check(plan, notes.message)
    assert len([text for (text,) in notes.of("message") if "too little" in text]) == lines


def test_the_free_space_is_that_of_the_file_system_of_a_folder_still_to_be_made(tmp_path):
    assert disk.free(tmp_path / "not" / "there") == pytest.approx(disk.free(tmp_path), rel=0.2)


def test_sizes_are_told_in_fitting_units():
    assert (disk.gib(3 * GIB // 2), disk.gib(5 << 20)) == ("1.5 GiB", "5.0 MiB")
