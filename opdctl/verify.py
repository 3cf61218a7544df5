"""Is what a workspace says of its checkpoints true? Digests, records, lineage, links and pins. Changes nothing.

A problem is something that a run would stumble over, or that would make a result untraceable. A remark is not: a parent
that gc deleted is still described by its note, and what a run at work has half-done is its own affair.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from opdctl.identity import fingerprint
from opdctl.records import RECORD, Record, parse_record, read_beginning
from opdctl.store import RunDir, StageDir, Workspace

Progress = Callable[[str, int], None]  # what is read now, and how many bytes were read since the last call
CHUNK = 1 << 22  # bytes between two calls


@dataclass(frozen=True)
class Finding:
    subject: str  # RUN:STAGE, RUN, or a pin
    told: str
    remedy: str = ""
    problem: bool = True


@dataclass(frozen=True)
class Verified:
    findings: tuple[Finding, ...]
    checkpoints: int
    bytes_read: int

    @property
    def problems(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.problem]


def _rerun(stage: StageDir) -> str:
    return f"the command of run {stage.run} with --rerun '{stage.name}' makes it anew; or put the file back as it was"


class Verifier:
    """Of some runs of a workspace, or of all of them."""

    def __init__(self, workspace: Workspace, runs: Sequence[RunDir] | None = None) -> None:
        self._workspace = workspace
        self._runs = workspace.runs() if runs is None else list(runs)
        self._whole = runs is None
        names = {run.name for run in self._runs}
        self._all = list(workspace.stages())
        self._stages = [stage for stage in self._all if stage.run in names]
        own = [one for stage in self._stages for one in stage.published()]
        linked = [source for stage in self._stages if (source := stage.reference())]
        self._checkpoints = {one.checkpoint.resolve(): one for one in [*own, *linked]}
        self._ids = {one.pinned for stage in self._all for one in stage.published()}
        self._deleted = workspace.ledger.deleted()
        self._busy = {run.name for run in self._runs if run.at_work()}
        self._read = 0

    @property
    def bytes_to_read(self) -> int:
        found = [parse_record(one.checkpoint) for one in self._checkpoints.values()]
        return sum(int(listed["size"]) for one in found if isinstance(one, Record) for listed in one.files.values())

    def verify(self, progress: Progress = lambda name, count: None) -> Verified:
        """Reads every byte of every checkpoint once."""
        findings = [
            *(finding for run in self._runs for finding in self._run(run)),
            *(finding for stage in self._stages for finding in self._stage(stage)),
            *(finding for one in self._checkpoints.values() for finding in self._checkpoint(one, progress)),
            *self._pins(),
        ]
        return Verified(tuple(findings), len(self._checkpoints), self._read)

    # ------------------------------------------------------------------------------------------ runs and stages

    def _run(self, run: RunDir) -> Iterator[Finding]:
        if run.name in self._busy:
            yield Finding(run.name, "is at work: what it is doing may look half-done", problem=False)
        if run.damaged:
            yield Finding(
                run.name, f"{run.path / 'pipeline.yaml'} is damaged", "the command that made the run mends it"
            )

    def _stage(self, stage: StageDir) -> Iterator[Finding]:
        where, published = f"{stage.run}:{stage.name}", stage.published()
        if stage.linked and not stage.checkpoint.is_dir():
            remedy = "opdctl run of its pipeline links another one, or makes it anew"
            yield Finding(where, f"the link {stage.path / 'checkpoint'} points to nothing: {stage.checkpoint}", remedy)
        elif stage.checkpoint.resolve() not in self._checkpoints and (damage := stage.damage()):
            yield Finding(where, damage, _rerun(stage))  # it lies where nothing else is looked at
        unknown = stage.identity.exists() and read_beginning(stage.identity) is None
        if unknown and stage.state.is_dir():
            told = f"{stage.identity} is damaged: the next run starts the stage anew"
            yield Finding(where, told, f"to go on from {stage.state} put the file back as it was")
        if stage.run not in self._busy:
            remedy = f"opdctl repair {stage.run}, or run its command again"
            whole = [one for one in published if one.record() is not None]
            if whole and not stage.linked:
                yield Finding(where, f"{whole[-1].checkpoint} was published and is not in force", remedy)
            for attempt in stage.attempts():
                if (attempt.output / RECORD).exists():
                    yield Finding(where, f"{attempt.output} was being published when its process died", remedy)
        for record_id in stage.unfinished_parents():
            if record_id is not None and record_id not in self._ids:
                told = f"its half-trained state started from checkpoint {record_id}, which is {self._gone(record_id)}"
                yield Finding(where, told, f"start it anew: --rerun '{stage.name}'")

    # ---------------------------------------------------------------------------------------------- checkpoints

    def _checkpoint(self, one: StageDir, progress: Progress) -> Iterator[Finding]:
        where, folder = f"{one.run}:{one.name}", one.checkpoint
        record = parse_record(folder)
        if isinstance(record, str):
            if one.pinned in self._deleted and not (folder / RECORD).exists():
                yield Finding(where, f"{folder} is half-deleted: opdctl gc --delete ends it", problem=False)
            else:
                yield Finding(where, record, _rerun(one))
            return
        yield from self._names(one, record)
        yield from self._files(one, record, progress)
        for parent in record.parents:
            if parent.record_id is None or parent.record_id in self._ids:
                continue
            told = f"its {parent.role} {parent.label} (record {parent.record_id}) is {self._gone(parent.record_id)}"
            known = parent.record_id in self._deleted
            remedy = "" if known else f"put runs/*/stages/*/checkpoints/{parent.record_id} back, or {_rerun(one)}"
            yield Finding(where, told, remedy, problem=not known)

    def _gone(self, record_id: str) -> str:
        note = self._deleted.get(record_id)
        return f"gone: gc deleted it on {note.when[:10]}, and kept its record" if note else "missing"

    def _names(self, one: StageDir, record: Record) -> Iterator[Finding]:
        where, note = f"{one.run}:{one.name}", one.checkpoint / RECORD
        remedy = "the folder was moved, renamed or copied by hand, or the record edited: put it back where it was made"
        for what, told, found in (
            ("id", record.id, one.checkpoint.name),
            ("run", record.run, one.run),
            ("stage", record.stage, one.name),
        ):
            if told != found:
                yield Finding(where, f"{note} has the {what} '{told}', and lies where '{found}' belongs", remedy)
        if fingerprint(record.identity) != record.fingerprint:
            told = f"{note}: the fingerprint {record.fingerprint} is not that of the identity beside it"
            yield Finding(where, told, "the record was edited: put it back as it was, or --rerun the stage")

    def _files(self, one: StageDir, record: Record, progress: Progress) -> Iterator[Finding]:
        where, folder = f"{one.run}:{one.name}", one.checkpoint
        if not record.files:
            yield Finding(where, f"{folder / RECORD} lists no file", _rerun(one))
        for name, listed in record.files.items():
            if problem := self._differs(folder / name, listed, partial(progress, f"{where} {name}")):
                yield Finding(where, problem, _rerun(one))
        there = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}
        for name in sorted(there - record.files.keys() - {RECORD}):
            yield Finding(where, f"{folder / name} is not in the record", "it was put there later: move it away")

    def _differs(self, path: Path, listed: Mapping[str, Any], progress: Callable[[int], None]) -> str:
        """From what the record says of it; empty where it does not."""
        digest, buffer = hashlib.sha256(), bytearray(CHUNK)
        try:
            if (size := path.stat().st_size) != listed["size"]:
                return f"{path} has {size:,} bytes instead of {listed['size']:,}"
            with path.open("rb", buffering=0) as file:
                while count := file.readinto(buffer):
                    digest.update(memoryview(buffer)[:count])
                    self._read += count
                    progress(count)
        except FileNotFoundError:
            return f"{path} is missing"
        except OSError as error:
            return f"{path} cannot be read: {error.strerror}"
        same = digest.hexdigest() == listed["sha256"]
        return "" if same else f"{path} has changed since it was published: its sha256 is another"

    # ----------------------------------------------------------------------------------------------------- pins

    def _pins(self) -> Iterator[Finding]:
        names = {run.name for run in self._runs}
        for record_id, pin in self._workspace.ledger.pins().items():
            if record_id not in self._ids and (self._whole or pin.run in names):
                told = f"points to a checkpoint that is {self._gone(record_id)}"
                yield Finding(f"pin {record_id}", told, f"opdctl unpin {record_id}")
