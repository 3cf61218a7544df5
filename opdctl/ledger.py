"""What a workspace keeps beside its runs, and the lock that holds its checkpoints still.

runs/.pins/ID.json          a checkpoint that `gc` leaves: a file each, so that no two commands write the same one
runs/RUN/.deleted/ID.json   the record of a checkpoint that gc deleted, its mtime says when: lineage still knows it
runs/.steady                held by many while they start or refer to a checkpoint, by one while it deletes
"""

import contextlib
import fcntl
import os
import re
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from opdctl.errors import ConfigError, RunBusy
from opdctl.fields import NAME_PATTERN
from opdctl.lock import try_lock
from opdctl.records import RECORD, Record, disk_errors, read_json, record_of, sync, write_json

WAIT_S = 60.0  # for a gc, which only renames while it holds the lock, or for runs that start


@dataclass(frozen=True)
class Pin:
    record_id: str
    run: str = ""
    stage: str = ""
    reason: str = ""
    created: str = ""  # ISO 8601 with time zone
    user: str = ""


@dataclass(frozen=True)
class Deleted:
    """A checkpoint that gc deleted."""

    record: Record
    when: str  # ISO 8601 with time zone


class Ledger:
    def __init__(self, runs: Path) -> None:
        self._runs = runs

    # ------------------------------------------------------------------ pins

    def pins(self) -> dict[str, Pin]:
        """By record id. A damaged file still pins: its name says what."""
        found: dict[str, Pin] = {}
        for path in sorted((self._runs / ".pins").glob("*.json")):
            told = read_json(path) or {"reason": f"{path} is damaged"}
            facts = {name: str(told.get(name, "")) for name in ("run", "stage", "reason", "created", "user")}
            found[path.stem] = Pin(path.stem, **facts)
        return found

    def pin(self, pin: Pin) -> None:
        write_json(self._file(".pins", pin.record_id), asdict(pin))

    def unpin(self, record_id: str) -> bool:
        """False where it was not pinned."""
        return _unlink(self._file(".pins", record_id))

    # ------------------------------------------------------------------ deleted checkpoints

    def deleted(self) -> dict[str, Deleted]:
        """By record id; notes that cannot be read are left out."""
        known = (_deleted(path) for path in self._runs.glob("*/.deleted/*.json"))
        return {found.record.id: found for found in known if found is not None}

    def find_deleted(self, record_id: str) -> Deleted | None:
        if not re.fullmatch(NAME_PATTERN, record_id):
            return None
        found = (_deleted(path) for path in self._runs.glob(f"*/.deleted/{record_id}.json"))
        return next((one for one in found if one is not None), None)

    def note_deleted(self, run: str, checkpoint: Path) -> None:
        """Take the record out of a checkpoint's folder, which from then on is none. Needs no space on the disk."""
        note = self._file(f"{run}/.deleted", checkpoint.name)
        with disk_errors(note):
            note.parent.mkdir(exist_ok=True)
            os.replace(checkpoint / RECORD, note)
            os.utime(note)
            sync(note.parent)
            sync(checkpoint)

    def _file(self, folder: str, record_id: str) -> Path:
        if not re.fullmatch(NAME_PATTERN, record_id):
            raise ConfigError(f"'{record_id}' is no record id", hint="opdctl lineage STAGE --json shows record ids")
        return self._runs / folder / f"{record_id}.json"

    # ------------------------------------------------------------------ the lock

    @contextlib.contextmanager
    def steady(self, *, alone: bool = False) -> Iterator[None]:
        """While it is held by many, no checkpoint is deleted; who holds it `alone` may delete. Raises RunBusy."""
        path = self._runs / ".steady"
        with disk_errors(path):
            self._runs.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            deadline = time.monotonic() + WAIT_S
            while not try_lock(descriptor, path, fcntl.LOCK_EX if alone else fcntl.LOCK_SH):
                if time.monotonic() > deadline:
                    who = "runs that are starting" if alone else "opdctl gc"
                    raise RunBusy(
                        f"{self._runs.parent} is held by {who}",
                        hint=f"try again once it has ended; fuser -v {path} says which process it is",
                    )
                time.sleep(0.05)
            yield
        finally:
            os.close(descriptor)


def _deleted(note: Path) -> Deleted | None:
    record = record_of(read_json(note))
    if isinstance(record, str) or record.id != note.stem:
        return None
    return Deleted(record, datetime.fromtimestamp(note.stat().st_mtime, UTC).isoformat(timespec="seconds"))


def _unlink(path: Path) -> bool:
    with disk_errors(path):
        try:
            path.unlink()
        except FileNotFoundError:
            return False
        sync(path.parent)
    return True
