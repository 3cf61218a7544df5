"""Carries a plan out: stages in parallel as far as the machine allows, each published once it is proven complete."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from getpass import getuser
from hashlib import sha256
from json import dumps
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import opdctl
from opdctl import gates
from opdctl.backends.contract import Event, StageResult
from opdctl.errors import ConfigError, OpdctlError, StageFailed, StageRefused
from opdctl.launch import Launcher
from opdctl.plan import Decision, Plan, PlannedStage
from opdctl.preflight import check_data
from opdctl.scheduler import Lease, Pool, Schedule
from opdctl.store import Parent, Record, StageDir, write_json
from opdctl.supervisor import RUN_AGAIN, Supervisor, Worker, judge, log_tail, tell_failure
from opdctl.tracking import Started, Status, Tracking, open_tracking

POLL_S = 0.1  # between two looks at the events of running stages
DRAIN_S = 60.0  # that tracking gets to catch up once the last stage has ended


class Reporter(Protocol):
    """Is told what happens, from one thread."""

    def started(self, stage: str, attempt: int) -> None: ...

    def progress(self, stage: str, event: Event) -> None: ...

    def finished(self, stage: str, record: Record) -> None: ...

    def failed(self, stage: str, message: str, log_tail: str) -> None: ...

    def reused(self, stage: str, reason: str) -> None: ...

    def message(self, text: str) -> None: ...


class Silent:
    """A reporter for programs."""

    def started(self, stage: str, attempt: int) -> None:
        return None

    def progress(self, stage: str, event: Event) -> None:
        return None

    def finished(self, stage: str, record: Record) -> None:
        return None

    def failed(self, stage: str, message: str, log_tail: str) -> None:
        return None

    def reused(self, stage: str, reason: str) -> None:
        return None

    def message(self, text: str) -> None:
        return None


@dataclass(frozen=True)
class Outcome:
    """`done`: stages that are finished now, reused ones included; one whose gate stopped the run is in `failed` too."""

    done: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)  # stage -> why
    not_run: dict[str, str] = field(default_factory=dict)  # stage -> why: a stage it reads failed, a gate, interrupted
    interrupted: bool = False


def execute(plan: Plan, *, reporter: Reporter) -> Outcome:
    """Run and resume what the plan says, until all is done, failed or waits for what failed.

    The first SIGINT or SIGTERM lets every worker finish its step and save; the second kills them.
    Raises StageRefused or ConfigError before anything starts, RunBusy if another process works in the run.
    """
    refused = [f"{item.stage.name}: {item.reason}" for item in plan.stages if item.decision is Decision.REFUSED]
    if refused:
        raise StageRefused("\n".join(refused), hint="--rerun STAGE starts it anew; another --run keeps both")
    with plan.run.lock(reporter.message) as lock, _Signals() as signals:
        return _Execution(plan, reporter, signals).run(lock)


class _Signals:
    """Counts SIGINT and SIGTERM instead of dying of them. Only the main thread can; elsewhere nothing changes."""

    def __init__(self) -> None:
        self.count = 0
        self.at_second: Callable[[], None] = lambda: None  # called at once, in the midst of whatever is going on
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "_Signals":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.count > 1:
            self.at_second()


class _Execution:
    """One `execute`, under the run's lock."""

    def __init__(self, plan: Plan, reporter: Reporter, signals: _Signals) -> None:
        self._plan, self._run, self._pipeline = plan, plan.run, plan.pipeline
        self._reporter, self._signals = reporter, signals
        self._work = {item.stage.name: item for item in plan.stages if item.decision in (Decision.RUN, Decision.RESUME)}
        self._schedule = Schedule({name: item.stage.upstream() for name, item in self._work.items()})
        self._pool = Pool(plan.pipeline.settings.machine)
        self._leases: dict[str, Lease] = {}
        self._parents: dict[str, list[Parent]] = {}  # as read, with record ids
        self._launcher = Launcher(plan, list(self._work.values()), reporter.message)
        self._code = commit_of_code() if self._work else ""
        self._outcome = Outcome()
        self._restarted: dict[str, int] = {}  # resumed stage -> the step, too low, that it reported
        self._heeded = 0  # signals acted on
        self._check()
        self._tracking = self._open()

    # ------------------------------------------------------------------ before anything starts

    def _check(self) -> None:
        """Refuses all that can be refused before the first stage starts."""
        problems = self._launcher.check()
        problems += check_data(self._pipeline, [item.stage for item in self._work.values()])
        if problems:
            raise ConfigError(problems)
        read = {parent for item in self._work.values() for parent in item.stage.upstream()}
        for item in self._plan.stages:
            name = item.stage.name
            if name in read and name not in self._work and (damage := self._folder(item).verify_digests()):
                raise StageRefused(
                    f"the checkpoint of stage '{name}' is corrupt: {'; '.join(damage)}",
                    hint=f"--rerun '{name}' trains it again; or put the file back as it was",
                )

    def _folder(self, item: PlannedStage) -> StageDir:
        """Where the checkpoint of a stage that is not run stands now."""
        return item.reuse_from or self._run.stage(item.stage.name)

    def _open(self) -> Tracking:
        if self._work or self._run.read_pipeline() != self._pipeline.resolved:  # a new run may find all it needs
            self._run.write_pipeline(self._pipeline.resolved)
            self._run.write_info(
                name=self._run.name,
                pipeline=self._pipeline.settings.name,
                source=self._pipeline.source,
                created=self._run.info.get("created") or now(),
                opdctl_version=opdctl.__version__,
                argv=sys.argv,
                user=getuser(),
            )
        for item in self._plan.stages:
            if item.decision is Decision.REUSE:
                if item.reuse_from is not None:
                    self._run.stage(item.stage.name).reuse(item.reuse_from)
                self._reporter.reused(item.stage.name, item.reason)
                self._outcome.done.append(item.stage.name)
            self._heed(item.stage.name, item.broken)
        return open_tracking(self._pipeline, self._run, work=bool(self._work))

    # ------------------------------------------------------------------ the loop

    def run(self, lock: int) -> Outcome:
        status: Status = "KILLED"
        try:
            with Supervisor(lock, self._launcher.preload) as supervisor:
                self._signals.at_second = supervisor.abandon
                while self._turn(supervisor):
                    pass
            if not self._interrupted:
                status = "FAILED" if self._outcome.failed else "FINISHED"
        finally:
            left = self._tracking.close(status, wait_s=DRAIN_S, give_up=lambda: self._signals.count > 1)
        for text in (*self._tracking.complaints(), left):
            if text:
                self._reporter.message(text)
        return replace(self._outcome, interrupted=self._interrupted)

    @property
    def _interrupted(self) -> bool:
        return self._signals.count > 0

    def _turn(self, supervisor: Supervisor) -> bool:
        """Start what can start, wait a little, deal with what happened. False once there is nothing left to do."""
        if self._signals.count > self._heeded:
            self._stop(supervisor)
        for name in self._schedule.ready():
            if self._signals.count > self._heeded:  # the first start takes seconds
                return True
            if (lease := self._pool.take(self._work[name].stage.settings.resources)) is not None:
                self._schedule.start(name)
                self._leases[name] = lease
                self._start(self._work[name], lease, supervisor)
        if not supervisor.workers:
            assert not self._schedule.ready(), "a stage needs more than the whole machine"
            return False
        ended = supervisor.wait(POLL_S)
        for worker in (*ended, *supervisor.workers.values()):
            for event in worker.events():
                if event.phase == "train":  # preparations count no steps
                    self._check_resumed(self._work[worker.stage], worker, event.step)
                self._reporter.progress(worker.stage, event)
        for worker in ended:
            self._pool.give_back(self._leases.pop(worker.stage))
            self._end(self._work[worker.stage], worker)
        for text in self._tracking.complaints():
            self._reporter.message(text)
        return True

    def _stop(self, supervisor: Supervisor) -> None:
        """Nothing new starts; workers save at the first request and die at the second."""
        self._heeded = self._signals.count
        for name in self._schedule.clear():
            self._outcome.not_run[name] = "interrupted"
        if self._heeded > 1:
            supervisor.kill()
        elif supervisor.workers:
            self._reporter.message("stopping: running stages finish their step and save; once more to stop at once")
            supervisor.stop()

    # ------------------------------------------------------------------ one stage

    def _start(self, item: PlannedStage, lease: Lease, supervisor: Supervisor) -> None:
        stage, resumed = self._run.stage(item.stage.name), item.decision is Decision.RESUME
        try:
            parents = self._parents[item.stage.name] = self._launcher.parents(item)
            stage.begin(item.identity, parents, resume=resumed)
            attempt = stage.new_attempt()
            write_json(stage.spec, asdict(self._launcher.spec(item, lease.devices, attempt)))
            self._tracking.started(stage, attempt, self._started(item, resumed))
            supervisor.start(item.stage.name, self._launcher.backend(item), str(stage.spec), attempt)
        except OpdctlError as error:
            self._pool.give_back(self._leases.pop(item.stage.name))
            if self._signals.count > 1:  # `abandon` took the fork server away
                self._outcome.not_run[item.stage.name] = "interrupted"
            else:
                self._fail(item, error, "")
        else:
            self._reporter.started(item.stage.name, attempt.number)

    def _check_resumed(self, item: PlannedStage, worker: Worker, step: int) -> None:
        """State that was there and is not found must not become a silent start from nothing."""
        if item.resume_step is not None and step <= item.resume_step and worker.stage not in self._restarted:
            self._restarted[worker.stage] = step
            worker.send(signal.SIGKILL)

    def _end(self, item: PlannedStage, worker: Worker) -> None:
        stage, attempt = self._run.stage(worker.stage), worker.attempt
        try:
            target = 1 if item.stage.settings.kind == "eval" else item.total_steps
            if worker.stage in self._restarted:
                raise StageFailed(
                    f"it should have gone on from step {item.resume_step}, and reported step "
                    f"{self._restarted[worker.stage]}: its saved state was not found",
                    hint=f"put {stage.state} back as it was, or start the stage anew with --rerun '{worker.stage}'",
                )
            result = judge(stage, worker, kind=item.stage.settings.kind, target=target)
            if result is None and not self._interrupted:
                raise StageFailed("its worker was asked to stop, and saved its state", hint=RUN_AGAIN)
            record = stage.publish(attempt.output, self._record(item, worker, result)) if result else None
        except OpdctlError as error:
            killed = (worker.exit_code() or -1) < 0
            self._tracking.ended(stage, attempt, "KILLED" if killed else "FAILED", str(error), None)
            if killed and self._interrupted:
                self._outcome.not_run[worker.stage] = "interrupted"
            else:
                tell_failure(attempt, str(error), error.hint)
                self._fail(item, error, log_tail(attempt))
            return
        if record is None:
            self._tracking.ended(stage, attempt, "KILLED", "interrupted", None)
            self._outcome.not_run[worker.stage] = "interrupted"
            return
        broken = list(gates.broken(item.stage.settings.gates, record.metrics))
        self._tracking.ended(stage, attempt, "FINISHED", "; ".join(f"gate: {gate.text}" for gate in broken), record)
        self._outcome.done.append(worker.stage)
        self._reporter.finished(worker.stage, record)
        self._heed(worker.stage, broken)
        self._schedule.done(worker.stage)

    def _heed(self, stage: str, broken: Sequence[gates.Broken]) -> None:
        """Do what the gates say that a finished stage did not pass."""
        for gate in broken:
            told = f"gate of {stage}: {gate.text}"
            if gate.action == "stop":
                self._outcome.failed.setdefault(stage, f"{told}{gate.known}")
                self._outcome.not_run.update(dict.fromkeys(self._schedule.clear(), told))
                self._reporter.failed(stage, f"{told}{gate.known}; nothing more is started", "")
                continue
            self._reporter.message(f"{told}{'; what reads it is skipped' if gate.action == 'skip' else ''}")
            if gate.action == "skip":
                self._outcome.not_run.update(dict.fromkeys(self._schedule.failed(stage), told))

    def _fail(self, item: PlannedStage, error: OpdctlError, tail: str) -> None:
        name = item.stage.name
        message = f"{error}; {error.hint}" if error.hint else str(error)
        self._outcome.failed[name] = message
        self._reporter.failed(name, message, tail)
        for dropped in self._schedule.failed(name):
            self._outcome.not_run[dropped] = f"{name} failed"
            self._reporter.message(f"{dropped}: not run, because {name} failed")

    def _started(self, item: PlannedStage, resumed: bool) -> Started:
        plain = self._pipeline.resolved["stages"][item.stage.name]
        return Started(
            kind=item.stage.settings.kind,
            labels=item.stage.labels,
            fingerprint=item.fingerprint,
            parents=self._parents[item.stage.name],
            settings={key: plain[key] for key in ("backend", "inputs", "config")} | {"seed": item.stage.seed},
            data={name: digest(task) for name, task in item.identity["tasks"].items()},
            resumed=resumed,
        )

    def _record(self, item: PlannedStage, worker: Worker, result: StageResult) -> Record:
        return Record(
            id=self._run.workspace.new_record_id(),
            run=self._run.name,
            stage=item.stage.name,
            kind=item.stage.settings.kind,
            step=result.step,
            fingerprint=item.fingerprint,
            identity=item.identity,
            parents=self._parents[item.stage.name],
            metrics=result.metrics,
            labels=item.stage.labels,
            created=now(),
            opdctl_version=opdctl.__version__,
            code=self._code,
            argv=sys.argv,
            seconds=time.time() - worker.started,
            mlflow_run_id=self._tracking.run_id(worker.attempt),
        )


def digest(value: Any) -> str:
    return sha256(dumps(value, sort_keys=True).encode()).hexdigest()[:32]


def now() -> str:
    return datetime.now(UTC).isoformat()


def commit_of_code() -> str:
    """Of opdctl itself, `-dirty` behind it where files are changed; empty for an installed copy."""
    git = ["git", "-C", str(Path(opdctl.__file__).parent)]
    try:
        subprocess.run([*git, "ls-files", "--error-unmatch", "__init__.py"], check=True, capture_output=True)
        described = subprocess.run(
            [*git, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            check=True,
            capture_output=True,
            text=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return described.stdout.strip()
