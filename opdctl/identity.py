"""What makes two stages the same: all that a result depends on, and nothing else."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from opdctl.checks import used_efforts
from opdctl.pipeline import Stage
from opdctl.settings import FileTask, HarnessSettings, PublicTask, ToolTaskSettings


def identity(stage: Stage, inputs: Mapping[str, Any], data: Mapping[str, Any], revision: str) -> dict[str, Any]:
    """All that the stage's result depends on, as plain data.

    `inputs` has the identity of each input by its `ref`, `data` the digests of a file task by the task's name and what
    a harness depends on, `revision` is the backend's. Paths, resources, names for display, save intervals and the time
    limits of a server are left out.
    """
    config = stage.settings.config.model_dump(mode="json")
    config.get("train", config).pop("save_every", None)
    if endpoint := (config.get("grader") or {}).get("endpoint"):
        config["grader"]["endpoint"] = {"url": endpoint["url"], "model": endpoint["model"]}
    if isinstance(stage.settings.config, HarnessSettings):
        config |= data
    payload: dict[str, Any] = {
        "kind": stage.settings.kind,
        "backend": stage.settings.backend,
        "revision": revision,
        "seed": stage.seed,
        "config": config,
        "tasks": {name: _task_identity(name, task, data) for name, task in stage.settings.tasks.items()},
        "inputs": _inputs_identity(stage, inputs),
    }
    if stage.settings.verl:
        payload["verl"] = stage.settings.verl
    if used_efforts(stage.settings) and stage.settings.efforts is not None:
        efforts = stage.settings.efforts
        payload["efforts"] = {"by": efforts.by, "levels": [list(level) for level in efforts.levels.items()]}
    return payload


def _task_identity(name: str, task: Any, data: Mapping[str, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = task.model_dump(mode="json")
    if isinstance(task, FileTask | PublicTask) and data.get(name):
        plain = {key: value for key, value in plain.items() if key not in ("path", "eval_path")}
        plain["data"] = data[name]
    if isinstance(task, ToolTaskSettings) and task.files():
        plain = {key: value for key, value in plain.items() if key not in task.FILES} | {"data": data[name]}
    return plain


def _inputs_identity(stage: Stage, inputs: Mapping[str, Any]) -> dict[str, Any]:
    roles: dict[str, list[Any]] = {}
    for given in stage.inputs:
        entry = {"model": inputs[given.ref]}
        if given.role == "teachers":
            entry |= {"route": dict(given.route), "weight": given.weight}
        elif stage.settings.kind == "merge" and given.role == "models":
            entry["weight"] = given.weight
        roles.setdefault(given.role, []).append(entry)
    return dict(roles)


def fingerprint(payload: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(payload, sort_keys=True).encode()).hexdigest()[:20]
