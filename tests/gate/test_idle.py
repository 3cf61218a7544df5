"""A teacher that some stage made from the student, and that learned nothing, is no mistake in a path."""

import pytest
from checkpoints import record
from gate.models import copy, distillation, save

from opdctl.gate import check_files, forget
from opdctl.settings import GateSettings
from opdctl.store import Parent, Workspace
from opdctl.verdicts import Outcome


def publish(workspace, folder, name, parents):
    stage = workspace.run("r").stage(name)
    made = record(f"id-{name}", stage=name, run="r", parents=(), identity={"seed": 0})
    stage.publish(copy(folder, f"{name}-output"), made.__class__(**{**made.__dict__, "parents": parents}))
    return stage.checkpoint


@pytest.fixture
def trained(tmp_path):
    """(student, teacher): two checkpoints of equal weights, the second trained from the first."""
    weights, workspace = save(tmp_path / "weights"), Workspace(tmp_path)
    student = publish(workspace, weights, "sft", [Parent("init", "model:", "model:")])
    return student, publish(workspace, weights, "rl", [Parent("init", "sft", "stage:sft", "id-sft")])


def same_model(folder, *models, **settings):
    forget()
    found = check_files(distillation(folder, *models), GateSettings(**settings))
    [one] = [one for one in found if one.check == "same_model"]
    return one


def test_a_stage_that_changed_nothing_is_warned_of_with_what_to_look_at(tmp_path, trained):
    found = same_model(tmp_path, *trained)
    assert found.outcome is Outcome.WARN
    assert "learned nothing" in found.evidence
    assert "learning rate" in found.remedy


def test_where_stages_may_learn_nothing_it_is_in_order(tmp_path, trained):
    found = same_model(tmp_path, *trained, difficulty=1.0)
    assert (found.outcome, found.remedy) == (Outcome.GO, "")
    assert "learned nothing" in found.evidence


def test_a_copy_of_the_student_with_its_record_is_refused_all_the_same(tmp_path, trained):
    twin = copy(trained[0].resolve(), "twin")
    assert same_model(tmp_path, trained[0], twin, difficulty=1.0).outcome is Outcome.REFUSE
