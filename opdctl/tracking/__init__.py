"""Tracking in MLflow: one run a pipeline run, one child a stage, checkpoints as models linked to their parents.

The orchestrator is the only writer, from a thread of its own: nothing waits for MLflow, and nothing that MLflow does
stops a stage. What there is to tell stands on disk (the journal beside each attempt, its events), so a server that is
down loses nothing: the same thread, the next run of the pipeline or `opdctl repair` tells it later, once.
"""

import contextlib
import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from opdctl.errors import OpdctlError
from opdctl.pipeline import Pipeline
from opdctl.records import Parent
from opdctl.secrets import redact, reveal, shown
from opdctl.settings import Tracking as TrackingSettings
from opdctl.store import Attempt, Record, RunDir, StageDir, Workspace
from opdctl.tracking import journal, server
from opdctl.tracking.journal import Ending, Entry, Status
from opdctl.tracking.server import Unreachable

if TYPE_CHECKING:
    from opdctl.tracking.server import Target
    from opdctl.tracking.writer import Writer

__all__ = [
    "Left",
    "NoTracking",
    "Started",
    "Status",
    "Tracker",
    "Tracking",
    "Unreachable",
    "end_stale",
    "left",
    "open_tracking",
    "pending",
]

EVERY_S = 1.0  # between two looks at the events of running stages
RETRY_S = (2.0, 5.0, 15.0, 30.0)  # after an error, then the last again and again


@dataclass(frozen=True)
class Started:
    """What is told of a stage's attempt when it starts."""

    kind: str
    labels: Mapping[str, str]
    fingerprint: str
    parents: list[Parent]
    settings: Mapping[str, Any]
    data: Mapping[str, str]
    resumed: bool  # goes on from half-trained state


class Tracking(Protocol):
    """What a runner tells as it happens. No call waits for a server or raises for its sake."""

    def started(self, stage: StageDir, attempt: Attempt, what: Started) -> None: ...

    def ended(self, stage: StageDir, attempt: Attempt, status: Status, message: str, record: Record | None) -> None: ...

    def run_id(self, attempt: Attempt) -> str | None:
        """The MLflow run of an attempt, if it is known yet."""
        ...

    def complaints(self) -> list[str]:
        """What went wrong since the last call, for the user."""
        ...

    def close(self, status: Status, *, wait_s: float, give_up: Callable[[], bool]) -> str:
        """Wait until all is told, at most `wait_s`, less if `give_up`; says what is not, empty if nothing is left."""
        ...


class NoTracking:
    """tracking.enabled: false, or nothing to tell."""

    def started(self, stage: StageDir, attempt: Attempt, what: Started) -> None:
        return None

    def ended(self, stage: StageDir, attempt: Attempt, status: Status, message: str, record: Record | None) -> None:
        return None

    def run_id(self, attempt: Attempt) -> str | None:
        return None

    def complaints(self) -> list[str]:
        return []

    def close(self, status: Status, *, wait_s: float, give_up: Callable[[], bool]) -> str:
        return ""


def open_tracking(pipeline: Pipeline, run: RunDir, *, work: bool) -> Tracking:
    """Under the run's lock. `work`: stages are going to run; else only what an earlier process left is told."""
    if not pipeline.settings.tracking.enabled:
        return NoTracking()
    known, stages = dict(run.info.get("tracking") or {}), run.stages()
    # without a note of it (run.json was damaged) all is told that MLflow does not have
    pending = known.get("pending", any(journal.entries(stage) for stage in stages))
    if not (work or pending):
        return NoTracking()
    pipeline_run = str(known.get("id") or next(filter(None, map(journal.pipeline_run, stages)), uuid.uuid4().hex))
    left = stages if pending else []
    for stage in left:
        journal.end_dead(stage)
    run.write_info(tracking={"id": pipeline_run, "pending": True})
    target = _target(pipeline.settings.tracking, pipeline.settings.name, pipeline.resolved, run, pipeline_run)
    return Tracker(target, run, left)


