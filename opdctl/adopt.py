"""Adopts a model from outside: a checkpoint of the run `imports`, with a record that says where it came from.

Pipelines read it as a folder, `path:runs/imports/stages/NAME/checkpoint`; what it is, is said by the digests of its
files. Nothing is unpickled or run, and the user's own files are left as they are.
"""

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from opdctl.digests import installed, model_of
from opdctl.errors import ConfigError, OpdctlError
from opdctl.fields import NAME, NAME_PATTERN
from opdctl.identity import fingerprint
from opdctl.lineage import IMPORT
from opdctl.model_folder import model_files
from opdctl.records import disk_errors, parse_record, sha256
from opdctl.store import Parent, Record, RunDir, StageDir, Workspace

RUN = "imports"
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
        raise ConfigError(f"--as: '{name}' cannot name a model", hint=f"use {NAME}")
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
    """Copy or link one file; its sha256. Raises OpdctlError unless the copy holds what was read."""
    if link:
        try:
            os.link(source.resolve(), target)
        except OSError as error:
            raise OpdctlError(
                f"cannot link {source} into the workspace: {error.strerror}", hint="copy: no --link"
            ) from error
        return sha256(target)
    digest, size, buffer = hashlib.sha256(), 0, bytearray(CHUNK)
    # written through a buffer: a disk that takes only a part of a chunk is then an error
    with disk_errors(target), source.open("rb", buffering=0) as read, target.open("wb") as write:
        while count := read.readinto(buffer):
            digest.update(memoryview(buffer)[:count])
            write.write(memoryview(buffer)[:count])
            size += count
    if (target.stat().st_size, sha256(target)) != (size, digest.hexdigest()):
        raise OpdctlError(
            f"{target} is not what was read from {source}: {target.stat().st_size:,} bytes of {size:,}, or others",
            hint="the disk or the memory fails: look at what the kernel says (dmesg), then import again",
        )
    return digest.hexdigest()
