"""What `opdctl gc` deletes: checkpoints that no rule keeps, and what processes that died left half-written.

Deleting is safe at every instant. The decision is made while no run can start or refer to a checkpoint
(`ledger.Ledger.steady`). A checkpoint ends with one rename, which makes its record the note that it was deleted,
children before their parents, so that what is left after a kill is whole; a second one takes the folder out of sight.
Files go last. Nothing of it needs space, for it is wanted when the disk is full.
"""

import os
import shutil
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Literal

from opdctl.lock import process_start
from opdctl.records import RECORD, Record, disk_errors, read_beginning, sync
from opdctl.retention import Census, Checkpoint
from opdctl.store import StageDir, Workspace

STALE_S = 86400.0  # a `.part` outside runs, whose writer holds no lock, counts as left behind when it is older
DEAD = "half-written or half-deleted by a process that died"

What = Literal["checkpoint", "output", "state", "part"]


@dataclass(frozen=True)
class Found:
    """Something on the disk, and why it goes or stays."""

    what: What
    path: Path
    run: str
    stage: str
    why: tuple[str, ...]
    size: int  # bytes of its files, a checkpoint's record excepted, which is kept
    record: Record | None = None


@dataclass(frozen=True)
class Sweep:
    go: tuple[Found, ...]  # in the order in which it is safe to delete
    stay: tuple[Found, ...]  # checkpoints
    notes: tuple[str, ...]  # what was left alone as a whole, and why
    freed: int  # bytes: of a file with several names, once the last of them goes


def survey(workspace: Workspace, runs: Sequence[str] = ()) -> Sweep:
    """What `collect` would delete, of these runs or of all. Changes nothing."""
    return _Survey(workspace, set(runs)).sweep()


def collect(workspace: Workspace, runs: Sequence[str] = ()) -> Sweep:
    """Delete it, and say what was. Raises RunBusy while runs start for longer than a minute."""
    if not (workspace.path / "runs").is_dir():
        return survey(workspace, runs)
    with workspace.ledger.steady(alone=True):
        sweep = survey(workspace, runs)
        emptied = [_out_of_sight(workspace, found) for found in sweep.go]
    for path in emptied:
        _remove(path)
    return sweep


def _out_of_sight(workspace: Workspace, found: Found) -> Path:
    """Returns where it is now: a name that belongs to nobody, in a folder of the same file system."""
    folder = found.path.parent
    if found.what == "checkpoint":
        folder = folder.parent  # all that is in checkpoints/ counts as published
        if found.record is not None:
            workspace.ledger.note_deleted(found.run, found.path)
    target = folder / f".{uuid.uuid4().hex}.part"
    with disk_errors(found.path):
        os.replace(found.path, target)
        sync(found.path.parent)
        sync(folder)
    return target


def _remove(path: Path) -> None:
    with disk_errors(path):
        while os.path.lexists(path):
            try:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
            except FileNotFoundError:  # another gc found the same remains
                continue


