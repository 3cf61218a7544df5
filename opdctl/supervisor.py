"""Worker processes: started by forking a server that has the heavy imports done, watched, stopped, never left behind.

A stage of a small recipe takes two seconds and `import torch` four. The server (`multiprocessing`'s) imports once;
a stage then starts in about 0.03 s, as a process group of its own.
"""

import contextlib
import multiprocessing
import os
import shutil
import signal
import sys
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing import connection, forkserver, reduction, resource_tracker
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

from opdctl import processes
from opdctl.backends.contract import EXIT_STOPPED, Event, StageResult
from opdctl.backends.events import EventTail
from opdctl.errors import OpdctlError, StageFailed
from opdctl.records import is_number, read_json, write_json
from opdctl.secrets import redact
from opdctl.store import Attempt, StageDir

# Threads: the server makes none of its own (it forks), and waiting ones sleep instead of burning the cores that other
# stages compute on. A worker raises the number to its stage's `resources.cpus`.
SERVER_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    # some microseconds of spinning halve the time of small steps on two threads (172 to 83 ms); much more of it stops
    # them altogether once another process wants the cores
    "GOMP_SPINCOUNT": "2000",
    "TOKENIZERS_PARALLELISM": "false",
}
EXIT_FAILED = 1  # an OpdctlError, told in `error_file`
EXIT_DIED = 4  # a ProgramDied, told likewise
EXIT_BUG = 3  # any other exception; its traceback is in the log
HELD_BACK = (signal.SIGINT, signal.SIGTERM)  # from a worker, until it can heed them
SERVER_LOST = 255  # multiprocessing's exit code where the server that would have reported it is gone

FULL_BYTES = 1 << 20  # a disk with less left counts as full
RUN_AGAIN = "run again to go on from the last saved step"
FULL_DISK = "the disk is full: free space, or move the workspace; then " + RUN_AGAIN
WEIGHTS = ("config.json", "*.safetensors")
OWED = {  # kind -> what it has to publish
    "sft": WEIGHTS,
    "rlvr": WEIGHTS,
    "opd": WEIGHTS,
    "eval": ("report.json",),
    "merge": WEIGHTS,
    "sample": ("data.jsonl", "report.json"),
    "select": (*WEIGHTS, "selection.json"),
}
STEPS = {  # kind -> what its steps are
    "eval": "models scored",
    "merge": "models merged",
    "sample": "prompts",
    "select": "models compared",
}


class SharedFd:
    """A descriptor that goes along to a worker when it is started (`fd` is then the worker's own number)."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __reduce__(self) -> tuple[Any, ...]:
        return _receive_fd, (reduction.DupFd(self.fd),)


def _receive_fd(handle: Any) -> SharedFd:
    return SharedFd(handle.detach())


def _work(backend: str, spec: str, attempt: Attempt, lock: SharedFd) -> None:
    import_module("opdctl.worker").main(backend, spec, attempt, lock.fd)  # a program of its own, above this layer


@dataclass
class Worker:
    """A running stage."""

    stage: str
    attempt: Attempt
    process: ForkServerProcess
    pidfd: int  # readable once the process has ended, whoever its parent is
    tail: EventTail
    started: float = field(default_factory=time.time)

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def send(self, number: signal.Signals) -> None:
        if self.pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, number)

    def events(self) -> list[Event]:
        return self.tail.read()

    def exit_code(self) -> int | None:
        """Of an ended worker; negative: the signal that killed it; None: unknown, the fork server was killed."""
        self.process.join(timeout=5)
        code = self.process.exitcode
        return None if code == SERVER_LOST else code


class Supervisor:
    """All workers of one `execute`. Use as a context manager: on exit nothing of theirs is left running."""

    def __init__(self, lock: int, preload: Sequence[str] = ()) -> None:
        self._lock = SharedFd(lock)
        self._context: ForkServerContext = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(preload))
        self.workers: dict[str, Worker] = {}

    def __enter__(self) -> "Supervisor":
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()
        while self.workers:
            self.wait(timeout_s=0.1)

    def start(self, stage: str, backend: str, spec: str, attempt: Attempt) -> None:
        """The first start waits for the server's imports, which takes seconds."""
        process = self._context.Process(target=_work, args=(backend, spec, attempt, self._lock), name=stage)
        with _environment(SERVER_ENVIRONMENT), _no_main_module():
            try:
                with _signals_held_back():
                    forkserver.ensure_running()
                process.start()
            except (EOFError, OSError) as error:
                raise StageFailed(
                    f"stage '{stage}': no worker process could be started ({type(error).__name__}: {error})",
                    hint="a traceback above says why the fork server ended; else look at free memory and processes",
                ) from error
        assert process.pid is not None
        self.workers[stage] = Worker(stage, attempt, process, _pidfd(process.pid), EventTail(attempt.events))

    def wait(self, timeout_s: float) -> list[Worker]:
        """Workers that ended, after at most `timeout_s`; what was left of their processes is killed."""
        by_fd = {worker.pidfd: worker for worker in self.workers.values() if worker.pidfd >= 0}
        gone = [worker for worker in self.workers.values() if worker.pidfd < 0]
        ready = connection.wait(list(by_fd), timeout=0 if gone else timeout_s)
        ended = gone + [by_fd[fd] for fd in ready if isinstance(fd, int)]
        for worker in ended:
            self._forget(worker)
        return ended

    def stop(self) -> None:
        """Ask every worker to save its state and end."""
        for worker in self.workers.values():
            worker.send(signal.SIGTERM)

    def abandon(self) -> None:
        """End the fork server, so that a `start` which waits for it fails at once. Callable from a signal handler."""
        pid = getattr(forkserver._forkserver, "_forkserver_pid", None)  # multiprocessing has no public name for it
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def kill(self) -> None:
        """End every worker now; `wait` still has to be told of it."""
        for worker in self.workers.values():
            worker.send(signal.SIGKILL)  # it may not lead its group yet
            _kill_group(worker.pid)

    def _forget(self, worker: Worker) -> None:
        _kill_group(worker.pid)
        processes.end(worker.attempt.path)  # those that left its group
        if worker.pidfd >= 0:
            os.close(worker.pidfd)
        del self.workers[worker.stage]


