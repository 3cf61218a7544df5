"""One start of a stage's worker: its folder, and who works in it."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opdctl import lock


@dataclass(frozen=True)
class Attempt:
    """One start of a stage's worker."""

    number: int
    path: Path

    @property
    def log(self) -> Path:
        return self.path / "log.txt"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def gate(self) -> Path:
        """What the gate found, if it was asked in this attempt."""
        return self.path / "gate.json"

    @property
    def alarms(self) -> Path:
        """The watchdog's, a JSON object a line."""
        return self.path / "alarms.jsonl"

    def read_alarms(self) -> list[dict[str, Any]]:
        """Whole ones; a line that a kill cut or the disk damaged is passed over."""
        try:
            lines = self.alarms.read_text(errors="replace").splitlines()
        except OSError:
            return []
        found = []
        for line in lines:
            try:
                alarm = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(alarm, dict):
                found.append(alarm)
        return found

    @property
    def worker(self) -> Path:
        """Who works on it: written by `note_worker`."""
        return self.path / "worker.json"

    @property
    def output(self) -> Path:
        """Where the worker puts what it publishes."""
        return self.path / "output"

    def delete_half_written(self) -> None:
        """Of a worker that is dead: what it was going to publish, and files that it was replacing."""
        shutil.rmtree(self.output, ignore_errors=True)
        for part in self.path.glob(".*.part"):
            part.unlink(missing_ok=True)

    def note_worker(self, pid: int) -> None:
        """Leave a note of the process, which leads its own group, so that it can be stopped if we die first."""
        lock.write_worker(self.worker, pid)

    def lives(self) -> bool:
        return lock.worker_lives(self.worker)
