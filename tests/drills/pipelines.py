"""What the drills run: SFT, two specialists of RL, distillation from both, evaluation; tracked in SQLite."""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import toy

TESTS = Path(__file__).resolve().parent.parent
RUN = "drill"  # the name of every run
DOMAINS = ("math", "code")
STEPS = {"toy": {"sft": 15, "rl": 12, "opd": 12}, "engine": {"sft": 20, "rl": 4, "opd": 4}}
SLEEP_MS = 15  # of a step of the toy: two thirds of a second for a stage


@dataclass(frozen=True)
class Subject:
    """A pipeline under drill."""

    name: str
    tree: Mapping[str, Any]

    def command(self, workspace: Path, *overrides: str) -> list[str]:
        """The command line that carries it out in a workspace, whose pipeline file is written if need be."""
        file = workspace / "drill.yaml"
        if not file.exists():
            file.write_text(json.dumps(self.tree))
        program = [str(TESTS / "drills" / "toy_cli.py")] if self.name == "toy" else ["-m", "opdctl"]
        return [sys.executable, *program, "run", str(file), *overrides, "--run", RUN, "--workspace", str(workspace)]


def _stage(kind: str, inputs: Mapping[str, Any], steps: int, tasks: list[str], **config: Any) -> dict[str, Any]:
    train = {"max_steps": steps, "global_batch_size": 8, "save_every": 2, "optimizer": {"lr": 1e-3}}
    return {
        "kind": kind,
        "backend": "embedded",
        "inputs": dict(inputs),
        "config": {"data": {"tasks": tasks}, "train": train, **config},
    }


def _tree(name: str, **more: Any) -> dict[str, Any]:
    steps, each = STEPS[name], {"domain": list(DOMAINS)}
    rollout = {"prompts": 4, "group_size": 2, "max_prompt_tokens": 12, "max_completion_tokens": 8}
    single = rollout | {"prompts": 8, "group_size": 1}
    sft = _stage("sft", {"init": "model:"}, steps["sft"], list(DOMAINS))
    sft["config"]["train"] |= {
        "global_batch_size": 48,
        "optimizer": {"lr": 6e-3},
    }  # the gate wants to see something learnt
    specialists = _stage(
        "rlvr", {"init": "stage:sft"}, steps["rl"], ["${each.domain}"], rollout=rollout, unfinished_reward=-1.0
    )
    specialists["config"]["train"]["optimizer"] = {"lr": 2e-4}
    return {
        "name": f"drill_{name}",
        "axes": each,
        "tasks": {domain: {"task": "chain", "domain": domain, "strides": {"low": 1}} for domain in DOMAINS},
        "machine": {"slots": 2, "cpus": 2},
        "retry": {"attempts": 1, "wait_s": 0.1},
        "disk": {
            "reserve_gib": 0.0,
            "forecast": "off",
        },  # the disks of some drills are small; both have tests of their own
        "stages": {
            "sft": sft,
            "rl": specialists | {"foreach": each},
            "opd": _stage(
                "opd",
                {"student": "stage:sft", "teachers": ["stage:rl[*]"]},
                steps["opd"],
                list(DOMAINS),
                rollout=single,
                loss={"form": "full_vocab"},
                route_by=["domain"],
            ),
            "eval": {
                "kind": "eval",
                "backend": "embedded",
                "inputs": {"before": "stage:sft", "teachers": ["stage:rl[*]"], "after": "stage:opd"},
                "config": {"data": {"tasks": list(DOMAINS)}, "rollout": single},
            },
        },
        **more,
    }


def _toy() -> Subject:
    """Hashing in the place of training: start-up and the moments between two stages weigh more."""
    tree = _tree(
        "toy", model={"source": "new", "shape": toy.SHAPE, "tokenizer": {"words": ["<pad>", "<bos>", "<eos>", "a"]}}
    )
    tree["gate"] = {"enabled": False}  # there is nothing to ask a toy model
    for salt, task in enumerate(tree["tasks"].values(), start=1):  # specialists that differ: a mix-up is seen
        task["strides"] = {"sleep_ms": SLEEP_MS, "salt": salt}
    return Subject("toy", tree)


TOY = _toy()
ENGINE = Subject("engine", _tree("engine", defaults=[{"/model": "tiny_qwen3"}, "_self_"]))
SUBJECTS = {subject.name: subject for subject in (TOY, ENGINE)}
