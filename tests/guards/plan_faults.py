"""Faults of a configuration, and of what a killed or damaged run left: what the plan, or the run, has to say."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import toy
from recipes import ABSENT, recipe

from opdctl.errors import ConfigError, OpdctlError


@dataclass(frozen=True)
class ConfigFault:
    name: str
    what: str
    key: str  # of the pipeline, that the message begins with
    changes: dict[str, Any]  # dotted key -> value, of `recipes.TREE`

    def said(self) -> list[str]:
        try:
            recipe(self.changes, folder=Path.cwd())
        except ConfigError as error:
            return error.problems
        return []


def fault(name: str, what: str, key: str, changes: dict[str, Any] | None = None, **value: Any) -> ConfigFault:
    return ConfigFault(name, what, key, changes or {key: value["is"]})


MAX, FUSE = "stages.max.config", "stages.fuse.config"
CONFIG = [
    fault("mistyped-key", "a key of the optimizer is mistyped", f"{MAX}.train.optimizer.learning_rte", **{"is": 1e-3}),
    fault("mistyped-value", "a number of steps is a word", f"{MAX}.train.max_steps", **{"is": "many"}),
    fault("circle", "two stages read each other", "stages", {"stages.sft.inputs.init": "stage:max[domain=math]"}),
    fault("unknown-input", "an input names no stage", "stages.fuse.inputs.student", **{"is": "stage:stf"}),
    fault("unknown-task", "the data name no task", f"{FUSE}.data.tasks", **{"is": ["math", "cod"]}),
    fault("no-teacher", "a domain has no teacher", "stages.fuse.inputs.teachers", **{"is": ["stage:max[domain=math]"]}),
    fault("lone-group", "groups of one completion", f"{MAX}.rollout.group_size", **{"is": 1}),
    fault("odd-batch", "a batch that does not divide the rollouts", f"{MAX}.train.global_batch_size", **{"is": 7}),
    fault("k-beyond", "top-k beyond the vocabulary", f"{FUSE}.loss.k", {f"{FUSE}.loss": {"form": "topk", "k": 64}}),
    fault("unknown-default", "the default teacher is none", f"{FUSE}.default_teacher", **{"is": "max[domain=mth]"}),
    fault("unknown-effort", "an effort that is not declared", f"{FUSE}.data.efforts", **{"is": ["max", "hgh"]}),
    fault("missing", "a required key is missing", f"{MAX}.data", {f"{MAX}.data": ABSENT}),
]  # fmt: skip


@dataclass(frozen=True)
class SaveFault:
    name: str
    what: str
    told: str  # what the failure begins with, or has in it
    said: Callable[[], str]  # in an empty workspace


def failure(wanted: Any, **options: Any) -> str:
    """Of its stage `sft`, or of the whole run."""
    try:
        return toy.run(wanted, **options).failed.get("sft", "")
    except OpdctlError as error:
        return str(error)


def with_knob(**knobs: int) -> Callable[[], str]:
    return lambda: failure(toy.pipeline({"sft": toy.sft(task="odd")}, knobs={"odd": knobs}))


def forgotten() -> str:
    """State of step 2 is there, and the worker begins at step 1."""
    wanted = toy.pipeline(
        {"sft": toy.sft(steps=40, task="odd")}, knobs={"odd": {"crash_at": 3, "forgetful": 1, "sleep_ms": 50}}
    )
    failure(wanted)
    return failure(wanted)


def other_settings() -> str:
    knobs = {"odd": {"crash_at": 3}}
    failure(toy.pipeline({"sft": toy.sft(task="odd")}, knobs=knobs))
    return failure(toy.pipeline({"sft": toy.sft(task="odd", lr=0.2)}, knobs=knobs))


def corrupt() -> str:
    wanted = toy.pipeline({"sft": toy.sft(), "more": toy.sft("stage:sft")})
    toy.run(wanted, only=["sft"])
    file = toy.stage(wanted, "sft").checkpoint / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 0xFF
    file.write_bytes(content)
    return failure(wanted)


SAVES = [
    SaveFault("nothing-left", "a worker ends with exit code 0, and nothing", "left no result", with_knob(exit_at=2)),
    SaveFault("steps-short", "a worker says it is done a step too early", "3 of 4 steps", with_knob(short_by=1)),
    SaveFault("no-weights", "a worker publishes no weights", "published no config.json", with_knob(no_weights=1)),
    SaveFault("killed", "a worker is killed by the system", "SIGKILL", with_knob(kill_at=2)),
    SaveFault("forgotten", "saved state is there and not gone on from", "its saved state was not found", forgotten),
    SaveFault("other-settings", "half-trained state of another learning rate", "config.train.optimizer.lr: 0.1 -> 0.2",
              other_settings),
    SaveFault("corrupt", "a byte of a finished checkpoint has changed", "has changed since it was published", corrupt),
]  # fmt: skip
