import pytest
from recipes import recipe

from opdctl.identity import fingerprint, identity
from opdctl.settings import FileTask


def _print(changes=None, stage="max[domain=math]", data=None, revision="1", inputs=None):
    stage = recipe(changes).stages[stage]
    read = {given.ref: "same" for given in stage.inputs} | (inputs or {})
    return fingerprint(identity(stage, read, data or {}, revision))


@pytest.mark.parametrize(
    "changes",
    [
        {"stages.max.config.train.save_every": 4},
        {"stages.max.resources": {"micro_batch_tokens": 8}},
        {"machine": {"cpus": 64}},
        {"stages.max.labels.colour": "red"},
        {"name": "other"},
        {"tracking": {"enabled": False}},
        {"tasks.code.links": 12},
        {"stages.max.config.surrogate": {"form": "clip", "low": 0.2}},  # the default, written out
        {"stages.max.config.train.optimizer.lr": 0.001},
    ],
)
def test_identity_leaves_out_what_does_not_change_the_result(changes):
    assert _print(changes) == _print()


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 1},
        {"stages.max.config.train.optimizer.lr": 0.002},
        {"stages.max.config.surrogate": {"form": "clip", "low": 0.1}},
        {"tasks.math.links": 12},
        {"efforts.levels.max": "<most>"},
        {"efforts.by": "system_prompt"},
    ],
)
def test_identity_holds_what_changes_the_result(changes):
    assert _print(changes) != _print()


def _judged(**endpoint):
    judge = {"tasks": ["math"], "mode": "rubric", "by": "endpoint", "template": "{completion}"}
    judge |= {"verdicts": {"good": 1.0, "bad": 0.0}, "max_tokens": 3}
    there = {"url": "http://127.0.0.1:8000/v1", "model": "judge", **endpoint}
    return _print({"stages.eval.config.grader": judge | {"endpoint": there}}, stage="eval")


def test_patience_with_a_server_is_no_other_stage():
    """A stage that a slow server failed goes on where it was, with a longer time limit."""
    assert _judged(timeout_s=600, attempts=9, concurrent=1, key_variable="KEY") == _judged()
    assert len({_print(stage="eval"), _judged(), _judged(model="other"), _judged(url="http://127.0.0.1:8001/v1")}) == 4


def test_identity_holds_inputs_and_the_revision_of_the_backend():
    assert len({_print(), _print(revision="2"), _print(inputs={"stage:sft": "another"})}) == 3


def test_identity_of_a_student_holds_routes_and_weights_of_its_teachers():
    weighed = [{"ref": "stage:max[domain=math]", "weight": 2.0}, "stage:max[domain=code]"]
    renamed = [{"ref": "stage:max[domain=math]", "label": "A"}, "stage:max[domain=code]"]
    key = "stages.fuse.inputs.teachers"
    assert _print({key: weighed}, "fuse") != _print(stage="fuse")
    assert _print({key: renamed}, "fuse") == _print(stage="fuse")


def test_identity_of_a_file_task_is_its_content_and_not_its_path():
    def task(path):
        return {"tasks.math": FileTask(path=path, prompt="p", answer="a", verifier="exact").model_dump()}

    here, there = task("a.jsonl"), task("b/c.jsonl")
    assert _print(here, data={"math": "x"}) == _print(there, data={"math": "x"})
    assert _print(here, data={"math": "x"}) != _print(here, data={"math": "y"})
