"""How a worker passes the gate: files before models, and gate.json whatever comes of it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from engine import stages
from engine.peaked import ROUTES, model, nudged
from gate.models import edit

from opdctl.backends.contract import Stopped
from opdctl.engine import gate
from opdctl.errors import StageFailed, StageRefused
from opdctl.settings import GateSettings
from opdctl.verdicts import read_verdicts
from opdctl.worker import _pass_gate

KEY = "key"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    uniform = model(folder / "uniform", change=lambda policy: policy.head().zero_())
    elsewhere = model(folder / "elsewhere", change=nudged)
    words = stages.MODEL["tokenizer"]["words"]
    for file, content in (
        ("config.json", {"eos_token_id": 5}),
        ("generation_config.json", {"eos_token_id": 5}),
        ("tokenizer_config.json", {"eos_token": words[5]}),
    ):
        edit(elsewhere / file, lambda known, new=content: known.update(new))
    return {
        "student": model(folder / "student"),
        "healthy": model(folder / "healthy", change=nudged),
        "uniform": uniform,
        "elsewhere": elsewhere,
    }


@pytest.fixture
def spec(tmp_path, models):
    def make(teacher: str, **settings):
        made = stages.opd(
            tmp_path / "opd", models["student"], dict.fromkeys(ROUTES, models[teacher]), {"form": "full_vocab"}
        )
        plain = GateSettings(rollouts=4, **settings).model_dump(mode="json")
        return replace(made, gate={"settings": plain, "file": str(tmp_path / "gate.json"), "key": KEY})

    return make


def told(spec, key: str | None = KEY):
    found = read_verdicts(Path(spec.gate["file"]), key)
    return None if found is None else {one.check for one in found}


def test_models_are_asked_after_files_and_all_is_written(spec):
    one = spec("healthy")
    _pass_gate(one, stages.Recorder())
    assert {"vocabulary", "distance"} <= told(one)


def test_where_files_refuse_models_are_not_asked(spec, monkeypatch):
    asked = []
    monkeypatch.setattr(gate, "check_models", lambda *given: asked.append(given) or [])
    one = spec("elsewhere")
    with pytest.raises(StageRefused, match="eos"):
        _pass_gate(one, stages.Recorder())
    assert asked == []
    assert "eos" in told(one)
    _pass_gate(spec("elsewhere", accept=["eos"]), stages.Recorder())
    assert len(asked) == 1


def test_what_models_are_refused_for_is_written_before(spec):
    one = spec("uniform")
    with pytest.raises(StageRefused, match="random_teacher"):
        _pass_gate(one, stages.Recorder())
    assert "random_teacher" in told(one)
    written = json.loads(Path(one.gate["file"]).read_text())["verdicts"]
    assert any(verdict["check"] == "random_teacher" and verdict["outcome"] == "refuse" for verdict in written)


@pytest.mark.parametrize("error", [Stopped, StageFailed("no more")], ids=["stop", "failure"])
def test_an_attempt_whose_models_were_not_asked_to_the_end_has_not_passed(spec, monkeypatch, error):
    def ends(*given):
        raise error

    monkeypatch.setattr(gate, "check_models", ends)
    one = spec("healthy")
    with pytest.raises((Stopped, StageFailed)):
        _pass_gate(one, stages.Recorder())
    assert told(one) is None
    assert "vocabulary" in told(one, key=None)
