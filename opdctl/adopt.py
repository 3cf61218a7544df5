"""Adopts a model from outside: a checkpoint of the run `imports`, with a record that says where it came from.

Pipelines read it as a folder, `path:runs/imports/stages/NAME/checkpoint`; what it is, is said by the digests of its
files. Nothing is unpickled or run, and the user's own files are left as they are.
"""

import hashlib
import json
import os
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from opdctl.digests import installed, model_of
from opdctl.errors import ConfigError, OpdctlError
from opdctl.fetch import UNWANTED, WANTED
from opdctl.identity import fingerprint
from opdctl.lineage import IMPORT
from opdctl.records import RECORD, disk_errors, parse_record, sha256
from opdctl.settings import NAME_PATTERN
from opdctl.store import Parent, Record, RunDir, StageDir, Workspace

RUN = "imports"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "tiktoken.model")
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle")
BESIDE = ("LICENSE*", "NOTICE*", "README*")  # are taken along
LONGEST_HEADER = 100_000_000  # bytes; safetensors itself reads no longer one
CHUNK = 1 << 22  # bytes


@dataclass(frozen=True)
class Adopted:
    stage: StageDir
    record: Record
    made: bool  # false: it was there already, with the same files
    left_out: tuple[str, ...]  # names of files that were not taken


def adopt(
    workspace: Workspace,
    source: Path,
    name: str,
    *,
    ref: str = "",
    licence: str = "",
    link: bool = False,
    argv: Sequence[str] = (),
) -> Adopted:
    """Make the model in the folder `source` the checkpoint of stage `name` of the run `imports`.

    `ref` says what it is (hf:REPO@COMMIT, a URL); absent: the folder, or the checkpoint that its record names. With
    `link` files are hard links of the user's instead of copies: for files that nobody changes in place.
    Raises OpdctlError for a folder that is no whole model in safetensors, ConfigError where `name` is taken.
    """
    if not re.fullmatch(NAME_PATTERN, name):
        raise ConfigError(f"--as: '{name}' cannot name a model", hint="use letters, digits and _ . -")
    files, left_out = model_files(source)
    run = workspace.run(RUN)
    stage = run.stage(name)
    with run.lock():
        _check_run(run)
        if stage.linked:
            return Adopted(stage, _same(stage, files), False, left_out)
        attempt = stage.new_attempt()
        with disk_errors(attempt.output):
            digests = {path.name: _take(path, attempt.output / path.name, link) for path in files}
        run.write_pipeline({"name": RUN, "stages": {**run.read_pipeline().get("stages", {}), name: {"kind": IMPORT}}})
        run.write_info(name=RUN, pipeline=RUN)  # without `created`: it is never the newest run
        labels = {"licence": licence} if licence else {}
        record = _record(workspace, stage, digests, _parent(workspace, source, ref), labels, argv)
        return Adopted(stage, stage.publish(attempt.output, record), True, left_out)


def _record(
    workspace: Workspace,
    stage: StageDir,
    digests: Mapping[str, str],
    parent: Parent,
    labels: Mapping[str, str],
    argv: Sequence[str],
) -> Record:
    identity = {"kind": IMPORT, "model": model_of({name: {"sha256": digest} for name, digest in digests.items()})}
    return Record(
        id=workspace.new_record_id(),
        run=stage.run,
        stage=stage.name,
        kind=IMPORT,
        step=0,
        fingerprint=fingerprint(identity),
        identity=identity,
        parents=[parent],
        metrics={},
        labels=labels,
        created=datetime.now(UTC).isoformat(),
        opdctl_version=installed("opdctl") or "",
        code="",
        argv=list(argv),
        seconds=0.0,
    )


def _parent(workspace: Workspace, source: Path, ref: str) -> Parent:
    """Where it came from: what the user says, else the checkpoint that a record beside it names, else the folder."""
    found = parse_record(source)
    if isinstance(found, Record) and not ref:
        known = workspace.checkpoint(found.id) is not None
        where = f"opdctl:{found.run}:{found.stage}@{found.id}"
        return Parent("source", f"{found.run}:{found.stage}", where, found.id if known else None)
    given = ref or f"path:{source.resolve()}"
    return Parent("source", given, given)


def _check_run(run: RunDir) -> None:
    kinds = {str(stage.get("kind")) for stage in run.read_pipeline().get("stages", {}).values()}
    if run.damaged or kinds - {IMPORT}:
        raise ConfigError(
            f"{run.path} is a run of a pipeline, and imports belong into a run of that name",
            hint=f"rename that run: mv {run.path} {run.path}-of-a-pipeline",
        )


def _same(stage: StageDir, files: Sequence[Path]) -> Record:
    """The record of what was adopted under this name. Raises ConfigError where it is something else."""
    found = stage.record()
    if found is None:
        raise ConfigError(f"import {stage.name} is damaged: {stage.damage()}", hint="choose another --as NAME")
    if {path.name: sha256(path) for path in files} != {name: listed["sha256"] for name, listed in found.files.items()}:
        raise ConfigError(
            f"--as {stage.name}: another model was imported under this name, on {found.created[:10]}",
            hint="choose another name: what has been read under this one must stay what it was",
        )
    return found


