"""Recovery state on disk: everything a killed stage needs to go on as if nothing had happened.

A save is a new folder `step-N` beside the old one; `step.json` names the one that counts and is switched by a rename,
so a kill between any two system calls leaves the old save or the new one, never a mixture.
"""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from opdctl.errors import StageRefused


@dataclass(frozen=True)
class Save:
    step: int
    position: Mapping[str, int]  # data positions and other counters
    metrics: Mapping[str, float]  # of the step: what a stage that died after its last step still has to report
    tensors: Mapping[str, Tensor]  # weights and optimizer moments


class Recovery:
    """The recovery state in one folder. `step.json` holds {"step": N}: readers of the folder may rely on that."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def load(self) -> Save | None:
        """The last complete save, or None. Raises StageRefused where it was damaged since."""
        pointer = self.folder / "step.json"
        if not pointer.exists():
            return None
        try:
            step = int(json.loads(pointer.read_text())["step"])
            folder = self.folder / f"step-{step}"
            counters = json.loads((folder / "counters.json").read_text())
            return Save(step, counters["position"], counters["metrics"], load_file(folder / "state.safetensors"))
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise damaged(self.folder, error) from error

    def save(self, save: Save) -> None:
        folder = self.folder / f"step-{save.step}"
        staging = self.folder / f"step-{save.step}.part"
        for leftover in (staging, folder):
            shutil.rmtree(leftover, ignore_errors=True)
        staging.mkdir(parents=True)
        save_file({name: tensor.contiguous() for name, tensor in save.tensors.items()}, staging / "state.safetensors")
        write_whole(staging / "counters.json", {"position": dict(save.position), "metrics": dict(save.metrics)})
        os.replace(staging, folder)
        write_whole(self.folder / "step.json", {"step": save.step})
        for old in self.folder.glob("step-*"):
            if old != folder:
                shutil.rmtree(old, ignore_errors=True)


def damaged(path: Path, error: Exception) -> StageRefused:
    """To start anew is the user's to decide: hours may be lost."""
    return StageRefused(
        f"{path}: the saved state cannot be read: {type(error).__name__}: {error}",
        hint="put it back as it was, or start the stage anew with --rerun STAGE",
    )


def write_whole(path: Path, value: Any) -> None:
    """JSON that readers see whole or not at all."""
    write_text(path, json.dumps(value, indent=1, sort_keys=True) + "\n")


def write_text(path: Path, text: str) -> None:
    """The same for any text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = path.with_name(path.name + ".part")
    staging.write_text(text)
    os.replace(staging, path)
