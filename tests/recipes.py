"""A small recipe as the plain tree that `opdctl.pipeline.expand` takes: one SFT, two specialists, one student, eval."""

import json
from typing import Any

from opdctl.pipeline import Pipeline, expand
from opdctl.templates import marker

TRAIN = {"max_steps": 4, "global_batch_size": 8, "save_every": 2, "optimizer": {"lr": 1e-3, "schedule": "constant"}}
ROLLOUT = {"prompts": 4, "group_size": 4, "max_prompt_tokens": 16, "max_completion_tokens": 11}
TREE: dict[str, Any] = {
    "name": "small",
    "axes": {"domain": ["math", "code"]},
    "model": {
        "source": "new",
        "shape": {
            "num_hidden_layers": 1,
            "hidden_size": 8,
            "intermediate_size": 8,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 4,
        },
        "tokenizer": {"words": ["<pad>", "<bos>", "<eos>", "a", "b"]},
    },
    "tasks": {"math": {"task": "chain", "domain": "math"}, "code": {"task": "chain", "domain": "code"}},
    "efforts": {"by": "control_token", "levels": {"low": "<low>", "max": "<max>"}},
    "stages": {
        "sft": {
            "kind": "sft",
            "backend": "embedded",
            "inputs": {"init": "model:"},
            "config": {"data": {"tasks": ["math", "code"], "efforts": ["low", "max"]}, "train": TRAIN},
        },
        "max": {
            "kind": "rlvr",
            "backend": "embedded",
            "foreach": {"domain": ["math", "code"]},
            "labels": {"effort": "max"},
            "inputs": {"init": "stage:sft"},
            "config": {
                "data": {"tasks": [marker("domain")], "efforts": ["max"]},
                "rollout": ROLLOUT,
                "train": TRAIN,
            },
        },
        "fuse": {
            "kind": "opd",
            "backend": "embedded",
            "inputs": {"student": "stage:sft", "teachers": ["stage:max[*]"]},
            "config": {
                "data": {"tasks": ["math", "code"], "efforts": ["max"]},
                "rollout": ROLLOUT | {"group_size": 2},
                "train": TRAIN,
                "loss": {"form": "full_vocab"},
                "route_by": ["domain", "effort"],
            },
        },
        "eval": {
            "kind": "eval",
            "backend": "embedded",
            "inputs": {"before": "stage:sft", "teachers": ["stage:max[*]"], "after": ["stage:fuse"]},
            "config": {"data": {"tasks": ["math", "code"], "efforts": ["max"]}, "rollout": ROLLOUT},
        },
    },
}
ABSENT = object()


def tree(changes: dict[str, Any] | None = None) -> dict[str, Any]:
    """The recipe with dotted keys changed (or removed: ABSENT)."""
    made: dict[str, Any] = json.loads(json.dumps(TREE))  # unlike deepcopy, parts that stages share become their own
    for key, value in (changes or {}).items():
        *folders, last = key.split(".")
        node = made
        for part in folders:
            node = node.setdefault(part, {})
        if value is ABSENT:
            del node[last]
        else:
            node[last] = value
    return made


def recipe(changes: dict[str, Any] | None = None, **options: Any) -> Pipeline:
    return expand(tree(changes), **options)
