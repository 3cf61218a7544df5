"""The overrides of verl's PPO trainer for on-policy distillation: teachers served by vLLM, and the loss."""

from typing import Any

from opdctl.backends.contract import InputSpec, StageSpec
from opdctl.backends.verl import render_policy_loss, render_rl
from opdctl.backends.verl.layout import ROUTE, teacher_key
from opdctl.backends.verl.overrides import Overrides
from opdctl.backends.verl.render_engine import model_path, verl_seed
from opdctl.backends.verl.render_rl import ACTOR
from opdctl.settings import ClippedSurrogate, OpdSettings, OverlapOpd, PolicyGradientOpd, Resources, TopKOpd

LOSSES = {  # as the plug-in calls them
    "policy_gradient": "opdctl_policy_gradient",
    "topk": "opdctl_reverse_kl_topk",
    "overlap": "opdctl_overlap",
}
_LOSS = "distillation.distillation_loss"


def opd(spec: StageSpec) -> Overrides:
    """Of a stage of kind opd."""
    settings, resources = OpdSettings.model_validate(spec.config), Resources.model_validate(spec.resources)
    overrides = Overrides()
    student = next(given for given in spec.inputs if given.role == "student")
    teachers = [given for given in spec.inputs if given.role == "teachers"]
    render_rl.common(overrides, spec, settings, resources, student)
    overrides.own(
        "kind",
        {
            "distillation.enabled": True,
            "algorithm.adv_estimator": _estimator(settings),
            "algorithm.norm_adv_by_std_in_grpo": False,
            "algorithm.use_kl_in_reward": False,
            f"{ACTOR}.use_kl_loss": False,
        },
    )
    _loss(overrides, settings)
    # the plug-in's losses clip as the stage says
    render_policy_loss.surrogate(overrides, ClippedSurrogate(), ACTOR, "config.loss")
    rule = settings.loss.mismatch if isinstance(settings.loss, PolicyGradientOpd) else None
    asynchronous = render_rl.is_async(resources)
    render_policy_loss.mismatch(overrides, rule, "config.loss.mismatch", asynchronous=asynchronous)
    overrides.own("config.route_by", {"distillation.teacher_key": ROUTE})
    size = teacher_pool(len(teachers), resources, alone=spec.workers["ray_address"] is None)
    overrides.own(
        "resources.verl.teacher_replicas",
        {"distillation.n_gpus_per_node": size[0], "distillation.nnodes": size[1]},
    )
    for number, teacher in enumerate(teachers):
        _teacher(overrides, spec, settings, resources, number, teacher)
    return overrides


def _estimator(settings: OpdSettings) -> str:
    """Of the rewards' advantages. Only metrics see them, unless the loss weighs them in: verl's takes groups of one."""
    loss = settings.loss
    if isinstance(loss, PolicyGradientOpd) and loss.outcome_weight > 0:
        return f"opdctl_{loss.outcome_advantage}"
    return "grpo"


def teacher_pool(teachers: int, resources: Resources, *, alone: bool) -> tuple[int, int]:
    """GPUs per node and nodes that verl sets aside for the servers of all teachers: exactly what they take.

    `alone`: on one node, that of the Ray that the stage starts. Else no node gives more than it has, and no server
    reaches over the end of one.
    """
    verl = resources.verl
    total = teachers * verl.teacher_replicas * verl.teacher_tensor_parallel
    most = total if alone else max(verl.gpus_per_node, verl.teacher_tensor_parallel)
    sizes = range(verl.teacher_tensor_parallel, min(total, most) + 1, verl.teacher_tensor_parallel)
    per_node = max(size for size in sizes if total % size == 0)
    return per_node, total // per_node


def _loss(overrides: Overrides, settings: OpdSettings) -> None:
    """The plug-in's losses are whole: it clips and weighs them, and verl only takes their mean."""
    form = settings.loss
    overrides.own(
        "config.loss",
        {
            f"{_LOSS}.loss_mode": LOSSES[form.form],
            f"{_LOSS}.use_policy_gradient": False,
            f"{_LOSS}.policy_loss_mode": "vanilla",
            f"{_LOSS}.topk": form.k if isinstance(form, TopKOpd | OverlapOpd) else None,
            f"{_LOSS}.use_task_rewards": False,
            f"{_LOSS}.distillation_loss_coef": 1.0,
            f"{_LOSS}.loss_max_clamp": None,
            f"{_LOSS}.log_prob_min_clamp": None,
            f"+{_LOSS}.use_chunked_topk": False,
        },
    )


def _teacher(
    overrides: Overrides,
    spec: StageSpec,
    settings: OpdSettings,
    resources: Resources,
    number: int,
    teacher: InputSpec,
) -> None:
    """Every field that matters: entries of `teacher_models` start from the defaults of a dataclass, which are random
    weights and lengths of 512, not from those of the YAML.
    """
    at, key, verl = f"distillation.teacher_models.{teacher_key(number)}", teacher_key(number), resources.verl
    inference = f"{at}.inference"
    overrides.own(
        "inputs.teachers",
        {
            f"+{at}.key": key,
            f"+{at}.model_path": model_path(spec, teacher),
            f"+{inference}.name": "vllm",
            f"+{inference}.mode": "async",
            f"+{inference}.load_format": "auto",
        },
    )
    overrides.own("resources.verl.teacher_replicas", {f"+{at}.num_replicas": verl.teacher_replicas})
    tensor = ("teacher_tensor_parallel", verl.teacher_tensor_parallel)
    render_rl.split(overrides, verl, inference, tensor, plus="+")
    overrides.own("config.train.precision", {f"+{inference}.dtype": settings.train.precision})
    own = settings.rollout
    lengths = render_rl.lengths(own.max_prompt_tokens, own.max_completion_tokens, inference, plus="+")
    overrides.own("config.rollout", lengths)
    overrides.own("seed", {f"+{inference}.seed": verl_seed(spec)})
    render_rl.serving(overrides, spec, resources, inference, memory=("teacher_memory", verl.teacher_memory), plus="+")
    overrides.own("config.loss", _scoring(settings, inference))
    # never asleep: a server that wakes without its weights answers all the same
    overrides.choose({f"+{inference}.free_cache_engine": False, f"+{inference}.enable_sleep_mode": False})


def _scoring(settings: OpdSettings, inference: str) -> dict[str, Any]:
    """A teacher scores the student's tokens at temperature 1, and samples none."""
    k = settings.loss.k if isinstance(settings.loss, TopKOpd | OverlapOpd) else 1
    return {
        f"+{inference}.temperature": 1.0,
        f"+{inference}.top_p": 1.0,
        f"+{inference}.top_k": -1,
        f"+{inference}.n": 1,
        f"+{inference}.engine_kwargs.vllm.max_logprobs": k,
    }
