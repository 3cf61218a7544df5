"""Does a trainer still do anything? And if not, where does it hang?"""

import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from opdctl import processes
from opdctl.processes import Tree

IDLE_SHARE = 0.01  # of a core for each process: those of a waiting Ray use 0.4 % on average
LOOK_S = 5.0  # between two looks at the CPU time
DUMPED = 40  # processes at most
HEAD = ("gcs_server", "raylet")  # without these two Ray cannot go on, and its clients may wait for minutes


@dataclass
class Liveness:
    """Of the processes of a stage. `tree.cpu_seconds` is asked every LOOK_S."""

    tree: Tree
    heads: dict[str, int] = field(default_factory=dict)  # name -> process number
    _cpu: dict[int, float] = field(default_factory=dict)
    _looked: float = field(default_factory=time.monotonic)
    _active: float = field(default_factory=time.monotonic)  # when something happened last
    _lost: float | None = None  # since when Ray has no head

    def happened(self) -> None:
        """An event or a line of the log was seen."""
        self._active = time.monotonic()

    def idle_s(self) -> float:
        """Seconds without an event, a line of the log or CPU use."""
        now = time.monotonic()
        if now - self._looked >= LOOK_S:
            cpu = self.tree.cpu_seconds()
            used = sum(max(0.0, seconds - self._cpu.get(pid, 0.0)) for pid, seconds in cpu.items())
            if used > IDLE_SHARE * max(1, len(cpu)) * (now - self._looked):
                self._active = now
            self._watch_heads(cpu, now)
            self._cpu, self._looked = cpu, now
        return now - self._active

    def lost_head(self, patience_s: float) -> str:
        """Name of a daemon of Ray's that ended `patience_s` ago or earlier; else empty."""
        if self._lost is None or time.monotonic() - self._lost < patience_s:
            return ""
        return next(name for name, pid in self.heads.items() if pid not in self._cpu)

    def _watch_heads(self, cpu: dict[int, float], now: float) -> None:
        for pid in cpu.keys() - self._cpu.keys():
            if (name := processes.command_of(pid)) in HEAD:
                self.heads.setdefault(name, pid)
        gone = any(pid not in cpu for pid in self.heads.values())
        self._lost = (self._lost or now) if gone else None


def dump_stacks(tree: Tree, python: str, target: Path) -> str:
    """The stacks of all Python processes of a stage, by py-spy, into the file `target`; what to tell of it."""
    beside = [str(Path(path).parent) for path in (python, sys.executable)]
    spy = shutil.which("py-spy", path=os.pathsep.join([*beside, os.environ.get("PATH", "")]))
    if spy is None:
        return f"no stacks: py-spy is in none of {', '.join(beside)} (pip install py-spy)"
    with target.open("w") as stream:
        for pid in processes.find(tree.attempt)[:DUMPED]:
            stream.write(f"\n==== {pid} {processes.command_of(pid)}\n")
            stream.flush()
            # without stopping it: a process that is stopped already would never answer
            command = [spy, "dump", "--nonblocking", "--pid", str(pid)]
            try:
                subprocess.run(command, stdout=stream, stderr=subprocess.STDOUT, timeout=20, check=False)
            except subprocess.TimeoutExpired:
                stream.write("no answer within 20 s\n")
    return f"the stacks of its processes are in {target}"
