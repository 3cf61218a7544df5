"""`events.jsonl`: one JSON object a line, appended by the worker while others read."""

import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from opdctl.backends.contract import Event

PART = 1 << 20  # bytes that are read at once
LARGEST = 1 << 63  # above every step and time that there is


class EventWriter:
    """Appends events, each in one write, so that a killed worker leaves whole lines."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def write(self, event: Event) -> None:
        """Raises OSError when the line does not fit on the disk."""
        line = (json.dumps(asdict(event), default=_plain) + "\n").encode()
        if (written := os.write(self._fd, line)) != len(line):
            raise OSError(f"{self._path}: {written} of {len(line)} bytes written, is the disk full?")


class EventTail:
    """Reads what was appended since the last call. A line without its end is left for later.

    Lines that were damaged on the disk are passed over: events are shown and tracked, nothing is computed from them.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> list[Event]:
        return [event for part in self.parts() for event in part]

    def parts(self, size: int = PART) -> Iterator[list[Event]]:
        """The same in pieces of about `size` bytes, for what grew without being read."""
        wanted = size
        while True:
            try:
                with open(self._path, "rb") as stream:
                    stream.seek(self._offset)
                    content = stream.read(wanted)
            except FileNotFoundError:
                return
            whole = content[: content.rfind(b"\n") + 1]
            self._offset += len(whole)
            yield [event for line in whole.split(b"\n") if (event := _event(line)) is not None]
            if len(content) < wanted:
                return
            wanted = size if whole else 2 * wanted  # a line longer than that


def _plain(value: Any) -> Any:
    """NumPy's scalars are numbers; what nobody can write as JSON is told as text rather than ending a training."""
    return value.item() if getattr(value, "size", 0) == 1 else str(value)


def _event(line: bytes) -> Event | None:
    try:
        found = Event(**json.loads(line))
    except (ValueError, TypeError, RecursionError):
        return None
    return found if _whole(found) else None


def _whole(event: Event) -> bool:
    """Is it what a worker writes? Metrics may be anything: what looks at them says which numbers it takes."""
    steps = all(type(one) is int and abs(one) < LARGEST for one in (event.step, event.total))
    known = type(event.time) in (int, float) and abs(event.time) < LARGEST  # NaN is not
    return steps and known and isinstance(event.metrics, dict) and isinstance(event.phase, str)
