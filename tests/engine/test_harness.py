"""An eval stage by lm-eval: local tasks on a tiny model, in lm-eval's own words."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from engine.stages import run, spec_of
from gguf_files import tiny_llama, write_gguf

from opdctl.backends.contract import InputSpec
from opdctl.engine.gguf_import import import_gguf
from opdctl.errors import OpdctlError, StageFailed, StageRefused

torch.set_num_threads(1)

ROWS = [{"question": q, "answer": a} for q, a in zip("abcdefgh", "pqrspqrs", strict=True)]
COMMON = {
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": "rows.jsonl", "train": "rows.jsonl"}},
    "test_split": "test",
    "fewshot_split": "train",
    "doc_to_text": "{{question}}",
}
WRITE = COMMON | {
    "task": "tiny_write",
    "output_type": "generate_until",
    "doc_to_target": "{{answer}}",
    "target_delimiter": "",
    "fewshot_delimiter": "",
    "generation_kwargs": {"until": ["zz"], "do_sample": False, "max_gen_toks": 6},
    "filter_list": [
        {"name": "whole", "filter": [{"function": "take_first"}]},
        {
            "name": "letter",
            "filter": [{"function": "regex", "regex_pattern": "([a-z0-9])"}, {"function": "take_first"}],
        },
    ],
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}
CHOOSE = COMMON | {
    "task": "tiny_choose",
    "output_type": "multiple_choice",
    "doc_to_target": "{{answer}}",
    "doc_to_choice": ["p", "q", "r", "s"],
    "target_delimiter": "",
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    import_gguf(write_gguf(folder / "tiny.gguf", tiny_llama()), folder / "hf")
    return folder / "hf"


@pytest.fixture
def stage(workspace, model):
    (workspace / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (workspace / "tasks").mkdir()
    for task in (WRITE, CHOOSE):
        (workspace / "tasks" / f"{task['task']}.yaml").write_text(yaml.safe_dump(task))

    def make(*labels, tasks=("tiny_write", "tiny_choose"), **config):
        inputs = [InputSpec("models", label, str(model)) for label in labels or ("a",)]
        settings = {"harness": "lm_eval", "tasks": list(tasks), "include_path": "tasks", **config}
        return spec_of(workspace / "stage", "eval", settings, inputs)

    return make


def published(spec):
    outcomes = [json.loads(line) for line in Path(spec.output, "outcomes.jsonl").read_text().splitlines()]
    return json.loads(Path(spec.output, "report.json").read_text()), outcomes


def test_scores_and_outcomes_are_those_of_lm_eval_itself(stage, model):
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    spec = stage("a", "b", metrics={"tiny_write": "exact_match,letter"}, num_fewshot=2)
    metrics = run(spec).metrics
    report, outcomes = published(spec)
    arguments = {"pretrained": str(model), "dtype": "float32", "tokenizer": str(model)}
    theirs = simple_evaluate(
        model="hf", model_args=arguments, tasks=["tiny_write", "tiny_choose"], num_fewshot=2, device="cpu",
        task_manager=TaskManager(include_path="tasks", include_defaults=False), batch_size=8, bootstrap_iters=0,
    )  # fmt: skip
    expected = {
        "tiny_write": theirs["results"]["tiny_write"]["exact_match,letter"],
        "tiny_choose": theirs["results"]["tiny_choose"]["acc,none"],
    }
    assert sorted(report["cells"]) == sorted(expected)
    for cell, accuracy in expected.items():
        found = report["models"]["a"][cell]
        assert found == report["models"]["b"][cell]
        assert (found["n"], found["accuracy"]["value"]) == (8, pytest.approx(accuracy))
        assert found["accuracy"]["low"] < accuracy < found["accuracy"]["high"] or accuracy in (0, 1)
        assert metrics[f"a/{cell}/accuracy"] == pytest.approx(accuracy)
        own = [line["correct"] for line in outcomes if (line["model"], line["cell"]) == ("a", cell)]
        assert sum(own) == round(accuracy * 8)
    written = {s["doc_id"]: s["resps"][0][0] for s in theirs["samples"]["tiny_write"]}
    told = {o["problem"]: o["completion"] for o in outcomes if (o["model"], o["cell"]) == ("a", "tiny_write")}
    assert told == written
    assert report["harness"]["metrics"] == {"tiny_write": "exact_match,letter", "tiny_choose": "acc,none"}


def test_one_is_solved_where_the_model_finds_the_likeliest_choice_right(stage, workspace):
    """The rows' answers are set to what the model chose: then all are right."""
    spec = stage(tasks=["tiny_choose"], limit=4)
    run(spec)
    chosen = {line["problem"]: line["completion"] for line in published(spec)[1]}
    assert len(chosen) == 4
    rows = [row | {"answer": chosen.get(at, "p")} for at, row in enumerate(ROWS)]
    (workspace / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    again = spec_of(workspace / "again", "eval", dict(spec.config), list(spec.inputs))
    run(again)
    assert published(again)[0]["models"]["a"]["tiny_choose"]["accuracy"]["value"] == 1.0


GREEDY = {"until": ["zz"], "do_sample": False}
BAD = {
    "elsewhere": WRITE | {"dataset_path": "org/none", "dataset_kwargs": {}},
    "unsafe": WRITE | {"unsafe_code": True},
    "long": WRITE | {"generation_kwargs": GREEDY | {"max_gen_toks": 60}, "num_fewshot": 3},
    "graded": WRITE | {"metric_list": [{"metric": "bleu", "aggregation": "bleu", "higher_is_better": True}]},
}


@pytest.mark.parametrize(
    ("task", "metrics", "error", "told"),
    [
        ("tiny_write", {"tiny_write": "acc"}, StageRefused, "it has 'exact_match,whole', 'exact_match,letter'"),
        ("elsewhere", {}, StageFailed, "the data of elsewhere cannot be had"),
        ("unsafe", {}, StageRefused, "unsafe"),
        ("long", {}, StageFailed, "has 7 tokens, and the model room for 4"),
        ("graded", {}, StageFailed, "solved or not is 1 or 0"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(stage, workspace, task, metrics, error, told):
    spec = stage(tasks=[task], metrics=metrics)
    if task in BAD:
        (workspace / "tasks" / "bad.yaml").write_text(yaml.safe_dump(BAD[task] | {"task": task}))
    with pytest.raises(error, match=told):
        run(spec)


def test_a_pickled_model_is_not_loaded(stage, workspace):
    (workspace / "pickled").mkdir()
    (workspace / "pickled" / "pytorch_model.bin").write_bytes(b"anything")
    spec = stage(tasks=["tiny_write"])
    with pytest.raises(OpdctlError, match="pickled"):
        run(replace(spec, inputs=[InputSpec("models", "a", str(workspace / "pickled"))]))
