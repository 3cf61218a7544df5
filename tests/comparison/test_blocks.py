"""Students of runs held against each other: numbers by hand, seeds, and what is said where runs do not fit together."""

import math
import shutil

import pytest
from examined import RIGHT, examined

from opdctl.comparison import Value, compare
from opdctl.engine.scores import wilson_interval

SECOND = {**RIGHT, "student": (60, 50, 70)}
T1 = 12.7062047  # Student's t of 95 %, one degree of freedom


def student(comparison, block=0, label="student"):
    return next(found for found in comparison.blocks[block].students if found.label == label)


def test_cells_of_one_seed_have_the_intervals_of_the_evaluation(workspace):
    found = compare([examined(workspace, "one")])
    row = student(found).scores["accuracy"].rows[0]
    wilson = wilson_interval(70, 100)
    assert (row.cell, row.before.value, row.teacher.value, row.teacher_label) == ("a.low", 0.4, 0.8, "teacher")
    assert (row.after.value, row.after.low, row.after.high, row.after.seeds) == (0.7, wilson.low, wilson.high, 1)
    assert row.gain.value == pytest.approx(0.3)
    assert row.delta.value == pytest.approx(-0.1)
    assert row.delta.low < row.delta.value < row.delta.high
    assert "one seed (0)" in found.notes[0]
    assert "binomial" in found.notes[0]


def test_recovery_and_normalised_score_by_hand(workspace):
    scores = student(compare([examined(workspace, "one")])).scores["accuracy"]
    assert [row.recovery.value for row in scores.rows] == pytest.approx([0.75, 1.0, 0.75])
    assert scores.normalised.value == pytest.approx(((65 - 30) / (70 - 30) + 0.75) / 2)
    assert scores.mean.recovery.value == pytest.approx((70 - 110 / 3) / (230 / 3 - 110 / 3))
    assert scores.normalised.low is None


def test_recovery_is_absent_where_the_teacher_scores_as_before(workspace):
    scores = student(compare([examined(workspace, "one", right={**RIGHT, "teacher": (40, 60, 90)})])).scores["accuracy"]
    assert scores.rows[0].recovery is None
    assert scores.rows[1].recovery is not None


@pytest.mark.parametrize("axis", [False, True])
def test_intervals_over_seeds_are_students_and_pair_by_seed(workspace, axis):
    if axis:
        runs = [examined(workspace, "all", seeds=(0, 1), right=lambda seed: SECOND if seed else RIGHT)]
    else:
        runs = [examined(workspace, "one"), examined(workspace, "two", seed=1, right=SECOND)]
    found = compare(runs)
    (block,) = found.blocks
    row = student(found).scores["accuracy"].rows[0]
    assert (list(block.seeds), [s.label for s in block.students]) == ([0, 1], ["student"])
    assert row.recovery.value == pytest.approx((0.75 + 0.5) / 2)
    assert row.recovery.high - row.recovery.value == pytest.approx(T1 * 0.25 / math.sqrt(2) / math.sqrt(2))
    assert row.delta.value == pytest.approx(-0.15)
    assert row.teacher.high == row.teacher.low == pytest.approx(0.8)
    assert row.after.seeds == 2
    assert "Student's over 2 seeds (0, 1)" in " ".join(found.notes)


def test_the_same_seed_twice_is_two_blocks(workspace):
    found = compare([examined(workspace, "one"), examined(workspace, "again", right=SECOND)])
    assert [block.name for block in found.blocks] == ["one", "again"]


def test_an_evaluation_that_a_run_of_more_seeds_reuses_is_shown_once(workspace):
    one = examined(workspace, "one")
    seeds = examined(workspace, "all", seeds=(0, 1), right=lambda seed: SECOND if seed else RIGHT)
    seeds.stage("eval[seed=0]").reuse(one.stage("eval"))
    found = compare([one, seeds])
    assert [list(block.seeds) for block in found.blocks] == [[0, 1]]
    assert "run all reuses the evaluation of run one, seed 0: shown once" in found.notes


def test_runs_that_differ_in_more_than_the_seed_are_two_blocks(workspace):
    found = compare([examined(workspace, "one"), examined(workspace, "two", seed=1, config={"seed": 98})])
    assert len(found.blocks) == 2
    assert "run two (eval) and run one (eval) were evaluated with different settings: config.seed" in found.notes


