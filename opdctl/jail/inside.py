"""What runs inside a jail. Standard library only; the host's side is `pool.py`.

    keeper       in the host's namespaces; ends everything as soon as the host closes its socket, or dies
    `- first     process 1 of the jail's own process namespace: when it ends, the kernel kills all others
       `- ...    a server that calls functions one after another, or one child for every program

Without namespaces (functions only) keeper and server are all there is.

Messages on the socket are JSON after their length in four bytes. A program's own messages go over a socket of its own,
handed over beside the order to run it, so that no program can speak for another.
"""

import contextlib
import importlib
import io
import json
import os
import resource
import select
import shutil
import signal
import socket
import struct
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from opdctl.jail import kernel
from opdctl.jail.values import encode

TEMP = "/dev/shm"  # of servers; programs have /tmp
INODES = 4096  # files in a temporary folder
NOBODY = 65534
MESSAGE = 64 * 2**20  # bytes of a message from the host
SHOWN = 2000  # characters of a traceback

_stop = b"x"


def main() -> None:
    """`python -c ... main() MODE [TEMP]`: MODE is one of those below, TEMP a folder to be removed at the end.

    Descriptor 0 is the socket to the host.
    """
    control = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.close(null)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        _keep(control, *MODES[sys.argv[1]], *sys.argv[2:])
    except OSError as error:
        send(control, {"refused": str(error)})


# ------------------------------------------------------------------------------------------------------ messages


def send(stream: socket.socket, message: Any) -> None:
    data = json.dumps(message).encode()
    stream.sendall(struct.pack(">I", len(data)) + data)


def receive(stream: socket.socket) -> Any:
    """Raises EOFError where the other side has closed."""
    (length,) = struct.unpack(">I", _exactly(stream, 4))
    if length > MESSAGE:
        raise EOFError("a message longer than any")
    return json.loads(_exactly(stream, length))


def _exactly(stream: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        part = stream.recv(min(length - len(data), 2**16))
        if not part:
            raise EOFError("closed")
        data += part
    return bytes(data)


# -------------------------------------------------------------------------------------------------------- keeper


def _keep(
    control: socket.socket, serve: Callable[[socket.socket], None], namespaces: bool, temp: str | None = None
) -> None:
    if namespaces:
        _own_namespaces()
    first = os.fork()
    if first == 0:
        os.setsid()
        kernel.die_with_parent()
        _, error = attempt(lambda: serve(control))
        if error is not None and not isinstance(error, EOFError):
            attempt(lambda: send(control, {"refused": _named(error)}))
        os._exit(int(not isinstance(error, EOFError)))
    watch = select.poll()
    watch.register(control, select.POLLRDHUP)
    watch.register(os.pidfd_open(first), select.POLLIN)
    ready = {descriptor for descriptor, _ in watch.poll()}
    if control.fileno() in ready:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(first, signal.SIGKILL)
    _, status = os.waitpid(first, 0)
    if temp:
        shutil.rmtree(temp, ignore_errors=True)
    os._exit(os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status))


def _own_namespaces() -> None:
    uid, gid = os.getuid(), os.getgid()
    flags = kernel.NEW_MOUNTS | kernel.NEW_PIDS | kernel.NEW_NETWORK | kernel.NEW_IPC | kernel.NEW_UTS
    if uid == 0:
        kernel.unshare(flags)
    else:
        kernel.unshare(flags | kernel.NEW_USER)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    kernel.make_mounts_private()


# ----------------------------------------------------------------------------------------------------- functions


def _functions(control: socket.socket) -> None:
    """Call trusted functions on any text. They read the host's files, write to TEMP and reach no network."""
    given = receive(control)
    if given["namespaces"]:
        server = os.fork()
        if server:  # process 1 is deaf to the signals that end a check
            _, status = os.waitpid(server, 0)
            os._exit(os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status))
        kernel.restrict("/", kernel.READ_ONLY)
        with contextlib.suppress(OSError):  # containers that hide parts of /proc refuse a fresh one
            kernel.mount_processes("/proc")
        kernel.mount_memory(TEMP, given["limits"]["file_mib"], INODES)
        given["temp"] = TEMP
        if os.getuid():
            kernel.drop_capabilities()
    kernel.deny(kernel.DENIED.values())
    os.chdir(given["temp"])
    os.environ["TMPDIR"] = given["temp"]
    sys.path[:] = given["path"]
    _limit(given["limits"], cpu=False)
    send(control, {"ready": True})
    while True:
        _answer(control, receive(control))


