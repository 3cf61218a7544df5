"""What an attempt starts beside its worker, and how nothing of it is left: processes, shared memory, temporary files.

Daemons (Ray's) leave the worker's process group and session, so they are known by a variable of their environment.
A watcher, a process of its own, ends all of it once the worker has ended, however that came about. What it could not
do, because it was killed as well, the attempt's note says: the next start does it. Run as a program, this module is
the watcher; it imports nothing of ours.
"""

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VARIABLE = "OPDCTL_ATTEMPT"  # holds the attempt's folder, in every process of the attempt but the worker
NOTE = "processes.json"  # in the attempt's folder, while anything may be left
LOOK_S = 1.0  # between two looks at the shared memory that they hold
END_S = 20.0  # that killed processes get to vanish
SHARED_MEMORY = Path("/dev/shm")
PREFIX = "opd-"  # of its name
SHORT = 40  # of a temporary folder: the sockets that Ray and vLLM put in it have paths of at most 107 bytes


@dataclass(frozen=True)
class Tree:
    """The processes of an attempt."""

    attempt: Path
    temp: Path  # a private folder for their temporary files

    @property
    def environment(self) -> Mapping[str, str]:
        """To be added to that of every process that is started."""
        return {VARIABLE: str(self.attempt), "TMPDIR": str(self.temp), "RAY_TMPDIR": str(self.temp)}

    def cpu_seconds(self) -> dict[int, float]:
        """Process number -> CPU time that it has used."""
        return {pid: seconds for pid in find(self.attempt) if (seconds := _cpu_seconds(pid)) is not None}


@contextlib.contextmanager
def guarded(attempt: Path) -> Iterator[Tree]:
    """To start processes in: at the end, or when this process ends in any way, all of them are killed and what they
    left in memory and in temporary files is removed."""
    parent = tempfile.gettempdir()
    temp = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent if len(parent) <= SHORT else "/tmp"))
    _write_note(attempt, {"temp": str(temp), "host": socket.gethostname(), "boot": boot(), "memory": []})
    # alone in its session, so that what ends this process's group does not end it; it waits for the end of its input
    watcher = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, str(attempt)], stdin=subprocess.PIPE, start_new_session=True
    )
    try:
        yield Tree(attempt, temp)
    finally:
        assert watcher.stdin is not None
        watcher.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            watcher.wait(END_S + 10)
        end(attempt)


def find(attempt: Path, besides: Iterable[int] = ()) -> list[int]:
    """The living processes of an attempt, its worker and its watcher excepted, and those of `besides`."""
    entry = f"\0{VARIABLE}={attempt}\0".encode()
    found = []
    for pid in _all().difference(besides, [os.getpid()]):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as stream:
            if entry in b"\0" + stream.read() + b"\0":
                found.append(pid)
    return sorted(found)


def _all() -> set[int]:
    return {int(name) for name in os.listdir("/proc") if name.isdigit()}


def command_of(pid: int) -> str:
    """Name of the program that a process runs; empty if it ended."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def killed(code: int) -> bool:
    """Of an exit code: did a signal end the process that was none of its own making? The next try may be spared."""
    return code < 0 and -code not in (signal.SIGSEGV, signal.SIGILL, signal.SIGFPE)


def left(attempt: Path) -> bool:
    """May an attempt have left anything on this machine?"""
    note = _read_note(attempt)
    return note is not None and note["host"] == socket.gethostname()


def end(attempt: Path) -> list[int]:
    """Kill what is left of an attempt on this machine and remove what it left behind; the processes that were found.

    Those that do not vanish within END_S, because a driver holds them, keep the note: the next start tries again.
    """
    note = _read_note(attempt)
    if note is None or note["host"] != socket.gethostname():
        return []
    memory = {tuple(pair) for pair in note["memory"]} if note["boot"] == boot() else set()
    ended: set[int] = set()
    deadline = time.monotonic() + END_S
    quiet = 0
    while quiet < 2:  # again: they may start others while they die, and one that becomes a program shows no environment
        alive = find(attempt)
        quiet = 0 if alive else quiet + 1
        memory |= _shared_memory(alive)
        ended.update(alive)
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if alive and time.monotonic() > deadline:
            return sorted(ended)
        time.sleep(0.02)
    _remove_shared_memory(memory)
    temp = Path(note["temp"])
    if temp.name.startswith(PREFIX) and str(temp.parent) in {tempfile.gettempdir(), "/tmp"}:  # as `guarded` makes it
        shutil.rmtree(temp, ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        (attempt / NOTE).unlink()
    return sorted(ended)


def _shared_memory(pids: Iterable[int]) -> set[tuple[int, int]]:
    """(device, inode) of every segment that these processes hold: names lie, semaphores are mapped under another."""
    held: set[tuple[int, int]] = set()
    for pid in pids:
        with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/maps", "rb") as stream:
            for line in stream:
                if b" /dev/shm/" in line:
                    device, inode = line.split(maxsplit=5)[3:5]
                    major, minor = (int(part, 16) for part in device.split(b":"))
                    held.add((os.makedev(major, minor), int(inode)))
    return held


def _remove_shared_memory(segments: set[tuple[int, int]]) -> None:
    """Those of `segments` that no living process holds: what was ours alone."""
    if not segments or not SHARED_MEMORY.is_dir():
        return
    others = _shared_memory(_all())
    for path in SHARED_MEMORY.iterdir():
        with contextlib.suppress(OSError):
            state = path.lstat()
            if (state.st_dev, state.st_ino) in segments - others and state.st_uid == os.getuid():
                path.unlink()


def _cpu_seconds(pid: int) -> float | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _read_note(attempt: Path) -> dict[str, Any] | None:
    """None for what is not exactly of the form that `guarded` writes: it was damaged."""
    try:
        note = json.loads((attempt / NOTE).read_text())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(note, dict) or not note.keys() >= {"temp", "host", "boot", "memory"}:
        return None
    named = isinstance(note["temp"], str) and "\0" not in note["temp"] and isinstance(note["host"], str)
    whole = named and isinstance(note["boot"], str | None) and isinstance(note["memory"], list)
    return note if whole and all(map(_is_segment, note["memory"])) else None


def _is_segment(pair: Any) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and all(isinstance(number, int) for number in pair)


def _write_note(attempt: Path, note: Mapping[str, Any]) -> None:
    staging = attempt / f".{NOTE}.part"
    staging.write_text(json.dumps(note))
    os.replace(staging, attempt / NOTE)


def boot() -> str | None:
    """Names the time since the machine started; None where it has no name."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def _watch(attempt: Path) -> None:
    """Until the worker closes our input, or dies: note which shared memory its processes hold. Then end them."""
    known: set[tuple[int, int]] = set()
    foreign: set[int] = set()  # told apart once: a machine may run thousands
    changed, looks = -1, 0
    while not select.select([sys.stdin], [], [], LOOK_S)[0]:
        living = _all()
        ours = find(attempt, foreign)
        foreign = living - set(ours)
        with contextlib.suppress(OSError):
            if changed != (changed := SHARED_MEMORY.stat().st_mtime_ns):  # a segment was made, or removed
                looks = 3  # it is mapped a little later
        if looks == 0:
            continue
        looks -= 1
        note, held = _read_note(attempt), _shared_memory(ours)
        if note is not None and held - known:
            known |= held
            _write_note(attempt, {**note, "memory": sorted(known)})
    end(attempt)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _watch(Path(sys.argv[1]))
