"""Records of finished checkpoints, and writing so that a kill or a power cut leaves the old content or the new one."""

import contextlib
import errno
import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from opdctl.errors import OpdctlError, StageRefused

RECORD = "record.json"
SELECTION = "selection.json"  # that a select stage publishes beside the model it chose


@dataclass(frozen=True)
class Parent:
    """A model that a stage read."""

    role: str
    label: str
    ref: str  # stage:NAME, model:, path:DIR, hf:REPO@REVISION, gguf:FILE
    record_id: str | None = None  # of the checkpoint that was read; None for models from outside


@dataclass(frozen=True)
class Record:
    """Written last, beside the weights: its presence makes a checkpoint finished. `id` is unique to one publish."""

    id: str
    run: str
    stage: str
    kind: str
    step: int
    fingerprint: str
    identity: Mapping[str, Any]
    parents: list[Parent]
    metrics: Mapping[str, float]
    labels: Mapping[str, str]
    created: str  # ISO 8601 with time zone
    opdctl_version: str
    code: str  # git commit of the code, or ""
    argv: list[str]
    seconds: float
    mlflow_run_id: str | None = None
    files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # name -> sha256, size, mtime_ns
    accepted: list[str] = field(default_factory=list)  # checks of the gate that refused, and were accepted by name

    def parent_ids(self) -> list[str | None]:
        return [parent.record_id for parent in self.parents]

    def began_with(self, note: Mapping[str, Any]) -> bool:
        """Is it what came of the attempts that `read_beginning` tells of?"""
        return [self.identity, self.parent_ids()] == [note["identity"], note["parents"]]


def is_number(value: Any) -> TypeGuard[float]:
    """Is it one that a float holds, NaN and infinities included?"""
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < 1 << 1000)


def record_of(data: Any) -> Record | str:
    """The record that plain data describes, else what is wrong with it: whoever reads a record relies on its types."""
    if not isinstance(data, dict):
        return "no JSON object"
    for name, (what, holds) in _FIELDS.items():
        if name in data and not holds(data[name]):
            return f"{name} is not {what}"
    try:
        return Record(**(data | {"parents": [Parent(**parent) for parent in data["parents"]]}))
    except (TypeError, KeyError) as error:  # a field is missing, or there is one too many
        return f"its fields are others: {error}"


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and "\0" not in value  # some are paths


def _is_id(value: Any) -> bool:
    """It is looked for as a folder's name."""
    from opdctl.fields import NAME_PATTERN  # loads pydantic, which those who only write need not wait for

    return isinstance(value, str) and re.fullmatch(NAME_PATTERN, value) is not None


def _is_parent(value: Any) -> bool:
    if not isinstance(value, dict) or not all(_is_text(value.get(name)) for name in ("role", "label", "ref")):
        return False
    return value.get("record_id") is None or _is_id(value["record_id"])


def _is_file(name: str, listed: Any) -> bool:
    """With a name that leads into the checkpoint's folder and not out of it."""
    try:
        inside = b"\0" not in os.fsencode(name) and not {"", "/", ".."} & {name, *Path(name).parts}
    except UnicodeEncodeError:
        return False
    if not inside or not isinstance(listed, dict) or not isinstance(listed.get("sha256"), str):
        return False
    size, changed = listed.get("size"), listed.get("mtime_ns")
    return isinstance(size, int) and 0 <= size < 1 << 63 and isinstance(changed, int)


def _texts(values: Any) -> bool:
    return isinstance(values, list) and all(map(_is_text, values))


# field -> what it holds, in words and as a test
_FIELDS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "id": ("the id of a record", _is_id),
    **dict.fromkeys(("run", "stage", "kind", "fingerprint", "created", "opdctl_version", "code"), ("text", _is_text)),
    "step": ("a whole number", lambda value: isinstance(value, int) and is_number(value)),
    "identity": ("an object", lambda value: isinstance(value, dict)),
    "parents": ("a list of parents", lambda value: isinstance(value, list) and all(map(_is_parent, value))),
    "metrics": ("an object of numbers", lambda value: isinstance(value, dict) and all(map(is_number, value.values()))),
    "labels": ("an object of texts", lambda value: isinstance(value, dict) and all(map(_is_text, value.values()))),
    "argv": ("a list of texts", _texts),
    "seconds": ("a finite number", lambda value: is_number(value) and math.isfinite(value)),
    "mlflow_run_id": ("text or null", lambda value: value is None or isinstance(value, str)),
    "files": (
        "an object of names in the folder, each with sha256, size and mtime_ns",
        lambda value: isinstance(value, dict) and all(_is_file(*listed) for listed in value.items()),
    ),
    "accepted": ("a list of texts", _texts),
}


def parse_record(folder: Path) -> Record | str:
    """The record of a checkpoint folder, whatever has become of its files; else what is wrong with it."""
    try:
        found = record_of(json.loads((folder / RECORD).read_text()))
    except FileNotFoundError:
        return f"{folder / RECORD} is missing"
    except (ValueError, RecursionError, OSError) as error:
        found = str(error)
    return found if isinstance(found, Record) else f"record unreadable: {folder / RECORD}: {found}"


def read_record(folder: Path) -> Record | str:
    """The record of a checkpoint folder if every file it lists is there in full, else what is wrong."""
    record = parse_record(folder)
    if isinstance(record, str):
        return record
    for name, listed in record.files.items():
        try:
            size = (folder / name).stat().st_size
        except OSError:
            return f"checkpoint damaged: {folder / name} is missing"
        if size != listed["size"]:
            return f"checkpoint damaged: {folder / name} has {size:,} bytes instead of {listed['size']:,}"
    return record


