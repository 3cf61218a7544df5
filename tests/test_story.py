"""What the files of a run tell of it."""

import json

import pytest
from examined import RIGHT, examined, publish

from opdctl.errors import ConfigError
from opdctl.store import Workspace
from opdctl.story import tell

SELECT = {"metric": "accuracy", "scores": {"a": 0.5, "b": 0.75}, "winner": "b"}


def test_stages_have_what_they_read_and_what_they_cost(workspace):
    story = tell(examined(workspace, "one"))
    student = next(chapter for chapter in story.chapters if chapter.name == "student")
    assert [(link.role, link.target) for link in student.links] == [("student", "sft"), ("teachers", "teacher")]
    assert student.links[1].record_id == "id-one-teacher"
    assert student.spent["cpu_seconds"] == 10


def test_what_an_unfinished_stage_is_going_to_read_comes_from_the_pipeline(workspace):
    seeds = examined(workspace, "two", seeds=(0, 1), right=lambda seed: RIGHT, unfinished=("teacher",))
    story = tell(seeds)
    by_name = {chapter.name: chapter for chapter in story.chapters}
    assert by_name["teacher[seed=1]"].record is None
    assert [link.target for link in by_name["teacher[seed=1]"].links] == ["sft[seed=1]"]


def test_what_a_reused_stage_read_is_named_as_this_run_names_it(workspace):
    made = examined(workspace, "one")
    pipeline = made.read_pipeline()
    inputs = {"student": "stage:sft[seed=0]", "teachers": [{"ref": "stage:teacher[seed=0]", "weight": 2.0}]}
    stages = {f"{name}[seed=0]": plain for name, plain in pipeline["stages"].items()}
    stages["student[seed=0]"] = stages["student[seed=0]"] | {"inputs": inputs}
    seeds = Workspace(workspace).run("two")
    seeds.write_pipeline(pipeline | {"seeds": [0], "stages": stages})
    for name in pipeline["stages"]:
        seeds.stage(f"{name}[seed=0]").reuse(made.stage(name))
    student = next(chapter for chapter in tell(seeds).chapters if chapter.name == "student[seed=0]")
    assert [(link.role, link.target, link.weight) for link in student.links] == [
        ("student", "sft[seed=0]", 1.0),
        ("teachers", "teacher[seed=0]", 2.0),
    ]


def test_gates_and_selections_say_what_they_decided(workspace):
    run = Workspace(workspace).run("r")
    gates = [
        {"metric": "score", "min": 0.9, "action": "warn"},
        {"metric": "score", "max": 0.9, "action": "stop"},
    ]
    config = {"metric": "accuracy"}
    plain = {"kind": "select", "backend": "embedded", "config": config, "gates": gates, "inputs": {"report": "stage:e"}}
    run.write_pipeline({"name": "p", "stages": {"best": plain}})
    publish(run, "best", "select", [], {"score": 0.75}, files={"selection.json": json.dumps(SELECT)})
    (chapter,) = tell(run).chapters
    assert [(found.what, found.outcome, found.passed) for found in chapter.decisions] == [
        ("gate 0.9 <= score, else warn", "score 0.75 < min 0.9", False),
        ("gate score <= 0.9, else stop", "passed", True),
        ("selection by accuracy: a 0.5, b 0.75", "takes b", True),
    ]


def test_a_run_that_has_not_started_is_refused(workspace):
    (workspace / "runs" / "empty").mkdir(parents=True)
    with pytest.raises(ConfigError, match="run empty has no stages yet"):
        tell(Workspace(workspace).run("empty"))