def _take(source: Path, target: Path, link: bool) -> str:
    """Copy or link one file; its sha256."""
    if link:
        try:
            os.link(source.resolve(), target)
        except OSError as error:
            raise OpdctlError(
                f"cannot link {source} into the workspace: {error.strerror}", hint="copy: no --link"
            ) from error
        return sha256(target)
    digest, buffer = hashlib.sha256(), bytearray(CHUNK)
    with source.open("rb", buffering=0) as read, target.open("wb", buffering=0) as write:
        while count := read.readinto(buffer):
            digest.update(memoryview(buffer)[:count])
            write.write(memoryview(buffer)[:count])
    return digest.hexdigest()


# ------------------------------------------------------------------------------------------------ is it a model?


def model_files(folder: Path) -> tuple[list[Path], tuple[str, ...]]:
    """The files of a Hugging Face folder to take, and the names of those to leave. Raises OpdctlError unless they are
    a whole model: a configuration, a tokenizer, all tensors as safetensors."""
    if not folder.is_dir():
        raise OpdctlError(f"{folder}: no such folder", hint="name a folder in Hugging Face format")
    there = sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    wanted = [path for path in there if any(fnmatch(path.name, pattern) for pattern in (*WANTED, *BESIDE))]
    taken = [path for path in wanted if path.name != RECORD and not any(fnmatch(path.name, p) for p in UNWANTED)]
    names = {path.name for path in taken}
    if not isinstance(_json(folder / "config.json").get("model_type"), str):
        raise OpdctlError(f"{folder / 'config.json'} names no model_type", hint="take the folder that was saved whole")
    if not names & {SINGLE, INDEX}:
        raise _no_weights(folder, [path.name for path in there])
    weights = {SINGLE} if SINGLE in names else _check_index(folder)
    if SINGLE in names:
        _tensors(folder / SINGLE)
    if not names & set(TOKENIZERS):
        raise OpdctlError(
            f"{folder}: no tokenizer ({', '.join(TOKENIZERS)})",
            hint="copy the tokenizer's files beside the weights: they belong to the model",
        )
    stray = {name for name in names if name.endswith(".safetensors")} - weights  # of an adapter, or of another format
    taken = [path for path in taken if path.name not in stray]
    return taken, tuple(path.name for path in there if path not in taken)


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise OpdctlError(f"{path} cannot be read: {error}", hint="name a folder in Hugging Face format") from error
    if not isinstance(found, dict):
        raise OpdctlError(f"{path} holds no JSON object", hint="copy the folder again")
    return found


def _no_weights(folder: Path, names: Sequence[str]) -> OpdctlError:
    if pickled := [name for name in names if any(fnmatch(name, pattern) for pattern in PICKLED)]:
        return OpdctlError(
            f"{folder}: the weights are pickled ({', '.join(pickled[:5])}), and opdctl never unpickles: a pickle can "
            "run any code",
            hint="take the model's safetensors; many repositories have them as revision refs/pr/N",
        )
    adapter = "adapter_model.safetensors" in names
    hint = "merge the adapter into its base model first" if adapter else "name a folder in Hugging Face format"
    return OpdctlError(f"{folder}: no weights ({SINGLE} or {INDEX})", hint=hint)


def _check_index(folder: Path) -> set[str]:
    """The files of the weights. Raises OpdctlError for files and tensors that the index names and nothing holds."""
    listed = _json(folder / INDEX).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise OpdctlError(f"{folder / INDEX} has no weight_map", hint="copy the folder again")
    names = {str(name) for name in listed.values()}
    if outside := sorted(name for name in names if Path(name).name != name):
        raise OpdctlError(f"{folder / INDEX} names files outside the folder: {', '.join(outside[:5])}")
    if missing := sorted(name for name in names if not (folder / name).is_file()):
        raise OpdctlError(
            f"{folder / INDEX} names files that are not there: {', '.join(missing[:5])}",
            hint="the download or copy was not complete; repeat it",
        )
    for name in sorted(names):
        lost = sorted({tensor for tensor, file in listed.items() if file == name} - _tensors(folder / name))
        if lost:
            raise OpdctlError(f"{folder / name} lacks tensors that {INDEX} says it holds: {', '.join(lost[:5])}")
    return names


def _tensors(path: Path) -> set[str]:
    """Names of the tensors of a safetensors file. Raises OpdctlError unless the file is whole."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else LONGEST_HEADER + 1
        header = file.read(length) if length <= min(LONGEST_HEADER, size) else b""
    try:
        entries = {name: entry for name, entry in json.loads(header).items() if name != "__metadata__"}
        end = max((int(entry["data_offsets"][1]) for entry in entries.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError):
        entries, end = {}, -1
    if end != size - 8 - length:
        raise OpdctlError(f"{path}: not a whole safetensors file", hint="it was cut short or damaged; copy it again")
    return set(entries)