class _Survey:
    def __init__(self, workspace: Workspace, runs: set[str]) -> None:
        self._workspace = workspace
        self._everything = not runs
        self._wanted = runs or {run.name for run in workspace.runs()}
        self._census = Census(workspace, self._wanted)
        self._notes: list[str] = []

    def sweep(self) -> Sweep:
        go = [*self._leftovers(), *self._checkpoints()]
        stay = [item for item in self._census.checkpoints if item.stays]
        return Sweep(
            tuple(go),
            tuple(_told(item, item.stays) for item in sorted(stay, key=lambda item: item.path)),
            tuple(self._notes),
            freed(found.path for found in go) - sum(size_of(one.path / RECORD) for one in go if one.record),
        )

    def _checkpoints(self) -> Iterator[Found]:
        """Children before their parents; none while it is not known what a checkpoint that stays was made from."""
        items = self._census.checkpoints
        if blind := [item for item in items if item.record is None and item.needed]:
            self._notes += [f"{item.stage.run}:{item.stage.name}: {item.problem}" for item in blind]
            self._notes.append(
                "no checkpoint goes while it is not known what these were made from: --rerun the stage, or put it back"
            )
            return
        go = {item.id: item for item in items if not item.stays}
        order: TopologicalSorter[str] = TopologicalSorter({name: [] for name in go})
        for name, item in go.items():
            for parent in item.record.parent_ids() if item.record else []:
                if parent in go and parent != name:
                    order.add(parent, name)
        for name in order.static_order():
            half = "half-deleted by a gc that was killed"
            yield _told(go[name], [half if go[name].half_deleted else "replaced, and no rule keeps it"])

    def _leftovers(self) -> Iterator[Found]:
        census = self._census
        for name, run in census.runs.items():
            if name in self._wanted and name in census.busy:
                self._notes.append(f"run {name} is at work: nothing of it goes")
            elif name in self._wanted and census.inside(run.path):
                yield from _there("part", _parts(run.path), name, "", DEAD)
        for stage in census.stages:
            ours = stage.run in self._wanted and stage.run in census.runs and census.inside(stage.path)
            if ours and stage.run not in census.busy:
                yield from self._of_stage(stage)
        if self._everything:
            yield from self._outside_runs()

    def _of_stage(self, stage: StageDir) -> Iterator[Found]:
        attempts = stage.attempts()
        for attempt in attempts:
            if attempt is attempts[-1] and stage.result.exists() and attempt.output.is_dir():
                self._notes.append(f"{attempt.output} was finished and not published: opdctl repair {stage.run}")
            else:
                why = f"half-written by attempt {attempt.number}, which ended"
                yield from _there("output", [attempt.output], stage.run, stage.name, why)
        half_trained = stage.unfinished() is not None
        whose = read_beginning(stage.identity)
        if not half_trained and (whose is not None or not stage.identity.exists()):
            yield from _there("state", [stage.state], stage.run, stage.name, "recovery state that nothing resumes")
        left = [path for one in (stage.path, *(attempt.path for attempt in attempts)) for path in _parts(one)]
        left += sorted(stage.state.glob("*.part")) if half_trained else []  # the engine's own
        yield from _there("part", left, stage.run, stage.name, DEAD)

    def _outside_runs(self) -> Iterator[Found]:
        for name in ("runs", "models", "data"):
            for path in _parts(self._workspace.path / name):
                if time.time() - _newest(path) > STALE_S and not _writer_lives(path):
                    yield from _there("part", [path], "", "", "half-written more than a day ago")
        for path in sorted((self._workspace.path / "models").glob("gguf-*")):
            self._notes.append(f"{path} stays: a pipeline that has not run yet may read its GGUF file")


def _told(item: Checkpoint, why: Iterable[str]) -> Found:
    stage, size = item.stage, size_of(item.path) - size_of(item.path / RECORD)
    return Found("checkpoint", item.path, stage.run, stage.name, tuple(dict.fromkeys(why)), size, item.record)


def _there(what: What, paths: Iterable[Path], run: str, stage: str, why: str) -> Iterator[Found]:
    """Those that exist; an empty folder is nothing, unless its name says that it is left over."""
    for path in paths:
        if path.is_symlink() or path.is_file() or (path.is_dir() and (what == "part" or any(path.iterdir()))):
            yield Found(what, path, run, stage, (why,), size_of(path))


def _parts(folder: Path) -> list[Path]:
    """Hidden ones: runs, the values of axes and files of the user's may be called `x.part` too."""
    return sorted(folder.glob(".*.part"))


def _writer_lives(path: Path) -> bool:
    """By the process number in `.NAME.NUMBER.part`, as `fetch.new_folder` calls it."""
    number = path.name.split(".")[-2]
    return number.isdigit() and process_start(int(number)) is not None


def _newest(path: Path) -> float:
    """Seconds since the epoch of the latest change below it; of what is being written just now, that is now."""
    try:
        return max(one.lstat().st_mtime for one in (path, *path.rglob("*")))
    except FileNotFoundError:
        return time.time()


# --------------------------------------------------------------------------------------------------------- bytes


def _files(path: Path) -> Iterator[os.stat_result]:
    if path.is_symlink() or path.is_file():
        yield path.lstat()
    else:
        for folder, _, names in os.walk(path):
            for name in names:
                yield os.lstat(os.path.join(folder, name))


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files below a folder; links are not followed."""
    return sum(state.st_size for state in _files(path))


def freed(paths: Iterable[Path]) -> int:
    """Bytes that deleting all of these gives back: a file with another name elsewhere stays."""
    names: dict[tuple[int, int], int] = {}
    sizes: dict[tuple[int, int], tuple[int, int]] = {}
    for path in paths:
        for state in _files(path):
            key = (state.st_dev, state.st_ino)
            names[key] = names.get(key, 0) + 1
            sizes[key] = (state.st_size, state.st_nlink)
    return sum(size for key, (size, links) in sizes.items() if names[key] >= links)
