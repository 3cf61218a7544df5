"""The packaged recipes: each has its header and its claims and can be planned; claims read finished runs."""

import importlib

import pytest

from opdctl.config import load_pipeline
from opdctl.engine.scores import Estimate, wilson_interval
from opdctl.errors import OpdctlError
from opdctl.plan import make_plan
from opdctl.store import Workspace
from scripts.recipes import __main__ as command
from scripts.recipes import page
from scripts.recipes.claim import Claim, above, kept
from scripts.recipes.results import Report, Results, first_step

ALL = command.recipes()


@pytest.mark.parametrize("recipe", ALL)
def test_header_names_the_report_and_says_what_is_faithful_what_is_not_and_what_is_undisclosed(recipe):
    title, *paragraphs = page.header(recipe)
    assert not title.startswith(("Faithful", "Not faithful", "Undisclosed"))
    for start in ("Faithful: ", "Not faithful: ", "Undisclosed"):
        assert [paragraph for paragraph in paragraphs if paragraph.startswith(start)], start


@pytest.mark.parametrize("recipe", ALL)
def test_recipe_is_called_as_its_file_can_be_planned_and_has_claims_about_an_evaluation(workspace, recipe):
    pipeline = load_pipeline(recipe, workspace=workspace)
    assert pipeline.settings.name == recipe
    planned = make_plan(pipeline, Workspace(workspace).run(recipe))
    assert "eval" in {item.stage.settings.kind for item in planned.stages}
    assert callable(importlib.import_module(f"scripts.recipes.{recipe}").claims)


def test_recipes_on_chains_share_their_first_stages(workspace):
    """Else `make recipes` would take hours."""

    def planned(recipe):
        stages = make_plan(load_pipeline(recipe), Workspace(workspace).run("any")).stages
        return {item.fingerprint for item in stages}

    first = planned("longcat_2")
    shared = {
        recipe: len(first & planned(recipe)) for recipe in ("uni_opd", "ui_tars_2", "stability_law", "mopd_paper")
    }
    assert shared == {"uni_opd": 7, "ui_tars_2": 4, "stability_law": 2, "mopd_paper": 1}


@pytest.mark.parametrize(
    ("low", "high", "verdict"), [(0.1, 0.3, True), (-0.1, 0.3, None), (-0.3, -0.1, False), (0.0, 0.1, None)]
)
def test_a_difference_decides_a_claim_only_where_its_whole_interval_is_on_one_side(low, high, verdict):
    assert above(Estimate((low + high) / 2, low, high)) is verdict


@pytest.mark.parametrize(("low", "high", "verdict"), [(-0.04, 0.1, True), (-0.1, 0.1, None), (-0.3, -0.06, False)])
def test_nothing_is_lost_where_the_whole_interval_is_above_five_points_of_loss(low, high, verdict):
    assert kept(Estimate((low + high) / 2, low, high)) is verdict


def cell(correct: int, n: int = 100) -> dict:
    found = vars(wilson_interval(correct, n))
    return {"accuracy": found, "within_budget": None, "length_mean": 9.0, "pass_k": {"1": correct / n, "4": 1.0}}


REPORT = Report(
    {
        "cells": ["a.low", "a.max", "b.low", "b.max"],
        "models": {
            "sft": dict(zip(["a.low", "a.max", "b.low", "b.max"], map(cell, (10, 20, 30, 40)), strict=True)),
            "rl[domain=a]": dict(zip(["a.low", "a.max", "b.low", "b.max"], map(cell, (50, 60, 0, 0)), strict=True)),
            "rl[domain=b]": dict(zip(["a.low", "a.max", "b.low", "b.max"], map(cell, (0, 0, 70, 80)), strict=True)),
        },
        "normalised_score": {"mopd/accuracy": 0.5},
    }
)


def test_scores_are_plain_means_over_the_cells_asked_for():
    assert REPORT.score("sft").value == pytest.approx(0.25)
    assert REPORT.gain("rl[domain=a]", "sft", ["a.low", "a.max"]).value == pytest.approx(0.4)
    routed = {"a.low": "rl[domain=a]", "a.max": "rl[domain=a]", "b.low": "rl[domain=b]", "b.max": "rl[domain=b]"}
    assert REPORT.teachers("sft", routed).value == pytest.approx(0.4)
    assert REPORT.domains({"a": "rl[domain=a]", "b": "rl[domain=b]"}) == {
        "a": {"low": 0.5, "max": 0.6},
        "b": {"low": 0.7, "max": 0.8},
    }


@pytest.mark.parametrize(("bound", "step"), [(0.5, 30), (0.4, 20), (0.9, None)])
def test_a_level_is_reached_where_the_mean_of_a_whole_window_is_as_high(bound, step):
    assert first_step([(10, 0.2), (20, 0.6), (30, 0.4), (40, 0.8)], bound, 2) == step


def test_a_model_that_was_not_examined_is_named_with_those_that_were():
    with pytest.raises(OpdctlError, match=r"no model rl: it has .*'rl\[domain=a\]'"):
        REPORT.score("rl")


def test_page_tells_verdicts_failures_and_the_whole_cost(tmp_path):
    claims = [Claim("said | so", "measured", True), Claim("s", "m", False), Claim("s", "m", None)]
    sections = [page.Section("ui_tars_2", claims, cpu_s=90.0), page.Section("longcat_2", failure="why")]
    page.write(tmp_path / "page.md", sections, scale="laptop")
    text = (tmp_path / "page.md").read_text()
    assert "| [ui_tars_2](#ui_tars_2) | UI-TARS-2 (arXiv 2509.02544): one SFT checkpoint" in text
    assert "further training. | 1 | 1 | 1 | 1.5 |" in text
    assert "| said \\| so | measured | yes |" in text
    assert "The run failed: why" in text
    assert "1.5 CPU minutes in the stages of all recipes" in text


def test_a_recipe_is_carried_out_and_written_down_and_a_second_call_reuses_it(workspace, capfd, monkeypatch):
    arguments = ["recipes", "longcat_flash_thinking", "--scale", "smoke", "--workspace", ".", "--output", "page.md"]
    monkeypatch.setattr("sys.argv", arguments)
    assert command.main() == 0
    text = (workspace / "page.md").read_text()
    assert "| The fused model is about as good as the best expert everywhere" in text
    run = Results(workspace, "longcat_flash_thinking")
    assert run.own_cost() == pytest.approx(sum(run.cost(stage) for stage in run.stages))
    assert [step for step, _ in run.curve("general_rl", "reward")] == [2, 4]
    capfd.readouterr()
    assert command.main() == 0
    assert "reused" in capfd.readouterr().out
    assert (workspace / "page.md").read_text() == text
