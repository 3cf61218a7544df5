"""A workspace on disk: runs, stages, attempts, checkpoints. Nothing else knows a file name in it.

    runs/RUN/  pipeline.yaml  run.json  .lock  .deleted/ (records of checkpoints that gc deleted)
      stages/NAME/ or stages/BASE/AXIS=VALUE,.../
        identity.json  spec.json  result.json  state/
        attempts/N/    log.txt  events.jsonl  worker.json  output/ (being filled)
        checkpoints/ID/  record.json  model.safetensors ...
        checkpoint -> checkpoints/ID, or the checkpoint of another stage that is reused

What a stage's state is follows from what exists, so it cannot lie. The link is switched by a rename once the
checkpoint is complete: a kill between any two system calls leaves the old checkpoint in force or the new one.
What is called .*.part belongs to the process that writes or deletes it, and to nobody once that has ended.
"""

import contextlib
import dataclasses
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from opdctl import lock, processes
from opdctl.attempts import Attempt
from opdctl.digests import Digests
from opdctl.errors import ConfigError, StageRefused
from opdctl.fields import NAME, NAME_PATTERN
from opdctl.ledger import Ledger
from opdctl.records import (
    RECORD,
    Parent,
    Record,
    changed_files,
    describe_files,
    disk_errors,
    read_beginning,
    read_info,
    read_json,
    read_record,
    refuse_links,
    sync,
    write_json,
    write_record,
)

__all__ = ["Attempt", "Parent", "Record", "RunDir", "StageDir", "Workspace", "disk_errors", "write_json"]


