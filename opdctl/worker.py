"""The child process: carries out one stage from spec.json and leaves result.json.

Exit codes: 0 done, 1 an error that the user can act on, 3 a bug, 4 a program that it started was killed, 75 stopped on
request with its state saved.
error.json says what went wrong; the log has the traceback, unless an error of opdctl's own says all there is.
"""

import contextlib
import errno
import faulthandler
import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict
from importlib import import_module
from io import TextIOWrapper
from multiprocessing import parent_process
from pathlib import Path
from types import FrameType
from typing import cast

from opdctl.backends.contract import EXIT_STOPPED, Backend, Event, InputSpec, StageSpec, Stopped
from opdctl.backends.events import EventWriter
from opdctl.errors import OpdctlError, ProgramDied, StageFailed
from opdctl.gate import check_files
from opdctl.records import read_json
from opdctl.secrets import redact, reveal
from opdctl.settings import GateSettings
from opdctl.store import Attempt, write_json
from opdctl.supervisor import EXIT_BUG, EXIT_DIED, EXIT_FAILED, FULL_DISK, HELD_BACK, tell_failure
from opdctl.verdicts import accept, refuse, write_verdicts


class WorkerControl:
    """Events go to the stage's file; a stop is asked for by SIGTERM, or by the orchestrator's death."""

    def __init__(self, events: Path) -> None:
        self._events = EventWriter(events)
        self._stop = False
        self._orchestrator = select.poll()
        if (parent := parent_process()) is not None:
            self._orchestrator.register(parent.sentinel, select.POLLIN)

    def stop(self, number: int, frame: FrameType | None) -> None:
        """The handler of SIGTERM."""
        self._stop = True

    def stop_requested(self) -> bool:
        return self._stop or bool(self._orchestrator.poll(0))

    def emit(self, step: int, total: int, metrics: Mapping[str, float], phase: str = "train") -> None:
        try:
            self._events.write(Event(step, total, metrics, phase, time.time()))
        except OSError as error:
            raise StageFailed(f"step {step} could not be reported: {error}", hint="free some space there") from error


def main(backend: str, spec_path: str, attempt: Attempt, lock: int) -> None:
    """Never returns. `backend` is a module's import path; `lock`, the run lock's descriptor, is held to the end."""
    os.setsid()
    attempt.note_worker(os.getpid())
    _redirect(attempt.log)
    sys.exit(_carry_out(backend, Path(spec_path), attempt))


def _carry_out(backend: str, spec_path: Path, attempt: Attempt) -> int:
    try:
        spec = read_spec(spec_path)
        control = WorkerControl(Path(spec.events))
        signal.signal(signal.SIGTERM, control.stop)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the orchestrator's to act on
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_BACK)
        os.chdir(spec.workspace)  # where a verifier of the user's own is looked for
        _limit(spec)
        _pass_gate(spec, control)
        result = cast(Backend, import_module(backend)).run(spec, control)
        write_json(Path(spec.result), asdict(result))
    except Stopped:
        return EXIT_STOPPED
    except OpdctlError as error:
        tell_failure(attempt, str(error), _named(error.hint, spec_path))
        if error.__cause__ is not None:  # else the message says all there is, and calls would only hide it
            _print_traceback()
        return EXIT_DIED if isinstance(error, ProgramDied) else EXIT_FAILED
    except Exception as error:
        told = "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]
        full = os.strerror(errno.ENOSPC) in told  # from libraries, as other errors than OSError
        tell_failure(attempt, told, FULL_DISK if full else f"the traceback is in {attempt.log}")
        _print_traceback()
        return EXIT_FAILED if full else EXIT_BUG
    return 0


def _named(hint: str, spec_path: Path) -> str:
    """Engines say `--rerun STAGE`; which stage that is, the spec knows."""
    spec = read_json(spec_path, "stage")
    return hint.replace("--rerun STAGE", f"--rerun '{spec['stage']}'") if spec else hint


def _pass_gate(spec: StageSpec, control: WorkerControl) -> None:
    """Raises StageRefused where a check refuses that was not accepted."""
    if "settings" not in spec.gate:
        return
    settings = GateSettings.model_validate(spec.gate["settings"])
    verdicts, whole = accept(check_files(spec, settings), settings.accept), False
    try:  # models of which files say that they do not belong together are not asked
        if settings.models and not any(verdict.stops for verdict in verdicts):
            asked = import_module("opdctl.engine.gate").check_models(spec, settings, control)
            verdicts += accept(asked, settings.accept)
        whole = True
    finally:  # without the key no later attempt takes what was asked for all
        write_verdicts(Path(spec.gate["file"]), spec.gate["key"] if whole else "", verdicts)
    refuse({"": verdicts})


def _print_traceback() -> None:
    with contextlib.suppress(OSError):  # a full disk
        sys.stderr.write(redact(traceback.format_exc()))


def read_spec(path: Path) -> StageSpec:
    """With the secrets that the file only refers to."""
    given = reveal(json.loads(path.read_text()))
    return StageSpec(**{**given, "inputs": [InputSpec(**item) for item in given["inputs"]]})


def _redirect(log: Path) -> None:
    """All that this process, its libraries and its children print goes to the log."""
    sys.stdout.flush()
    sys.stderr.flush()
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    for stream in (sys.stdout, sys.stderr):
        cast(TextIOWrapper, stream).reconfigure(line_buffering=True, errors="backslashreplace")
    faulthandler.enable()


def _limit(spec: StageSpec) -> None:
    """The stage's share of the machine: leased GPUs only, `resources.cpus` threads."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    named = [visible[i] if i < len(visible) and visible[i] else str(i) for i in spec.devices]
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(named)
    cpus = int(spec.resources["cpus"])
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(cpus)  # for libraries still to be loaded
    if (torch := sys.modules.get("torch")) is not None:  # loaded before the fork, limited to one thread
        torch.set_num_threads(cpus)
