"""Finishes or undoes what a crash left in a run, and says what it did. A second time finds nothing more to do.

What a publish had proven complete is put in force; what was half-written is removed; half-trained state is kept, for
the next run goes on from it. Nothing is done in a run that somebody works in.
"""

import contextlib
import shlex
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from opdctl import lock, processes, tracking
from opdctl.errors import OpdctlError, RunBusy
from opdctl.records import RECORD, Record, changed_files, read_beginning, read_json, read_record
from opdctl.store import Attempt, RunDir, StageDir, Workspace

State = Literal["mended", "would mend", "skipped", "left"]
WAIT_S = 300.0  # that MLflow gets to take what is left to tell of one run


@dataclass(frozen=True)
class Found:
    """One thing that a crash left."""

    run: str  # empty: of the whole workspace
    stage: str  # empty: of the run itself
    what: str
    state: State  # left: it cannot be mended here
    told: str  # what was done, or would be; of what is left or skipped, what the user can do


def repair(
    workspace: Workspace, runs: Iterable[RunDir], *, dry_run: bool = False, stop: bool = False
) -> Iterator[Found]:
    """What is found in `runs`, as it is dealt with. `stop`: workers that outlived their orchestrator are ended; else a
    run with such is left alone. With `dry_run` nothing is changed."""
    for run in runs:
        yield from _Repair(run, dry_run=dry_run, stop=stop).carry_out()
    yield from _stale(workspace, dry_run)


