"""The gate's process for large models: it is asked for real, and dies, hangs and is stopped for real."""

import json
import os
import shutil
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from engine import stages
from engine.peaked import ROUTES, model, nudged

from opdctl.backends.contract import StageSpec, Stopped
from opdctl.engine import gate_child, gate_large
from opdctl.engine.gate import ask_models, check_models
from opdctl.processes import NOTE, find
from opdctl.settings import GateSettings
from opdctl.verdicts import Outcome, Verdict

SETTINGS = GateSettings(rollouts=4)
PAIRS = {f"sft -> {effort}[domain={domain}]" for domain, effort in ROUTES}
SECRET = "hunter2"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return model(folder / "student"), model(folder / "healthy", change=nudged)


@pytest.fixture
def spec(tmp_path, models):
    """Of another program, and beyond what a CPU is asked for."""
    student, teacher = models
    made = stages.opd(tmp_path / "opd", student, dict.fromkeys(ROUTES, teacher), {"form": "full_vocab"})
    return replace(made, backend="verl", workers={"key": SECRET})


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Stands in the place of the one that asks."""

    def write(text: str) -> None:
        (tmp_path / "stand_in.py").write_text(text)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.setattr(gate_large, "CHILD", "stand_in")

    return write


def _attempt(spec: StageSpec) -> Path:
    return Path(spec.events).parent


def ask(spec: StageSpec, control=None) -> list[Verdict]:
    return gate_large.ask_in_child(spec, SETTINGS, control or stages.Recorder())


def test_the_process_says_what_the_worker_itself_would_say(spec):
    found = ask(spec)
    assert found == ask_models(gate_large.on_the_cpu(spec), SETTINGS, stages.Recorder())
    assert {one.subject for one in found if one.check == "distance"} == PAIRS
    assert os.listdir(_attempt(spec)) == ["out"]


DEATHS = {
    "killed": ("import os\nos.kill(os.getpid(), 9)", "ended with -9"),
    "raises": ("raise MemoryError('no room')", "ended with 1: MemoryError: no room"),
    "says nothing": ("", "ended with 0"),
}


@pytest.mark.parametrize("death", DEATHS)
def test_a_process_that_dies_is_told_of_and_the_norms_are_looked_at(spec, program, death):
    text, told = DEATHS[death]
    program(text)
    found = ask(spec)
    unasked = [one for one in found if not one.asked]
    assert {(one.check, one.subject, one.outcome) for one in unasked} == {("distance", p, Outcome.WARN) for p in PAIRS}
    assert all(told in one.evidence and one.remedy for one in unasked)
    assert [one.outcome for one in found if one.check == "random_teacher"] == [Outcome.GO] * len(PAIRS)  # trained


def test_a_process_that_hangs_is_ended_and_told_of(spec, program, monkeypatch):
    program("import sys, time\nprint('so far', flush=True)\ntime.sleep(600)")
    monkeypatch.setattr(gate_large, "PATIENCE_S", 1.0)
    began = time.monotonic()
    found = ask(spec)
    assert time.monotonic() - began < 30
    assert any("did not end within 1 s: so far" in one.evidence for one in found)
    assert find(_attempt(spec)) == []
    assert not (_attempt(spec) / NOTE).exists()


def test_a_stop_ends_the_process(spec, program):
    program("import time\ntime.sleep(600)")

    class Control(stages.Recorder):
        def stop_requested(self):
            return bool(find(_attempt(spec)))

    with pytest.raises(Stopped):
        ask(spec, Control())
    assert find(_attempt(spec)) == []


def test_secrets_of_the_stage_go_through_a_pipe_alone(spec, program):
    program(
        "import os, pathlib, sys\n"
        "folders = pathlib.Path(sys.argv[1]).parent, pathlib.Path(os.environ['TMPDIR'])\n"
        "seen = [p.read_text() for folder in folders for p in folder.rglob('*') if p.is_file()]\n"
        f"assert {SECRET!r} in sys.stdin.read() and {SECRET!r} not in str([sys.argv, os.environ, seen])\n"
        "raise SystemExit('nowhere else')"
    )
    assert any("ended with 1: nowhere else" in one.evidence for one in ask(spec))
    assert not any(SECRET in path.read_text() for path in _attempt(spec).rglob("*") if path.is_file())


def test_without_an_attempt_nothing_is_left_where_the_command_runs(spec, program, tmp_path, monkeypatch):
    """`opdctl check`."""
    program("raise SystemExit('here')")
    monkeypatch.chdir(tmp_path / "opd")
    assert any("ended with 1: here" in one.evidence for one in ask(replace(spec, events="")))
    assert os.listdir() == ["out"]


def test_without_a_gpu_it_is_told_what_was_not_asked(spec, monkeypatch):
    monkeypatch.setattr(gate_large, "SMALL", -1)
    found = check_models(spec, SETTINGS, stages.Recorder())
    unasked = {(one.check, one.subject, one.outcome) for one in found if not one.asked}
    assert unasked == {("distance", pair, Outcome.GO) for pair in PAIRS}
    assert all("the stage has no GPU" in one.evidence for one in found if not one.asked)


def test_difficulty_that_is_not_asked_is_told(tmp_path, models, monkeypatch):
    monkeypatch.setattr(gate_large, "SMALL", -1)
    spec = replace(stages.rlvr(tmp_path / "rlvr", models[0]), backend="verl")
    [found] = [one for one in check_models(spec, SETTINGS, stages.Recorder()) if one.check == "difficulty"]
    assert (found.subject, found.outcome, found.asked) == ("task math", Outcome.GO, False)
    assert "the stage has no GPU" in found.evidence


def test_models_that_do_not_fit_on_the_gpu_are_told_of(spec, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 2000))
    given = {"spec": asdict(replace(spec, devices=[0])), "settings": SETTINGS.model_dump(mode="json")}
    found = gate_child.ask(given)
    assert all("GiB are free on the GPU" in one.evidence for one in found if not one.asked)
    assert {one.subject for one in found if not one.asked} == PAIRS


def test_a_model_that_the_engine_does_not_read_is_told_of(spec, tmp_path, models):
    strange = tmp_path / "strange"
    shutil.copytree(models[0], strange)
    config = json.loads((strange / "config.json").read_text())
    (strange / "config.json").write_text(json.dumps(config | {"model_type": "nobody_knows"}))
    inputs = [replace(one, path=str(strange)) if one.role == "student" else one for one in spec.inputs]
    found = check_models(replace(spec, inputs=inputs), SETTINGS, stages.Recorder())
    assert {one.subject for one in found if not one.asked} == PAIRS