@dataclass(frozen=True)
class StageDir:
    """A stage of a run; with `pinned` as it was when the record of that id was published."""

    path: Path
    name: str
    pinned: str = ""

    @property
    def state(self) -> Path:
        return self.path / "state"

    @property
    def spec(self) -> Path:
        return self.path / "spec.json"

    @property
    def result(self) -> Path:
        return self.path / "result.json"

    @property
    def identity(self) -> Path:
        """Whose state is in `state/`: written by `begin`, gone when there is none."""
        return self.path / "identity.json"

    @property
    def run_dir(self) -> "RunDir":
        return RunDir(self.path.parents[len(_folder(self.name))])

    @property
    def run(self) -> str:
        return self.run_dir.name

    @property
    def _link(self) -> Path:
        return self.path / "checkpoint"

    @property
    def checkpoint(self) -> Path:
        """The folder of the checkpoint in force, wherever it is."""
        if self.pinned:
            return self.path / "checkpoints" / self.pinned
        try:
            return Path(os.path.normpath(self.path / os.readlink(self._link)))
        except OSError:
            return self._link

    def record(self) -> Record | None:
        """Of the checkpoint in force; None where there is none, or where a file of it is missing or cut."""
        found = read_record(self.checkpoint)
        return found if isinstance(found, Record) else None

    def damage(self) -> str:
        """Why `record()` is None although a checkpoint was published or reused here; else empty."""
        if not self.linked:
            return ""
        found = read_record(self.checkpoint)
        return found if isinstance(found, str) else ""

    def reference(self) -> "StageDir | None":
        """The stage whose checkpoint is reused here; None if the checkpoint is this stage's own, or there is none."""
        target = self.checkpoint
        if not self.linked or target.parent.parent == self.path:
            return None
        found = read_record(target)
        return StageDir(target.parent.parent, found.stage, target.name) if isinstance(found, Record) else None

    def records(self) -> list[Record]:
        """Of every intact checkpoint published here, those that newer ones replaced included."""
        found = (read_record(path.parent) for path in sorted(self.path.glob(f"checkpoints/*/{RECORD}")))
        return [record for record in found if isinstance(record, Record)]

    def published(self) -> list["StageDir"]:
        """With each checkpoint that was published here, whole or not."""
        return [self.at(path.name) for path in sorted(self.path.glob("checkpoints/*")) if path.is_dir()]

    @property
    def linked(self) -> bool:
        """Is a checkpoint in force here, wherever it is and whether it can be read or not?"""
        return os.path.lexists(self._link)

    def at(self, record_id: str) -> "StageDir":
        """This stage with the checkpoint that was published under `record_id`."""
        return dataclasses.replace(self, pinned=record_id)

    # ------------------------------------------------------------------ attempts, under the run's lock

    def attempts(self) -> list[Attempt]:
        """Oldest first."""
        numbers = (int(path.name) for path in self.path.glob("attempts/*") if re.fullmatch("[0-9]+", path.name))
        return [Attempt(number, self.path / "attempts" / str(number)) for number in sorted(numbers)]

    def new_attempt(self) -> Attempt:
        """With an empty `output`; what dead attempts left half-written is deleted."""
        earlier = self.attempts()
        for attempt in earlier:
            attempt.delete_half_written()
        number = earlier[-1].number + 1 if earlier else 1
        attempt = Attempt(number, self.path / "attempts" / str(number))
        with disk_errors(attempt.path):
            attempt.output.mkdir(parents=True)
        return attempt

    def begin(self, identity: Mapping[str, Any], parents: Sequence[Parent], *, resume: bool) -> None:
        """Call before an attempt: says whose state `state/` holds from now on. Without `resume` it is emptied first."""
        run = self.path.parents[len(_folder(self.name))]
        refuse_links(run, self.state, self.path / "attempts", self.path / "checkpoints")
        if not resume:
            self.discard_state()
        with disk_errors(self.state):
            self.state.mkdir(parents=True, exist_ok=True)
            self.result.unlink(missing_ok=True)
        ids = [parent.record_id for parent in parents]
        write_json(self.identity, {"identity": dict(identity), "parents": ids})

    def unfinished(self) -> Mapping[str, Any] | None:
        """The identity of half-trained state; None where there is none, or where its checkpoint is published."""
        note = self._note()
        return note["identity"] if note else None

    def unfinished_parents(self) -> list[str | None]:
        """Record ids of the checkpoints that the half-trained state started from."""
        note = self._note()
        return list(note["parents"]) if note else []

    def state_step(self) -> int | None:
        """The optimizer step that a resumed stage goes on from."""
        step = (read_json(self.state / "step.json") or {}).get("step")
        return step if type(step) is int else None

    def _note(self) -> Mapping[str, Any] | None:
        note = read_beginning(self.identity)
        if note is None or not self.state.is_dir() or not any(self.state.iterdir()):
            return None
        record = self.record()  # a kill after publishing, before the state was deleted
        return None if record and record.began_with(note) else note

    def discard_state(self) -> None:
        with disk_errors(self.identity):
            self.identity.unlink(missing_ok=True)  # first: what is left of the state then belongs to nobody
            if self.state.exists():
                sync(self.path)
                shutil.rmtree(self.state)

    # ------------------------------------------------------------------ checkpoints, under the run's lock

    def publish(self, output: Path, record: Record) -> Record:
        """Make the folder `output` the checkpoint in force and drop the state; `record.files` is filled in here.

        The checkpoint it replaces stays in checkpoints/.
        """
        with disk_errors(output):
            record = dataclasses.replace(record, files=describe_files(output))
            write_record(output, record)
            target = self.path / "checkpoints" / record.id
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(output, target)
            sync(target.parent)
            self._point_to(target)
        self.discard_state()
        return record

    def reuse(self, other: "StageDir", *, keep_state: bool = False) -> None:
        """Put another stage's checkpoint in force here, by reference. Raises StageRefused where it is gone by now."""
        with disk_errors(self.path), self.run_dir.workspace.ledger.steady():
            if isinstance(found := read_record(other.checkpoint), str):
                raise StageRefused(
                    f"{self.name} cannot reuse the checkpoint of run {other.run}, stage {other.name}: {found}",
                    hint="it was deleted since the plan was made: run the same command again",
                )
            self._point_to(other.checkpoint)
        if not keep_state:
            self.discard_state()

    def _point_to(self, target: Path) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        staging = self.path / ".checkpoint.part"
        staging.unlink(missing_ok=True)
        staging.symlink_to(os.path.relpath(target, self.path))
        os.replace(staging, self._link)
        sync(self.path)

    def verify_digests(self, full: bool = False) -> list[str]:
        """What differs from the record, a line each; `full` hashes every file, else only those touched since."""
        found = read_record(self.checkpoint)
        return [found] if isinstance(found, str) else changed_files(self.checkpoint, found, full=full)


