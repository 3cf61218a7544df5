"""Carries a plan out: stages in parallel as far as the machine allows, each published once it is proven complete."""

import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from getpass import getuser
from hashlib import sha256
from json import dumps
from typing import Any

import opdctl
from opdctl import disk, gates, secrets
from opdctl.backends.contract import StageResult
from opdctl.errors import ConfigError, OpdctlError, StageFailed, StageRefused
from opdctl.guards import Guards, Order
from opdctl.launch import Launcher
from opdctl.lineage import commit_of_code
from opdctl.notify import Notifier
from opdctl.plan import Decision, Plan, PlannedStage
from opdctl.preflight import check_data
from opdctl.reporter import Outcome, Reporter, Silent
from opdctl.retry import Retries
from opdctl.scheduler import Lease, Pool, Schedule
from opdctl.settings import NotifyOn
from opdctl.signals import Signals
from opdctl.store import Attempt, Parent, Record, StageDir, write_json
from opdctl.supervisor import RUN_AGAIN, Supervisor, Worker, judge, log_tail, tell_failure
from opdctl.tracking import Started, Status, Tracking, open_tracking

__all__ = ["Outcome", "Reporter", "Silent", "execute"]

POLL_S = 0.1  # between two looks at the events of running stages
PATIENCE_S = 60.0  # that a worker gets to save after a guard told it to end
ENDS: Mapping[Status, NotifyOn] = {"FINISHED": "finished", "FAILED": "failed", "KILLED": "stopped"}
DRAIN_S = 60.0  # that tracking gets to catch up once the last stage has ended


def execute(plan: Plan, *, reporter: Reporter) -> Outcome:
    """Run and resume what the plan says, until all is done, failed or waits for what failed.

    The first SIGINT or SIGTERM lets every worker finish its step and save; the second kills them.
    Raises StageRefused or ConfigError before anything starts, RunBusy if another process works in the run.
    """
    refused = [f"{item.stage.name}: {item.reason}" for item in plan.stages if item.decision is Decision.REFUSED]
    if refused:
        raise StageRefused("\n".join(refused), hint="--rerun STAGE starts it anew; another --run keeps both")
    with plan.run.lock(reporter.message) as lock, Signals() as signals:
        return _Execution(plan, reporter, signals).run(lock)


