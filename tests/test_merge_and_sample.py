"""Merge, sample and select as stages of a pipeline, on the embedded engine: planned, run, reused, recorded."""

import json
from pathlib import Path

import pytest
from engine.stages import EFFORTS, MODEL, TASKS
from safetensors.torch import load_file

from opdctl.cli.inspect import stage_lines
from opdctl.console import plan as shown
from opdctl.lineage import trace
from opdctl.pipeline import expand
from opdctl.plan import Decision, make_plan
from opdctl.runner import Silent, execute
from opdctl.store import Workspace

DATA = {"tasks": ["math", "code"], "efforts": ["low", "max"]}
ROLLOUT = {"prompts": 6, "group_size": 2, "max_prompt_tokens": 10, "max_completion_tokens": 6}


def stage(kind, inputs, **config):
    return {"kind": kind, "backend": "embedded", "inputs": inputs, "config": config}


def sft(init, steps=12, seed=0, *, lr=1e-2, **inputs):
    train = {"max_steps": steps, "global_batch_size": 16, "save_every": 100, "optimizer": {"lr": lr}}
    return stage("sft", {"init": init, **inputs}, data=DATA, train=train) | {"seed": seed}


def pipeline(folder, weights=(0.5, 0.5), keep="all", **choice):
    choice = choice or {"metric": "accuracy", "cells": ["math.max"]}
    models = [{"ref": f"stage:{name}", "weight": weight} for name, weight in zip("ab", weights, strict=True)]
    stages = {
        "base": sft("model:", 30),
        "a": sft("stage:base", seed=1),
        "b": sft("stage:base", seed=2),
        "merged": stage("merge", {"models": models}, merge={"method": "convex"}, precision="float32"),
        "drawn": stage("sample", {"model": "stage:merged"}, data=DATA, rollout=ROLLOUT, keep=keep, save_every=4),
        "student": sft("stage:base", 4, data="stage:drawn"),
        "eval": stage("eval", {"models": ["stage:merged", "stage:student"]}, data=DATA, rollout=ROLLOUT),
        "best": stage("select", {"report": "stage:eval", "models": ["stage:merged", "stage:student"]}, **choice),
        "further": sft("stage:best", 2),
    }
    tree = {
        "name": "toy",
        "model": MODEL,
        "tasks": TASKS,
        "efforts": EFFORTS,
        "machine": {"slots": 2, "cpus": 2},
        "tracking": {"enabled": False},
        "stages": stages,
    }
    return expand(tree, folder=folder)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("workspace")
    directory = Workspace(folder).run("r")
    outcome = execute(make_plan(pipeline(folder), directory), reporter=Silent())
    assert outcome.failed == {}
    return directory


def test_the_merge_is_the_convex_sum_of_what_the_stages_published(run):
    first, second, merged = (load_file(run.stage(n).checkpoint / "model.safetensors") for n in ("a", "b", "merged"))
    for name, tensor in merged.items():
        assert ((first[name] + second[name]) / 2 - tensor).abs().max() < 1e-6


def test_the_eval_has_scores_of_the_merged_model_and_of_the_student(run):
    report = json.loads((run.stage("eval").checkpoint / "report.json").read_text())
    assert report["models"].keys() == {"merged", "student"}


def test_lineage_has_all_parents(run):
    nodes = trace(run.workspace, [run.stage("student")])
    by_title = {node.title: node for node in nodes.values()}
    assert {edge.label for edge in by_title["merged"].parents} == {"a", "b"}
    assert {(edge.role, edge.label) for edge in by_title["student"].parents} == {("init", "base"), ("data", "drawn")}
    assert {edge.role for edge in by_title["drawn"].parents} == {"model"}


