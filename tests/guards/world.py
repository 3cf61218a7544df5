"""A workspace with small trained models, and pipelines over them: what gate faults are planted in.

`student` has learned a little; `teacher` has learned a little more, from it; both are of two layers and 49 words.
"""

import contextlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from engine.stages import EFFORTS, MODEL, TASKS, Recorder, sft
from engine.stages import run as train_stage
from safetensors.torch import load_file, save_file

from opdctl.backends.contract import InputSpec
from opdctl.engine.checkpoint import new_policy, save_policy
from opdctl.engine.gate import check_models
from opdctl.launch import Launcher
from opdctl.pipeline import Pipeline, expand
from opdctl.plan import make_plan
from opdctl.settings import GateSettings, NewModel
from opdctl.store import Workspace
from opdctl.verdicts import Verdict

WEIGHTS = "model.safetensors"
ROLLOUT = {"prompts": 4, "group_size": 1, "max_prompt_tokens": 10, "max_completion_tokens": 6}
TRAIN = {
    "max_steps": 2,
    "global_batch_size": 4,
    "save_every": 2,
    "optimizer": {"lr": 1e-3, "schedule": "constant"},
}
Tensors = dict[str, torch.Tensor]


def build(folder: Path) -> Path:
    """The models of a workspace."""
    trained = {"student": (60, 1e-2, None), "teacher": (20, 2e-3, "student")}
    for name, (steps, lr, start) in trained.items():
        spec = sft(folder / "made" / name, steps=steps, train={"optimizer": {"lr": lr, "schedule": "linear"}})
        if start is not None:
            spec = replace(spec, inputs=[InputSpec("init", start, str(folder / start))])
        train_stage(spec, Recorder())
        Path(spec.output).rename(folder / name)
    policy, tokenizer = new_policy(NewModel.model_validate(MODEL), 7)
    save_policy(policy, tokenizer, folder / "random", dtype=torch.float32)
    return folder


# ------------------------------------------------------------------------------------------------------ other models


def copy(folder: Path, name: str, of: str = "teacher") -> Path:
    made = folder / name
    shutil.copytree(folder / of, made)
    return made


def reweigh(model: Path, change: Callable[[Tensors], None]) -> None:
    tensors = load_file(model / WEIGHTS)
    change(tensors)
    save_file(tensors, model / WEIGHTS, metadata={"format": "pt"})


def edit(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


# --------------------------------------------------------------------------------------------------------- pipelines


def distillation(*teachers: str, data: Mapping[str, Any] | None = None, **config: Any) -> dict[str, Any]:
    """A stage whose student learns math from one teacher, or math and code from two."""
    domains = ["math", "code"][: len(teachers)]
    given = [{"ref": f"path:{name}", "route": {"domain": at}} for name, at in zip(teachers, domains, strict=True)]
    settings: dict[str, Any] = {
        "data": data or {"tasks": domains, "efforts": ["max"]},
        "rollout": ROLLOUT,
        "train": TRAIN,
        "loss": {"form": "full_vocab"},
        "route_by": ["domain"],
    }
    inputs = {"student": "path:student", "teachers": given}
    return {"kind": "opd", "backend": "embedded", "inputs": inputs, "config": settings | config}


def reinforcement(task: str = "math", efforts: tuple[str, ...] = ("max",), **config: Any) -> dict[str, Any]:
    settings = {
        "data": {"tasks": [task], "efforts": list(efforts)},
        "rollout": ROLLOUT | {"group_size": 4},
        "train": TRAIN | {"global_batch_size": 16},
        "unfinished_reward": 0.0,
    }
    return {"kind": "rlvr", "backend": "embedded", "inputs": {"init": "path:student"}, "config": settings | config}


def imitation(task: str = "math", efforts: tuple[str, ...] = ("max",), **config: Any) -> dict[str, Any]:
    settings = {"data": {"tasks": [task], "efforts": list(efforts)}, "max_tokens": 24, "train": TRAIN}
    return {"kind": "sft", "backend": "embedded", "inputs": {"init": "path:student"}, "config": settings | config}


def verdicts(wanted: Pipeline) -> list[Verdict]:
    """What `opdctl check` says: of files, then of the models where they are there and the files let them pass."""
    plan = make_plan(wanted, Workspace(wanted.folder).run("r"))
    launcher = Launcher(plan, plan.stages, print)
    found = [verdict for judged in launcher.judge_files().values() for verdict in judged]
    for item in plan.stages:
        spec = launcher.draft(item)
        if not spec.gate["missing"] and not any(verdict.stops for verdict in found):
            with contextlib.chdir(wanted.folder):  # where a stage runs, and finds its own verifiers
                found += check_models(spec, GateSettings.model_validate(spec.gate["settings"]), Recorder())
    return found


def pipeline(folder: Path, stage: Mapping[str, Any], tasks: Mapping[str, Any] | None = None, **more: Any) -> Pipeline:
    """Of one stage, or of several by their names."""
    tree = {
        "name": "guards",
        "model": MODEL,
        "tasks": TASKS | dict(tasks or {}),
        "efforts": EFFORTS,
        "machine": {"slots": 2, "cpus": 2},
        "tracking": {"enabled": False},
        "stages": {"stage": stage} if "kind" in stage else stage,
        **more,
    }
    return expand(json.loads(json.dumps(tree)), folder=folder)
