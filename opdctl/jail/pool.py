"""The host's side of a jail: worker processes, what they are asked, and how long they may take."""

import atexit
import contextlib
import json
import os
import select
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from queue import LifoQueue
from types import TracebackType
from typing import Any

from opdctl.errors import StageFailed, StageRefused
from opdctl.jail import monty
from opdctl.jail.checks import FUNCTION, PROGRAM, Check, Limits, Outcome, Program
from opdctl.jail.inside import send
from opdctl.jail.server import GRACE_S, START_S, Lost, Server
from opdctl.jail.values import decode

MOST = 8  # workers by default
MONTY_S = 0.5  # of CPU time, where CPython may still try


class Jail:
    """Workers, started when first needed, kept between checks, replaced when lost. Safe to use from several threads."""

    def __init__(self, workers: int | None = None) -> None:
        count = workers or min(MOST, len(os.sched_getaffinity(0)))
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="jail")
        self._free: LifoQueue[_Worker] = LifoQueue()  # the last one used comes first: few checks start few workers
        self._workers = [_Worker() for _ in range(count)]
        for worker in self._workers:
            self._free.put(worker)

    def run(self, checks: Sequence[Check | Program]) -> list[Outcome]:
        """An outcome for each check, in the order given.

        Raises StageRefused for a program where this machine cannot contain it, StageFailed where no worker starts.
        """
        if any(isinstance(check, Program) and check.interpreter != "monty" for check in checks):
            require_isolation()
        return list(self._threads.map(self._one, checks))

    def _one(self, check: Check | Program) -> Outcome:
        worker = self._free.get()
        try:
            return worker.program(check) if isinstance(check, Program) else worker.function(check)
        finally:
            self._free.put(worker)

    def close(self) -> None:
        self._threads.shutdown()
        for worker in self._workers:
            worker.close()

    def __enter__(self) -> "Jail":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


# ------------------------------------------------------------------------------------------------------- workers


class _Worker:
    """At most one server for functions and one for programs."""

    def __init__(self) -> None:
        self._functions: Server | None = None
        self._programs: Server | None = None
        self._imported: set[str] = set()
        self._given: tuple[int, int] | None = None  # the limits that the server for functions has for its whole life

    # -------------------------------------------------------------------------------------------------- functions

    def function(self, check: Check) -> Outcome:
        limits = check.limits
        if self._given != (limits.memory_mib, limits.file_mib):
            self._end_functions()
        server = self._functions or self._start_functions(limits)
        modules = {check.function.partition(":")[0], *check.imports} - self._imported
        question = {"function": check.function, "arguments": check.arguments, "cpu_s": limits.cpu_s}
        try:
            with contextlib.suppress(ConnectionError):  # it has ended: `receive` says so
                if modules:  # before the check's time begins
                    send(server.control, {"imports": sorted(modules)})
                    server.receive(START_S)
                    self._imported |= modules
                send(server.control, question | {"output": limits.output_kib * 1024})
            answer = server.receive(limits.wall_s)
        except TimeoutError:
            self._end_functions()
            return Outcome(None, "time", f"took more than {limits.wall_s:g} s")
        except Lost:
            code = self._end_functions()
            if code == 27:  # SIGPROF
                return Outcome(None, "time", f"took more than {limits.cpu_s:g} s of CPU time")
            return Outcome(None, "crash", f"ended its process ({code})")
        return Outcome(answer.get("value"), answer.get("failure", ""), answer.get("detail", ""))

    def _start_functions(self, limits: Limits) -> Server:
        jailed = isolation() == ""
        temp = None if jailed else tempfile.mkdtemp(prefix="opdctl-jail-")  # the keeper removes it
        greeting = {
            "namespaces": jailed,
            "temp": temp,
            "path": [path for path in sys.path if path],
            "limits": asdict(limits),
        }
        self._functions = Server("jailed" if jailed else "functions", greeting, temp)
        self._given = (limits.memory_mib, limits.file_mib)
        return self._functions

    def _end_functions(self) -> int:
        code = self._functions.close() if self._functions else 0
        self._functions = self._given = None
        self._imported.clear()
        return code

    # --------------------------------------------------------------------------------------------------- programs

    def program(self, program: Program) -> Outcome:
        if program.interpreter == "monty":
            return self._monty(program, program.limits.cpu_s)
        if program.interpreter == "auto" and program.calls and not program.files and monty.installed():
            outcome = self._monty(program, min(program.limits.cpu_s, MONTY_S))
            if not outcome.failure:
                return outcome
        return self._cpython(program)

    def _monty(self, program: Program, cpu_s: float) -> Outcome:
        limits = program.limits
        given = [program.source, list(program.calls), cpu_s, limits.memory_mib, limits.output_kib * 1024]
        outcome = self.function(
            Check("opdctl.jail.monty:run", given, replace(FUNCTION, output_kib=2 * limits.output_kib))
        )
        if outcome.failure:
            return outcome
        told = outcome.value
        if "time" in told:
            return Outcome(None, "time", f"{cpu_s:g} s", told.get("printed", ""))
        return _answered(told, told.get("printed", ""), limits)

    def _cpython(self, program: Program) -> Outcome:
        limits = program.limits
        server = self._programs or self._start_programs()
        answers, theirs = socket.socketpair()
        printed, output = os.pipe()
        try:
            try:
                socket.send_fds(server.control, [b"r"], [theirs.fileno(), output])
            except OSError:
                pass  # it has ended, as `_collect` finds out
            finally:
                theirs.close()
                os.close(output)
            given = {"source": program.source, "calls": list(program.calls), "files": dict(program.files)}
            collected = _collect(server, answers, printed, given | {"limits": asdict(limits)}, limits)
        except (Lost, TimeoutError):
            self._end_programs()
            return Outcome(None, "crash", "took its whole jail with it")
        finally:
            answers.close()
            os.close(printed)
        return collected

    def _start_programs(self) -> Server:
        self._programs = Server("programs", {})
        return self._programs

    def _end_programs(self) -> None:
        if self._programs:
            self._programs.close()
        self._programs = None

    def close(self) -> None:
        self._end_functions()
        self._end_programs()