def _target(
    settings: TrackingSettings, name: str, resolved: Mapping[str, Any], run: RunDir, pipeline_run: str
) -> "Target":
    from opdctl.tracking.server import Target

    workspace = run.workspace
    database = None if settings.uri else workspace.tracking_database
    return Target(
        uri=reveal(settings.uri) if settings.uri else f"sqlite:///{workspace.tracking_database}",
        shown=shown(settings.uri) if settings.uri else f"sqlite:///{workspace.tracking_database}",
        database=database,
        artifacts=(workspace.path / "mlartifacts").as_uri() if database else None,
        experiment=settings.experiment or name,
        pipeline=name,
        run=run.name,
        pipeline_run=pipeline_run,
        resolved=resolved,
    )


@dataclass(frozen=True)
class Left:
    """What a run's last orchestrator had still to tell."""

    run: RunDir
    target: "Target"

    @property
    def uri(self) -> str:
        return self.target.shown

    def tell(self, *, wait_s: float) -> str:
        """Under the run's lock; says what is still not told after that time, empty if nothing."""
        stages = self.run.stages()
        for stage in stages:
            journal.end_dead(stage)
        tracker = Tracker(self.target, self.run, stages, aloud=False)
        missing = tracker.close(_status(self.run), wait_s=wait_s, give_up=lambda: False)
        return missing or "; ".join(tracker.complaints())


def pending(run: RunDir) -> bool:
    """Was its last orchestrator not done with telling?"""
    return bool((run.info.get("tracking") or {}).get("pending"))


def left(run: RunDir) -> Left | None:
    """None where all was told, or `pipeline.yaml`, which says where MLflow is, cannot be read. Raises ConfigError where
    its address refers to a secret that is not there."""
    known, resolved = dict(run.info.get("tracking") or {}), run.read_pipeline()
    settings = TrackingSettings.model_validate(resolved.get("tracking") or {})
    if not (pending(run) and known.get("id") and resolved and settings.enabled):
        return None
    return Left(run, _target(settings, str(resolved.get("name") or run.name), resolved, run, str(known["id"])))


def _status(run: RunDir) -> Status:
    """Of a run whose orchestrator is gone."""
    names = run.read_pipeline().get("stages", {})
    if names and all(run.stage(name).record() for name in names):
        return "FINISHED"
    last = [found[-1][1].ended for stage in run.stages() if (found := journal.entries(stage))]
    return "FAILED" if any(ended and ended.status == "FAILED" for ended in last) else "KILLED"


def end_stale(workspace: Workspace, works: Callable[[RunDir], bool], *, dry_run: bool) -> list[str]:
    """Runs that the workspace's own database has RUNNING, and in which nobody `works`: marked as killed.

    Their names. Raises Unreachable where the database does not answer. On a server, which others use too, nobody can
    tell whose runs are dead; those of runs that are still here are set right when they are told.
    """
    database = workspace.tracking_database
    if not database.exists():
        return []

    def living() -> set[str]:
        known = [run.info.get("tracking") or {} for run in workspace.runs() if works(run)]
        return {str(tracking["id"]) for tracking in known if tracking.get("id")}

    with server.asking():
        return server.end_stale(server.connect(f"sqlite:///{database}", database), living, dry_run=dry_run)


