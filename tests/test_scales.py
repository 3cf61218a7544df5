"""The packaged scales, models and pipelines fit together: without verl, a GPU or a network."""

import re
from pathlib import Path

import pytest
from checkpoints import model_folder

from opdctl.backends import embedded
from opdctl.config import builtin_folder, load_pipeline
from opdctl.errors import ConfigError
from opdctl.launch import Launcher
from opdctl.plan import make_plan
from opdctl.settings import EvalStage, OpdStage, RlvrStage
from opdctl.store import Workspace

PIPELINES = sorted(path.stem for path in (builtin_folder() / "pipelines").glob("*.yaml"))
EVERYWHERE = ("kimi_k3", "kimi_k3_verl_smoke")  # at every scale with every model; what they hold, the others hold too
SCALES = sorted(path.stem for path in (builtin_folder() / "conf" / "scale").glob("*.yaml"))
ON_CPU = ("laptop", "smoke", "verl_cpu")
OF_135M = ("laptop_135m", "verl_cpu_135m")  # for a pretrained model: lengths that the others do not have
FITS = {  # scale of GPUs -> a model of each size whose stages its GPUs hold
    "gpu1": ["qwen3_0_6b"],
    "h100x8": ["qwen3_0_6b", "qwen3_8b"],
    "h200x8": ["qwen3_0_6b", "qwen3_8b", "qwen3_14b", "qwen3_30b_a3b"],
    "b200x8": ["qwen3_0_6b", "qwen3_8b", "qwen3_30b_a3b"],
    "2x8": ["qwen3_8b", "qwen3_30b_a3b"],
}
MODELS = sorted({model for models in FITS.values() for model in models})
PRETRAINED = sorted(
    path.stem for path in (builtin_folder() / "conf" / "model").glob("*.yaml") if "source: folder" in path.read_text()
)
FITTING = [(scale, model) for scale, models in FITS.items() for model in models]
LAPTOP = "c09b1be0f2189232109a"  # fingerprint of the evaluation at the end of the demo, and so of all that it reads


@pytest.fixture
def workspace(workspace):
    """With what has to be fetched before a plan, or the looks of it."""
    model_folder(workspace / "models" / "smollm2_135m")
    return workspace


def planned(workspace, pipeline, *overrides):
    return make_plan(load_pipeline(pipeline, overrides, workspace=workspace), Workspace(workspace).run("scales"))


def test_every_scale_is_tested_here():
    assert set(SCALES) == {*ON_CPU, *OF_135M, *FITS}


@pytest.mark.parametrize("scale", OF_135M)
def test_word_problems_are_valid_at_the_scales_of_their_model(workspace, scale):
    pipeline = load_pipeline("word_problems", [f"scale={scale}"], workspace=workspace)
    assert pipeline.stages["fused"].settings.backend == ("verl" if scale == "verl_cpu_135m" else "embedded")


@pytest.mark.parametrize(
    ("pipeline", "scale"),
    [(p, scale) for p in PIPELINES for scale in ON_CPU if p in EVERYWHERE or scale != "verl_cpu"],
)
def test_every_pipeline_is_valid_with_its_own_model_at_every_scale_without_a_gpu(workspace, pipeline, scale):
    assert load_pipeline(pipeline, [f"scale={scale}"]).settings.machine.gpus == 0


@pytest.mark.parametrize("pipeline", EVERYWHERE)
@pytest.mark.parametrize(("scale", "model"), FITTING)
def test_every_pipeline_is_valid_at_every_scale_of_gpus_with_every_model_that_fits(workspace, pipeline, scale, model):
    assert load_pipeline(pipeline, [f"scale={scale}", f"model={model}"]).settings.machine.gpus > 0


@pytest.mark.parametrize("pipeline", [p for p in PIPELINES if p not in EVERYWHERE])
def test_on_eight_gpus_a_recipe_has_commands_for_verl_or_all_that_is_said_names_the_backend_that_can(
    workspace, pipeline
):
    try:
        plan = planned(workspace, pipeline, "scale=h200x8", "model=qwen3_8b")
    except ConfigError as error:
        problems = error.problems
    else:
        problems = []
        commands = Launcher(plan, plan.stages, lambda text: None, fetch=False).commands()
        trained = {item.stage.name for item in plan.stages if item.stage.settings.backend == "verl"}
        assert {stage for stage, text in commands.items() if text} == trained
    assert not [text for text in problems if not re.search(r"\b(embedded|vllm|verl)\b", text)]


