"""Models that another program will train: what the gate can ask of them without being in its way.

Small ones are asked on the CPU, for a GPU's memory is to be empty when verl starts. Large ones are asked on the stage's
GPU by a process that ends, and takes its memory with it, before verl starts. Where there is no GPU, or both models do
not fit on it, the norms alone are looked at, which every architecture begins as constants and no training leaves so.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from opdctl.backends.contract import Control, InputSpec, StageSpec, Stopped
from opdctl.engine.loop import role
from opdctl.engine.weights import weight_files
from opdctl.errors import StageFailed
from opdctl.processes import guarded
from opdctl.settings import GateSettings
from opdctl.verdicts import Outcome, Verdict, read_verdicts, write_verdicts

SMALL = 600 * 2**20  # bytes of weights of student and teacher: a CPU reads a few dozen completions in seconds
POLL_S = 0.5
ROOM = 0.9  # of a GPU's free memory: the rest is for what a few dozen completions take
GIB = 2**30


def weight_bytes(models: Sequence[InputSpec]) -> int:
    """Of the largest of them; a new model counts as none."""
    return max((sum(path.stat().st_size for path in weight_files(Path(m.path))) for m in models if m.path), default=0)


def is_small(spec: StageSpec) -> bool:
    return _needed(spec) <= SMALL


def on_the_cpu(spec: StageSpec) -> StageSpec:
    """The stage as the embedded engine reads it, without its GPUs."""
    return replace(spec, devices=[], resources={**spec.resources, "teacher_states": "direct", "resident_teachers": 1})


def ask_in_child(spec: StageSpec, settings: GateSettings, control: Control) -> list[Verdict]:
    """`gate.ask_models` in a process of its own, which is killed where a stop is asked for."""
    attempt = Path(spec.events).parent
    asked, told = attempt / "gate-asked.json", attempt / "gate-told.json"
    one = replace(on_the_cpu(spec), devices=spec.devices)
    asked.write_text(json.dumps({"spec": asdict(one), "settings": settings.model_dump(mode="json")}))
    with guarded(attempt) as tree:
        command = [sys.executable, "-m", "opdctl.engine.gate_large", str(asked), str(told)]
        process = subprocess.Popen(command, env={**os.environ, **tree.environment})
        while process.poll() is None:
            if control.stop_requested():
                process.kill()
                process.wait()
                raise Stopped
            try:
                process.wait(POLL_S)
            except subprocess.TimeoutExpired:
                continue
    found = read_verdicts(told)
    asked.unlink()
    told.unlink(missing_ok=True)
    if process.returncode or found is None:
        raise StageFailed(
            f"the gate's process ended with {process.returncode}",
            hint="its output is in the stage's log; gate.models: false leaves out what only models can answer",
        )
    return found


def check_norms(spec: StageSpec, reason: str) -> list[Verdict]:
    """Of models that are not loaded, for this reason: is a teacher untrained?"""
    found = []
    for teacher in role(spec, "teachers"):
        fresh = constant_norms(Path(teacher.path))
        found.append(
            Verdict(
                "random_teacher",
                f"{role(spec, 'student')[0].label} -> {teacher.label}",
                Outcome.REFUSE if fresh else Outcome.GO,
                f"the weights of its norms are {'all equal, as before training' if fresh else 'trained'}; nothing else "
                f"was asked: {reason}",
                f"name a trained checkpoint ({teacher.path})" if fresh else "",
            )
        )
    return found


def constant_norms(folder: Path) -> bool:
    """Whether there are norms, and the weights of each are one number."""
    found = False
    for path in weight_files(folder):
        with safe_open(path, framework="pt") as tensors:
            for name in (name for name in tensors.keys() if name.endswith("norm.weight")):  # noqa: SIM118  # no dict
                values = tensors.get_tensor(name)
                if float(values.max()) != float(values.min()):
                    return False
                found = True
    return found


def _needed(spec: StageSpec) -> int:
    return weight_bytes(role(spec, "student") + role(spec, "init")) + weight_bytes(role(spec, "teachers"))


def _main(asked: Path, told: Path) -> None:
    from opdctl.engine.gate import ask_models

    class Unheard:
        """The parent hears stops, and kills this process."""

        def stop_requested(self) -> bool:
            return False

        def emit(self, *_: Any, **__: Any) -> None: ...

    given = json.loads(asked.read_text())
    spec = StageSpec(**{**given["spec"], "inputs": [InputSpec(**item) for item in given["spec"]["inputs"]]})
    free = torch.cuda.mem_get_info(0)[0] if spec.devices else 2 * _needed(spec)
    if _needed(spec) > ROOM * free:
        found = check_norms(spec, f"{_needed(spec) / GIB:.1f} GiB of weights, of {free / GIB:.1f} GiB free on the GPU")
    else:
        found = list(ask_models(spec, GateSettings.model_validate(given["settings"]), Unheard()))
    write_verdicts(told, "", found)


if __name__ == "__main__":
    _main(Path(sys.argv[1]), Path(sys.argv[2]))
