"""Rows as they lie on disk: which files a path means, and what they hold, read as a stream.

JSONL, parquet and the Arrow files of the `datasets` library (`save_to_disk`), which is not needed to read them.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from opdctl.errors import ConfigError

SUFFIXES = (".jsonl", ".parquet", ".arrow")
_SHARD = re.compile(r"(.+?)[-_.]\d+-of-\d+$")  # of a split: train-00000-of-00002
_HERE = "paths of data are relative to the workspace"
_BATCH = 4096  # rows of a columnar file that are in memory


class BadRow(Exception):
    """A row that cannot be used: `str()` says why, after the number of the row."""


def sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def data_files(path: Path, key: str = "path") -> list[Path]:
    """The files that a path of data means, in the order in which their rows count.

    `path` is a file, a folder of shards, one that `datasets` wrote, or a pattern (`data/train-*.parquet`). Raises
    ConfigError, naming `key`, where it is none of them, and for a folder that holds several splits.
    """
    if "*" in path.name and not path.exists():
        files = sorted(path.parent.glob(path.name))
    elif path.is_dir():
        files = _folder(path, key)
    else:
        files = [path]
    if not files:
        raise ConfigError(f"{key}: no file {path}", hint=_HERE)
    for file in files:
        if file.suffix not in SUFFIXES:
            hint = "convert it to JSONL, one object a line, or to parquet"
            raise ConfigError(f"{key}: {file} is none of {', '.join(SUFFIXES)}", hint=hint)
        if not file.is_file():
            raise ConfigError(f"{key}: no file {file}", hint=_HERE)
    return files


def _folder(path: Path, key: str) -> list[Path]:
    if (path / "dataset_dict.json").is_file():
        splits = sorted(found.parent.name for found in path.glob("*/state.json"))
        raise ConfigError(
            f"{key}: {path} holds several splits: {', '.join(splits)}",
            hint=f"name one of them: {path}/{splits[0] if splits else 'train'}; another as eval_path",
        )
    if (path / "state.json").is_file():
        return _saved_to_disk(path, key)
    files = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES and not file.name.startswith("."))
    if not files:
        inside = ", ".join(sorted(entry.name for entry in path.iterdir())[:8]) or "nothing"
        raise ConfigError(f"{key}: {path} has no {', '.join(SUFFIXES)} in it, but {inside}", hint=_HERE)
    splits = sorted({found[1] if (found := _SHARD.match(file.stem)) else file.stem for file in files})
    sharded = all(_SHARD.match(file.stem) for file in files)
    if len({file.suffix for file in files}) > 1 or (sharded and len(splits) > 1) or _split_names(splits):
        raise ConfigError(
            f"{key}: {path} holds {', '.join(file.name for file in files[:4])}: which of them are the rows?",
            hint=f"name them by a pattern: {path}/{splits[0]}*{files[0].suffix}; others as eval_path",
        )
    return files


def _split_names(stems: Iterable[str]) -> bool:
    """Files called train and test are two data sets, a and b the parts of one."""
    return sum(bool(re.match(r"(train|test|eval|valid|validation|dev)([-_.]|$)", stem)) for stem in stems) > 1


def _saved_to_disk(path: Path, key: str) -> list[Path]:
    try:
        listed = json.loads((path / "state.json").read_text())["_data_files"]
        return [path / str(file["filename"]) for file in listed]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{key}: {path}/state.json is not as `datasets` writes it: {error}") from error


def read_raw(path: Path, wanted: Iterable[str] | None, key: str) -> Iterator[tuple[int, Any]]:
    """(row number, row) of one file, from 1: lines of JSONL, rows of the others. A row that is no JSON comes as a
    BadRow. `wanted`: the top-level columns to read of a columnar file, all where None."""
    if path.suffix == ".jsonl":
        return _jsonl(path)
    return enumerate(_columnar(path, None if wanted is None else set(wanted), key), 1)


def _jsonl(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            try:
                yield number, json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except UnicodeDecodeError as error:
                yield number, BadRow(f"not UTF-8 at byte {error.start} of the line; convert the file to UTF-8")
            except json.JSONDecodeError as error:
                yield number, BadRow(f"not JSON: {error.msg} (character {error.pos + 1}); one object a line is wanted")
            except ValueError as error:
                yield number, BadRow(str(error))  # a number of thousands of digits
            except RecursionError:
                yield number, BadRow("JSON nested too deep")


def _columnar(path: Path, wanted: set[str] | None, key: str) -> Iterator[Any]:
    import pyarrow

    batches = _parquet(path, wanted) if path.suffix == ".parquet" else _arrow(path, wanted)
    try:
        for batch in batches:
            yield from batch.to_pylist()
    except pyarrow.ArrowException as error:
        kind = "a parquet" if path.suffix == ".parquet" else "an Arrow"
        raise ConfigError(f"{key}: {path} is not {kind} file that can be read: {error}") from error


def _parquet(path: Path, wanted: set[str] | None) -> Iterator[Any]:
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        present = [name for name in file.schema_arrow.names if wanted is None or name in wanted]
        yield from file.iter_batches(batch_size=_BATCH, columns=present)


def _arrow(path: Path, wanted: set[str] | None) -> Iterator[Any]:
    """A stream, as `datasets` writes; the file format too."""
    import pyarrow

    with pyarrow.memory_map(str(path)) as source:
        try:
            reader = pyarrow.ipc.open_stream(source)
        except pyarrow.ArrowInvalid:
            file = pyarrow.ipc.open_file(source)
            reader = (file.get_batch(i) for i in range(file.num_record_batches))
        for batch in reader:
            kept = batch if wanted is None else batch.select([n for n in batch.schema.names if n in wanted])
            for start in range(0, kept.num_rows, _BATCH):
                yield kept.slice(start, _BATCH)