class _Repair:
    """Of one run."""

    def __init__(self, run: RunDir, *, dry_run: bool, stop: bool) -> None:
        self._run, self._dry, self._stop = run, dry_run, stop
        self._lock = run.path / ".lock"

    def carry_out(self) -> Iterator[Found]:
        if lock.held(self._lock):
            holder = read_json(self._lock, "pid") or {}
            yield self._found("", "an opdctl works in it", "skipped", f"process {holder.get('pid')}; repair it later")
            return
        orphans = self._orphans()
        if orphans and not self._stop:
            for stage, attempt, pids in orphans:
                yield self._found(
                    stage.name,
                    f"attempt {attempt.number} goes on without its orchestrator ({pids})",
                    "left",
                    f"opdctl run goes on with the stage; or stop it: opdctl repair {self._run.name} --stop",
                )
            return
        if self._dry:
            for stage, attempt, pids in orphans:
                yield self._mended(stage.name, f"attempt {attempt.number} goes on without its orchestrator", pids)
            yield from self._mend()
            return
        reports: list[str] = []
        dead = lock.abandoned(self._lock)
        try:
            with self._run.lock(reports.append):
                if dead:
                    yield self._mended("", f"its orchestrator died ({dead})", "its lock is released")
                for report in reports:
                    yield self._mended("", "processes outlived their orchestrator", report)
                yield from self._mend()
        except RunBusy as error:
            yield self._found("", str(error), "skipped", error.hint)

    def _found(self, stage: str, what: str, state: State, told: str) -> Found:
        return Found(self._run.name, stage, what, state, told)

    def _mended(self, stage: str, what: str, told: str) -> Found:
        return self._found(stage, what, "would mend" if self._dry else "mended", told)

    def _do(self, action: Callable[[], object]) -> None:
        if not self._dry:
            action()

    def _orphans(self) -> list[tuple[StageDir, Attempt, str]]:
        """Attempts with living processes, and who they are."""
        found = []
        for stage in self._run.stages():
            for attempt in stage.attempts():
                pids = processes.find(attempt.path) if processes.left(attempt.path) else []
                if attempt.lives():
                    pids.insert(0, int((read_json(attempt.worker) or {})["pid"]))
                if pids:
                    named = ", ".join(f"{pid} {processes.command_of(pid)}" for pid in pids)
                    found.append((stage, attempt, named))
        return found

    # ------------------------------------------------------------------ under the lock

    def _mend(self) -> Iterator[Found]:
        yield from self._files_of_run()
        yield from self._each("", self._staging())
        for stage in self._run.stages():
            for step in (self._publishing, self._state, self._outputs):
                yield from self._each(stage.name, step(stage))
            if damage := stage.damage():
                hint = f"put it back as it was, or train it again: opdctl run ... --rerun '{stage.name}'"
                yield self._found(stage.name, damage, "left", hint)
        yield from self._each("", self._tracking())

    def _each(self, stage: str, found: Iterator[Found]) -> Iterator[Found]:
        """What the disk or the user has to make possible first does not keep the rest from being mended."""
        try:
            yield from found
        except OpdctlError as error:
            yield self._found(stage, str(error), "left", error.hint)

    def _files_of_run(self) -> Iterator[Found]:
        argv = self._run.info.get("argv") or ["opdctl", "run", "PIPELINE", "--run", self._run.name]
        again = f"the command that made it writes it anew: {shlex.join(['opdctl', *argv[1:]])}"
        if self._run.damaged:
            yield self._found("", "pipeline.yaml is damaged", "left", again)
        info = self._run.path / "run.json"
        if info.exists() and read_json(info) is None:
            yield self._found("", "run.json is damaged", "left", again)

    def _staging(self) -> Iterator[Found]:
        """Half-written files, beside those that they were to replace. Published folders hold what their record says."""
        for path in sorted(self._run.path.rglob(".*.part")):
            name = path.relative_to(self._run.path)
            if "checkpoints" in name.parts or "output" in name.parts:
                continue
            trash = path.is_dir() and not path.is_symlink()  # of gc, too
            self._do(partial(_remove, path))
            if trash:
                yield self._mended("", f"{name} was being written or deleted", "removed")
            else:
                whole = path.name[1:].removesuffix(".part")
                yield self._mended("", f"{name} was being written", f"removed; {whole} is as it was before")

    def _publishing(self, stage: StageDir) -> Iterator[Found]:
        """A checkpoint that was complete, and is not in force: between the record's writing and the link's switch."""
        last = stage.attempts()[-1:]
        for attempt in last:
            record = _whole(attempt.output)
            if record is not None:
                what = f"attempt {attempt.number} was being published"
                yield self._mended(stage.name, what, f"published as {record.id}")
                if not self._dry:
                    (attempt.output / RECORD).unlink()  # written anew: it must not list itself
                    stage.publish(attempt.output, record)
                return
        ended = stage.result.exists() and not any(attempt.output.exists() for attempt in last)
        if ended and (record := self._moved(stage)):
            self._do(partial(stage.reuse, stage.at(record.id)))
            yield self._mended(stage.name, f"checkpoint {record.id} was published but not put in force", "put in force")
        elif record := self._unlinked(stage):
            self._do(partial(stage.reuse, stage.at(record.id), keep_state=True))
            yield self._mended(
                stage.name, "its link `checkpoint` was gone", f"checkpoint {record.id} is in force again"
            )

    def _unlinked(self, stage: StageDir) -> Record | None:
        """The newest intact checkpoint that was made here, where the link is missing or points to one that is gone.
        No kill does that; copies that leave links out do. A link into another run's folder is the next run's to renew.
        """
        if stage.linked and (stage.checkpoint.is_dir() or stage.checkpoint.parent.parent != stage.path):
            return None
        own = (record for record in stage.records() if (record.run, record.stage) == (stage.run, stage.name))
        newest_first = sorted(own, key=lambda record: record.created, reverse=True)
        there = ((record, stage.at(record.id).checkpoint) for record in newest_first)
        return next((record for record, at in there if at.is_dir() and not changed_files(at, record, full=True)), None)

    def _moved(self, stage: StageDir) -> Record | None:
        """The newest checkpoint, if the state is still there that it was made from and it is newer than the one in
        force: `publish` deletes the one once the other is in force."""
        note, in_force = read_beginning(stage.identity), stage.record()
        if note is None:
            return None
        made = [record for record in stage.records() if record.began_with(note)]
        newest = max(made, key=lambda record: record.created, default=None)
        if newest is None or (in_force is not None and in_force.created >= newest.created):
            return None
        return newest if not changed_files(stage.at(newest.id).checkpoint, newest, full=True) else None

    def _state(self, stage: StageDir) -> Iterator[Found]:
        """State that no attempt would go on from."""
        if not stage.state.is_dir():
            if stage.identity.exists():
                self._do(stage.discard_state)
                yield self._mended(stage.name, "identity.json speaks of state that is gone", "removed")
            return
        if stage.unfinished() is not None:
            return
        note, record = read_beginning(stage.identity), stage.record()
        if stage.identity.exists() and note is None:
            hint = f"the next run starts the stage anew; to go on from {stage.state} put identity.json back"
            yield self._found(stage.name, "identity.json is damaged", "left", hint)
        elif note is None and any(stage.state.iterdir()):
            self._do(stage.discard_state)
            yield self._mended(stage.name, "state was left behind that belongs to nobody", "removed")
        elif note and record and record.began_with(note):
            self._do(stage.discard_state)
            yield self._mended(stage.name, "state was left behind by a publish", "removed: the stage is finished")

    def _outputs(self, stage: StageDir) -> Iterator[Found]:
        """What attempts that died had half-written. A failed attempt's is kept for whoever looks into the failure."""
        for attempt in stage.attempts():
            if not attempt.output.is_dir() or (attempt.path / "error.json").exists() or _whole(attempt.output):
                continue
            size = sum(path.stat().st_size for path in attempt.output.rglob("*") if path.is_file())
            if size:
                what = f"attempt {attempt.number} died with {size:,} bytes of output half-written"
                yield self._mended(stage.name, what, "removed; the next run goes on from the last saved step")
            self._do(partial(shutil.rmtree, attempt.output))

    def _tracking(self) -> Iterator[Found]:
        left = tracking.left(self._run)
        if left is None:
            return
        what = f"MLflow at {left.uri} was not told everything"
        if self._dry:
            yield self._mended("", what, "it would be told")
        elif missing := left.tell(wait_s=WAIT_S):
            yield self._found("", what, "left", f"{missing}; then: opdctl repair {self._run.name}")
        else:
            yield self._mended("", what, "told")


def _stale(workspace: Workspace, dry_run: bool) -> Iterator[Found]:
    """Runs that the workspace's own database takes for running although nobody works in them."""
    try:
        for name in tracking.end_stale(workspace, lambda run: run.busy() or tracking.pending(run), dry_run=dry_run):
            state: State = "would mend" if dry_run else "mended"
            yield Found("", "", f"MLflow took {name} for running", state, "marked as killed")
    except tracking.Unreachable as error:
        what = f"{workspace.tracking_database.name} cannot be read: {error}"
        yield Found("", "", what, "left", "end what locks it, or move it away: a new one is made, and runs go into it")


def _whole(output: Path) -> Record | None:
    """The record of a folder that was about to be published, if all it lists is there as it was."""
    found = read_record(output) if output.is_dir() else ""
    return found if isinstance(found, Record) and not changed_files(output, found, full=True) else None


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)  # a gc may be at it as well
    else:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