def _collect(server: Server, answers: socket.socket, printed: int, given: Mapping[str, Any], limits: Limits) -> Outcome:
    """Hand a program over, and read what it answers and prints until it has ended, or must."""
    deadline = time.monotonic() + limits.wall_s
    most = limits.output_kib * 1024
    said, shown = bytearray(), bytearray()
    excess = ""
    answers.settimeout(GRACE_S)
    with contextlib.suppress(OSError):  # it has ended: told below
        send(answers, given)
    streams = {answers.fileno(): said, printed: shown}
    watch = select.poll()
    for descriptor in (*streams, server.control.fileno()):
        watch.register(descriptor, select.POLLIN)
    report: dict[str, Any] | None = None
    while report is None or streams:
        ready = watch.poll(max(0.0, deadline - time.monotonic()) * 1000) if report is None else watch.poll(0)
        if report is not None and not ready:
            break
        for descriptor, _ in ready:
            if descriptor == server.control.fileno():
                report = server.receive(GRACE_S)
                watch.unregister(descriptor)
            elif part := os.read(descriptor, 65536):
                streams[descriptor] += part
            else:
                watch.unregister(descriptor)
                del streams[descriptor]
        if max(len(said), len(shown)) > most:
            excess = excess or "output"
        if report is None and (excess or time.monotonic() >= deadline):
            excess = excess or "time"
            server.control.sendall(b"x")
            report = server.receive(GRACE_S)
            break
    return _outcome(report or {}, bytes(said), bytes(shown[:most]).decode(errors="replace"), excess, limits)


def _outcome(report: Mapping[str, Any], said: bytes, printed: str, excess: str, limits: Limits) -> Outcome:
    if excess == "output":
        return Outcome(None, "output", f"more than {limits.output_kib} KiB", printed)
    if excess == "time" or (report["signal"] == 9 and report["cpu_s"] > limits.cpu_s - 0.1):
        spent = f"{report['cpu_s']:.1f} s of CPU time, {report['wall_s']:.1f} s in all"
        return Outcome(None, "time", spent, printed)
    try:
        return _answered(json.loads(said), printed, limits)
    except (ValueError, RecursionError):
        ended = f"signal {report['signal']}" if report["signal"] else "it ended"
        return Outcome(None, "crash", f"no answer: {ended}", printed)


def _answered(answer: Any, printed: str, limits: Limits) -> Outcome:
    """Of what a program's process says, of which nothing is known. Raises ValueError where it is no answer."""
    match answer:
        case {"refused": str(why)}:
            return Outcome(None, "crash", why, printed)
        case {"memory": True}:
            return Outcome(None, "memory", f"more than {limits.memory_mib} MiB", printed)
        case {"raised": [str(kind), str(shown)]}:
            return Outcome(None, "error", shown or kind, printed)
        case {"values": [*values]}:
            return Outcome([decode(value) for value in values], "", "", printed)
    raise ValueError("no answer")


# ----------------------------------------------------------------------------------------------------- isolation

_PROBE = """
import os, socket
found = []
def allowed(name, act):
    try:
        act()
    except OSError:
        return
    found.append(name)
allowed("writes files", lambda: open("/r", "w"))
allowed("writes libraries", lambda: open(os.__file__ + "_", "w"))
allowed("starts processes", lambda: os.fork() or os._exit(0))
allowed("opens sockets", socket.socket)
allowed("reads /proc", lambda: os.listdir("/proc"))
allowed("reads /etc", lambda: os.listdir("/etc"))
allowed("becomes root", lambda: os.setuid(0))
"""
_known: list[str] = []
_lock = threading.Lock()


def isolation() -> str:
    """Why this machine cannot contain a program; "" where it can. Found out once, by a program that tries to escape."""
    with _lock:
        if not _known:
            _known.append(_probed())
        return _known[0]


def _probed() -> str:
    worker = _Worker()
    try:
        outcome = worker.program(Program(_PROBE, ["found"], interpreter="cpython"))
    except StageFailed as error:
        return str(error)
    finally:
        worker.close()
    if outcome.failure:
        return f"{outcome.failure}: {outcome.detail}"
    return f"a program {', '.join(outcome.value[0])}" if outcome.value[0] else ""


def require_isolation() -> None:
    """Raises StageRefused where a program could not be contained."""
    if why := isolation():
        raise StageRefused(f"code of a model may not run here: this machine cannot contain it ({why})", hint=REMEDY)


REMEDY = (
    "allow user namespaces (sysctl user.max_user_namespaces=10000, kernel.apparmor_restrict_unprivileged_userns=0; in "
    "a container: a seccomp profile that allows unshare, mount and pivot_root), on Linux 5.14 or later"
)

_shared: dict[int, Jail] = {}


def shared() -> Jail:
    """This process's jail, made at first use."""
    with _lock:
        if os.getpid() not in _shared:  # a forked child has another
            _shared.clear()
            _shared[os.getpid()] = Jail()
            atexit.register(_shared[os.getpid()].close)
        return _shared[os.getpid()]


def run_python(source: str, calls: Sequence[str] = (), limits: Limits = PROGRAM) -> Outcome:
    """One `Program` in this process's jail."""
    return shared().run([Program(source, calls, limits=limits)])[0]