def test_the_selection_is_the_model_that_the_report_says_is_best(run):
    report = json.loads((run.stage("eval").checkpoint / "report.json").read_text())
    scores = {name: of["math.max"]["accuracy"]["value"] for name, of in report["models"].items()}
    selection = json.loads((run.stage("best").checkpoint / "selection.json").read_text())
    winner = max(scores, key=scores.get)
    assert (selection["scores"], selection["winner"]) == (scores, winner)
    assert selection["record"] == run.stage(winner).record().id
    weights = [(run.stage(name).checkpoint / "model.safetensors").read_bytes() for name in ("best", winner)]
    assert weights[0] == weights[1]
    (node,) = [node for node in trace(run.workspace, [run.stage("further")]).values() if node.kind == "select"]
    assert (node.note, node.step) == (f"is {winner}", 2)
    assert {edge.role for edge in node.parents} == {"report", "models"}
    assert {line.stage: line.note for line in stage_lines(run)}["best"] == f"is {winner}"


def test_another_metric_is_another_selection(run):
    planned = make_plan(pipeline(run.workspace.path, metric="length_mean", best="lowest"), run)
    again = [(item.stage.name, item.total_steps) for item in planned.stages if item.decision is Decision.RUN]
    assert again == [("best", 2), ("further", 2)]


def test_records_count_models_and_prompts(run):
    assert run.stage("merged").record().step == 2
    assert run.stage("drawn").record().step == 6 * 4
    assert "math.low/accepted" in run.stage("drawn").record().metrics


def test_a_second_plan_reuses_everything(run):
    planned = make_plan(pipeline(run.workspace.path), run)
    assert {item.decision for item in planned.stages} == {Decision.REUSE}
    assert {item.stage.name: item.total_steps for item in planned.stages}["drawn"] == 24


def test_other_weights_are_another_merge_and_all_that_reads_it_runs_again(run):
    planned = make_plan(pipeline(run.workspace.path, weights=(0.25, 0.75)), run)
    again = [item.stage.name for item in planned.stages if item.decision is Decision.RUN]
    assert again == ["merged", "drawn", "student", "eval", "best", "further"]


def test_another_save_interval_changes_nothing_that_was_sampled(run):
    changed = pipeline(run.workspace.path)
    stages = dict(changed.stages)
    drawn = stages["drawn"].settings
    config = drawn.config.model_copy(update={"save_every": 100})
    object.__setattr__(stages["drawn"], "settings", drawn.model_copy(update={"config": config}))
    assert {item.decision for item in make_plan(changed, run).stages} == {Decision.REUSE}


def test_the_plan_states_how_the_weights_are_made(run):
    planned = make_plan(pipeline(run.workspace.path), run)
    text = " ".join(str(getattr(line, "renderable", line)) for line in shown._formulas(planned.stages))
    assert "weights: sum w_i theta_i, sum w_i = 1" in text
    assert "w = 0.5, 0.5; computed in float32, published in float32" in text


def test_packaged_defaults_of_the_kinds_make_a_pipeline(tmp_path, monkeypatch):
    from opdctl.config import load_pipeline

    monkeypatch.chdir(tmp_path)
    Path("own.yaml").write_text(OWN)
    stages = load_pipeline("own.yaml", [], workspace=tmp_path).stages
    assert stages["merged"].settings.config.precision == "float32"
    assert stages["drawn"].settings.config.rollout.group_size == 4
    assert stages["best"].settings.config.best == "highest"


OWN = """
defaults:
  - /model: tiny_qwen3
  - /task: kimi_k3_chains
  - /tracking: local
  - /scale: smoke
  - /stage@stages.sft: sft
  - /stage@stages.merged: merge
  - /stage@stages.drawn: sample
  - /stage@stages.eval: eval
  - /stage@stages.best: select
  - _self_
name: own
stages:
  sft:
    inputs: {init: "model:"}
    config: {data: {tasks: [general]}}
  merged:
    inputs: {models: ["stage:sft"], base: "model:"}
    config: {merge: {method: task_arithmetic, scale: 0.5}}
  drawn:
    inputs: {model: "stage:merged"}
    config: {data: {tasks: [general]}, rollout: {prompts: 8, group_size: 4}}
  eval:
    inputs: {models: ["stage:sft", "stage:merged"]}
    config: {data: {tasks: [general]}}
  best:
    inputs: {report: "stage:eval", models: ["stage:sft", "stage:merged"]}
    config: {metric: accuracy}
"""