@dataclass(frozen=True)
class RunDir:
    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def workspace(self) -> "Workspace":
        return Workspace(self.path.parent.parent)

    def stage(self, name: str) -> StageDir:
        return StageDir(self.path.joinpath("stages", *_folder(name)), name)

    def stages(self) -> list[StageDir]:
        """Those that something was written for, in alphabetical order."""
        top = [path for path in self.path.glob("stages/*") if path.is_dir()]
        found = {
            path.name: path for path in top if os.path.lexists(path / "checkpoint") or (path / "attempts").exists()
        }
        found |= {f"{base.name}[{path.name}]": path for base in top for path in base.glob("*=*")}
        return [StageDir(path, name) for name, path in sorted(found.items())]

    @contextlib.contextmanager
    def lock(self, report: Callable[[str], None] = lambda text: None) -> Iterator[int]:
        """Hold the run; yields the descriptor that workers have to inherit.

        Raises RunBusy if a living orchestrator holds it. Workers left behind by a dead one are stopped first.
        """
        refuse_links(self.path)
        with contextlib.ExitStack() as stack:
            with self.workspace.ledger.steady():  # gc looks which runs are held, then deletes
                descriptor = stack.enter_context(lock.hold(self.path / ".lock", self._worker_notes, report))
            yield descriptor

    def busy(self) -> bool:
        """Does somebody work in it: an orchestrator, or a worker that outlived one?"""
        return lock.held(self.path / ".lock") or any(
            attempt.lives() for stage in self.stages() for attempt in stage.attempts()[-1:]
        )

    def at_work(self) -> bool:
        """Does any process hold it, or is anything left running that a stage started?"""
        attempts = [attempt for stage in self.stages() for attempt in stage.attempts()]
        left = (bool(processes.find(one.path)) for one in attempts if processes.left(one.path))
        return lock.taken(self.path / ".lock") or any(one.lives() for one in attempts) or any(left)

    def _worker_notes(self) -> list[Path]:
        return [attempt.worker for stage in self.stages() for attempt in stage.attempts()]

    def write_pipeline(self, resolved: Mapping[str, Any]) -> None:
        """As JSON, which is YAML too."""
        write_json(self.path / "pipeline.yaml", dict(resolved))

    def read_pipeline(self) -> Mapping[str, Any]:
        """Empty where the run has not started, or the file was damaged."""
        found = read_json(self.path / "pipeline.yaml", "stages") or {}
        stages = found.get("stages")
        whole = isinstance(stages, dict) and all(isinstance(one, dict) for one in stages.values())
        return found if whole and isinstance(found.get("tracking", {}), dict) else {}

    @property
    def damaged(self) -> bool:
        """Is there a pipeline that cannot be read?"""
        return (self.path / "pipeline.yaml").exists() and not self.read_pipeline()

    @property
    def info(self) -> Mapping[str, Any]:
        """Who started the run, when and how; empty where it has not started."""
        return read_info(self.path / "run.json")

    def write_info(self, **values: Any) -> None:
        """Add to `info`."""
        write_json(self.path / "run.json", {**self.info, **values})


class Workspace:
    """The folder that holds runs/ and the tracking store."""

    def __init__(self, path: Path) -> None:
        self.path = Path(os.path.abspath(path))
        self._index: dict[str, list[StageDir]] | None = None

    @property
    def ledger(self) -> Ledger:
        return Ledger(self.path / "runs")

    @property
    def tracking_database(self) -> Path:
        return self.path / "mlflow.db"

    def run(self, name: str) -> RunDir:
        if not re.fullmatch(NAME_PATTERN, name):
            raise ConfigError(f"--run: '{name}' cannot name a run", hint=f"use {NAME}")
        return RunDir(self.path / "runs" / name)

    def runs(self) -> list[RunDir]:
        """Newest first."""
        found = [RunDir(path) for path in (self.path / "runs").glob("*/") if re.fullmatch(NAME_PATTERN, path.name)]
        return sorted(found, key=_started, reverse=True)

    def stages(self) -> Iterator[StageDir]:
        """Of every run, also those of which only checkpoints are left."""
        for pattern in ("*/stages/*", "*/stages/*/*=*"):
            for path in sorted((self.path / "runs").glob(pattern)):
                if path.is_dir():
                    base = path.parent.name
                    yield StageDir(path, f"{base}[{path.name}]" if pattern.endswith("=*") else path.name)

    def find(self, fingerprint: str, parents: Sequence[str | None]) -> StageDir | None:
        """An intact checkpoint of any run with this fingerprint, made from the checkpoints with these record ids."""
        for stage in self.index().get(fingerprint, []):
            record = stage.record()
            if record is not None and record.parent_ids() == list(parents):
                return stage
        return None

    def index(self) -> Mapping[str, list[StageDir]]:
        """Fingerprint -> every checkpoint that was ever published with it; read once, newest first."""
        if self._index is None:
            self._index = {}
            known = [(data, path) for path in self._record_files() if (data := read_json(path, "stage"))]
            for data, path in sorted(known, key=lambda pair: str(pair[0].get("created")), reverse=True):
                stage = StageDir(path.parents[2], str(data["stage"]), path.parent.name)
                self._index.setdefault(str(data.get("fingerprint")), []).append(stage)
        return self._index

    def checkpoint(self, record_id: str) -> StageDir | None:
        """The stage as it was when the record of this id was published; None if the folder is gone."""
        for path in self._record_files(record_id):
            if data := read_json(path, "stage"):
                return StageDir(path.parents[2], str(data["stage"]), record_id)
        return None

    def _record_files(self, record_id: str = "*") -> Iterator[Path]:
        runs = self.path / "runs"
        yield from runs.glob(f"*/stages/*/checkpoints/{record_id}/{RECORD}")
        yield from runs.glob(f"*/stages/*/*=*/checkpoints/{record_id}/{RECORD}")

    @staticmethod
    def new_record_id() -> str:
        """Unique to one publish; sorts by time."""
        return f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{uuid.uuid4().hex[:12]}"

    def digests(self) -> "Digests":
        return Digests(self.path / "runs" / ".digests.json")


def _folder(name: str) -> list[str]:
    """max[domain=general] -> max, domain=general"""
    base, _, axes = name.removesuffix("]").partition("[")
    return [base, axes] if axes else [base]


def _started(run: RunDir) -> tuple[str, str]:
    return str(run.info.get("created", "")), run.name
