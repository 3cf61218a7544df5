"""Evaluation by vLLM, in an environment of its own."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from opdctl.backends.contract import Control, StageResult, StageSpec
from opdctl.errors import StageFailed

REVISION = "vllm-1"


def check(specs: Sequence[StageSpec]) -> Mapping[str, list[str]]:
    """What stops these stages from running here."""
    return {
        spec.stage: [
            f"workers.vllm.python: {spec.workers['python']}: no such file (`make verl-env` makes an environment)"
        ]
        for spec in specs
        if not Path(spec.workers["python"]).exists()
    }


def command(spec: StageSpec) -> str:
    """None: prompts and verdicts are exchanged with opdctl's own worker process."""
    return ""


def run(spec: StageSpec, control: Control) -> StageResult:
    """Score the models of an eval stage."""
    raise StageFailed("not written yet")
