"""One attempt of a stage on verl: prepare, start, watch, publish."""

import contextlib
import logging
import math
import os
import secrets
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from getpass import getuser
from pathlib import Path

from opdctl import processes
from opdctl.backends.contract import Control, InputSpec, StageResult, StageSpec, Stopped
from opdctl.backends.verl import checkpoints, converted, data, progress, render, render_rl
from opdctl.backends.verl.checkpoints import Saves
from opdctl.backends.verl.layout import layout
from opdctl.backends.verl.render import Command
from opdctl.backends.verl.watch import Liveness, dump_stacks
from opdctl.errors import ProgramDied, StageFailed, StageRefused
from opdctl.processes import Tree
from opdctl.records import read_json

POLL_S = 0.5  # between two looks at the trainer
HEAD_S = 12.0  # that a trainer gets to end once Ray has lost its head: when it fails, it takes the head down first
END_S = 300.0  # that a trainer gets to end once it has saved the last step
MEMORY_S = 60.0  # that the driver gets to free the memory of ended processes
MEMORY_SLACK_MIB = 512
logger = logging.getLogger(__name__)
_FOREIGN = ("MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID", "VERL_FILE_LOGGER_ROOT")  # opdctl alone tracks


def run(spec: StageSpec, control: Control) -> StageResult:
    """Carry the stage out, resuming from `spec.state`.

    verl saves at intervals only. A stop ends it at once: what came after its last save is done again.
    """
    train = spec.config["train"]
    updates = render_rl.updates_of(spec)
    target = math.ceil(train["max_steps"] / updates)
    saves = checkpoints.saves_of(spec, updates)
    saves.folder.mkdir(parents=True, exist_ok=True)
    start = saves.mend()
    student = next(given for given in spec.inputs if given.role in ("init", "student"))
    command = render.command(spec)
    environment = _environment(spec, command)
    metrics = saves.noted_metrics()
    if start:
        saves.note(start, metrics)
    if start < target:
        _check_ranks(spec, saves, start)
        if not student.path:
            checkpoints.make_new_model(spec)
        data.write(spec, control)
        layout(spec).failure.unlink(missing_ok=True)
        metrics = _train(spec, control, saves, target, Command(environment, command.argv))
    checkpoints.publish(spec, saves.engine(target), _folder(spec, student), environment)
    converted.publish(layout(spec), Path(spec.output))
    ours = {name: value for name, value in metrics.items() if not name.startswith(progress.THEIRS)}
    return StageResult(step=target * updates, metrics=ours)


def _folder(spec: StageSpec, given: InputSpec) -> Path:
    return Path(given.path) if given.path else layout(spec).new_model


