"""The watchdog over real stages of the engine: quiet where they train, within five events where they only seem to."""

import shutil
from pathlib import Path

import pytest
import torch
from engine.stages import ROLLOUT, Recorder, opd, rlvr, run, sft, train
from safetensors.torch import load_file, save_file

from opdctl.backends.contract import Event, InputSpec, StageSpec
from opdctl.engine import opd as opd_stage
from opdctl.settings import WatchSettings
from opdctl.watchdog import Alarm, Watch

FULL = {"form": "full_vocab"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    specs = [sft(folder / str(seed), steps=60, seed=seed, train={"optimizer": {"lr": 1e-2}}) for seed in (0, 1)]
    for spec in specs:
        assert alarms(spec) == []
    return Path(specs[0].output), Path(specs[1].output)


def alarms(spec: StageSpec, recorder: Recorder | None = None) -> list[Alarm]:
    """What the watchdog says of a stage that is carried out."""
    recorder, watch = recorder or Recorder(), Watch(spec.kind, WatchSettings(), save_every=2)
    run(spec, recorder)
    total = recorder.events[-1][0]
    events = [Event(step, total, metrics, "train", float(step)) for step, metrics in recorder.events]
    return [alarm for event in events for alarm in watch.see(event)]


def distil(folder: Path, student: Path, low: Path, high: Path, loss=FULL, **config) -> StageSpec:
    four = {("math", "low"): low, ("math", "max"): high, ("code", "low"): low, ("code", "max"): high}
    return opd(folder, student, four, loss, **({"train": train(10, 8)} | config))


def without_weights(model: Path, folder: Path) -> Path:
    """Every token gets -ln V."""
    shutil.copytree(model, folder)
    tensors = load_file(folder / "model.safetensors")
    save_file({name: torch.zeros_like(value) for name, value in tensors.items()}, folder / "model.safetensors")
    return folder


def test_training_raises_no_alarm(tmp_path, models):
    student, other = models
    assert alarms(distil(tmp_path / "opd", student, other, other)) == []
    assert alarms(rlvr(tmp_path / "rlvr", student, steps=20)) == []


@pytest.mark.parametrize("loss", [FULL, {"form": "policy_gradient", "max_advantage": 5.0}, {"form": "topk", "k": 8}])
def test_a_teacher_that_lost_its_weights_is_named(tmp_path, models, loss):
    student, other = models
    lost = without_weights(other, tmp_path / "lost")
    [first, *_] = alarms(distil(tmp_path / "opd", student, lost, lost, loss))
    assert (first.rule, first.action) == ("teacher_constant", "stop")
    assert first.step <= 5


def test_one_of_two_teachers_that_loses_its_weights_at_step_3_is_named_by_the_canary(tmp_path, models, monkeypatch):
    """Relax#287: a teacher becomes uniform in the midst of training, and the loss falls on."""
    opened, open_states = [], opd_stage.open_states
    monkeypatch.setattr(opd_stage, "open_states", lambda *given: opened.append(open_states(*given)) or opened[0])

    class Loses(Recorder):
        def emit(self, step, total, metrics, phase="train"):
            super().emit(step, total, metrics, phase)
            if step == 3:
                with torch.no_grad():
                    for weight in opened[0].policy(1).parameters():  # max[domain=math] and, one model, max[domain=code]
                        weight.zero_()

    student, other = models
    found = alarms(distil(tmp_path / "opd", student, student, other), Loses())
    alarm = next(alarm for alarm in found if alarm.rule == "teacher_constant")
    assert 3 < alarm.step <= 8
    assert alarm.action == "stop"
    assert "canary" in alarm.evidence


def test_a_teacher_that_is_the_student_is_named(tmp_path, models):
    student, _ = models
    found = alarms(distil(tmp_path / "opd", student, student, student))
    assert {alarm.rule: alarm.step for alarm in found}["kl_stuck"] == 5


def test_rows_of_one_teacher_alone_are_named(tmp_path, models):
    student, other = models
    spec = distil(tmp_path / "opd", student, student, other, data={"tasks": ["math"], "efforts": ["max"]})
    assert [(alarm.rule, alarm.step) for alarm in alarms(spec)] == [("one_teacher", 5)]


def test_answers_that_are_all_cut_and_earn_all_the_same_are_named(tmp_path, models):
    rollout = ROLLOUT | {"max_completion_tokens": 1}
    spec = rlvr(tmp_path / "rlvr", models[0], steps=12, rollout=rollout, unfinished_reward=0.0)
    found = {alarm.rule: alarm.step for alarm in alarms(spec)}
    assert found == {"zero_advantage": 10, "zero_gradient": 10, "truncated": 10}  # two steps a batch


def test_the_kl_in_the_loss_is_told(tmp_path, models):
    student, other = models
    kl = {"estimator": "k3", "coef": 0.1, "placement": "loss"}
    told: dict[str, float] = {}
    for name, reference in (("same", student), ("other", other)):
        spec = rlvr(tmp_path / name, student, steps=4, kl=kl, inputs=(InputSpec("reference", "ref", str(reference)),))
        recorder = Recorder()
        run(spec, recorder)
        told[name] = recorder.events[0][1]["reference_kl"]
    assert told["same"] == 0.0
    assert told["other"] > 0.01