def _answer(control: socket.socket, check: Mapping[str, Any]) -> None:
    data, error = attempt(lambda: _called(check))
    if error is not None:  # it may call itself false
        memory = isinstance(error, MemoryError)
        data = json.dumps({"failure": "memory" if memory else "error", "detail": "" if memory else _named(error)})
    signal.setitimer(signal.ITIMER_PROF, 0)
    raw = data.encode()
    if len(raw) > check.get("output", MESSAGE):
        raw = json.dumps({"failure": "output", "detail": f"{len(raw)} bytes"}).encode()
    control.sendall(struct.pack(">I", len(raw)) + raw)


def _called(check: Mapping[str, Any]) -> str:
    if "imports" in check:
        return json.dumps({"value": [importlib.import_module(name).__name__ for name in check["imports"]]})
    module, _, name = check["function"].partition(":")
    function = getattr(importlib.import_module(module), name)
    # of CPU time; its default action ends this process, whatever the function catches
    signal.setitimer(signal.ITIMER_PROF, check["cpu_s"])
    return json.dumps({"value": function(*check["arguments"])})


# ------------------------------------------------------------------------------------------------------ programs


def _programs(control: socket.socket) -> None:
    """Run programs that nobody trusts, each in a child of its own; nothing of it survives its answer."""
    _own_root()
    kernel.hide_memory()
    os.environ.clear()
    os.environ.update({"PATH": "/nowhere", "HOME": "/tmp", "TMPDIR": "/tmp", "LANG": "C.UTF-8"})
    sys.path[:] = [path for path in sys.path if path.startswith(str(_library()))]
    receive(control)
    send(control, {"ready": True})
    while True:
        order, descriptors, _, _ = socket.recv_fds(control, 1, 2)
        if not order:
            return
        if order == _stop:
            continue  # it ended before the order came
        answer, output = descriptors
        begin = time.monotonic()
        child = os.fork()
        if child == 0:
            control.close()
            _program(socket.socket(fileno=answer), output)
        os.close(answer)
        os.close(output)
        ended = os.pidfd_open(child)
        watch = select.poll()
        watch.register(control, select.POLLIN)
        watch.register(ended, select.POLLIN)
        watch.poll()
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)  # all of this namespace but process 1
        status, cpu = 0, 0.0
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, state, used = os.wait4(-1, 0)
                cpu += used.ru_utime + used.ru_stime
                status = state if pid == child else status
        os.close(ended)
        signalled = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        send(control, {"signal": signalled, "cpu_s": cpu, "wall_s": time.monotonic() - begin})


def _library() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def _own_root() -> None:
    """A root that holds the standard library, the shared libraries and four devices, all read-only.

    It is built on /proc, which every machine has and nothing needed lies in. Programs get its folder `r` by chroot,
    for inside a chroot the kernel makes no user namespaces.
    """
    root = "/proc"
    kernel.mount_memory(root, 1, 256)
    top = Path(root, "r")
    Path(root, "old").mkdir()
    for source in (
        Path("/lib"),
        Path("/lib64"),
        Path("/usr/lib"),
        Path("/usr/lib64"),
        Path("/usr/local/lib"),
        _library(),
    ):
        target = top / source.relative_to("/")
        if not source.exists() or target.exists():  # the library may lie in one of the others
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink():
            target.symlink_to(os.readlink(source))
        else:
            target.mkdir()
            kernel.bind(str(source), str(target))
            kernel.restrict(str(target), kernel.READ_ONLY | kernel.NO_SUID | kernel.NO_DEVICES)
    (top / "dev").mkdir()
    for device in ("null", "zero", "random", "urandom"):
        (target := top / "dev" / device).touch()
        kernel.bind(f"/dev/{device}", str(target))
    (top / "tmp").mkdir()
    kernel.pivot_root(root, "old")
    kernel.restrict("/", kernel.READ_ONLY, recursive=False)


