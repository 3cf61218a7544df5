"""The embedded PyTorch engine, in the worker's own process: a CPU, or one CUDA GPU."""

from importlib import import_module
from importlib.util import find_spec

from opdctl.backends.contract import Control, StageResult, StageSpec

REVISION = "1"
KINDS = {
    "sft": "opdctl.engine.sft",
    "rlvr": "opdctl.engine.rlvr",
    "opd": "opdctl.engine.opd",
    "eval": "opdctl.engine.eval",
}


def check(spec: StageSpec) -> list[str]:
    """What stops this stage from running here. Imports nothing heavy."""
    problems = [
        f"the Python package {package} is missing: pip install opdctl brings it"
        for package in ("torch", "transformers", "safetensors")
        if find_spec(package) is None
    ]
    if len(spec.devices) > 1:
        problems.append(f"resources.gpus: {len(spec.devices)}, and the embedded engine uses one GPU at most")
    return problems


def run(spec: StageSpec, control: Control) -> StageResult:
    """Carry the stage out, resuming from `spec.state`."""
    result: StageResult = import_module(KINDS[spec.kind]).run(spec, control)
    return result
