"""Bad merges, bad selections, bad sampling and bad data for SFT, each by the key that the user wrote."""

import pytest
from recipes import recipe, tree

from opdctl.errors import ConfigError
from opdctl.pipeline import expand


def problems(changes):
    with pytest.raises(ConfigError) as caught:
        expand(tree(changes))
    return caught.value.problems


def merge(how, *models, **more):
    return {
        "stages.merged": {
            "kind": "merge",
            "backend": "embedded",
            "inputs": {"models": list(models) or ["stage:max[*]"], **more.pop("inputs", {})},
            "config": {"merge": how, "precision": "float32"},
            **more,
        }
    }


def sample(**more):
    config = {
        "data": {"tasks": ["math"], "efforts": ["max"]},
        "rollout": {"prompts": 8, "group_size": 2, "max_prompt_tokens": 16, "max_completion_tokens": 11},
    }
    stage = {"kind": "sample", "backend": "embedded", "inputs": {"model": "stage:sft"}, "config": config}
    return {"stages.drawn": stage, **{f"stages.drawn.{key}": value for key, value in more.items()}}


def learn(data, **more):
    stage = {
        "kind": "sft",
        "backend": "embedded",
        "inputs": {"init": "stage:sft", "data": data},
        "config": {
            "data": {"tasks": ["math"], "efforts": ["max"], **more},
            "train": {"max_steps": 4, "global_batch_size": 8, "optimizer": {"lr": 1e-3}},
        },
    }
    return {"stages.learnt": stage}


HALF = [{"ref": f"stage:max[domain={domain}]", "weight": 0.5} for domain in ("math", "code")]
TIES = {"method": "ties", "density": 0.2, "scale": 1.0}
BASE = {"base": "stage:sft"}
MERGES = [
    (merge({"method": "convex"}), "inputs.models", "method convex needs weights that sum to 1, and 1 + 1 is 2"),
    (merge(TIES), "inputs.base", "required, and not set: config.merge.method is ties"),
    (
        merge({"method": "linear"}, inputs=BASE),
        "inputs.base",
        "would not be read: config.merge.method is linear",
    ),
    (
        merge({"method": "sce", "select": 0.1}, *HALF, inputs=BASE),
        "inputs.models",
        "method sce weighs the models itself",
    ),
    (
        merge({"method": "sce", "select": 0.1}, "stage:max[domain=math]", inputs=BASE),
        "inputs.models",
        "method sce compares models: give 2 or more",
    ),
    (merge({"method": "tis"}), "config.merge.method", "'tis' is not known (did you mean 'ties'?"),
    (merge({"method": "ties", "density": 0.2}, inputs=BASE), "config.merge.scale", "required, and not set"),
    (
        merge({"method": "longcat_fusion", "norm": "l2", "scale": 1.0}, inputs=BASE),
        "config.merge.drop_rate",
        "required, and not set",
    ),
    (merge({"method": "linear"}, "stage:eval"), "inputs.models", "'eval' is of kind eval, which publishes no model"),
    (
        merge({"method": "linear"}, backend="verl"),
        "backend",
        "verl trains only: kind merge needs backend: embedded",
    ),
    (
        merge({"method": "linear"}, backend="vllm"),
        "backend",
        "vllm generates only: kind merge needs backend: embedded",
    ),
]


@pytest.mark.parametrize(("changes", "key", "text"), MERGES, ids=[f"{key}: {text}"[:60] for _, key, text in MERGES])
def test_a_bad_merge_is_told_by_its_key(changes, key, text):
    told = problems(changes)
    assert any(line.startswith(f"stages.merged.{key}: {text}") for line in told), told


@pytest.mark.parametrize("how", [{"method": "linear"}, {"method": "convex"}, TIES])
def test_a_good_merge_is_accepted(how):
    stage = recipe(merge(how, *HALF, inputs=BASE if how is TIES else {})).stages["merged"]
    assert stage.upstream() == {"max[domain=math]", "max[domain=code]"} | ({"sft"} if how is TIES else set())
    assert stage.settings.tasks == {}


def test_thirds_sum_to_one_for_a_convex_merge():
    thirds = [{"ref": ref, "weight": 0.3333333} for ref in ("stage:sft", "stage:max[domain=math]", "stage:fuse")]
    assert "merged" in recipe(merge({"method": "convex"}, *thirds)).stages