def _program(answer: socket.socket, output: int) -> None:
    said, error = attempt(lambda: json.dumps(_confined(receive(answer), output)))
    if error is not None:
        said = json.dumps({"memory": True} if isinstance(error, MemoryError) else {"refused": _named(error)})
    attempt(lambda: answer.sendall(said.encode()))
    os._exit(0)


def _confined(given: Mapping[str, Any], output: int) -> dict[str, Any]:
    limits = given["limits"]
    os.setsid()
    kernel.unshare(kernel.NEW_MOUNTS | kernel.NEW_IPC)
    kernel.mount_memory("/r/tmp", limits["file_mib"], INODES)
    if os.getuid() == 0:  # RLIMIT_NPROC does not bind root
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    kernel.unshare(kernel.NEW_USER)  # RLIMIT_NPROC counts by user namespace
    os.chroot("/r")
    os.chdir("/tmp")
    kernel.drop_capabilities()
    kernel.deny([*kernel.DENIED.values(), *kernel.SLEEP.values()], processes=limits["processes"] > 1)
    for name, text in given["files"].items():
        path = Path("/tmp", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    _limit(limits, cpu=True)
    return _run(given["source"], given["calls"])


def _limit(limits: Mapping[str, Any], cpu: bool) -> None:
    bounds = {
        resource.RLIMIT_AS: limits["memory_mib"] * 2**20,
        resource.RLIMIT_FSIZE: limits["file_mib"] * 2**20,
        resource.RLIMIT_NOFILE: 64 if cpu else 256,
        resource.RLIMIT_CORE: 0,
    }
    if cpu:
        bounds |= {
            resource.RLIMIT_CPU: max(1, -int(-limits["cpu_s"] // 1)),
            resource.RLIMIT_NPROC: limits["processes"],
            resource.RLIMIT_MEMLOCK: 0,
            resource.RLIMIT_MSGQUEUE: 0,
        }
    for name, bound in bounds.items():
        _, hard = resource.getrlimit(name)
        bound = bound if hard == resource.RLIM_INFINITY else min(bound, hard)
        resource.setrlimit(name, (bound, bound))


def _run(source: str, calls: Sequence[str]) -> dict[str, Any]:
    """{"values": [...]}, or {"raised": [kind, traceback]} where the source itself raises."""
    sys.stdin = io.StringIO()
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        setattr(sys, name, os.fdopen(descriptor, "w", encoding="utf-8", errors="replace", closefd=False))
    module = ModuleType("program" if calls else "__main__")
    sys.modules[module.__name__] = module
    sys.argv = ["program"]
    sys.path.insert(0, "/tmp")
    _, error = attempt(lambda: exec(compile(source, "<program>", "exec"), module.__dict__))
    values = [_raised(error)] if error is not None else [_value(call, module) for call in calls]
    for stream in (sys.stdout, sys.stderr):
        attempt(stream.flush)
    return values[0] if error is not None else {"values": values}


def _value(call: str, module: ModuleType) -> Any:
    value, error = attempt(lambda: encode(eval(compile(call, "<call>", "eval"), module.__dict__)))
    return _raised(error) if error is not None else value


def _raised(error: BaseException) -> dict[str, Any]:
    """Of what a program raised; memory that is full ends it."""
    if isinstance(error, MemoryError):
        raise error
    lines, lie = attempt(lambda: traceback.format_exception(type(error), error, error.__traceback__, limit=-8))
    # what lies above is the jail's own
    kept = (
        []
        if lie is not None
        else [line for line in lines if '"<program>"' in line or not line.lstrip().startswith("File ")]
    )
    return {"raised": [type(error).__name__, "".join(kept)[-SHOWN:]]}


# ------------------------------------------------------------------------------------------------------ failures


def attempt(act: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """(what it returns, None), or (None, whatever it raises): SystemExit would end a server without a word."""
    try:
        return act(), None
    except BaseException as error:
        return None, error


def _named(error: BaseException) -> str:
    said, _ = attempt(lambda: str(error))
    return f"{type(error).__name__}: {said or ''}"[:SHOWN]


# what the first process does, and whether in namespaces of its own
MODES = {"functions": (_functions, False), "jailed": (_functions, True), "programs": (_programs, True)}
