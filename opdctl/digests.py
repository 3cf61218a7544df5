"""What files from outside contain, remembered so that a plan need not read them again."""

import os
from collections.abc import Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from opdctl.records import RECORD, read_json, sha256, write_json

_MODEL_SUFFIXES = {".json", ".safetensors", ".txt", ".model", ".jinja"}


def installed(package: str) -> str | None:
    """Its version; None where it is missing."""
    return version(package) if find_spec(package) else None


def model_of(files: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """What `Digests.model` says of a checkpoint, from the files that its record lists."""
    return {name: str(files[name]["sha256"]) for name in sorted(files) if _makes_model(name)}


def _makes_model(name: str) -> bool:
    return "/" not in name and Path(name).suffix in _MODEL_SUFFIXES and name != RECORD


class Digests:
    """sha256 of files from outside, remembered by path, size and mtime so that a plan stays fast."""

    def __init__(self, memory: Path) -> None:
        self._memory = memory
        found = read_json(memory) or {}
        self._known: dict[str, list[Any]] = {
            key: known for key, known in found.items() if isinstance(known, list) and len(known) == 3
        }
        self._grown = False

    def file(self, path: Path) -> str:
        """Raises OSError where the file cannot be read."""
        state = path.stat()
        key = str(path.resolve())
        known = self._known.get(key)
        if known is None or known[:2] != [state.st_size, state.st_mtime_ns]:
            known = self._known[key] = [state.st_size, state.st_mtime_ns, sha256(path)]
            self._grown = True
        return str(known[2])

    def tree(self, folder: Path) -> dict[str, str]:
        """Of all files below a folder, by their paths in it."""
        paths = sorted(path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
        return {path.relative_to(folder).as_posix(): self.file(path) for path in paths}

    def model(self, folder: Path) -> dict[str, str]:
        """Of all files that make a model in Hugging Face format."""
        names = sorted(path.name for path in folder.iterdir() if _makes_model(path.name))
        return {name: self.file(folder / name) for name in names}

    def save(self) -> None:
        """Only beside runs that exist: a plan makes no folder."""
        if self._grown and self._memory.parent.is_dir() and os.access(self._memory.parent, os.W_OK):
            write_json(self._memory, self._known)
