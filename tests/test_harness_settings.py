"""An eval stage by lm-eval in a pipeline: what is refused before launch, and what makes it another stage."""

import pytest
import toy

from opdctl.backends import embedded
from opdctl.errors import ConfigError
from opdctl.launch import Launcher
from opdctl.plan import make_plan
from opdctl.store import Workspace


def exam(backend="embedded", inputs=None, **config):
    settings = {"harness": "lm_eval", "tasks": ["gsm8k"], **config}
    return {"kind": "eval", "backend": backend, "inputs": inputs or {"models": ["stage:sft"]}, "config": settings}


def planned(workspace, evaluation, **more):
    pipeline = toy.pipeline({"sft": toy.sft(), "eval": evaluation, **more}, folder=workspace)
    return make_plan(pipeline, Workspace(workspace).run("r"))


def test_task_files_and_their_data_are_part_of_what_the_stage_is(workspace):
    (workspace / "tasks").mkdir()
    (workspace / "tasks" / "a.yaml").write_text("task: a")
    before = planned(workspace, exam(include_path="tasks")).stages[1]
    (workspace / "tasks").rename(workspace / "elsewhere")
    assert planned(workspace, exam(include_path="elsewhere")).stages[1].fingerprint == before.fingerprint
    (workspace / "elsewhere" / "rows.jsonl").write_text("{}")
    assert planned(workspace, exam(include_path="elsewhere")).stages[1].fingerprint != before.fingerprint
    assert before.identity["config"]["lm_eval"]


def test_our_own_harness_can_be_named_and_changes_nothing(workspace):
    own = toy.evaluation("stage:sft")
    named = own | {"config": own["config"] | {"harness": "opdctl"}}
    assert planned(workspace, named).stages[1].fingerprint == planned(workspace, own).stages[1].fingerprint


@pytest.mark.parametrize(
    ("evaluation", "told"),
    [
        (exam(backend="vllm"), "stages.eval.backend: vllm, and lm-eval loads models itself"),
        (exam(harness="lm-eval"), "stages.eval.config.harness: 'lm-eval' is not known (did you mean 'lm_eval'?"),
        (exam(rollout={}), "stages.eval.config.rollout: unknown key"),
        (exam(inputs={"grader": "model:"}), "stages.eval.inputs.grader: would not be read: config.harness is lm_eval"),
        (exam(inputs={"budget": "model:"}), "stages.eval.inputs: names no model; give models"),
    ],
)
def test_what_does_not_fit_is_told_by_its_key(workspace, evaluation, told):
    with pytest.raises(ConfigError) as caught:
        planned(workspace, evaluation)
    assert any(line.startswith(told) for line in caught.value.problems), caught.value.problems


def test_its_report_can_choose_a_model(workspace):
    best = {"kind": "select", "backend": "embedded", "inputs": {"report": "stage:eval", "models": ["stage:sft"]}}
    assert planned(workspace, exam(), best=best | {"config": {"metric": "accuracy", "cells": ["mmlu_law"]}})
    with pytest.raises(ConfigError, match="counts none: its config.harness is lm_eval"):
        planned(workspace, exam(), best=best | {"config": {"metric": "within_budget"}})


def test_without_lm_eval_the_extra_is_named_before_anything_starts(workspace, monkeypatch):
    plan = planned(workspace, exam())
    launcher = Launcher(plan, plan.stages, lambda text: None)
    assert launcher.check() == []
    real = embedded.find_spec
    monkeypatch.setattr(embedded, "find_spec", lambda name: None if name == "lm_eval" else real(name))
    assert launcher.check() == [
        "stages.eval: config.harness: lm_eval, and the Python package lm_eval is missing: pip install 'opdctl[tasks]'"
    ]
