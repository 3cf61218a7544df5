"""Stages for the tests of the verl backend; nothing that they name exists."""

from collections.abc import Callable
from typing import Any

from opdctl.backends.contract import InputSpec, StageSpec
from opdctl.settings import OpdSettings, Resources, RlvrSettings, SftSettings
from opdctl.workers import VerlWorkers

TASKS = {
    "math": {"task": "chain", "domain": "math", "links": 4, "strides": {"low": 2, "max": 1}},
    "code": {"task": "chain", "domain": "code", "links": 4, "strides": {"low": 2, "max": 1}},
}
ROLLOUT = {"prompts": 16, "group_size": 4, "max_prompt_tokens": 100, "max_completion_tokens": 27}
SETTINGS = {"sft": SftSettings, "rlvr": RlvrSettings, "opd": OpdSettings}
GPUS = {"gpus_per_node": 8, "rollout_tensor_parallel": 2, "sequence_parallel": 2, "offload": True}
MEGATRON = {
    "strategy": "megatron",
    "gpus_per_node": 8,
    "tensor_parallel": 2,
    "expert_parallel": 4,
    "rollout_tensor_parallel": 4,
    "teacher_tensor_parallel": 2,
    "offload": True,
}


def train(**more: Any) -> dict[str, Any]:
    optimizer = {"lr": 1e-6, "schedule": "cosine", "warmup_steps": 2} | more.pop("optimizer", {})
    return {"max_steps": 8, "global_batch_size": 32, "save_every": 4, "optimizer": optimizer, **more}


def spec(
    kind: str,
    config: dict[str, Any] | None = None,
    *,
    device: str = "cpu",
    verl: dict[str, Any] | None = None,
    raw: dict[str, Any] | None = None,
    teachers: int = 2,
    workers: dict[str, Any] | None = None,
    **more: Any,
) -> StageSpec:
    """`verl`: keys of `resources.verl`; `raw`: the user's overrides; `config`: beside what every stage needs."""
    settings: dict[str, Any] = {"data": {"tasks": ["math", "code"], "efforts": ["low", "max"]}, "train": train()}
    inputs = [InputSpec("init", "sft", "/runs/k3/sft/checkpoint")]
    if kind == "sft":
        settings["max_tokens"] = 128
        inputs = [InputSpec("init", "model:", "")]
    else:
        settings["rollout"] = ROLLOUT
    if kind == "opd":
        settings |= {"loss": {"form": "policy_gradient", "max_advantage": 5.0}, "route_by": ["domain", "effort"]}
        inputs = [InputSpec("student", "sft", "/runs/k3/sft/checkpoint")]
        inputs += [InputSpec("teachers", f"max{i}", f"/runs/k3/max{i}/checkpoint") for i in range(teachers)]
    settings = SETTINGS[kind].model_validate(settings | (config or {})).model_dump(mode="json")
    resources = Resources.model_validate({"micro_batch_tokens": 4096, "verl": verl or {}})
    where = VerlWorkers.model_validate({"python": "/envs/verl/bin/python", "device": device, **(workers or {})})
    given = {
        "stage": f"{kind}[domain=math]",
        "kind": kind,
        "backend": "verl",
        "seed": 7,
        "config": settings,
        "tasks": TASKS,
        "efforts": {"by": "control_token", "levels": {"low": "<low>", "max": "<max>"}},
        "resources": resources.model_dump(mode="json"),
        "workers": where.model_dump(mode="json"),
        "verl": raw or {},
        "devices": [],
        "inputs": inputs,
        "workspace": "/work space",
        "new_model": None,
        "state": f"/runs/k3/{kind}[domain=math]/state",
        "output": "",
        "events": "",
        "result": f"/runs/k3/{kind}[domain=math]/result.json",
    }
    return StageSpec(**given | more)


BF16 = {"train": train(precision="bfloat16")}
TOPK = {"loss": {"form": "topk", "k": 64}}
KL = {"kl": {"estimator": "k3", "coef": 0.001}, "aggregation": "constant", "advantage": "leave_one_out"}
CASES: dict[str, Callable[[], StageSpec]] = {  # of which the whole command is pinned, and shown to verl
    "sft-cpu": lambda: spec("sft"),
    "rlvr-cpu": lambda: spec("rlvr"),
    "opd-cpu": lambda: spec("opd"),
    "opd-topk-cpu": lambda: spec("opd", TOPK),
    "sft-h200x8": lambda: spec("sft", BF16, device="cuda", verl=GPUS),
    "rlvr-h200x8": lambda: spec("rlvr", BF16 | KL, device="cuda", verl=GPUS),
    "rlvr-async-h200x8": lambda: spec("rlvr", BF16, device="cuda", verl=GPUS | {"mode": "async"}),
    "opd-topk-h200x8": lambda: spec("opd", BF16 | TOPK, device="cuda", verl=GPUS, teachers=9),
    "sft-megatron": lambda: spec("sft", BF16, device="cuda", verl=MEGATRON),
    "rlvr-megatron": lambda: spec("rlvr", BF16, device="cuda", verl=MEGATRON),
    "opd-2x8": lambda: spec(
        "opd",
        BF16,
        device="cuda",
        verl=GPUS | {"gpus_per_node": 4},
        teachers=9,
        workers={"ray_address": "10.0.0.1:6379"},
    ),
}
