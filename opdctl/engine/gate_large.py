"""Models that another program will train: what the gate can ask of them without being in its way.

Small ones are asked on the CPU, for a GPU's memory is to be empty when verl starts. Large ones are asked on the stage's
GPU by a process that ends, and takes its memory with it, before verl starts (`gate_child.py`). Where there is no GPU,
or both models do not fit on it, the norms alone are looked at, which every architecture begins as constants and no
training leaves so; verdicts say what was not asked, and why.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from safetensors import safe_open

from opdctl.backends.contract import Control, InputSpec, StageSpec, Stopped
from opdctl.engine.loop import role
from opdctl.errors import OpdctlError
from opdctl.processes import guarded
from opdctl.secrets import redact
from opdctl.settings import GateSettings
from opdctl.verdicts import Outcome, Verdict, read_verdicts, unasked
from opdctl.weight_files import weight_files

SMALL = 600 * 2**20  # bytes of weights of student and teacher: a CPU reads a few dozen completions in seconds
CHILD = "opdctl.engine.gate_child"
POLL_S = 0.5
PATIENCE_S = 900.0  # that the process gets for what it asks ...
SLOWEST = 50 * 2**20  # ... and bytes a second for the weights that it reads first: a network disk
SIGNS = 200  # of the last line that it wrote


def weight_bytes(models: Sequence[InputSpec]) -> int:
    """Of the largest of them; a new model counts as none."""
    return max((sum(path.stat().st_size for path in weight_files(Path(m.path))) for m in models if m.path), default=0)


def needed_bytes(spec: StageSpec) -> int:
    """Of the weights that are in memory at once."""
    return weight_bytes(role(spec, "student") + role(spec, "init")) + weight_bytes(role(spec, "teachers"))


def is_small(spec: StageSpec) -> bool:
    return needed_bytes(spec) <= SMALL


def on_the_cpu(spec: StageSpec) -> StageSpec:
    """The stage as the embedded engine reads it, without its GPUs."""
    return replace(spec, devices=[], resources={**spec.resources, "teacher_states": "direct", "resident_teachers": 1})


def ask_in_child(spec: StageSpec, settings: GateSettings, control: Control) -> list[Verdict]:
    """`gate.ask_models` in a process of its own, which is killed where a stop is asked for. One that dies, or does not
    end, is told of: it says nothing against the stage."""
    allowed_s = PATIENCE_S + sum(weight_bytes([model]) for model in spec.inputs) / SLOWEST
    one = replace(on_the_cpu(spec), devices=spec.devices)
    given = json.dumps({"spec": asdict(one), "settings": settings.model_dump(mode="json")})
    with TemporaryDirectory(prefix="opdctl-gate-") as folder:
        told = Path(folder, "told.json")
        with guarded(Path(spec.events).parent if spec.events else Path(folder)) as tree:  # `opdctl check`: no attempt
            code, said = _run(told, given, {**os.environ, **tree.environment}, control, allowed_s)
        found = read_verdicts(told)
    sys.stderr.write(said)
    if code == 0 and found is not None:
        return found
    ended = f"did not end within {allowed_s:.0f} s" if code is None else f"ended with {code}"
    last = f": {said.strip().splitlines()[-1][-SIGNS:]}" if said.strip() else ""
    return not_asked(spec, settings, f"the process that asks {ended}{last}", Outcome.WARN)


def _run(
    told: Path, given: str, environment: Mapping[str, str], control: Control, allowed_s: float
) -> tuple[int | None, str]:
    """(exit code, what it wrote); the code is None where it had to be killed after so long. What is asked may hold
    secrets, and goes through a pipe. Raises Stopped, with the process killed."""
    command, deadline = [sys.executable, "-m", CHILD, str(told)], time.monotonic() + allowed_s
    with subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        try:
            while time.monotonic() < deadline:
                if control.stop_requested():
                    raise Stopped
                try:
                    said, _ = process.communicate(given or None, POLL_S)
                    return process.returncode, redact(said)
                except subprocess.TimeoutExpired:
                    given = ""  # it is on its way
            process.kill()
            return None, redact(process.communicate()[0])
        finally:
            process.kill()


def not_asked(spec: StageSpec, settings: GateSettings, reason: str, outcome: Outcome = Outcome.GO) -> list[Verdict]:
    """Of models that are not loaded, for this reason."""
    remedy = "" if outcome is Outcome.GO else "the stage's log has what it wrote; gate.models: false leaves this out"
    if spec.kind == "rlvr":
        return [
            unasked("difficulty", f"task {name}", reason, outcome, remedy)
            for name in (spec.config["data"]["tasks"] if settings.difficulty_prompts else [])
        ]
    [student], found = role(spec, "student"), []
    for teacher in role(spec, "teachers"):
        subject = f"{student.label} -> {teacher.label}"
        found.append(_by_norms(teacher, subject))
        told = f"{reason} (nor determinism, forward pass, entropies, overlap, headroom)"
        found.append(unasked("distance", subject, told, outcome, remedy))
    return found


def _by_norms(teacher: InputSpec, subject: str) -> Verdict:
    """Is a teacher untrained?"""
    try:
        fresh = constant_norms(Path(teacher.path))
    except OpdctlError as error:
        return unasked("random_teacher", subject, str(error))
    told = "all equal, as before training" if fresh else "trained"
    return Verdict(
        "random_teacher",
        subject,
        Outcome.REFUSE if fresh else Outcome.GO,
        f"the weights of its norms are {told}",
        f"name a trained checkpoint ({teacher.path})" if fresh else "",
    )


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
