"""The processes of a run by their roles, found by a variable of their environment, whoever their parents are by now."""

import contextlib
import os
import signal
import time
from pathlib import Path

VARIABLE = "OPDCTL_DRILL"
ROLES = ("orchestrator", "fork server", "worker", "other")


class Family:
    """All processes that were started with `tag` in `VARIABLE`."""

    def __init__(self, tag: str) -> None:
        self._entry = f"\0{VARIABLE}={tag}\0".encode()

    def alive(self) -> dict[int, str]:
        """Process -> role."""
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        ours = [pid for pid in pids if self._entry in b"\0" + _read(pid, "environ") + b"\0"]
        servers = {pid for pid in ours if _forks(pid) and not (_forks(_parent(pid)) or _leads_session(pid))}
        return {pid: _role(pid, servers) for pid in ours}

    def of(self, role: str) -> list[int]:
        return sorted(pid for pid, found in self.alive().items() if found == role)

    def left(self, patience_s: float) -> dict[int, str]:
        """Those that live on after so long a wait; a process that becomes another shows no environment for a moment."""
        deadline, quiet, found = time.monotonic() + patience_s, 0, self.alive()
        while quiet < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
            found = self.alive()
            quiet = 0 if found else quiet + 1
        return found

    def end(self) -> None:
        """Kill all of them, stopped ones too."""
        while found := self.alive():
            for pid in found:
                send(pid, signal.SIGKILL)
            time.sleep(0.02)


def send(pid: int, number: int) -> bool:
    """False if the process had ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False


def _role(pid: int, servers: set[int]) -> str:
    command = _read(pid, "cmdline")
    if pid in servers:
        return "fork server"
    if _forks(pid):
        return "worker" if _leads_session(pid) or _parent(pid) in servers else "other"
    return "orchestrator" if b"\0run\0" in command else "other"


def _forks(pid: int) -> bool:
    return b"multiprocessing.forkserver" in _read(pid, "cmdline")


def _leads_session(pid: int) -> bool:
    try:
        return os.getsid(pid) == pid
    except ProcessLookupError:
        return False


def _parent(pid: int) -> int:
    fields = _read(pid, "stat").rpartition(b")")[2].split()
    return int(fields[1]) if len(fields) > 1 else 0


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""
