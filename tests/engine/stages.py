"""Small stages for tests: the chain tasks, a two-layer model, a Control that records and stops on demand."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml

from opdctl.backends import embedded
from opdctl.backends.contract import InputSpec, StageResult, StageSpec

torch.set_num_threads(1)
ROOT = Path(__file__).resolve().parents[2]
TASKS = {
    "math": {"task": "chain", "domain": "math", "links": 4, "strides": {"low": 2, "max": 1}},
    "code": {"task": "chain", "domain": "code", "links": 4, "strides": {"low": 2, "max": 1}},
}
EFFORTS = {"by": "control_token", "levels": {"low": "<low>", "max": "<max>"}}
MODEL = yaml.safe_load((ROOT / "conf/model/tiny_qwen3.yaml").read_text())
MODEL["shape"] |= {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48}
ROLLOUT = {"prompts": 4, "group_size": 4, "max_prompt_tokens": 10, "max_completion_tokens": 6}
BUDGET = {"samples": 2, "percentile": 90.0, "over": "finished", "effort": "max"}


class Recorder:
    """Keeps the events; asks to stop once the step `stop_at` was reported."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.stop_at = stop_at
        self.events: list[tuple[int, dict[str, float]]] = []

    def stop_requested(self) -> bool:
        return self.stop_at is not None and bool(self.events) and self.events[-1][0] >= self.stop_at

    def emit(self, step: int, total: int, metrics: Mapping[str, float], phase: str = "train") -> None:
        self.events.append((step, {k: v for k, v in metrics.items() if k != "tokens_per_s"}))


def train(max_steps: int, batch: int, **more: Any) -> dict[str, Any]:
    optimizer = {"lr": 3e-3, "schedule": "linear", "warmup_steps": 1} | more.pop("optimizer", {})
    return {"max_steps": max_steps, "global_batch_size": batch, "save_every": 2, "optimizer": optimizer, **more}


def spec_of(folder: Path, kind: str, config: dict[str, Any], inputs: list[InputSpec], **more: Any) -> StageSpec:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "out").mkdir(exist_ok=True)
    resources = {"cpus": 1, "micro_batch_tokens": 16_384, "resident_teachers": 2, "teacher_states": "direct"}
    resources |= more.pop("resources", {})
    spec = StageSpec(
        stage=folder.name,
        kind=kind,
        backend="embedded",
        seed=0,
        config=config,
        tasks=TASKS,
        efforts=EFFORTS,
        resources=resources,
        workers={},
        verl={},
        devices=[],
        inputs=inputs,
        workspace=str(folder),
        new_model=MODEL,
        state=str(folder / "state"),
        output=str(folder / "out"),
        events=str(folder / "events.jsonl"),
        result=str(folder / "result.json"),
    )
    return replace(spec, **more)


def run(spec: StageSpec, control: Recorder | None = None) -> StageResult:
    return embedded.run(spec, control or Recorder())


def sft(folder: Path, *, steps: int = 6, seed: int = 0, **more: Any) -> StageSpec:
    config = {
        "data": {"tasks": ["math", "code"], "efforts": ["low", "max"]},
        "train": train(steps, 24, **more.pop("train", {})),
    }
    return spec_of(folder, "sft", config, [InputSpec("init", "model:", "")], seed=seed, **more)


def rlvr(folder: Path, start: Path, *, steps: int = 8, inputs: tuple[InputSpec, ...] = (), **config: Any) -> StageSpec:
    resources = config.pop("resources", {})
    settings = {
        "data": {"tasks": ["math"], "efforts": ["max"]},
        "rollout": ROLLOUT,
        "train": train(steps, 8),
        "unfinished_reward": -1.0,
        **config,
    }
    return spec_of(folder, "rlvr", settings, [InputSpec("init", "start", str(start)), *inputs], resources=resources)


def opd(
    folder: Path, student: Path, teachers: dict[tuple[str, str], Path], loss: dict[str, Any], **config: Any
) -> StageSpec:
    resources = config.pop("resources", {})
    settings = {
        "data": {"tasks": ["math", "code"], "efforts": ["low", "max"]},
        "rollout": ROLLOUT | {"prompts": 8, "group_size": 1},
        "train": train(4, 8),
        "loss": loss,
        "route_by": ["domain", "effort"],
        **config,
    }
    given = [
        InputSpec("teachers", f"{effort}[domain={domain}]", str(path), {"domain": domain, "effort": effort})
        for (domain, effort), path in teachers.items()
    ]
    return spec_of(folder, "opd", settings, [InputSpec("student", "sft", str(student)), *given], resources=resources)
