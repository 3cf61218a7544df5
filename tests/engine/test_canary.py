"""The probe that is repeated while a stage trains."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine import stages
from engine.peaked import ROUTES, model, nudged

from opdctl.backends.contract import Stopped
from opdctl.engine import canary
from opdctl.engine.teacher_states import CachedStates, DirectStates
from opdctl.settings import NewModel

VOCABULARY = len(NewModel.model_validate(stages.MODEL).tokenizer.words)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    return (
        model(folder / "student"),
        model(folder / "one", change=nudged),
        model(folder / "two", change=lambda policy: (nudged(policy), nudged(policy))),
    )


def stage(folder: Path, made, states: str):
    student, one, two = made
    teachers = dict.fromkeys(ROUTES, one) | {ROUTES[-1]: two}
    spec = stages.opd(folder, student, teachers, {"form": "full_vocab"}, resources={"teacher_states": states})
    return replace(spec, config=spec.config | {"train": stages.train(6, 8)})


@pytest.mark.parametrize("states", ["direct", "cached"])
def test_a_frozen_teacher_says_the_same_all_along(tmp_path, made, states):
    record = stages.Recorder()
    stages.run(stage(tmp_path, made, states), record)
    told = {step: metrics for step, metrics in record.events if "teacher_canary" in metrics}
    assert list(told) == [1, 5]  # as many steps were done
    assert all(metrics["teacher_canary"] == 0.0 for metrics in told.values())
    assert all(metrics["teacher_off_uniform"] > 0.5 for metrics in told.values())
    assert not any(name.startswith("teacher_canary/") for metrics in told.values() for name in metrics)


@pytest.mark.parametrize(("states", "kind"), [("direct", DirectStates), ("cached", CachedStates)])
def test_a_teacher_that_turns_uniform_is_named_within_five_steps(tmp_path, made, monkeypatch, states, kind):
    """Case 24: its weights are lost at the third step."""
    steps, begin = [0], kind.begin

    def losing(self, *args):
        begin(self, *args)
        steps[0] += 1
        pool = self._pool if kind is DirectStates else self._heads
        if steps[0] == 3:
            load = pool._load

            def lost(number):
                held = load(number)
                if number == len(ROUTES) - 1:
                    (held.head() if kind is DirectStates else held).data.zero_()
                return held

            pool._load = lost
            pool._held.clear()

    monkeypatch.setattr(kind, "begin", losing)
    record = stages.Recorder()
    stages.run(stage(tmp_path, made, states), record)
    first = next(step for step, metrics in record.events if metrics.get("teacher_canary", 0.0) > 0.05)
    metrics = dict(record.events)[first]
    assert first <= 3 + 5
    assert metrics["teacher_off_uniform"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["teacher_canary/max[domain=code]"] == metrics["teacher_canary"]
    assert sum(name.startswith("teacher_canary/") for name in metrics) == 1


def test_a_resumed_stage_compares_with_the_first_start(tmp_path, made):
    whole, cut = stage(tmp_path / "whole", made, "direct"), stage(tmp_path / "cut", made, "direct")
    undisturbed, before, after = stages.Recorder(), stages.Recorder(4), stages.Recorder()
    stages.run(whole, undisturbed)
    with pytest.raises(Stopped):
        stages.run(cut, before)
    stages.run(cut, after)
    assert before.events + after.events == undisturbed.events


def test_no_number_is_an_alarm():
    assert canary._distance(torch.tensor([math.nan, -1.0]), torch.tensor([-1.0, -1.0])) == math.inf
    assert canary._distance(torch.full((3,), -math.log(VOCABULARY)), torch.tensor(-math.log(VOCABULARY))) < 1e-6
