"""One orchestrator a run. The lock is a descriptor that workers inherit, so a worker left behind still holds it."""

import contextlib
import fcntl
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from opdctl import processes
from opdctl.errors import OpdctlError, RunBusy
from opdctl.records import disk_errors, read_json, write_json
from opdctl.secrets import command_line

PATIENCE_S = 30.0  # that an orphaned worker gets to save its state
UNSIGNED_S = 1.0  # that whoever took the lock gets to sign it
# That gets the process that forks workers: an orchestrator killed with its request to fork in flight leaves the lock
# to it, and it notices once its libraries are loaded: seconds, on a busy machine or a slow disk a minute.
UNKNOWN_S = 180.0
TELL_S = 5.0  # that a worker gets to leave its note; after that it is killed, or it is said what is waited for

NOTED = ("pid", "pgid", "start", "boot")  # what a worker's note holds
SIGNED = ("pid", "host", "started", "start", "boot")  # what the orchestrator's signature holds


@contextlib.contextmanager
def hold(path: Path, workers: Callable[[], Iterable[Path]], report: Callable[[str], None]) -> Iterator[int]:
    """Lock the file `path`. `workers` lists the files of `write_worker` of those that may still hold it.

    Raises RunBusy while the orchestrator that took the lock lives. If it died, what it left running is stopped first.
    """
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        _take(descriptor, path, workers, report)
        _end_what_is_left((note.parent for note in workers()), report)
        os.set_inheritable(descriptor, True)
        _sign(descriptor, path)
        try:
            yield descriptor
        finally:
            os.ftruncate(descriptor, 0)  # who holds it no more is not named in it
    finally:
        os.close(descriptor)


def held(path: Path) -> bool:
    """Does the orchestrator that signed the lock live, and hold it still? Looks only; another host's cannot be seen."""
    holder = _read(path, SIGNED)
    return holder is not None and holder["host"] == socket.gethostname() and _lives(holder)


def abandoned(path: Path) -> str:
    """Whose signature the lock still carries although it ended without taking it back: it was killed. Else empty."""
    holder = _read(path, SIGNED)
    if holder is None or holder["host"] != socket.gethostname() or _lives(holder):
        return ""
    return f"process {holder['pid']}, of {holder['started']}"


def taken(path: Path) -> bool:
    """Does any process hold the lock: an orchestrator, a worker that outlived one, or somebody on another host?

    A lock that cannot be looked at may be held.
    """
    holder = _read(path, SIGNED)
    if holder is not None and holder["host"] != socket.gethostname():
        return True
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        return not try_lock(descriptor, path)
    except OpdctlError:
        return True
    finally:
        os.close(descriptor)


def _read(path: Path, keys: tuple[str, ...]) -> dict[str, Any] | None:
    """A signature or a worker's note; None where there is none, or where a disk or a hand made it something else."""
    found = read_json(path, *keys)
    if found is None or not isinstance(found.get("host", ""), str):
        return None
    numbers = [found[key] for key in ("pid", "pgid") if key in keys]
    return found if all(type(number) is int and number > 0 for number in numbers) else None  # 0 and below mean groups


def process_start(pid: int) -> int | None:
    """Clock ticks from boot to the start of a living process; with the number it names the process for good."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def write_worker(path: Path, pid: int) -> None:
    """Leave a note of a worker process, once it leads its own group, for whoever has to stop it later."""
    write_json(path, {"pid": pid, "pgid": os.getpgid(pid), "start": process_start(pid), "boot": processes.boot()})


def worker_lives(path: Path) -> bool:
    note = _read(path, NOTED)
    return note is not None and _lives(note)


def _take(descriptor: int, path: Path, workers: Callable[[], Iterable[Path]], report: Callable[[str], None]) -> None:
    start, told = time.monotonic(), False
    while not try_lock(descriptor, path):
        waited = time.monotonic() - start
        holder = _read(path, SIGNED)
        if holder is None:
            if waited > UNSIGNED_S:
                raise RunBusy(f"run '{path.parent.name}' is in use", hint="try again, or give another --run")
            time.sleep(0.05)
            continue
        _refuse_if_alive(holder, path)
        _stop(workers(), report)
        if waited > TELL_S:
            begun = _without_note(path, workers())
            for pid in begun:
                report(f"killing worker {pid}, which an opdctl that ended was starting")
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if not begun and not told:
                report(f"waiting for what an opdctl that ended was starting; it holds {path} (fuser -v shows who)")
                told = True
        if waited > UNKNOWN_S and not try_lock(descriptor, path):
            raise RunBusy(
                f"run '{path.parent.name}' is locked by a process that opdctl does not know",
                hint=f"find it with: fuser -v {path}",
            )
        time.sleep(0.05)


def _without_note(path: Path, notes: Iterable[Path]) -> list[int]:
    """Workers that hold the lock and left no note, for they were stopped or got no time: they have done nothing yet."""
    known = {note["pid"] for each in notes if (note := _read(each, NOTED))}
    lock, found = os.path.realpath(path), []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended, or is another user's
            forked = b"multiprocessing.forkserver" in (process / "cmdline").read_bytes()
            if forked and any(os.readlink(file) == lock for file in (process / "fd").iterdir()):
                found.append(int(process.name))
    return [pid for pid in found if pid not in known and pid != os.getpid()]


def try_lock(descriptor: int, path: Path, how: int = fcntl.LOCK_EX) -> bool:
    """Whether it could be had at once. Raises OpdctlError where the file system has no locks."""
    with disk_errors(path):
        try:
            fcntl.flock(descriptor, how | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def _sign(descriptor: int, path: Path) -> None:
    note = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "argv": command_line(),
        "start": process_start(os.getpid()),
        "boot": processes.boot(),
    }
    with disk_errors(path):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(note).encode(), 0)


def _refuse_if_alive(holder: dict[str, Any], path: Path) -> None:
    if holder["host"] != socket.gethostname() or _lives(holder):
        raise RunBusy(
            f"run '{path.parent.name}' is in use by process {holder['pid']} on {holder['host']}, "
            f"since {holder['started']}",
            hint=f"wait for it, end it with: kill {holder['pid']}, or give another --run",
        )


def _lives(note: dict[str, Any]) -> bool:
    """A number that another process has by now does not count, nor one from before the last boot."""
    start = process_start(note["pid"])
    return start is not None and start == note["start"] and note["boot"] == processes.boot()


def _end_what_is_left(attempts: Iterable[Path], report: Callable[[str], None]) -> None:
    """Of attempts whose worker and watcher were killed."""
    for attempt in attempts:
        if not processes.left(attempt):
            continue
        if found := processes.find(attempt):
            names = ", ".join(f"{pid} {processes.command_of(pid)}" for pid in found)
            report(f"killing what {attempt} left running: {names}")
        processes.end(attempt)


def _stop(notes: Iterable[Path], report: Callable[[str], None]) -> None:
    left = [note for path in notes if (note := _read(path, NOTED)) and _lives(note)]
    for note in left:
        report(f"stopping worker {note['pid']}, left behind by an opdctl that ended; it saves its state first")
        with contextlib.suppress(ProcessLookupError):
            os.kill(note["pid"], signal.SIGTERM)
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline and any(_lives(note) for note in left):
        time.sleep(0.05)
    for note in left:
        if _lives(note):
            report(f"killing worker {note['pid']}: it did not stop within {PATIENCE_S:.0f} s")
        with contextlib.suppress(ProcessLookupError):  # children that outlive their leader hold the lock too
            os.killpg(note["pgid"], signal.SIGKILL)
    while any(_lives(note) for note in left):
        time.sleep(0.02)
