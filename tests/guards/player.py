"""A backend that plays a stream of metrics in the place of training: a line of streams/STAGE.jsonl a step.

A line may have `sleep_s`, how long the step takes, and in a first attempt `fails`, an error, or `dies`, a SIGKILL. All
else is as in `toy_backend`: saved as it goes, stopped on request.
"""

import json
import os
import signal
import struct
import time
from pathlib import Path

from opdctl.backends.contract import StageResult, Stopped
from opdctl.errors import StageFailed
from opdctl.store import write_json

REVISION = "player-1"


def check(specs):
    return {}


def command(spec):
    return ""


def run(spec, control):
    lines = (Path(spec.workspace) / "streams" / f"{spec.stage}.jsonl").read_text().splitlines()
    saved = Path(spec.state) / "step.json"
    step = json.loads(saved.read_text())["step"] if saved.exists() else 0
    total, every, metrics = spec.config["train"]["max_steps"], spec.config["train"]["save_every"], {}
    for line in lines[step:total]:
        metrics = json.loads(line)
        _misbehave(metrics, control, first=Path(spec.events).parent.name == "1")
        step += 1
        control.emit(step, total, metrics)
        stop = control.stop_requested() and step < total
        if stop or step % every == 0:
            write_json(saved, {"step": step})
        if stop:
            raise Stopped
    write_json(saved, {"step": step})
    _publish(Path(spec.output), step)
    return StageResult(step, metrics)


def _misbehave(metrics, control, *, first):
    until = time.monotonic() + metrics.pop("sleep_s", 0.0)
    while time.monotonic() < until and not control.stop_requested():
        time.sleep(0.02)
    fails, dies = metrics.pop("fails", ""), metrics.pop("dies", False)
    if first and fails:
        raise StageFailed(fails, hint="mend it, and run again")
    if first and dies:
        os.kill(os.getpid(), signal.SIGKILL)


def _publish(output, step):
    header = json.dumps({"w": {"dtype": "F64", "shape": [1], "data_offsets": [0, 8]}}).encode()
    (output / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + struct.pack("<d", step))
    write_json(output / "config.json", {"model_type": "toy"})
