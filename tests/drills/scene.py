"""A drill's workspace and the runs in it: started, watched until a moment, waited for, gone on with until the end."""

import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from drills.family import VARIABLE, Family
from drills.pipelines import RUN, SUBJECTS, TESTS, Subject

PATIENCE_S = 900.0  # that a run gets to end; undisturbed it takes seconds, on a busy machine minutes
RERUN = re.compile(r"--rerun '?([^\s']+?)'?(?=[\s;,:)]|$)")


class Missed(Exception):
    """The run was over, or `early`: had not come so far, when the fault should have struck: to be drawn again."""

    def __init__(self, told: str, *, early: bool = False) -> None:
        super().__init__(told)
        self.early = early


class Lost(Exception):
    """The run did not come to its end."""


@dataclass(frozen=True)
class Undisturbed:
    """What a run is like to which nothing happens."""

    seconds: float
    events: int
    digests: Mapping[str, str]
    points: Mapping[str, Mapping[str, list[tuple[int, float]]]]  # stage -> metric -> points


@dataclass(frozen=True)
class Rehearsal:
    """What all drills share."""

    folder: Path  # with the workspaces of the undisturbed runs
    undisturbed: Mapping[str, Undisturbed]
    database: Path  # an empty MLflow store: to set one up takes seconds
    shim: Path | None  # None: there is no C compiler


@dataclass
class Scene:
    """One drill at work."""

    known: Rehearsal
    subject: Subject
    workspace: Path
    draw: random.Random
    at: float  # where in the run the fault strikes, from 0 to 1
    tracked: bool
    runs: list["Running"] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what was done, for the one who reads a failure
    remedies: list[str] = field(default_factory=list)  # that a run asked for, and got
    lost_events: set[tuple[str, int]] = field(default_factory=set)  # (stage, step) whose only trace was destroyed
    repeated: set[str] = field(default_factory=set)  # stages whose finished result was destroyed
    destroyed: set[str] = field(default_factory=set)  # ids of published checkpoints with a damaged file
    verdict: list[str] | None = None  # what does not hold, once it was looked at

    def __post_init__(self) -> None:
        self.workspace.mkdir(parents=True)
        self.family = Family(str(self.workspace))
        if self.tracked:
            shutil.copy(self.known.database, self.workspace / "mlflow.db")

    @property
    def undisturbed(self) -> Undisturbed:
        return self.known.undisturbed[self.subject.name]

    @property
    def folder(self) -> Path:
        return self.workspace / "runs" / RUN

    def start(self, *overrides: str, faults: Mapping[str, str] | None = None) -> "Running":
        """`opdctl run`, told more; with an environment in which something fails."""
        tracking = () if self.tracked else ("tracking.enabled=false",)
        return self._start(self.subject.command(self.workspace, *tracking, *overrides), faults)

    def repair(self) -> "Running":
        """`opdctl repair --stop`, whatever it finds."""
        command = [sys.executable, "-m", "opdctl", "repair", "--stop", "--workspace", str(self.workspace)]
        running = self._start(command)
        self.notes.append(f"repaired, exit code {running.wait(600)}")
        return running

    def _start(self, command: Sequence[str], faults: Mapping[str, str] | None = None) -> "Running":
        log = self.workspace.with_name(f"{self.workspace.name}-{len(self.runs) + 1}.log")
        with log.open("w") as stream:
            process = subprocess.Popen(
                command, stdout=stream, stderr=subprocess.STDOUT, env=self._environment(faults or {})
            )
        running = Running(self, process, log)
        self.runs.append(running)
        return running

    def _environment(self, faults: Mapping[str, str]) -> dict[str, str]:
        path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
        return {
            **os.environ,
            VARIABLE: str(self.workspace),
            "PYTHONPATH": path,
            "OMP_NUM_THREADS": "1",
            "MLFLOW_HTTP_REQUEST_TIMEOUT": "2",
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "HF_HUB_OFFLINE": "1",
            **faults,
        }

    def go_on(self) -> None:
        """Run again until the end, doing what a refusal says is to be done. Raises Lost."""
        options: list[str] = []
        for _ in range(4):
            running = self.start(*options)
            code, told = running.wait(), running.told()
            if code == 0:
                self.tell_mlflow(told)
                return
            options = []
            if code == 1 and (found := RERUN.search(told)):
                options = ["--rerun", found.group(1)]
                self.remedies.append(" ".join(options))
            else:
                raise Lost(f"the next run ended with exit code {code}: {told[-1500:]}")
        raise Lost(f"four runs did not come to the end: {told[-1500:]}")

    def tell_mlflow(self, told: str) -> None:
        """Where a run gave up waiting for MLflow, as it does on a busy machine: `repair` waits for longer."""
        for _ in range(3):
            if "not yet in MLflow" not in told:
                return
            told = self.repair().told()

    def events(self) -> int:
        """That the workers have written so far."""
        found = [path for part in ("*", "*/*=*") for path in self.folder.glob(f"stages/{part}/attempts/*/events.jsonl")]
        return sum(path.read_bytes().count(b"\n") for path in found)


@dataclass
class Running:
    """One `opdctl`."""

    scene: Scene
    process: subprocess.Popen[bytes]
    log: Path
    began: float = field(default_factory=time.monotonic)

    def until(self, at: float) -> None:
        """Wait for a moment: half of them by the clock, half by how far the stages have come. Raises Missed."""
        scene = self.scene
        if scene.draw.random() < 0.5:
            moment = self.began + at * scene.undisturbed.seconds
            while time.monotonic() < moment:
                self._still_runs(0.005)
            return
        wanted, jitter = int(at * scene.undisturbed.events), scene.draw.uniform(0, 0.05)
        while scene.events() < wanted:
            self._still_runs(0.01)
        self._still_runs(jitter)

    def victims(self, role: str) -> list[int]:
        """The processes of a role; waits until there is one. Raises Missed where the run ends before."""
        while not (found := self.scene.family.of(role)):
            self._still_runs(0.005)
        return found

    def _still_runs(self, wait_s: float) -> None:
        if self.process.poll() is not None:
            raise Missed("the run was over")
        if time.monotonic() - self.began > PATIENCE_S:
            raise Lost(f"a run got stuck before the fault: {self.told()[-1500:]}")
        time.sleep(wait_s)

    def over(self) -> bool:
        return self.process.poll() is not None

    def wait(self, patience_s: float = PATIENCE_S) -> int:
        """Its exit code. Raises Lost where it does not end."""
        try:
            return self.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self.scene.family.end()
            self.process.wait()
            raise Lost(f"a run did not end within {patience_s:.0f} s: {self.told()[-1500:]}") from None

    def told(self) -> str:
        return self.log.read_text(errors="replace")


@contextmanager
def scene(
    known: Rehearsal, subject: str, workspace: Path, draw: random.Random, at: float, tracked: bool
) -> Iterator[Scene]:
    """A new one; nothing of it runs on afterwards."""
    shutil.rmtree(workspace, ignore_errors=True)
    made = Scene(known, SUBJECTS[subject], workspace, draw, at, tracked)
    try:
        yield made
    finally:
        made.family.end()
        for running in made.runs:
            running.process.wait()
