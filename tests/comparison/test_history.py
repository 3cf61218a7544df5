"""Curves out of the events of attempts."""

import math
from dataclasses import replace

import pytest
from examined import examined, publish

from opdctl.backends.contract import Event
from opdctl.backends.events import EventWriter
from opdctl.comparison import Curve, curves
from opdctl.store import Workspace


def test_steps_to_a_share_of_the_last_tenth():
    curve = Curve(list(range(1, 21)), [step / 20 for step in range(1, 21)])
    assert curve.last == pytest.approx(0.975)
    # 0.95 * 0.975 = 0.926: the mean of steps 18 and 19 is 0.925, of 19 and 20 0.975
    assert curve.reaches(0.95) == 20
    assert curve.reaches(0.9) == 19


def test_nothing_is_reached_where_the_end_is_zero_or_no_number():
    assert Curve([1, 2], [0.5, 0.0]).reaches(0.95) is None
    assert Curve([1, 2], [0.5, math.nan]).reaches(0.95) is None


def test_a_later_attempt_repeats_steps_and_its_word_counts(workspace):
    run = Workspace(workspace).run("r")
    stage = run.stage("sft")
    for number, steps in enumerate([(1, 2, 3), (3, 4)]):
        writer = EventWriter(stage.new_attempt().events)
        for step in steps:
            writer.write(Event(step, 4, {"loss": float(10 * number + step)}, "train", 1.0))
    assert curves(stage)["loss"] == Curve([1, 2, 3, 4], [1.0, 2.0, 13.0, 14.0])


def test_an_attempt_after_the_checkpoint_is_not_part_of_it(workspace):
    run = examined(workspace, "one")
    stage = run.stage("sft")
    EventWriter(stage.new_attempt().events).write(Event(3, 20, {"loss": 9.0}, "train", 4e9))
    assert curves(stage)["loss"].values[2] == pytest.approx(1 / 3)


def test_curves_of_a_reused_stage_are_those_of_the_run_that_made_it(workspace):
    made = Workspace(workspace).run("made")
    publish(made, "sft", "sft", [], {})
    other = Workspace(workspace).run("other").stage("sft")
    other.reuse(made.stage("sft"))
    assert curves(other) == curves(made.stage("sft"))
    assert replace(curves(other)["loss"]).last > 0