def write_record(folder: Path, record: Record) -> None:
    write_json(folder / RECORD, asdict(record))


def describe_files(folder: Path) -> dict[str, dict[str, Any]]:
    """sha256, size and mtime_ns of each file below `folder`; every byte is on disk when it returns."""
    files: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            sync(path)
            name = path.relative_to(folder).as_posix()
            state = path.stat()
            files[name] = {"sha256": sha256(path), "size": state.st_size, "mtime_ns": state.st_mtime_ns}
        else:
            sync(path)
    return files


def changed_files(folder: Path, record: Record, *, full: bool) -> list[str]:
    """What differs from the record, a line each. Files with an unchanged mtime are hashed only if `full`."""
    problems: list[str] = []
    for name, listed in record.files.items():
        path = folder / name
        if not path.is_file():
            problems.append(f"{path} is missing")
        elif path.stat().st_size != listed["size"]:
            problems.append(f"{path} has {path.stat().st_size:,} bytes instead of {listed['size']:,}")
        elif (full or path.stat().st_mtime_ns != listed["mtime_ns"]) and sha256(path) != listed["sha256"]:
            problems.append(f"{path} has changed since it was published: its sha256 is another")
    return problems


def sha256(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def write_json(path: Path, value: Any) -> None:
    """Whole or not at all, and on disk when it returns."""
    with disk_errors(path):
        write_text(path, json.dumps(value, indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    """As `write_json`; raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = path.with_name(f".{path.name}.part")
    try:
        with staging.open("w", encoding="utf-8", errors="backslashreplace") as handle:
            handle.write(text)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(staging, path)
    except OSError:
        with contextlib.suppress(OSError):  # half a file helps nobody, least of all on a full disk
            staging.unlink()
        raise
    sync(path.parent)


def read_json(path: Path, *keys: str) -> dict[str, Any] | None:
    """None where there is no file, or none that holds a JSON object with these keys: it was damaged then."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and found.keys() >= set(keys) else None


def read_info(path: Path) -> dict[str, Any]:
    """Who started a run, when and how; values of other types than are written there are left out."""
    holds: Mapping[str, Callable[[Any], bool]] = {
        "argv": _texts,
        "created": _is_text,
        "tracking": lambda value: isinstance(value, dict),
    }
    found = read_json(path) or {}
    return {key: value for key, value in found.items() if key not in holds or holds[key](value)}


def read_beginning(path: Path) -> dict[str, Any] | None:
    """What half-trained state began with: its identity, and the record ids of its parents (None: from outside). None
    where there is no such note, or a damaged one."""
    note = read_json(path, "identity", "parents") or {}
    parents = note.get("parents")
    listed = isinstance(parents, list) and all(one is None or isinstance(one, str) for one in parents)
    return note if listed and isinstance(note["identity"], dict) else None


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_IN_THE_WAY = "a file stands where a folder is wanted: move it away, or choose another folder (--run, --workspace)"
_REMEDY = {
    errno.ENOSPC: "the disk is full: free space, or move the workspace; then run the same command again",
    errno.EDQUOT: "the disk quota is used up: free space; then run the same command again",
    errno.EROFS: "the file system is read-only: choose another --workspace",
    errno.EIO: "the disk fails: look at what the kernel says (dmesg); once it is mended, run the same command again",
    errno.EEXIST: _IN_THE_WAY,
    errno.ENOTDIR: _IN_THE_WAY,
    errno.ENAMETOOLONG: "a name is too long for the file system: shorten --run, stages, axes or their values",
    errno.EISDIR: "a folder stands where a file is wanted: move it away",
    errno.ELOOP: "a link leads back to itself: remove it",
    errno.EFBIG: "no file may be that large: raise the limit (ulimit -f), or take another file system (--workspace)",
    errno.ENOLCK: "the file system gives no locks: choose a --workspace on another, or have it mounted with locks",
    errno.EMFILE: "too many open files for one process: raise the limit (ulimit -n); then run the same command again",
    errno.EACCES: "no permission: choose another --workspace, or change the folder's permissions",
    errno.EPERM: "no permission: choose another --workspace, or change the folder's permissions",
}


def remedy_of(error: OSError) -> str:
    """What the user can do about it; empty where that is not known."""
    return _REMEDY.get(error.errno or 0, "")


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """A full disk or a folder that may not be written is the user's to mend: say which, and how."""
    try:
        yield
    except OSError as error:
        remedy = remedy_of(error)
        if not remedy:
            raise
        where = error.filename2 or error.filename or path  # of two, the second is what was written
        raise OpdctlError(f"cannot write {where}: {error.strerror}", hint=remedy) from error


def refuse_links(run: Path, *folders: Path) -> None:
    """What a run writes and deletes is its own: in it, only a checkpoint may be a link.

    Raises StageRefused where the run's folder is a link, or one of the folders below it or what holds them.
    """
    for folder in dict.fromkeys((run, *(above for last in folders for above in (*last.parents, last)))):
        if folder.is_relative_to(run) and folder.is_symlink():
            raise StageRefused(
                f"{folder} is a link, to {os.readlink(folder)}: opdctl writes and deletes in folders of its own only",
                hint="move the folder itself to where the link is, or link the whole workspace",
            )