SAMPLES = [
    (sample(**{"config.per_prompt": 3}), "drawn.config.per_prompt", "3 answers of a prompt need as many tries"),
    (sample(backend="verl"), "drawn.backend", "verl trains only: kind sample needs backend: vllm or embedded"),
    (
        learn("stage:max[domain=math]"),
        "learnt.inputs.data",
        "'max[domain=math]' is of kind rlvr; kind sample publishes",
    ),
    (learn("path:rows"), "learnt.inputs.data", "'path:rows' is no stage: rows of files are tasks"),
    (
        sample() | learn("stage:drawn", tasks=["math", "code"]),
        "learnt.inputs.data",
        "no stage samples task 'code' of config.data.tasks",
    ),
    (
        sample() | learn("stage:drawn", efforts=["low", "max"]),
        "learnt.inputs.data",
        "no stage samples task 'math' at effort low of config.data.efforts",
    ),
    (
        sample() | {"stages.fuse.inputs.student": "stage:drawn"},
        "fuse.inputs.student",
        "'drawn' is of kind sample, which publishes no model",
    ),
]


@pytest.mark.parametrize(("changes", "key", "text"), SAMPLES, ids=[f"{key}: {text}"[:60] for _, key, text in SAMPLES])
def test_bad_sampling_and_bad_data_are_told_by_their_key(changes, key, text):
    told = problems(changes)
    assert any(line.startswith(f"stages.{key}: {text}") for line in told), told


def test_sft_takes_the_data_of_several_stages():
    second = {**sample()["stages.drawn"], "config": sample()["stages.drawn"]["config"] | {"data": {"tasks": ["code"]}}}
    changes = (
        sample()
        | {"stages.second": second}
        | learn(["stage:drawn", "stage:second"], tasks=["math", "code"], efforts=[])
    )
    assert recipe(changes).stages["learnt"].upstream() == {"sft", "drawn", "second"}


def selection(*models, report="stage:eval", **config):
    return {
        "stages.best": {
            "kind": "select",
            "backend": "embedded",
            "inputs": {"report": report, "models": list(models) or ["stage:max[*]"]},
            "config": {"metric": "accuracy", **config},
        }
    }


SELECTIONS = [
    (selection(report="stage:sft"), "inputs.report", "'sft' is of kind sft; kind eval publishes a report"),
    (selection(report="path:reports"), "inputs.report", "'path:reports' is no stage"),
    (selection(cells=["math.max", "math.max"]), "config.cells", "'math.max' is there twice; name it once"),
    (selection(cells=["math.high"]), "config.cells", "'eval' has no cell 'math.high' (cells: math.max, code.max)"),
    (selection(metric="within_budget"), "config.metric", "within_budget, and 'eval' counts none"),
    (selection("stage:max[*]", "hf:org/model@1"), "inputs.models", "'eval' does not score 'hf:org/model@1'"),
    (selection("stage:eval"), "inputs.models", "'eval' is of kind eval, which publishes no model"),
    (selection("model:"), "inputs.models", "'model:' is made anew wherever it is read"),
    (selection() | {"stages.best.inputs": {"models": ["stage:sft"]}}, "inputs.report", "required, and not set"),
    (selection() | {"stages.best.backend": "vllm"}, "backend", "vllm generates only: kind select needs backend"),
]


@pytest.mark.parametrize(("changes", "key", "text"), SELECTIONS, ids=[f"{k}: {text}"[:60] for _, k, text in SELECTIONS])
def test_a_bad_selection_is_told_by_its_key(changes, key, text):
    told = problems(changes)
    assert any(line.startswith(f"stages.best.{key}: {text}") for line in told), told


def test_a_selection_may_stand_before_the_evaluation_and_be_read_as_a_model():
    changes = selection("stage:max[*]", "stage:fuse", cells=["math.max"])
    turned = tree(changes | {"stages.again": learn("stage:drawn")["stages.learnt"]})
    turned["stages"]["again"]["inputs"] = {"init": "stage:best"}
    turned["stages"] = dict(reversed(turned["stages"].items()))
    stages = expand(turned).stages
    assert stages["best"].upstream() == {"eval", "fuse", "max[domain=math]", "max[domain=code]"}
    assert stages["again"].upstream() == {"best"}
