"""Tracking in MLflow: one run a pipeline run, one child a stage, checkpoints as models linked to their parents.

The orchestrator is the only writer, from a thread of its own: nothing waits for MLflow, and nothing that MLflow does
stops a stage. What there is to tell stands on disk (the journal beside each attempt, its events), so a server that is
down loses nothing: the same thread, or the next run of the pipeline, tells it later, once.
"""

import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from json import JSONDecodeError
from typing import TYPE_CHECKING, Any, Protocol

from opdctl.pipeline import Pipeline
from opdctl.records import Parent
from opdctl.secrets import redact, reveal
from opdctl.store import Attempt, Record, RunDir, StageDir
from opdctl.tracking import journal
from opdctl.tracking.journal import Ending, Entry, Status

if TYPE_CHECKING:
    from opdctl.tracking.writer import Target, Writer

__all__ = ["NoTracking", "Started", "Status", "Tracker", "Tracking", "open_tracking"]

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
    known = dict(run.info.get("tracking") or {})
    if not pipeline.settings.tracking.enabled or not (work or known.get("pending")):
        return NoTracking()
    left = run.stages() if known.get("pending") else []
    for stage in left:
        journal.end_dead(stage)
    known = {"id": known.get("id") or uuid.uuid4().hex, "pending": True}
    run.write_info(tracking=known)
    return Tracker(_target(pipeline, run, str(known["id"])), run, left)


def _target(pipeline: Pipeline, run: RunDir, pipeline_run: str) -> "Target":
    from opdctl.tracking.writer import Target

    settings, workspace = pipeline.settings.tracking, run.workspace
    database = None if settings.uri else workspace.tracking_database
    return Target(
        uri=reveal(settings.uri) or f"sqlite:///{workspace.tracking_database}",
        database=database,
        artifacts=(workspace.path / "mlartifacts").as_uri() if database else None,
        experiment=settings.experiment or pipeline.settings.name,
        pipeline=pipeline.settings.name,
        run=run.name,
        pipeline_run=pipeline_run,
        resolved=pipeline.resolved,
    )


class Tracker:
    """The thread. Stages are told of in the order in which they started."""

    def __init__(self, target: "Target", run: RunDir, left: Iterable[StageDir] = ()) -> None:
        self._target, self._run = target, run
        self._open = {stage.name: stage for stage in left}  # stages with something to tell
        self._running: set[str] = set()
        self._run_ids: dict[str, str] = {}  # attempt's folder -> MLflow run
        self._complaints: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._status: Status | None = None  # of the whole run, once it is over
        self._told = False
        self._error = ""
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
        )
        journal.begin(stage, attempt, entry, resumed=what.resumed)
        with self._lock:
            self._open[stage.name] = stage
            self._running.add(stage.name)
        if not self._thread.is_alive() and self._status is None:
            self._thread.start()

    def ended(self, stage: StageDir, attempt: Attempt, status: Status, message: str, record: Record | None) -> None:
        published = journal.published(stage, record) if record else None
        journal.end(attempt, Ending(status, time.time(), redact(message), published))
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
        if self._told or self._thread.ident is None:
            self._run.write_info(tracking={**self._run.info["tracking"], "pending": False})
            return ""
        waiting = ", ".join(self._open) or "the end of the run"
        why = f": {self._error}" if self._error else ""
        return f"not yet in MLflow at {redact(self._target.uri)}: {waiting}{why}; the next run of this pipeline tells it"

    # ------------------------------------------------------------------ the thread's side

    def _work(self) -> None:
        writer: Writer | None = None
        failures = 0
        while True:
            last = self._status is not None  # read before the work: all that it is about is on disk by now
            try:
                writer = self._tell(writer, last)
                failures = 0
            except _errors() as error:
                writer, failures = None, failures + 1  # a call may or may not have come through: look again
                self._complain(error)
            if last:
                return
            self._wake.wait(RETRY_S[min(failures, len(RETRY_S)) - 1] if failures else EVERY_S)

    def _tell(self, writer: "Writer | None", last: bool) -> "Writer":
        from opdctl.tracking.writer import Writer

        writer = writer or Writer(self._target)
        with self._lock:
            stages, running = dict(self._open), set(self._running)
        for name, stage in stages.items():
            writer.sync(stage)
            for attempt, entry in journal.entries(stage):
                if (run_id := writer.run_id(entry.curve)) is not None:
                    self._run_ids[str(attempt.path)] = run_id
            with self._lock:
                if name not in running and name not in self._running:
                    self._open.pop(name)
        if last and self._status is not None:
            writer.finish(self._status)
            self._told = True
        return writer

    def _complain(self, error: BaseException) -> None:
        text = redact(next(iter(str(error).splitlines()), "") or type(error).__name__)
        if not self._error:
            self._complaints.put(
                f"tracking: MLflow at {redact(self._target.uri)} does not answer as it should ({text}); "
                "training goes on, and what is missing there is told later"
            )
        self._error = text


def _errors() -> tuple[type[BaseException], ...]:
    """All that a server, a database or a network can do to us. MLflow that cannot be imported is among it."""
    errors = (OSError, ImportError, JSONDecodeError)
    try:
        from alembic.util import CommandError
        from mlflow.exceptions import MlflowException
        from sqlalchemy.exc import SQLAlchemyError
    except ImportError:
        return errors
    return (*errors, CommandError, MlflowException, SQLAlchemyError)
