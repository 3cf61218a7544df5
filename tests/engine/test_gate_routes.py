"""Exchanged teachers are looked for only among those that were trained from the student as it stands."""

import pytest
from gate.models import distillation, publish, save

from opdctl.backends.contract import InputSpec
from opdctl.engine.gate import may_begin_at
from opdctl.store import Parent, Workspace


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """sft -> specialist; sft -> warmed, on answers of the specialist; and a folder that nothing tells of."""
    folder = tmp_path_factory.mktemp("made")
    weights, workspace = save(folder / "weights"), Workspace(folder)
    parents = {
        "sft": [Parent("init", "model:", "model:")],
        "specialist": [Parent("init", "sft", "stage:sft", "id-sft")],
        "warmed": [Parent("init", "sft", "stage:sft", "id-sft"), Parent("data", "answers", "stage:answers", "id-a")],
    }
    for name, of in parents.items():
        publish(workspace, weights, name, of)
    return folder


def given(made, name):
    known = made / "runs/r/stages" / name / "checkpoint"
    return InputSpec(name, name, str(known if known.exists() else made / "weights"))


@pytest.mark.parametrize(
    ("student", "teacher", "looked_at"),
    [
        ("sft", "specialist", True),
        ("warmed", "specialist", False),  # near to whose answers it has learned
        ("specialist", "sft", False),  # taught by what it was
        ("sft", "outside", True),  # nobody knows
        ("outside", "specialist", False),
    ],
)
def test_a_teacher_counts_that_may_have_begun_as_the_student(made, student, teacher, looked_at):
    spec = distillation(made, made / "weights", made / "weights")
    assert may_begin_at(spec, given(made, student), given(made, teacher)) is looked_at
