"""verl's own classes take what every packaged recipe would give them on GPUs."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
from engine.stages import ROOT

from opdctl.backends.verl import schema
from opdctl.config import builtin_folder, load_pipeline
from opdctl.errors import ConfigError
from opdctl.launch import Launcher
from opdctl.plan import make_plan
from opdctl.store import Workspace

PYTHON = Path(os.environ.get("OPDCTL_VERL_PYTHON", ROOT / ".venv-verl/bin/python"))
RECIPES = sorted(path.stem for path in (builtin_folder() / "pipelines").glob("*.yaml"))


def specs(workspace, recipe):
    """Of the stages that verl trains; none where all that refuses the recipe is what only the embedded engine has."""
    overrides = ["scale=h200x8", "model=qwen3_8b", f"workers.verl.python={PYTHON}"]
    overrides += ["machine.gpus=16"]  # Keye-VL's thirteen teachers are served beside the student
    try:
        pipeline = load_pipeline(recipe, overrides, workspace=workspace)
    except ConfigError as refusal:
        if any("backend: embedded" not in problem for problem in refusal.problems):
            raise
        return []
    plan = make_plan(pipeline, Workspace(workspace).run(recipe))
    launcher = Launcher(plan, plan.stages, lambda text: None, fetch=False)
    trained = [item for item in plan.stages if item.stage.settings.backend == "verl"]
    drafts = [launcher.spec(item, range(item.stage.settings.resources.gpus), None) for item in trained]
    return [replace(draft, stage=f"{recipe}: {draft.stage}") for draft in drafts]


@pytest.mark.verl
def test_verl_takes_the_stages_of_every_recipe(workspace):
    if not PYTHON.exists():
        pytest.skip(f"no {PYTHON}: make verl-env")
    asked = [spec for recipe in RECIPES for spec in specs(workspace, recipe)]
    assert len({spec.stage.partition(":")[0] for spec in asked}) >= 8
    assert {stage: lines for stage, lines in schema.check(asked).items() if lines} == {}