class Tracker:
    """The thread. Stages are told of in the order in which they started."""

    def __init__(self, target: "Target", run: RunDir, left: Iterable[StageDir] = (), *, aloud: bool = True) -> None:
        """`aloud`: an error is a complaint while the run goes on; else `close` alone says it."""
        self._target, self._run = target, run
        self._open = {stage.name: stage for stage in left}  # stages with something to tell
        self._running: set[str] = set()
        self._run_ids: dict[str, str] = {}  # attempt's folder -> MLflow run
        self._complaints: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._status: Status | None = None  # of the whole run, once it is over
        self._told = False
        self._unended = False  # a start or an end could not be written down: the next process finds it out
        self._error = ""  # of the last try
        self._heard = ""  # the error among the complaints, which the user reads before what `close` returns
        self._aloud = aloud
        self._complained = 0  # how often of the server
        self._thread = threading.Thread(target=self._work, name="tracking", daemon=True)
        if self._open:
            self._thread.start()

    # ------------------------------------------------------------------ the runner's side

    def started(self, stage: StageDir, attempt: Attempt, what: Started) -> None:
        entry = Entry(
            stage=stage.name,
            kind=what.kind,
            labels=what.labels,
            fingerprint=what.fingerprint,
            parents=what.parents,
            settings=what.settings,
            data=what.data,
            attempt=attempt.number,
            started=time.time(),
            pipeline_run=self._target.pipeline_run,
        )
        try:
            journal.begin(stage, attempt, entry, resumed=what.resumed)
        except OpdctlError as error:  # a full disk: the stage will say so itself if it has to
            self._unended = True  # what of it reached the disk is told by the next run
            self._complaints.put(f"tracking: attempt {attempt.number} of {stage.name} is not tracked: {error}")
            return
        with self._lock:
            self._open[stage.name] = stage
            self._running.add(stage.name)
        if self._thread.ident is None:
            self._thread.start()

    def ended(self, stage: StageDir, attempt: Attempt, status: Status, message: str, record: Record | None) -> None:
        published = journal.published(stage, record) if record else None
        try:
            journal.end(attempt, Ending(status, time.time(), redact(message), published))
        except OpdctlError as error:
            self._unended = True
            self._complaints.put(f"tracking: the end of {stage.name} is told by the next run: {error}")
        with self._lock:
            self._running.discard(stage.name)

    def run_id(self, attempt: Attempt) -> str | None:
        return self._run_ids.get(str(attempt.path))

    def complaints(self) -> list[str]:
        found: list[str] = []
        while not self._complaints.empty():
            found.append(self._complaints.get())
        return found

    def close(self, status: Status, *, wait_s: float, give_up: Callable[[], bool]) -> str:
        self._status = status
        self._wake.set()
        deadline = time.monotonic() + wait_s
        while self._thread.is_alive() and time.monotonic() < deadline and not give_up():
            self._thread.join(timeout=0.05)
        with self._lock:
            waiting, running = ", ".join(self._open) or "the end of the run", bool(self._running)
        if (self._told or self._thread.ident is None) and not (self._unended or running):
            with contextlib.suppress(OpdctlError):  # the next process looks once more, and finds nothing left to tell
                self._run.write_info(tracking={"id": self._target.pipeline_run, "pending": False})
            return ""
        why = (" (why: see above)" if self._error == self._heard else f": {self._error}") if self._error else ""
        return (
            f"not yet in MLflow at {self._target.shown}: {waiting}{why}; "
            f"the next run of this pipeline tells it, or: opdctl repair {self._run.name}"
        )

    # ------------------------------------------------------------------ the thread's side

    def _work(self) -> None:
        writer: Writer | None = None
        failures = 0
        while True:
            last = self._status is not None  # read before the work: all that it is about is on disk by now
            try:
                with server.asking():
                    writer = self._tell(writer, last)
                failures, self._error = 0, ""
            except Unreachable as error:
                writer, failures = None, failures + 1  # a call may or may not have come through: look again
                self._complain(error)
            if last:
                return
            self._wake.wait(RETRY_S[min(failures, len(RETRY_S)) - 1] if failures else EVERY_S)

    def _tell(self, writer: "Writer | None", last: bool) -> "Writer":
        from opdctl.tracking.writer import Writer

        writer = writer or Writer(self._target, self._complaints.put)
        with self._lock:
            stages, running = dict(self._open), set(self._running)
        trouble: Unreachable | None = None
        for name, stage in stages.items():
            try:
                with server.asking():
                    writer.sync(stage)
            except Unreachable as error:  # one stage does not hold back the others
                if error.away:
                    raise
                trouble = trouble or error
                continue
            for attempt, entry in journal.entries(stage):
                if (run_id := writer.run_id(entry.curve)) is not None:
                    self._run_ids[str(attempt.path)] = run_id
            with self._lock:
                if name not in running and name not in self._running:
                    self._open.pop(name)
        if trouble is not None:
            raise trouble
        if last and self._status is not None:
            writer.finish(self._status)
            self._told = True
        return writer

    def _complain(self, error: Unreachable) -> None:
        self._error = str(error)
        if self._aloud and not self._complained:
            self._heard = self._error
            self._complaints.put(
                f"tracking: MLflow at {self._target.shown} does not answer as it should ({self._error}); "
                "training goes on, and what is missing there is told later"
            )
        self._complained += 1
