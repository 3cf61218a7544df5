"""A teacher with the student's weights is in order where stages made both of one model and learned nothing."""

import pytest
from gate.models import copy, distillation, publish, save

from opdctl.gate import check_files, forget
from opdctl.settings import GateSettings
from opdctl.store import Parent, Workspace
from opdctl.verdicts import Outcome


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
    assert "nothing was learned" in found.evidence
    assert "learning rate" in found.remedy


def test_where_stages_may_learn_nothing_it_is_in_order(tmp_path, trained):
    found = same_model(tmp_path, *trained, difficulty=1.0)
    assert (found.outcome, found.remedy) == (Outcome.GO, "")
    assert "nothing was learned" in found.evidence


def test_a_copy_of_the_student_with_its_record_is_refused_all_the_same(tmp_path, trained):
    twin = copy(trained[0].resolve(), "twin")
    assert same_model(tmp_path, trained[0], twin, difficulty=1.0).outcome is Outcome.REFUSE


def test_two_that_learned_nothing_from_one_checkpoint_are_in_order_too(tmp_path, trained):
    other = publish(Workspace(tmp_path), tmp_path / "weights", "rl2", [Parent("init", "sft", "stage:sft", "id-sft")])
    assert same_model(tmp_path, trained[1], other, difficulty=1.0).outcome is Outcome.GO
    assert same_model(tmp_path, trained[1], other).outcome is Outcome.WARN


def test_two_that_learned_the_same_are_one_model_by_two_names(tmp_path):
    workspace, parents = Workspace(tmp_path), [Parent("init", "sft", "stage:sft", "id-sft")]
    publish(workspace, save(tmp_path / "start", seed=1), "sft", [Parent("init", "model:", "model:")])
    weights = save(tmp_path / "weights")
    models = [publish(workspace, weights, name, parents) for name in ("rl", "again")]
    assert same_model(tmp_path, *models, difficulty=1.0).outcome is Outcome.REFUSE


def test_a_student_that_was_selected_as_the_best_of_a_domain_teaches_it_beside_others(tmp_path, trained):
    weights = tmp_path / "weights"
    best = publish(Workspace(tmp_path), weights, "best", [Parent("models", "sft", "stage:sft", "id-sft")], "select")
    other = save(tmp_path / "other", noise=0.1)
    forget()
    found = check_files(distillation(tmp_path, trained[0], best, other), GateSettings())
    assert [one.outcome for one in found if one.check == "same_model"] == [Outcome.GO, Outcome.GO]
    assert same_model(tmp_path, trained[0], best).outcome is not Outcome.GO