@pytest.mark.parametrize(("scale", "model"), [(s, m) for s in FITS for m in MODELS if (s, m) not in FITTING])
def test_a_model_that_a_scale_has_no_fit_for_is_refused_with_the_sizes_that_fit(workspace, scale, model):
    with pytest.raises(ConfigError, match=r"keys of scale\.fit: (dense|moe)_") as caught:
        load_pipeline("kimi_k3", [f"scale={scale}", f"model={model}"])
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize("scale", ["gpu1", "h100x8", "h200x8", "b200x8"])
def test_the_tiny_model_runs_the_verl_smoke_at_the_scales_of_one_node(workspace, scale):
    stages = load_pipeline("kimi_k3_verl_smoke", [f"scale={scale}"]).stages
    assert {stages[name].settings.backend for name in ("sft", "specialist[domain=general]")} == {"verl"}


def test_demo_keeps_its_settings(workspace, monkeypatch):
    """Checkpoints of the laptop scale stay good. A change of a default or of the scale that is meant changes this."""
    monkeypatch.setattr(embedded, "REVISION", "any")
    assert planned(workspace, "kimi_k3", "scale=laptop").stages[-1].fingerprint == LAPTOP


def test_verl_smoke_is_two_specialists_and_a_student_for_each_loss_of_verl(workspace):
    stages = load_pipeline("kimi_k3_verl_smoke").stages
    assert {name: stage.settings.backend for name, stage in stages.items()} == {
        "sft": "verl",
        "specialist[domain=general]": "verl",
        "specialist[domain=coding_agents]": "verl",
        "mopd[loss=policy_gradient]": "verl",
        "mopd[loss=topk]": "verl",
        "eval": "vllm",
    }
    assert load_pipeline("kimi_k3_verl_smoke").settings.machine.slots == 1  # two stages of verl do not fit two cores


@pytest.mark.parametrize(("scale", "model"), FITTING)
def test_the_longest_sequence_fits_a_micro_batch(workspace, scale, model):
    """verl refuses one that does not; the embedded engine would exceed the memory that was reckoned with."""
    for name, stage in load_pipeline("kimi_k3", [f"scale={scale}", f"model={model}"]).stages.items():
        config, resources = stage.settings.config, stage.settings.resources
        spread = resources.verl.sequence_parallel if stage.settings.backend == "verl" else 1
        if isinstance(stage.settings, RlvrStage | OpdStage):
            longest = config.rollout.max_prompt_tokens + config.rollout.max_completion_tokens
        elif isinstance(stage.settings, EvalStage):
            continue
        else:
            longest = config.max_tokens
        assert longest <= resources.micro_batch_tokens * spread, name


@pytest.mark.parametrize(("scale", "model"), FITTING)
def test_a_rollout_batch_divides_among_the_trainer_processes(workspace, scale, model):
    for name, stage in load_pipeline("kimi_k3", [f"scale={scale}", f"model={model}"]).stages.items():
        verl = stage.settings.resources.verl
        if stage.settings.backend == "verl":
            replicas = verl.nodes * verl.gpus_per_node // verl.sequence_parallel
            assert stage.settings.config.train.global_batch_size % replicas == 0, name


@pytest.mark.parametrize(("scale", "model"), [*FITTING, ("verl_cpu", "tiny_qwen3_h32")])
def test_every_verl_stage_has_a_command(workspace, scale, model):
    plan = planned(workspace, "kimi_k3", f"scale={scale}", f"model={model}")
    commands = Launcher(plan, plan.stages, lambda text: None, fetch=False).commands()
    for item in plan.stages:
        assert bool(commands[item.stage.name]) == (item.stage.settings.backend == "verl"), item.stage.name


@pytest.mark.parametrize("model", PRETRAINED)
def test_every_model_from_outside_runs_on_eight_gpus(workspace, model):
    plan = planned(workspace, "kimi_k3_verl_smoke", "scale=h200x8", f"model={model}")
    commands = Launcher(plan, plan.stages, lambda text: None, fetch=False).commands()
    assert sum(bool(text) for text in commands.values()) == sum(
        item.stage.settings.backend == "verl" for item in plan.stages
    )


def test_models_of_the_hub_are_pinned_to_a_commit_where_they_do_not_say_that_it_is_a_branch():
    for name in PRETRAINED:
        text = (builtin_folder() / "conf" / "model" / f"{name}.yaml").read_text()
        scheme, _, target = text.split("ref: ")[1].split()[0].partition(":")
        pinned = len(target.partition("@")[2]) == 40
        assert pinned or scheme == "path" or "The revision is a branch" in text, name


def test_every_package_of_verls_environment_has_an_exact_version():
    text = (Path(__file__).parent.parent / "requirements-verl.txt").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert all(line.count("==") == 1 for line in lines)
    assert not {"torchvision", "torchaudio", "torchcodec"} & {line.split("==")[0] for line in lines}
