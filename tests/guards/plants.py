"""Workspaces with a fault in them, for the runbooks: each is a function that fills an empty folder."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from checkpoints import model_folder
from guards import world
from guards.gate_faults import end_elsewhere, noise, swap_words
from guards.streams import Stream, healthy
from guards.watch_faults import STREAMS

from opdctl.engine.checkpoint import new_policy, save_policy
from opdctl.settings import NewModel

Plant = Callable[[Path], str]  # the module that is `opdctl` there
TRAIN = {"max_steps": 60, "global_batch_size": 16, "save_every": 10, "optimizer": {"lr": 1e-3, "schedule": "constant"}}


def pipeline(folder: Path, name: str, stages: Mapping[str, Any], **more: Any) -> None:
    tree = {
        "name": name,
        "model": world.MODEL,
        "tasks": world.TASKS,
        "efforts": world.EFFORTS,
        "machine": {"slots": 1, "cpus": 1},
        "tracking": {"enabled": False},
        "stages": dict(stages),
        **more,
    }
    (folder / "pipelines").mkdir(exist_ok=True)
    (folder / "pipelines" / f"{name}.yaml").write_text(yaml.safe_dump(json.loads(json.dumps(tree)), sort_keys=False))


def play(folder: Path, stage: str, stream: Stream, **told: Mapping[int, Any]) -> None:
    """`told`: key of a line -> step -> value, see `player.py`."""
    lines = [
        m | {"sleep_s": stream.gaps.get(at, 0.0)} | {key: of[at] for key, of in told.items() if at in of}
        for at, m in enumerate(stream.steps, start=1)
    ]
    (folder / "streams").mkdir(exist_ok=True)
    (folder / "streams" / f"{stage}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def models(folder: Path, *names: str) -> None:
    """Folders that look like models, for a backend that reads none."""
    for name in names:
        model_folder(folder / name, name[:4].encode())


def stage(kind: str) -> dict[str, Any]:
    """One of 60 steps, of which each is a rollout batch of 16 completions or a batch of 16 demonstrations."""
    made = {"opd": world.distillation("teacher"), "rlvr": world.reinforcement(), "sft": world.imitation()}[kind]
    groups = {"opd": {"prompts": 16, "group_size": 1}, "rlvr": {"prompts": 4, "group_size": 4}}
    rollout = {"rollout": world.ROLLOUT | groups[kind]} if kind in groups else {}
    made["config"] = made["config"] | rollout | {"train": TRAIN}
    return made


def stream(name: str, pipeline_name: str, **more: Any) -> Plant:
    """A stage that plays a planted stream; the gate has nothing to ask it."""
    [fault] = [fault for fault in STREAMS if fault.name == name]

    def plant(folder: Path) -> str:
        models(folder, "student", "teacher")
        pipeline(folder, pipeline_name, {fault.kind: stage(fault.kind)}, gate={"enabled": False}, **more)
        play(folder, fault.kind, fault.stream)
        return "guards.cli"

    return plant


def killed(folder: Path) -> str:
    """The second of two stages dies at step 35, and the first was told an error at step 25 before."""
    models(folder, "student")
    second = stage("rlvr")
    second["inputs"] = {"init": "stage:sft"}
    pipeline(folder, "killed", {"sft": stage("sft"), "rlvr": second}, gate={"enabled": False}, retry={"wait_s": 0.5})
    play(folder, "sft", Stream("sft", healthy("sft")), fails={25: "the loss is nan at step 25"})
    play(folder, "rlvr", Stream("rlvr", healthy("rlvr")), dies={35: True})
    return "guards.cli"


def mismatch(folder: Path) -> str:
    """A teacher of the student's origin, with two words swapped and another end."""
    policy, tokenizer = new_policy(NewModel.model_validate(world.MODEL), 1)
    save_policy(policy, tokenizer, folder / "student", dtype=torch.float32)
    made = world.copy(folder, "teacher", of="student")
    world.reweigh(made, noise(0.01))
    swap_words(made)
    end_elsewhere(made)
    pipeline(folder, "mismatch", {"opd": stage("opd")})
    return "opdctl"


def full(folder: Path) -> str:
    """A run that leaves a replaced checkpoint, where more is to stay free than is."""
    models(folder, "student")
    pipeline(folder, "full", {"sft": stage("sft")}, gate={"enabled": False}, retention={"keep_last": 0})
    play(folder, "sft", Stream("sft", healthy("sft"), gaps=dict.fromkeys(range(1, 61), 0.1)))
    return "guards.cli"


def damaged(folder: Path) -> str:
    """A finished run; a byte of a checkpoint changed, another was not yet in force when its publisher was killed."""
    models(folder, "student")
    second = stage("rlvr")
    second["inputs"] = {"init": "stage:sft"}
    pipeline(folder, "damaged", {"sft": stage("sft"), "rlvr": second}, gate={"enabled": False})
    for kind in ("sft", "rlvr"):
        play(folder, kind, Stream(kind, healthy(kind)))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "guards.cli", "run", "pipelines/damaged.yaml", "--run", "damaged"]
    subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
    weights = folder / "runs/damaged/stages/rlvr/checkpoint" / world.WEIGHTS
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0")
    sft = folder / "runs/damaged/stages/sft"
    (sft / "checkpoint").unlink()
    (sft / ".spec.json.part").write_text("{")
    return "guards.cli"


PLANTS: Mapping[str, Plant] = {
    "collapse": stream("entropy-collapse", "collapse"),
    "damaged": damaged,
    "divergence": stream("kl-grows", "divergence", watch={"kl_high": {"action": "stop"}}),
    "full": full,
    "hang": stream("hangs", "hang", watch={"no_progress": {"least_s": 2.0}}),
    "killed": killed,
    "mismatch": mismatch,
}
