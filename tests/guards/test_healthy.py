"""Healthy pipelines raise no alarm and no warning: the packaged recipes as files, some of them really run."""

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
SMALL = {  # what keeps a run short; all else is as packaged
    "kimi_k3": ["axes.domain=[general]", "axes.loss=[full_vocab]"],
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_files_of_a_recipe_pass_the_gate_without_a_word(recipe, workspace):
    pipeline = load_pipeline(recipe, ["scale=smoke"], workspace=workspace)
    plan = make_plan(pipeline, Workspace(workspace).run(recipe))
    assert check_data(pipeline, [item.stage for item in plan.stages]) == []
    judged = Launcher(plan, plan.stages, print, fetch=False).judge_files()
    told = [(stage, verdict) for stage, verdicts in judged.items() for verdict in verdicts if verdict.outcome != "go"]
    assert told == []
    assert judged


@pytest.mark.parametrize("recipe", SMALL)
def test_a_recipe_runs_under_gate_and_watchdog_without_a_warning(recipe, workspace):
    overrides = ["scale=smoke", "scale.eval.prompts=2", "tracking.enabled=false", *SMALL[recipe]]
    plan = make_plan(load_pipeline(recipe, overrides, workspace=workspace), Workspace(workspace).run(recipe))
    notes = toy.Notes()
    outcome = execute(plan, reporter=notes)
    assert outcome.failed == {}
    assert [text for (text,) in notes.of("message") if "gate:" in text or "watchdog:" in text] == []
    assert not list(workspace.glob("runs/*/stages/**/alarms.jsonl"))
    assert list(workspace.glob("runs/*/stages/**/gate.json"))
