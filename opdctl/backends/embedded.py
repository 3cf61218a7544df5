"""The embedded PyTorch engine, in the worker's own process: a CPU, or one CUDA GPU."""

import resource
import time
from collections.abc import Iterable, Sequence
from importlib import import_module
from importlib.util import find_spec

from opdctl.backends.contract import Control, StageResult, StageSpec

REVISION = "2"
KINDS = {
    "sft": "opdctl.engine.sft",
    "rlvr": "opdctl.engine.rlvr",
    "opd": "opdctl.engine.opd",
    "eval": "opdctl.engine.eval",
    "merge": "opdctl.engine.merge",
    "sample": "opdctl.engine.sample",
    "select": "opdctl.engine.select",
}
_OPTIMIZES = ("sft", "rlvr", "opd")


def preload(kinds: Iterable[str]) -> list[str]:
    """What workers of these kinds of stage import, for the server that forks them to import once.

    `torch._dynamo` is nobody's wish: the first optimizer of a process imports it, 1.2 to 2 seconds of CPU time.
    """
    kinds = sorted(kinds)
    return [*(KINDS[kind] for kind in kinds), *(["torch._dynamo"] if set(kinds) & set(_OPTIMIZES) else [])]


def check(specs: Sequence[StageSpec]) -> dict[str, list[str]]:
    """What stops these stages from running here. Imports nothing heavy."""
    missing = [
        f"the Python package {package} is missing: pip install opdctl brings it"
        for package in ("torch", "transformers", "safetensors")
        if find_spec(package) is None
    ]
    return {spec.stage: missing + _too_many_gpus(spec) + _harness(spec) for spec in specs}


def _harness(spec: StageSpec) -> list[str]:
    if spec.config.get("harness") != "lm_eval" or find_spec("lm_eval") is not None:
        return []
    return ["config.harness: lm_eval, and the Python package lm_eval is missing: pip install 'opdctl[tasks]'"]


def _too_many_gpus(spec: StageSpec) -> list[str]:
    count = len(spec.devices)
    return [f"resources.gpus: {count}, and the embedded engine uses one GPU at most"] if count > 1 else []


def command(spec: StageSpec) -> str:
    """None: the engine runs in opdctl's own worker process."""
    return ""


def run(spec: StageSpec, control: Control) -> StageResult:
    """Carry the stage out, resuming from `spec.state`. What kinds without a step loop cost is that of this attempt."""
    began = time.process_time()
    result: StageResult = import_module(KINDS[spec.kind]).run(spec, control)
    cost = {"cpu_seconds": time.process_time() - began, "peak_memory_gib": _peak_bytes(spec) / 2**30}
    return StageResult(result.step, {**cost, **result.metrics})


def _peak_bytes(spec: StageSpec) -> int:
    """Of the GPU's memory, else of this process's."""
    if not spec.devices:
        return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    import torch

    return int(torch.cuda.max_memory_allocated())
