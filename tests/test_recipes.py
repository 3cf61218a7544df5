"""The packaged recipes: each has its header and its claims, and can be planned; claims read finished runs."""

import importlib
import re

import pytest

from opdctl.config import load_pipeline
from opdctl.plan import make_plan
from opdctl.store import Workspace
from scripts.recipes.__main__ import recipes
from scripts.recipes.page import header

ALL = recipes()


@pytest.mark.parametrize("recipe", ALL)
def test_header_names_the_report_and_says_what_is_faithful_what_is_not_and_what_is_undisclosed(recipe):
    title, *paragraphs = header(recipe)
    assert not title.startswith(("Faithful", "Not faithful", "Undisclosed"))
    starts = ["Faithful: ", "Not faithful: ", "Undisclosed"]
    assert [next(p for p in paragraphs if p.startswith(start)) for start in starts]


@pytest.mark.parametrize("recipe", ALL)
def test_recipe_is_called_as_its_file_and_can_be_planned(workspace, recipe):
    pipeline = load_pipeline(recipe, workspace=workspace)
    assert pipeline.settings.name == recipe
    assert make_plan(pipeline, Workspace(workspace).run(recipe)).stages


@pytest.mark.parametrize("recipe", ALL)
def test_recipe_ends_in_an_evaluation_and_has_claims_about_it(workspace, recipe):
    assert "eval" in {stage.settings.kind for stage in load_pipeline(recipe, workspace=workspace).stages.values()}
    assert callable(importlib.import_module(f"scripts.recipes.{recipe}").claims)


def test_every_pipeline_that_is_no_check_of_verl_is_a_recipe(workspace):
    assert not [recipe for recipe in ALL if re.search(r"smoke", recipe)]
