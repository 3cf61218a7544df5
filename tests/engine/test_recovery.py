"""A save is the old one or the new one, whatever instant the process dies at."""

import os

import pytest
import torch

from opdctl.engine.recovery import Recovery, Save
from opdctl.errors import StageRefused


def save_of(step: int) -> Save:
    return Save(step, {"rows": 10 * step}, {"loss": 1.0 / step}, {"policy.w": torch.full((3,), float(step))})


def test_no_save_is_none(tmp_path):
    assert Recovery(str(tmp_path / "state")).load() is None


def test_the_last_save_comes_back_whole(tmp_path):
    recovery = Recovery(str(tmp_path))
    recovery.save(save_of(1))
    recovery.save(save_of(2))
    loaded = recovery.load()
    assert loaded is not None
    assert (loaded.step, loaded.position, loaded.metrics) == (2, {"rows": 20}, {"loss": 0.5})
    assert torch.equal(loaded.tensors["policy.w"], torch.full((3,), 2.0))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-2", "step.json"]


class Killed(BaseException):
    pass


@pytest.mark.parametrize("dies_at", range(3))
def test_a_save_cut_short_leaves_the_one_before(tmp_path, monkeypatch, dies_at):
    """Dies before each of the renames of a save (counters.json, the folder, step.json)."""
    recovery = Recovery(str(tmp_path))
    recovery.save(save_of(1))
    calls = 0
    rename = os.replace

    def dying(source, target):
        nonlocal calls
        if calls == dies_at:
            raise Killed
        calls += 1
        rename(source, target)

    monkeypatch.setattr(os, "replace", dying)
    with pytest.raises(Killed):
        recovery.save(save_of(2))
    monkeypatch.undo()
    loaded = Recovery(str(tmp_path)).load()
    assert loaded is not None
    assert loaded.step == 1
    recovery.save(save_of(2))  # the leftovers are in nobody's way
    again = recovery.load()
    assert again is not None
    assert again.step == 2


@pytest.mark.parametrize("name", ["step.json", "step-1/counters.json", "step-1/state.safetensors"])
@pytest.mark.parametrize("content", [None, b"", b"[]", b"\xff\x00{"])
def test_a_damaged_save_is_refused_by_its_folder_and_never_a_start_from_nothing(tmp_path, name, content):
    recovery = Recovery(str(tmp_path))
    recovery.save(save_of(1))
    if content is not None:
        (tmp_path / name).write_bytes(content)
    elif name != "step.json":
        (tmp_path / name).unlink()
    else:
        (tmp_path / "step-1").rename(tmp_path / "step-2")
    with pytest.raises(StageRefused, match="the saved state cannot be read") as refused:
        recovery.load()
    assert str(tmp_path) in str(refused.value)
    assert "--rerun" in refused.value.hint