def judge(stage: StageDir, worker: Worker, *, kind: str, target: int) -> StageResult | None:
    """What an ended worker achieved; None if it stopped on request.

    Exit code 0 is not enough: the result must be there, reach `target` steps, and the output hold what `kind` owes.
    Raises StageFailed saying what is missing.
    """
    code = worker.exit_code()
    attempt = worker.attempt
    if code == EXIT_STOPPED:
        return None
    given = read_json(stage.result, "step", "metrics")
    if code is None and given is None:
        raise StageFailed("its end was not seen, the process that forks workers was killed", hint=RUN_AGAIN)
    if code:
        raise _failure(code, attempt)
    if given is None:
        raise StageFailed("it ended with exit code 0 but left no result", hint=f"the log says more: {attempt.log}")
    result = _result(given, attempt)
    if result.step < target:
        what = STEPS.get(kind, "steps")
        raise StageFailed(
            f"it ended with exit code 0 after {result.step} of {target} {what}",
            hint=f"the log says more: {attempt.log}",
        )
    if missing := [pattern for pattern in OWED[kind] if not any(attempt.output.glob(pattern))]:
        raise StageFailed(
            f"it ended with exit code 0 but published no {' and no '.join(missing)}",
            hint=f"look into {attempt.output}, and into the log: {attempt.log}",
        )
    return result


def _result(given: Mapping[str, Any], attempt: Attempt) -> StageResult:
    """A final metric that is no number is left out: gates and retention compare them. Its events have it."""
    step, metrics = given["step"], given["metrics"]
    if type(step) is not int or not isinstance(metrics, dict):
        raise StageFailed("its result is damaged: it has no whole step, or no metrics", hint=f"see {attempt.log}")
    return StageResult(step, {name: value for name, value in metrics.items() if is_number(value)})


def _failure(code: int, attempt: Attempt) -> StageFailed:
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        if -code == signal.SIGKILL:
            hint = "most likely the machine ran out of memory: lower resources.micro_batch_tokens; " + RUN_AGAIN
        else:
            hint = f"the log says more: {attempt.log}"
        return StageFailed(f"its worker was killed by {name}", hint=hint)
    error = read_json(error_file(attempt), "message", "hint")
    if code in (EXIT_FAILED, EXIT_DIED, EXIT_BUG) and error is not None:
        return StageFailed(error["message"], hint=error["hint"])
    if (free := shutil.disk_usage(attempt.path).free) < FULL_BYTES:  # not even the reason could be written
        return StageFailed(
            f"its worker ended with exit code {code}, and the disk of {attempt.path} is full ({free:,} bytes free)",
            hint=FULL_DISK,
        )
    return StageFailed(f"its worker ended with exit code {code}", hint=f"the log says more: {attempt.log}")


def log_tail(attempt: Attempt, lines: int = 20) -> str:
    """The last lines of the log; empty where there is none."""
    try:
        with attempt.log.open("rb") as stream:
            stream.seek(max(0, attempt.log.stat().st_size - 65_536))
            text = stream.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
    return redact("\n".join(text.rstrip().splitlines()[-lines:]))


def tell_failure(attempt: Attempt, message: str, hint: str) -> None:
    """Leave for later why an attempt failed. What a full disk has no room for is told by the caller alone."""
    with contextlib.suppress(OpdctlError):
        write_json(error_file(attempt), {"message": redact(message), "hint": redact(hint)})


def error_file(attempt: Attempt) -> Path:
    """{"message", "hint"}: why the attempt failed; absent if it did not, or nobody lived to say so."""
    return attempt.path / "error.json"


def _kill_group(pid: int) -> None:
    """A worker leads a group with its own number."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _pidfd(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:  # ended, and collected, already
        return -1


@contextlib.contextmanager
def _signals_held_back() -> Iterator[None]:
    """A process started inside never gets SIGINT and SIGTERM, nor do its children until they unblock them.

    Ctrl-C reaches every process of the terminal; the fork server would die of it while it still imports, and a worker
    before it has its own group and its handler.
    """
    resource_tracker.ensure_running()  # it unblocks the two again if it has to start
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HELD_BACK)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _no_main_module() -> Iterator[None]:
    """`multiprocessing` runs the main script again in every child. Workers need nothing of it."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