def _environment(spec: StageSpec, command: Command) -> dict[str, str]:
    unwanted = set(_FOREIGN)
    own: dict[str, str] = {}
    if (address := spec.workers["ray_address"]) is not None:
        own["RAY_ADDRESS"] = address
    else:
        unwanted |= {"RAY_ADDRESS", "RAY_AUTH_TOKEN_PATH"}
        own["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    if spec.workers["device"] == "cpu":
        unwanted.add("CUDA_VISIBLE_DEVICES")  # Ray counts slots for ranks as if they were devices
    inherited = {name: value for name, value in os.environ.items() if name not in unwanted}
    # compiled kernels outlive the stage's temporary folder
    kept = {"TORCHINDUCTOR_CACHE_DIR": str(Path(tempfile.gettempdir()) / f"torchinductor_{getuser()}")}
    return kept | inherited | dict(command.environment) | own


def _check_ranks(spec: StageSpec, saves: Saves, start: int) -> None:
    wanted = spec.resources["verl"]["nodes"] * spec.resources["verl"]["gpus_per_node"]
    ranks = saves.ranks(start) if start else None
    if ranks is not None and ranks != wanted:
        raise StageRefused(
            f"the state of step {start * saves.updates} was saved by {ranks} processes, and resources.verl gives "
            f"{wanted}: verl's FSDP engine reads only saves of as many",
            hint=f"set resources.verl.nodes x gpus_per_node to {ranks}, or start the stage anew with --rerun STAGE",
        )


def _train(spec: StageSpec, control: Control, saves: Saves, target: int, command: Command) -> dict[str, float]:
    """From the newest save to the last step; the metrics of that step."""
    attempt = Path(spec.events).parent
    before = _memory_used(spec)
    try:
        with processes.guarded(attempt) as tree, (attempt / "log.txt").open("ab") as log:
            process = subprocess.Popen(
                command.argv,
                env={**command.environment, **tree.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
            run = _Run(spec, control, saves, target, tree, process)
            try:
                run.follow()
            finally:
                process.kill()  # it is our child, to be waited for; `guarded` ends the others
                process.wait()
    finally:
        _await_memory(spec, before)
    run.judge()
    return dict(run.metrics)


@dataclass
class _Run:
    """A trainer that was started, seen from outside."""

    spec: StageSpec
    control: Control
    saves: Saves
    target: int  # steps here are verl's
    tree: Tree
    process: "subprocess.Popen[bytes]"
    metrics: Mapping[str, float] = field(default_factory=dict)
    saved: int = 0
    start: int = 0
    step: int = 0

    def __post_init__(self) -> None:
        self.start = self.saved = self.step = self.saves.latest() or 0
        self.metrics = self.saves.noted_metrics()
        log = self.tree.attempt / "log.txt"
        self._log = progress.Lines(log, log.stat().st_size)
        self._reports = progress.Lines(layout(self.spec).log)
        self._alive = Liveness(self.tree)
        self._saved_at = time.monotonic()

    def follow(self) -> None:
        """Until the trainer has ended. Raises Stopped, and StageFailed for a trainer that started elsewhere than at
        the newest save, that hangs, or whose Ray cluster broke down; the caller ends its processes."""
        running = True
        while running:
            running = self.process.poll() is None
            self._read()
            self._note_save()
            self._check_failure()
            if not running:
                return
            if self.saved >= self.target:
                if time.monotonic() - self._saved_at > END_S:
                    logger.warning("verl has saved its last step %.0f s ago and does not end: it is ended", END_S)
                    return
            elif self.control.stop_requested():
                raise Stopped
            else:
                self._check_alive()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(POLL_S)

    def judge(self) -> None:
        """Of an ended trainer: raises StageFailed unless it saved the last step, whatever its exit code says."""
        code, newest = self.process.returncode, max(self.saves.whole(), default=0)
        if newest >= self.target:
            if code:
                logger.warning("verl ended with exit code %d after its last save", code)
            return
        if code:
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            raise self._failed(f"verl {how}", ProgramDied if processes.killed(code) else StageFailed)
        of = f"of {self._steps(self.target)} steps"
        made = "without one new step" if self.step == self.start else f"after step {self._steps(self.step)}"
        raise StageFailed(
            f"verl ended with exit code 0 {made}: {self._steps(newest)} {of} are saved", hint=self._see_log()
        )

    def _read(self) -> None:
        lines = self._log.read()
        if (began := progress.start_step(lines)) is not None and began != self.start and self.step == self.start:
            raise self._restarted(f"goes on from step {self._steps(began)}")
        reports = list(progress.trained(self.spec.kind, self._reports.read()))
        if lines or reports:
            self._alive.happened()
        for report in reports:
            if report.step <= self.start:
                raise self._restarted(f"reported step {self._steps(report.step)}")
            self.step, self.metrics = report.step, report.metrics
            self.control.emit(self._steps(report.step), self.spec.config["train"]["max_steps"], report.metrics)

    def _restarted(self, what: str) -> StageFailed:
        return StageFailed(
            f"verl should have gone on from step {self._steps(self.start)}, and {what}",
            hint=f"see what became of {self.saves.folder}, or start the stage anew with --rerun STAGE",
        )

    def _note_save(self) -> None:
        latest = self.saves.latest()
        if latest is None or latest <= self.saved or latest not in self.saves.whole():
            return
        # RL saves before it reports a step, so the metrics may be those of the step before
        self.saves.note(latest, self.metrics)
        self.saved, self._saved_at = latest, time.monotonic()
        self.saves.retain(self.spec.resources["verl"]["keep_last"])
        self._alive.happened()

    def _check_failure(self) -> None:
        """Of a verifier or a teacher: verl would go on without the completions concerned."""
        if (told := read_json(layout(self.spec).failure, "message", "hint")) is not None:
            raise StageFailed(told["message"], hint=told["hint"])

    def _check_alive(self) -> None:
        limit = self.spec.workers["stall_timeout_s"]
        idle = self._alive.idle_s()
        if lost := self._alive.lost_head(HEAD_S):
            raise self._failed(f"Ray's {lost} ended", ProgramDied)
        if idle < limit:
            return
        told = dump_stacks(self.tree, self.spec.workers["python"], self.tree.attempt / "stacks.txt")
        raise StageFailed(
            f"verl hangs after step {self._steps(self.step)}: no event, no line of its log and no CPU use for "
            f"{idle:.0f} s (workers.verl.stall_timeout_s: {limit:g})",
            hint=f"{told}; {self._see_log()}",
        )

    def _failed(self, what: str, kind: type[StageFailed]) -> StageFailed:
        with self._log.path.open("rb") as log:
            log.seek(max(0, log.seek(0, 2) - 200_000))
            error = progress.last_error(log.read().decode(errors="replace"))
        told = f": {error}" if error else ""
        return kind(f"{what} after step {self._steps(self.step)}{told}", hint=self._see_log())

    def _steps(self, step: int) -> int:
        """In optimizer steps."""
        return step * self.saves.updates

    def _see_log(self) -> str:
        return f"the log says more: {self._log.path}"


def _memory_used(spec: StageSpec) -> int | None:
    """MiB in use on the stage's GPUs; None without any, or where nvidia-smi does not tell."""
    if not spec.devices:
        return None
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        ended = subprocess.run(
            [*command, "-i", os.environ["CUDA_VISIBLE_DEVICES"]], capture_output=True, text=True, timeout=30, check=True
        )
        return sum(map(int, ended.stdout.split()))
    except (OSError, ValueError, KeyError, subprocess.SubprocessError) as error:
        logger.warning("device memory is not watched: %s", error)
        return None


def _await_memory(spec: StageSpec, before: int | None) -> None:
    """The next stage finds the memory that this one found."""
    deadline = time.monotonic() + MEMORY_S
    while before is not None and (used := _memory_used(spec)) is not None and used > before + MEMORY_SLACK_MIB:
        if time.monotonic() > deadline:
            logger.warning("%d MiB of device memory are in use still, %.0f s after the end", used - before, MEMORY_S)
            return
        time.sleep(1.0)
