"""Rows from one format to another: as they are, or as a task of kind `file` reads them."""

import json
import os
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from opdctl.errors import ConfigError
from opdctl.settings import FileTask
from opdctl.tasks.mapping import Row, stream_rows
from opdctl.tasks.shards import BadRow, data_files, read_raw

_GROUP = 4096  # rows of a row group, the part of a file that is in memory
_SCOUTED = 1024  # rows that a parquet file's columns are guessed from
WRITERS = (".jsonl", ".parquet")


def convert(source: Path, target: Path, mapping: FileTask | None) -> int:
    """Writes the rows of `source` to `target`, whole or not at all; how many.

    With a mapping they get the columns prompt, answer, completion, images and those that it names, where they have
    them. Raises ConfigError naming bad rows, and for a target that is there, or that is neither JSONL nor parquet.
    """
    if target.suffix not in WRITERS:
        raise ConfigError(f"{target}: the name must end in {' or '.join(WRITERS)}")
    if target.exists():
        raise ConfigError(f"{target} is there already", hint="name another file, or remove it")
    rows = _raw(source) if mapping is None else _mapped(source, mapping)
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = target.with_name(f".{target.name}.part")
    try:
        count = (_write_parquet if target.suffix == ".parquet" else _write_jsonl)(staging, rows)
        if not count:
            raise ConfigError(f"{source} holds no rows")
        with staging.open("rb") as written:
            os.fsync(written.fileno())
        staging.replace(target)
    except UnicodeEncodeError as error:
        near = error.object[max(0, error.start - 20) : error.start + 20]
        raise ConfigError(
            f"{source}: half a surrogate pair (\\ud800 to \\udfff), which is no text, in {near!r}",
            hint="all bad rows at once: opdctl data check",
        ) from error
    finally:
        staging.unlink(missing_ok=True)
    return count


def _raw(source: Path) -> Iterator[dict[str, Any]]:
    for file in data_files(source):
        for number, raw in read_raw(file, None, "path"):
            if not isinstance(raw, dict):
                why = raw if isinstance(raw, BadRow) else f"{type(raw).__name__} where an object is wanted"
                raise _refused(file, number, str(why))
            yield raw


def _mapped(source: Path, mapping: FileTask) -> Iterator[dict[str, Any]]:
    for file, number, row in stream_rows(source, mapping, "path"):
        if not isinstance(row, Row):
            raise _refused(file, number, str(row))
        prompt = [dict(message) for message in row.messages] or row.text
        completion = {} if row.completion is None else {"completion": row.completion}
        images = {"images": list(row.images)} if mapping.images else {}
        yield {"prompt": prompt, "answer": row.answer, **completion, **images, **row.columns}


def _refused(file: Path, number: int, why: str) -> ConfigError:
    return ConfigError(f"{file}, row {number}: {why}", hint="all bad rows at once: opdctl data check")


def _write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> int:
    count = 0
    with path.open("w", encoding="utf-8") as stream:
        for row in rows:
            stream.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
            count += 1
    return count


def _write_parquet(path: Path, rows: Iterable[dict[str, Any]]) -> int:
    import pyarrow
    from pyarrow import parquet

    rows = iter(rows)
    first = list(islice(rows, _SCOUTED))
    if not first:
        return 0
    names = list(dict.fromkeys(name for row in first for name in row))
    count = 0
    try:
        schema = pyarrow.Table.from_pylist([{name: row.get(name) for name in names} for row in first]).schema
        with parquet.ParquetWriter(path, schema) as writer:
            group = first
            while group:
                for at, row in enumerate(group, count + 1):
                    if unknown := [name for name in row if name not in names]:
                        told = f"row {at}: column {unknown[0]!r} is in no row before"
                        raise ConfigError(told, hint="give all rows the same columns, or write JSONL")
                writer.write_table(pyarrow.Table.from_pylist(group, schema=schema))
                count += len(group)
                group = list(islice(rows, _GROUP))
    except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError, pyarrow.ArrowNotImplementedError) as error:
        told = f"rows {count + 1:,} and on: {error}"
        raise ConfigError(
            told, hint="a column of a parquet file has one type in all rows; JSONL has no such rule"
        ) from error
    return count
