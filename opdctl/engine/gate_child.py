"""The program that asks models on a stage's GPU, and takes its memory with it: `gate_large.ask_in_child` starts it."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from opdctl.backends.contract import InputSpec, StageSpec
from opdctl.engine.gate import ask_models
from opdctl.engine.gate_large import needed_bytes, not_asked
from opdctl.errors import OpdctlError
from opdctl.memory import GIB
from opdctl.settings import GateSettings
from opdctl.verdicts import Verdict, write_verdicts

ROOM = 0.9  # of a GPU's free memory: the rest is for what a few dozen completions take


class _Unheard:
    """The parent hears stops, and kills this process."""

    def stop_requested(self) -> bool:
        return False

    def emit(self, step: int, total: int, metrics: Mapping[str, float], phase: str = "train") -> None:
        return None


def ask(given: Mapping[str, Any]) -> list[Verdict]:
    spec = StageSpec(**{**given["spec"], "inputs": [InputSpec(**item) for item in given["spec"]["inputs"]]})
    settings = GateSettings.model_validate(given["settings"])
    needed = needed_bytes(spec)
    if spec.devices and needed > ROOM * (free := torch.cuda.mem_get_info(0)[0]):
        reason = f"{needed / GIB:.1f} GiB of weights, and {free / GIB:.1f} GiB are free on the GPU"
        return not_asked(spec, settings, reason)
    try:
        return ask_models(spec, settings, _Unheard())
    except OpdctlError as error:  # an architecture that verl reads and the engine does not
        return not_asked(spec, settings, str(error))


if __name__ == "__main__":
    write_verdicts(Path(sys.argv[1]), "", ask(json.load(sys.stdin)))
