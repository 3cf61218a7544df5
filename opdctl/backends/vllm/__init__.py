"""Evaluation and sampling by vLLM, in an environment of its own: it draws the completions, opdctl asks and judges."""

import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from opdctl.backends.contract import Control, StageResult, StageSpec
from opdctl.settings import Rollout
from opdctl.workers import VllmResources

REVISION = "vllm-1"
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # vLLM 0.28: cpu_attn.get_supported_head_sizes
LEAST_TEMPERATURE = 0.01  # vLLM raises a lower one to it
_ASK = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"


def check(specs: Sequence[StageSpec]) -> Mapping[str, list[str]]:
    """What stops these stages from running here."""
    missing = {python: _environment(python) for python in {str(spec.workers["python"]) for spec in specs}}
    return {spec.stage: [*missing[str(spec.workers["python"])], *_limits(spec)] for spec in specs}


def command(spec: StageSpec) -> str:
    """None: prompts and completions are exchanged with opdctl's own worker process."""
    return ""


def run(spec: StageSpec, control: Control) -> StageResult:
    """Carry out an eval or a sample stage, resuming from `spec.state`."""
    from opdctl.backends.vllm.offline import Offline
    from opdctl.engine import eval as evaluation
    from opdctl.engine import sample

    run = sample.run if spec.kind == "sample" else evaluation.run
    rollout = Rollout.model_validate(spec.config["rollout"])
    with Offline(spec, control, rollout, VllmResources.model_validate(spec.resources["vllm"])) as vllm:
        return run(spec, control, vllm.open)


def read_config(folder: str) -> dict[str, Any] | None:
    """The text model's part of a folder's config.json; None where the folder has none that can be read."""
    try:
        config: dict[str, Any] = json.loads((Path(folder) / "config.json").read_text())
    except (OSError, ValueError):
        return None
    return {**config, **config.get("text_config", {})}


def _environment(python: str) -> list[str]:
    hint = "`make verl-env` makes an environment with vLLM"
    if not Path(python).exists():
        return [f"workers.vllm.python: {python}: no such file ({hint})"]
    try:
        asked = subprocess.run([python, "-P", "-c", _ASK], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"workers.vllm.python: {python} does not run as a Python interpreter: {error}"]
    if asked.returncode:
        told = asked.stderr.strip().splitlines()
        return [f"workers.vllm.python: {python} has no vLLM ({told[-1] if told else hint})"]
    return []


def _limits(spec: StageSpec) -> Iterator[str]:
    """What vLLM itself would refuse, or do otherwise than asked."""
    temperature = Rollout.model_validate(spec.config["rollout"]).temperature
    if temperature < LEAST_TEMPERATURE:
        yield (
            f"config.rollout.temperature: {temperature}, and vLLM draws with {LEAST_TEMPERATURE} at least; top_k: 1 "
            "takes the likeliest token"
        )
    if spec.workers["device"] != "cpu":
        return
    for given in spec.inputs:
        config = read_config(given.path)
        if config is None and spec.new_model is not None:  # a stage will have trained it
            config = spec.new_model["shape"]
        if config and (size := head_size(config)) not in (*CPU_HEAD_SIZES, None):
            yield (
                f"{given.role} {given.label}: attention heads of {size}, and vLLM on a CPU knows sizes of "
                f"{', '.join(map(str, CPU_HEAD_SIZES))}: use backend: embedded, or a model with one of them"
            )
            return


def head_size(config: Mapping[str, Any]) -> int | None:
    """Of a configuration as Hugging Face names it; None where it does not say."""
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    return config.get("head_dim") or (hidden // heads if hidden and heads else None)
