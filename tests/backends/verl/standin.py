"""Stages on a stand-in for verl (`trainer.py`), in this process or by the command line."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import toy
from backends.verl import examples
from engine.stages import EFFORTS, MODEL, TASKS, Recorder

from opdctl import processes
from opdctl.backends import BACKENDS, verl
from opdctl.backends.contract import StageResult, StageSpec
from opdctl.backends.verl.stage import run as run_stage
from opdctl.plan import make_plan
from opdctl.runner import Outcome, execute
from opdctl.store import Workspace

TRAIN = {"max_steps": 8, "global_batch_size": 8, "save_every": 2, "optimizer": {"lr": 1e-3, "schedule": "constant"}}


def python(folder: Path) -> str:
    """An interpreter that runs the stand-in whatever it is asked to run."""
    script = folder / "python"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{Path(__file__).with_name("trainer.py")}" "$@"\n')
    script.chmod(0o755)
    return str(script)


def spec(folder: Path, kind: str = "sft", *, attempt: int = 1, **more) -> StageSpec:
    """A stage in `folder`, and an attempt of it."""
    place = folder / "attempts" / str(attempt)
    (place / "output").mkdir(parents=True, exist_ok=True)
    (place / "log.txt").touch()
    workers = more.pop("workers", {}) | {"python": python(folder)}
    made = examples.spec(kind, {"train": TRAIN | more.pop("train", {})}, workers=workers, **more)
    inputs = [replace(given, path="") for given in made.inputs]
    return replace(
        made,
        tasks=TASKS,
        efforts=EFFORTS,
        inputs=inputs,
        new_model=MODEL,
        workspace=str(folder),
        state=str(folder / "state"),
        output=str(place / "output"),
        events=str(place / "events.jsonl"),
        result=str(folder / "result.json"),
    )


def run(monkeypatch, given: StageSpec, control: Recorder | None = None, **knobs) -> StageResult:
    monkeypatch.setenv("STANDIN", json.dumps(knobs))
    return run_stage(given, control or Recorder())


def left(folder: Path) -> list[int]:
    """Processes of any attempt below `folder` that still run."""
    return [pid for note in folder.glob("**/attempts/*") for pid in processes.find(note)]


# ------------------------------------------------------------------------------------- by the command line


def execute_in(workspace: Path, *, notes=None) -> Outcome:
    """An SFT stage of eight steps, planned and executed as the command line does."""
    unchecked = ModuleType(verl.__name__)  # verl's own classes cannot be asked
    unchecked.__dict__.update(vars(verl), check=lambda specs: {})
    sft = toy.sft(backend="verl") | {"config": {"data": {"tasks": ["plain"]}, "max_tokens": 64, "train": TRAIN}}
    wanted = toy.pipeline(
        {"sft": sft},
        folder=workspace,
        knobs={"plain": {"max": 1}},
        workers={"verl": {"python": python(workspace), "device": "cpu"}},
        model=MODEL,
        machine={"slots": 2, "cpus": 2, "gpus": 1},
    )
    BACKENDS["verl"] = unchecked
    try:
        return execute(make_plan(wanted, Workspace(workspace).run("r")), reporter=notes or toy.Silent())
    finally:
        BACKENDS["verl"] = verl


if __name__ == "__main__":
    print(execute_in(Path(sys.argv[1])))
