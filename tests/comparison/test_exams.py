"""What eval stages found."""

import json

from examined import publish, report_of

from opdctl.comparison.exams import exams_of
from opdctl.store import Parent, Workspace


def test_several_seeds_of_a_model_in_one_evaluation_are_a_student_each(workspace):
    run, names = Workspace(workspace).run("r"), ("m[loss=a,seed=0]", "m[loss=a,seed=1]")
    run.write_pipeline({"seed": 0, "stages": {"eval": {"kind": "eval"}}})
    parents = [Parent("models", name, f"stage:{name}", publish(run, name, "sft", [], {}).id) for name in names]
    report = report_of({names[0]: (10, 20, 30), names[1]: (40, 50, 60)}, dict.fromkeys(names, "models"))
    publish(run, "eval", "eval", parents, {}, files={"report.json": json.dumps(report)})
    (exam,) = exams_of(run, [])
    assert exam.students() == {name: name for name in names}