def test_different_cells_are_named(workspace):
    found = compare([examined(workspace, "one"), examined(workspace, "two", cells=("a.low", "a.high", "c.low"))])
    (note,) = (note for note in found.notes if "different cells" in note)
    assert "only one has b.low; only two has c.low" in note


def test_a_run_without_a_finished_evaluation_is_said_and_the_others_are_compared(workspace):
    found = compare([examined(workspace, "one"), examined(workspace, "two", unfinished=("eval",))])
    assert [block.name for block in found.blocks] == ["one"]
    assert "run two: no eval stage has finished" in found.notes[0]


@pytest.mark.parametrize("text", ["x", '{"cells": ["z"], "models": {"a": {}}, "roles": {}, "fusion": []}'])
@pytest.mark.parametrize("size", ["same", "other"])
def test_a_damaged_report_is_said(workspace, text, size):
    run = examined(workspace, "one")
    report = run.stage("eval").checkpoint / "report.json"
    report.write_text(text.ljust(report.stat().st_size) if size == "same" else text)
    found = compare([run])
    assert found.blocks == []
    assert found.notes[0].startswith("run one: eval is left out, for it is damaged: ")
    assert found.notes[0].endswith("; run it again: --rerun 'eval'")


def test_students_stand_side_by_side_in_the_order_of_the_evaluation(workspace):
    right = {**RIGHT, "mopd[loss=topk]": (75, 60, 80), "average": (50, 30, 60)}
    (block,) = compare([examined(workspace, "one", right=right)]).blocks
    assert [found.label for found in block.students] == ["student", "mopd[loss=topk]", "average"]


def test_costs_alone_and_with_ancestors_each_counted_once(workspace):
    cost = student(compare([examined(workspace, "one")])).cost
    assert (cost["cpu_seconds"].value, cost["sampled_tokens"].value, cost["steps"].value) == (10, 1000, 20)
    assert (cost["all_cpu_seconds"].value, cost["all_sampled_tokens"].value) == (35, 4000)
    assert cost["all_seconds"].value == 36
    assert cost["gpu_seconds"] is None


def test_a_cost_that_an_ancestor_does_not_tell_is_absent_and_not_a_smaller_sum(workspace):
    cost = student(compare([examined(workspace, "one", metrics={"teacher": {"reward": 0.9}})])).cost
    assert cost["all_cpu_seconds"] is cost["all_sampled_tokens"] is None
    assert cost["cpu_seconds"].value == 10


def test_a_cost_whose_ancestor_is_gone_is_absent(workspace):
    run = examined(workspace, "one")
    shutil.rmtree(run.stage("teacher").path)
    cost = student(compare([run])).cost
    assert cost["all_seconds"] is cost["all_cpu_seconds"] is cost["all_sampled_tokens"] is None
    assert cost["seconds"].value == 12


def test_health_is_the_first_and_the_last_tenth(workspace):
    health = student(compare([examined(workspace, "one")])).health["reverse_kl"]
    assert health.first.value == pytest.approx((1 + 1 / 2) / 2)
    assert health.last.value == pytest.approx((1 / 19 + 1 / 20) / 2)
    assert list(health.curves[0].steps) == list(range(1, 21))


def test_models_without_roles_are_compared_by_what_they_score(workspace, tmp_path):
    import json

    from examined import publish, report_of

    from opdctl.store import Parent, Workspace

    run = Workspace(workspace).run("plain")
    run.write_pipeline({"name": "plain", "seed": 0, "stages": {"m": {"kind": "sft"}, "eval": {"kind": "eval"}}})
    made = publish(run, "m", "sft", [], {"cpu_seconds": 1.0})
    report = json.dumps(report_of({"m": (10, 20, 30)}, {"m": "models"}))
    publish(run, "eval", "eval", [Parent("models", "m", "stage:m", made.id)], {}, files={"report.json": report})
    row = student(compare([run]), label="m").scores["accuracy"].mean
    assert row.after.value == pytest.approx(0.2)
    assert row.before is row.teacher is row.delta is row.recovery is None


@pytest.mark.parametrize(
    ("low", "high", "sign"), [(0.1, 0.3, 1), (-0.3, -0.1, -1), (-0.1, 0.3, 0), (0.2, 0.2, 0), (None, None, 0)]
)
def test_a_difference_counts_where_its_interval_excludes_zero(low, high, sign):
    assert Value(0.2, low, high, 2).sign == sign
