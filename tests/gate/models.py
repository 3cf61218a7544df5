"""Small real models, what one can spoil in a copy of their folders, and stages over them."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import torch
from checkpoints import record

from opdctl.backends.contract import InputSpec, StageSpec
from opdctl.engine.checkpoint import new_policy, save_policy
from opdctl.gate import check_files, forget
from opdctl.settings import GateSettings, NewModel
from opdctl.store import Parent, Workspace

WORDS = ["<pad>", "<bos>", "<eos>", "a", "b", "c", "d", "e"]
SHAPE = {
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 32,
}


def new_model(words=WORDS, **shape):
    return {"source": "new", "shape": SHAPE | shape, "tokenizer": {"words": list(words)}}


def save(folder: Path, words=WORDS, *, seed=0, noise=0.0, dtype=torch.float32, **shape) -> Path:
    """`noise`: what training would do, as a share of each weight's own size."""
    policy, tokenizer = new_policy(NewModel.model_validate(new_model(words, **shape)), seed)
    generator = torch.Generator().manual_seed(99)
    with torch.no_grad():
        for weight in policy.parameters():
            weight += noise * weight.abs().mean() * torch.randn(weight.shape, generator=generator)
    save_policy(policy, tokenizer, folder, dtype=dtype)
    return folder


def copy(folder: Path, name: str) -> Path:
    made = folder.with_name(name)
    shutil.copytree(folder, made)
    return made


def publish(workspace: Workspace, folder: Path, name: str, parents: list[Parent], kind="sft") -> Path:
    """The weights of `folder` as the checkpoint of a stage that read `parents`."""
    stage = workspace.run("r").stage(name)
    made = record(f"id-{name}", stage=name, run="r", kind=kind, identity={"seed": 0})
    stage.publish(copy(folder, f"{name}-output"), replace(made, parents=parents))
    return stage.checkpoint


def edit(file: Path, change) -> None:
    content = json.loads(file.read_text()) if file.exists() else {}
    change(content)
    file.write_text(json.dumps(content))


def stage(folder: Path, kind: str, inputs, *, config=None, tasks=None, backend="embedded", gate=None, **more):
    """`inputs`: role and folder, None for a new model, then the route if there is one."""
    given = [
        InputSpec(role, Path(path).name if path else "new", str(path or ""), *route) for role, path, *route in inputs
    ]
    values = {
        "stage": kind,
        "kind": kind,
        "backend": backend,
        "seed": 0,
        "config": config or {},
        "tasks": tasks or {},
        "efforts": None,
        "resources": {},
        "workers": {},
        "verl": {},
        "devices": [],
        "inputs": given,
        "workspace": str(folder),
        "new_model": new_model(),
        "state": "",
        "output": "",
        "events": "",
        "result": "",
        "gate": gate or {},
    }
    return StageSpec(**(values | more))


def judged(spec: StageSpec):
    forget()
    return check_files(spec, GateSettings())


def verdict(spec: StageSpec, check: str, subject: str | None = None):
    """The one of that check."""
    [found] = [one for one in judged(spec) if one.check == check and subject in (None, one.subject)]
    return found


def opd_config(tasks, *, prompts=4, steps=4, completion=8, **more):
    train = {"max_steps": steps, "global_batch_size": prompts, "optimizer": {"lr": 1e-3}}
    return {
        "data": {"tasks": tasks},
        "rollout": {"prompts": prompts, "max_prompt_tokens": 8, "max_completion_tokens": completion},
        "train": train,
        "loss": {"form": "full_vocab"},
        "route_by": ["domain"],
        **more,
    }


CHAIN = {"task": "chain", "domain": "math", "links": 4, "strides": {"max": 1}}


def distillation(folder: Path, student, *teachers, **more):
    """A student and teachers, of a chain task each."""
    names = [f"t{number}" for number in range(len(teachers))]
    routed = [("teachers", path, {"domain": name}) for name, path in zip(names, teachers, strict=True)]
    given = {"config": opd_config(names), "tasks": dict.fromkeys(names, CHAIN)} | more
    return stage(folder, "opd", [("student", student), *routed], **given)
