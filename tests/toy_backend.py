"""A backend that trains eight numbers by hashing, in milliseconds, and misbehaves where a task's name says so.

It keeps the contract of `opdctl.backends.contract` to the letter: state saved as it goes, resumed to the bit, stopped
on request. Its knobs travel in `tasks.NAME.strides` of the pipeline, a free mapping of whole numbers.
"""

import hashlib
import json
import math
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

from opdctl.backends.contract import StageResult, Stopped
from opdctl.errors import ProgramDied, StageFailed
from opdctl.store import write_json

REVISION = "toy-1"


def check(specs):
    return {spec.stage: ["this stage may not run here"] for spec in specs if "unfit" in _knobs(spec)}


def command(spec):
    return ""


def run(spec, control):
    knobs = _knobs(spec)
    return _eval(spec, control, knobs) if spec.kind == "eval" else _train(spec, control, knobs)


def _knobs(spec):
    return {name: value for task in spec.tasks.values() for name, value in task.get("strides", {}).items()}


def _train(spec, control, knobs):
    print(f"threads {os.environ['OMP_NUM_THREADS']} devices '{os.environ['CUDA_VISIBLE_DEVICES']}'")
    print(f"works in {os.getcwd()}")
    print("a line of the log on stderr", file=sys.stderr)
    train = spec.config["train"]
    saved = Path(spec.state) / "step.json"
    forgets = "forgetful" in knobs
    known = (
        json.loads(saved.read_text()) if saved.exists() and not forgets else {"step": 0, "values": _start(spec, knobs)}
    )
    step, values = known["step"], known["values"]
    while step < train["max_steps"]:
        _misbehave(spec, knobs, step)
        time.sleep(knobs.get("sleep_ms", 0) / 1000)
        step += 1
        values = [_draw(spec.seed, step, at, value) for at, value in enumerate(values)]
        control.emit(
            step,
            train["max_steps"],
            {"loss": values[0], "reward": values[1]} | _odd(knobs, step) | _ill(spec, knobs, step),
        )
        if knobs.get("refuse_late_at") == step:  # long enough after its event for a guard to act on that
            time.sleep(1.0)
            raise StageFailed("loss is nan at step 3", hint="lower the learning rate")
        stop = control.stop_requested() and step < train["max_steps"]
        if stop or step % train["save_every"] == 0:
            write_json(saved, {"step": step, "values": values})
        if stop:
            raise Stopped
    write_json(saved, {"step": step, "values": values})
    if "no_weights" not in knobs:
        _save(Path(spec.output), values)
    return StageResult(step - knobs.get("short_by", 0), {"loss": values[0], "reward": values[1]} | _odd(knobs, step))


def _eval(spec, control, knobs):
    digests = {}
    for number, given in enumerate(spec.inputs, start=1):
        content = (Path(given.path) / "model.safetensors").read_bytes()
        digests[given.label] = hashlib.sha256(content).hexdigest()
        accuracy = int(digests[given.label][:4], 16) / 0xFFFF
        control.emit(number, len(spec.inputs), {f"{given.label}/math/accuracy": accuracy}, "eval")
    if "no_weights" not in knobs:
        cell = {"n": 1, "correct": 0.5, "within": None, "length_mean": 1.0, "truncated": 0}
        models = {label: {"math": cell} for label in digests}
        report = {"cells": ["math"], "models": models, "fusion": [], "sha256": digests}
        write_json(Path(spec.output) / "report.json", report)
    return StageResult(len(spec.inputs), {"accuracy": 0.5})


def _start(spec, knobs):
    content = b"".join((Path(given.path) / "model.safetensors").read_bytes() for given in spec.inputs if given.path)
    salt = [knobs["salt"]] if "salt" in knobs else []  # data that differ train other weights
    return [_draw(spec.seed, 0, at, content.hex(), *salt) for at in range(8)]


def _draw(*of):
    return int(hashlib.sha256(repr(of).encode()).hexdigest()[:12], 16) / 16**12


def _save(folder, values):
    header = json.dumps({"w": {"dtype": "F64", "shape": [8], "data_offsets": [0, 64]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + struct.pack("<8d", *values))
    write_json(folder / "config.json", {"model_type": "toy"})


def _odd(knobs, step):
    if "odd_values" not in knobs:
        return {}
    return {
        "nested": {"deep": {"x": step}},
        "inf": math.inf,
        "nan": math.nan,
        "huge": 10**400,
        "text": "words among numbers",
        "long": "x" * 20_000,
        "none": None,
        "flag": True,
        "max[domain=general,effort=low]/acc@1": 0.5,
        "a//b/../c": 1.0,
        "n" * 400: 2.0,
    }


def _ill(spec, knobs, step):
    """Metrics of a stage that trains on, and learns nothing."""
    if not _first(spec):
        return {}
    still = {"grad_norm": 0.0} if step >= knobs.get("still_from", math.inf) else {}
    return still | ({"loss": math.nan} if step >= knobs.get("nan_from", math.inf) else {})


def _first(spec):
    """A first attempt only: the next one finds the fault mended."""
    return Path(spec.events).parent.name == "1"


def _misbehave(spec, knobs, step):
    if knobs.get("kill_always_at") == step:
        os.kill(os.getpid(), signal.SIGKILL)
    if knobs.get("program_dies_at") == step and _first(spec):
        raise ProgramDied("what it started was killed by SIGKILL")
    if knobs.get("leave_at") == step:
        os._exit(knobs["leave_with"])
    if knobs.get("signal_at") == step:
        signal.signal(knobs["signal"], signal.SIG_DFL)
        os.kill(os.getpid(), knobs["signal"])
    if not _first(spec):
        return
    if knobs.get("hang_at") == step:
        os.kill(os.getpid(), signal.SIGSTOP)
    if knobs.get("refuse_at") == step:
        raise StageFailed("loss is nan at step 3", hint="lower the learning rate")
    if knobs.get("crash_at") == step:
        raise ZeroDivisionError("a bug in the backend")
    if knobs.get("kill_at") == step:
        os.kill(os.getpid(), signal.SIGKILL)
    if knobs.get("exit_at") == step:
        sys.exit(0)
    if knobs.get("child_at") == step:
        child = subprocess.Popen(["sleep", "600"])
        (Path(spec.events).parent / "child.pid").write_text(str(child.pid))