class _Execution:
    """One `execute`, under the run's lock."""

    def __init__(self, plan: Plan, reporter: Reporter, signals: Signals) -> None:
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
        self._guards, self._retries = Guards(plan), Retries()
        context = {"pipeline": self._pipeline.settings.name, "run": self._run.name}
        context["workspace"] = str(self._run.workspace.path)
        self._notifier = Notifier(self._pipeline.settings.notify, context)
        self._halted: dict[str, Order] = {}  # stage -> why its worker was told to end
        self._paused = self._closed = False  # a stage was paused; nothing more is started
        self._deadlines: dict[str, float] = {}  # halted stage -> when its worker is killed
        self._again: dict[str, float] = {}  # failed stage -> when it is tried again
        self._restarted: dict[str, int] = {}  # resumed stage -> the step, too low, that it reported
        self._heeded = 0  # signals acted on
        try:
            self._check()
        except StageRefused as error:
            self._notifier.tell("refused", "", str(error))
            self._tell_unsent()
            raise
        self._tracking = self._open()

    # ------------------------------------------------------------------ before anything starts

    def _check(self) -> None:
        """Refuses all that can be refused before the first stage starts."""
        problems = self._launcher.check()
        problems += check_data(self._pipeline, [item.stage for item in self._work.values()])
        if problems:
            raise ConfigError(problems)
        disk.check(self._plan, self._reporter.message)
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
                argv=secrets.command_line(),
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
            if not self._interrupted and (self._outcome.failed or not self._paused):
                status = "FAILED" if self._outcome.failed else "FINISHED"
        finally:
            left = self._tracking.close(status, wait_s=DRAIN_S, give_up=lambda: self._signals.count > 1)
            self._notifier.tell(ENDS[status], "", self._outcome.summary())
            self._tell_unsent()
        for text in (*self._tracking.complaints(), left):
            if text:
                self._reporter.message(text)
        return replace(self._outcome, interrupted=self._interrupted or self._paused)

    def _tell_unsent(self) -> None:
        for text in self._notifier.close(lambda: self._signals.count > 1):
            self._reporter.message(text)

    @property
    def _interrupted(self) -> bool:
        return self._signals.count > 0

    def _turn(self, supervisor: Supervisor) -> bool:
        """Start what can start, wait a little, deal with what happened. False once there is nothing left to do."""
        if self._signals.count > self._heeded:
            self._stop(supervisor)
        due = [name for name, at in self._again.items() if at <= time.monotonic()]
        for name in (*due, *self._schedule.ready()):
            if self._signals.count > self._heeded:  # the first start takes seconds
                return True
            if (lease := self._pool.take(self._work[name].stage.settings.resources)) is not None:
                if self._again.pop(name, None) is None:
                    self._schedule.start(name)
                self._leases[name] = lease
                self._start(self._work[name], lease, supervisor)
        if not supervisor.workers:
            assert not self._schedule.ready(), "a stage needs more than the whole machine"
            if self._again:
                time.sleep(POLL_S)
            return bool(self._again)
        ended = supervisor.wait(POLL_S)
        for worker in (*ended, *supervisor.workers.values()):
            for event in worker.events():
                if event.phase == "train":  # preparations count no steps
                    self._check_resumed(self._work[worker.stage], worker, event.step)
                self._reporter.progress(worker.stage, event)
                self._obey(self._guards.seen(worker.stage, event), supervisor)
        self._obey(self._guards.turn(), supervisor)
        for worker in ended:
            self._pool.give_back(self._leases.pop(worker.stage))
            self._end(self._work[worker.stage], worker)
        for text in self._tracking.complaints():
            self._reporter.message(text)
        return True

    def _stop(self, supervisor: Supervisor) -> None:
        """Nothing new starts; workers save at the first request and die at the second."""
        self._heeded = self._signals.count
        self._close("interrupted")
        if self._heeded > 1:
            supervisor.kill()
        elif supervisor.workers:
            self._reporter.message("stopping: running stages finish their step and save; once more to stop at once")
            supervisor.stop()

    def _close(self, why: str) -> list[str]:
        """Nothing more is started; what would have been."""
        self._closed = True
        dropped = [*self._schedule.clear(), *self._again]
        self._again.clear()
        self._outcome.not_run.update(dict.fromkeys(dropped, why))
        return dropped

    def _obey(self, orders: Sequence[Order], supervisor: Supervisor) -> None:
        """What the guards order."""
        for order in orders:
            worker = supervisor.workers.get(order.stage)
            if order.action == "tell":
                self._reporter.warned(order.stage, order.text)
            elif not order.stage:
                self._paused |= bool(self._close(order.text))
            elif order.outranks(self._halted.get(order.stage)) and (worker is not None or order.void):
                self._halted[order.stage] = order
                if worker is not None:
                    worker.send(signal.SIGTERM)
                    self._deadlines.setdefault(order.stage, time.monotonic() + PATIENCE_S + order.extra_s)
            else:
                self._reporter.warned(order.stage, order.text)  # it ends already, or has ended
        for name, at in list(self._deadlines.items()):
            if at <= time.monotonic():  # it hangs
                del self._deadlines[name]
                if (worker := supervisor.workers.get(name)) is not None:
                    worker.send(signal.SIGKILL)

    # ------------------------------------------------------------------ one stage

    def _start(self, item: PlannedStage, lease: Lease, supervisor: Supervisor) -> None:
        stage, resumed = self._run.stage(item.stage.name), item.decision is Decision.RESUME
        attempt: Attempt | None = None
        try:
            parents = self._parents[item.stage.name] = self._launcher.parents(item)
            stage.begin(item.identity, parents, resume=resumed)
            attempt = stage.new_attempt()
            write_json(stage.spec, asdict(self._launcher.spec(item, lease.devices, attempt)))
            self._tracking.started(stage, attempt, self._started(item, resumed))
            supervisor.start(item.stage.name, self._launcher.backend(item), str(stage.spec), attempt)
        except OpdctlError as error:
            self._pool.give_back(self._leases.pop(item.stage.name))
            given_up = self._signals.count > 1  # `abandon` took the fork server away
            if attempt is not None:
                self._tracking.ended(stage, attempt, "KILLED" if given_up else "FAILED", str(error), None)
            if given_up:
                self._outcome.not_run[item.stage.name] = "interrupted"
            else:
                self._fail(item, error, "")
        else:
            self._reporter.started(item.stage.name, attempt.number)
            self._obey(self._guards.started(item, attempt), supervisor)

    def _check_resumed(self, item: PlannedStage, worker: Worker, step: int) -> None:
        """State that was there and is not found must not become a silent start from nothing."""
        if item.resume_step is not None and step <= item.resume_step and worker.stage not in self._restarted:
            self._restarted[worker.stage] = step
            worker.send(signal.SIGKILL)

    def _end(self, item: PlannedStage, worker: Worker) -> None:
        stage, attempt = self._run.stage(worker.stage), worker.attempt
        for told in self._guards.ended(worker.stage):
            self._reporter.warned(worker.stage, told.text)
        halted = self._halted.pop(worker.stage, None)
        self._deadlines.pop(worker.stage, None)
        try:
            target = 1 if item.stage.settings.kind == "eval" else item.total_steps
            if worker.stage in self._restarted:
                raise StageFailed(
                    f"it should have gone on from step {item.resume_step}, and reported step "
                    f"{self._restarted[worker.stage]}: its saved state was not found",
                    hint=f"put {stage.state} back as it was, or start the stage anew with --rerun '{worker.stage}'",
                )
            if halted is not None and halted.ends(worker.exit_code()):
                if halted.action == "pause":
                    self._pause(item, worker, halted)
                    return
                raise StageFailed(halted.text, hint=halted.hint or RUN_AGAIN)
            result = judge(stage, worker, kind=item.stage.settings.kind, target=target)
            if result is None and not self._interrupted:
                raise StageFailed("its worker was asked to stop, and saved its state", hint=RUN_AGAIN)
            record = stage.publish(attempt.output, self._record(item, worker, result)) if result else None
        except OpdctlError as error:
            killed = (worker.exit_code() or -1) < 0
            self._tracking.ended(stage, attempt, "KILLED" if killed else "FAILED", str(error), None)
            if killed and self._interrupted:
                self._outcome.not_run[worker.stage] = "interrupted"
            elif halted is None and worker.stage not in self._restarted and self._try_again(item, worker, error):
                return
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
        if halted is not None:
            self._reporter.warned(worker.stage, f"{halted.text}; it was done before it could be halted")
        self._reporter.finished(worker.stage, record)
        self._heed(worker.stage, broken)
        self._schedule.done(worker.stage)

    def _pause(self, item: PlannedStage, worker: Worker, order: Order) -> None:
        """The next run goes on from what it saved, or, if it hung, had saved before."""
        name, stage = worker.stage, self._run.stage(worker.stage)
        told = f"{order.text}; paused, saved at step {stage.state_step() or 0}"
        self._tracking.ended(stage, worker.attempt, "KILLED", told, None)
        self._paused = True
        self._outcome.not_run[name] = f"paused: {order.text}"
        self._outcome.not_run.update(dict.fromkeys(self._schedule.failed(name), f"{name} is paused"))
        self._reporter.paused(name, f"{told}; {order.hint}")
        self._notifier.tell("stopped", name, told)

    def _try_again(self, item: PlannedStage, worker: Worker, error: OpdctlError) -> bool:
        """Is the failure one that may pass? Then the stage goes on from its last save, a little later."""
        settings, name = item.stage.settings.retry, item.stage.name
        stage = self._run.stage(name)
        resumed = stage.unfinished() is not None
        vanished = item.decision is Decision.RESUME and not resumed  # no silent start from nothing
        if self._interrupted or self._closed or vanished or settings is None:
            return False
        again = self._retries.next(name, settings, worker.exit_code())
        if again is None:
            return False
        self._work[name] = replace(
            item,
            decision=Decision.RESUME if resumed else Decision.RUN,
            resume_step=stage.state_step() if resumed else None,
        )
        self._again[name] = time.monotonic() + again.wait_s
        self._reporter.message(f"{name}: {error}; tried again in {again.wait_s:.0f} s ({again.number} of {again.of})")
        return True

    def _heed(self, stage: str, broken: Sequence[gates.Broken]) -> None:
        """Do what the gates say that a finished stage did not pass."""
        for gate in broken:
            told = f"gate of {stage}: {gate.text}"
            if gate.action == "stop":
                self._outcome.failed.setdefault(stage, f"{told}{gate.known}")
                self._close(told)
                self._reporter.failed(stage, f"{told}{gate.known}; nothing more is started", "")
                self._notifier.tell("failed", stage, self._outcome.failed[stage])
                continue
            self._reporter.message(f"{told}{'; what reads it is skipped' if gate.action == 'skip' else ''}")
            if gate.action == "skip":
                self._outcome.not_run.update(dict.fromkeys(self._schedule.failed(stage), told))

    def _fail(self, item: PlannedStage, error: OpdctlError, tail: str) -> None:
        name = item.stage.name
        message = secrets.redact(f"{error}; {error.hint}" if error.hint else str(error))
        self._outcome.failed[name] = message
        self._reporter.failed(name, message, tail)
        self._notifier.tell("refused" if name in self._guards.refused else "failed", name, message)
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
            argv=secrets.command_line(),
            seconds=time.time() - worker.started,
            mlflow_run_id=self._tracking.run_id(worker.attempt),
            accepted=self._launcher.accepted(item),
        )


def digest(value: Any) -> str:
    return sha256(dumps(value, sort_keys=True).encode()).hexdigest()[:32]


def now() -> str:
    return datetime.now(UTC).isoformat()
