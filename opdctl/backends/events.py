"""`events.jsonl`: one JSON object a line, appended by the worker while others read."""

import json
import os
from dataclasses import asdict
from pathlib import Path

from opdctl.backends.contract import Event


class EventWriter:
    """Appends events, each in one write, so that a killed worker leaves whole lines."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def write(self, event: Event) -> None:
        """Raises OSError when the line does not fit on the disk."""
        line = (json.dumps(asdict(event)) + "\n").encode()
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
        try:
            with open(self._path, "rb") as stream:
                stream.seek(self._offset)
                content = stream.read()
        except FileNotFoundError:
            return []
        whole = content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [event for line in whole.split(b"\n") if (event := _event(line)) is not None]


def _event(line: bytes) -> Event | None:
    try:
        found = Event(**json.loads(line))
        float(found.step), float(found.total), float(found.time), dict(found.metrics)
    except (ValueError, TypeError):
        return None
    return found
