"""Healthy pipelines raise no alarm and no warning: packaged recipes as files and really run, all by `make recipe`."""

import pytest
import toy

from opdctl.config import load_pipeline
from opdctl.launch import Launcher
from opdctl.plan import make_plan
from opdctl.preflight import check_data
from opdctl.runner import execute
from opdctl.store import Workspace
from scripts.recipes import __main__ as command

RECIPES = command.recipes()
FOREIGN = {  # a teacher that was made from nothing, as the student was: the gate is right to say so
    "qwen3_small": {"origin", "topk_overlap"},
    "rethinking_opd": {"origin"},
    "stability_law": {"origin"},
}
QUICK = ["axes.domain=[general]", "axes.loss=[full_vocab]", "scale.eval.prompts=2"]  # what keeps a run of kimi_k3 short


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_files_of_a_recipe_pass_the_gate_without_a_word(recipe, workspace):
    pipeline = load_pipeline(recipe, ["scale=smoke"], workspace=workspace)
    plan = make_plan(pipeline, Workspace(workspace).run(recipe))
    assert check_data(pipeline, [item.stage for item in plan.stages]) == []
    judged = Launcher(plan, plan.stages, print, fetch=False).judge_files()
    told = [(stage, verdict) for stage, verdicts in judged.items() for verdict in verdicts if verdict.outcome != "go"]
    assert told == []
    assert judged


@pytest.mark.parametrize(
    ("recipe", "overrides"),
    [
        pytest.param("kimi_k3", QUICK, id="kimi_k3-quick"),
        *(pytest.param(recipe, [], id=recipe, marks=pytest.mark.recipe) for recipe in RECIPES),
    ],
)
def test_a_recipe_runs_under_gate_and_watchdog_without_a_warning(recipe, overrides, workspace):
    pipeline = load_pipeline(recipe, ["scale=smoke", "tracking.enabled=false", *overrides], workspace=workspace)
    notes = toy.Notes()
    outcome = execute(make_plan(pipeline, Workspace(workspace).run(recipe)), reporter=notes)
    assert (outcome.failed, outcome.not_run) == ({}, {})
    told = [text for (text,) in notes.of("message") if "gate:" in text or "watchdog:" in text]
    assert [text for text in told if not any(f"gate: {check}, " in text for check in FOREIGN.get(recipe, ()))] == []
    assert not list(workspace.glob("runs/*/stages/**/alarms.jsonl"))
    assert list(workspace.glob("runs/*/stages/**/gate.json"))
