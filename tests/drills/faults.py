"""The kinds of faults with how many of each, and the drills that a seed makes of them: plain data."""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SEED = 6
TRACKED = 0.6  # share of the toy's drills with tracking, where the fault does not need it; the engine's have it all


@dataclass(frozen=True)
class Kind:
    """`inject`: the function of `inject.py`, called with `how`. `toy`, `engine`: drills with each trainer."""

    row: str  # of the table
    inject: str
    how: Mapping[str, Any]
    toy: int
    engine: int = 0
    tracked: bool = False  # needs tracking


@dataclass(frozen=True)
class Drill:
    number: int
    kind: Kind
    subject: str
    at: float  # where in the run, from 0 to 1
    tracked: bool

    @property
    def name(self) -> str:
        how = " ".join(f"{key}={value}" for key, value in self.kind.how.items() if value not in ("", False))
        return f"{self.number} {self.kind.inject} {how} on {self.subject} at {self.at:.2f}"


def _signals() -> list[Kind]:
    kill, term = {"name": "SIGKILL"}, {"name": "SIGTERM"}
    return [
        Kind("SIGKILL of the orchestrator", "signalled", {"role": "orchestrator", **kill}, 12, 2),
        Kind("SIGKILL of a worker", "signalled", {"role": "worker", **kill}, 13, 3),
        Kind("SIGKILL of the fork server", "signalled", {"role": "fork server", **kill}, 8, 1),
        Kind("SIGKILL of orchestrator and workers", "signalled", {"role": "both", **kill}, 9, 2),
        Kind("SIGKILL of all processes at once", "signalled", {"role": "all", **kill}, 8, 2),
        Kind("SIGKILL again and again", "again_and_again", {"times": 3}, 4),
        Kind("workers killed until retries are used up", "storm", {"times": 6}, 3, 1),
        Kind("SIGTERM", "signalled", {"role": "orchestrator", **term}, 5, 1),
        Kind("SIGTERM", "signalled", {"role": "worker", **term}, 4, 1),
        Kind("SIGTERM", "signalled", {"role": "fork server", **term}, 2),
        Kind("SIGTERM", "signalled", {"role": "both", **term}, 2),
        Kind("SIGTERM twice", "signalled", {"role": "orchestrator", **term, "times": 2}, 3),
        Kind("SIGSTOP, later SIGCONT", "stopped", {"role": "worker", "then": "continue"}, 3, 1),
        Kind("SIGSTOP, later SIGCONT", "stopped", {"role": "orchestrator", "then": "continue"}, 3),
        Kind("SIGSTOP, later SIGCONT", "stopped", {"role": "fork server", "then": "continue"}, 2),
        Kind("SIGSTOP, later SIGKILL", "stopped", {"role": "worker", "then": "kill"}, 3, 1),
        Kind("SIGSTOP, later SIGKILL", "stopped", {"role": "orchestrator", "then": "kill"}, 3, 1),
        Kind("SIGSTOP of a worker, orchestrator killed", "stopped", {"role": "worker", "then": "left"}, 2),
    ]


def _disks() -> list[Kind]:
    any_call = "write open fsync rename mkdir symlink unlink"
    kinds = []
    for error, sticky, row, worker, orchestrator in (
        ("ENOSPC", True, "ENOSPC from the n-th call on", (3, 1), (3, 0)),
        ("ENOSPC", False, "ENOSPC once", (2, 1), (2, 1)),
        ("EIO", False, "EIO at the n-th call", (4, 1), (5, 1)),
        ("EROFS", True, "read-only from the n-th call on", (2, 0), (2, 0)),
    ):
        how = {"calls": any_call, "error": error, "sticky": sticky}
        kinds.append(Kind(row, "failing", {"role": "worker", **how}, *worker))
        kinds.append(Kind(row, "failing", {"role": "orchestrator", **how}, *orchestrator))
    for call in ("fsync", "rename"):
        how = {"calls": call, "error": "EIO"}
        kinds.append(Kind(f"a failing {call}", "failing", {"role": "worker", **how}, 1, 1 if call == "rename" else 0))
        kinds.append(Kind(f"a failing {call}", "failing", {"role": "orchestrator", **how}, 2))
    short = {"calls": "write", "error": "short"}
    return [
        *kinds,
        Kind("a short write", "failing", {"role": "worker", **short}, 3, 1),
        Kind("a short write", "failing", {"role": "orchestrator", **short}, 3),
        Kind("a full disk", "small_disk", {}, 3, 1),
        Kind("a disk mounted read-only", "read_only_disk", {}, 1),
    ]


def _files() -> list[Kind]:
    run, stage = "runs/drill", "runs/drill/stages/**"
    torn = {
        "events.jsonl": (f"{stage}/attempts/*/events.jsonl", 2, 1),
        "tracking.json": (f"{stage}/attempts/*/tracking.json", 2, 0),
        "gate.json": (f"{stage}/attempts/*/gate.json", 0, 1),
        "worker.json": (f"{stage}/attempts/*/worker.json", 1, 0),
        "pipeline.yaml": (f"{run}/pipeline.yaml", 2, 0),
        "run.json": (f"{run}/run.json", 2, 0),
        "result.json": (f"{stage}/result.json", 1, 0),
        "spec.json": (f"{stage}/spec.json", 1, 0),
        "identity.json": (f"{stage}/identity.json", 2, 0),
        ".lock": (f"{run}/.lock", 1, 0),
        "step.json": (f"{stage}/state/step.json", 0, 2),
        "state.safetensors": (f"{stage}/state/step-*/state.safetensors", 0, 1),
        "record.json": (f"{stage}/checkpoints/*/record.json", 1, 0),
        "model.safetensors": (f"{stage}/checkpoints/*/model.safetensors", 1, 0),
    }
    kinds = []
    for at, (name, (pattern, toy, engine)) in enumerate(torn.items()):
        how = ("half", "empty")[at % 2]
        needs = name in ("events.jsonl", "tracking.json", "run.json")
        kinds.append(Kind(f"{name} torn or empty", "damaged", {"pattern": pattern, "how": how}, toy, engine, needs))
    return kinds


def _others() -> list[Kind]:
    hour = 3600
    return [
        Kind("the clock an hour ahead", "clock_jumps", {"role": "orchestrator", "seconds": hour}, 2),
        Kind("the clock an hour ahead", "clock_jumps", {"role": "worker", "seconds": hour}, 1, 1),
        Kind("the clock an hour back", "clock_jumps", {"role": "orchestrator", "seconds": -hour}, 2),
        Kind("the clock an hour back", "clock_jumps", {"role": "worker", "seconds": -hour}, 1),
        Kind("the clock, then SIGKILL", "clock_jumps", {"role": "all", "seconds": hour, "killed": True}, 2),
        Kind("the clock, then SIGKILL", "clock_jumps", {"role": "all", "seconds": -hour, "killed": True}, 2),
        Kind("MLflow's server is down", "server_refuses", {"how": "closed"}, 2, tracked=True),
        Kind("MLflow's server answers 503", "server_refuses", {"how": "unavailable"}, 2, tracked=True),
        Kind("MLflow's server never answers", "server_refuses", {"how": "silent"}, 1, tracked=True),
        Kind("MLflow's database is locked", "database_locked", {"seconds": None}, 2, tracked=True),
        Kind("MLflow's database is locked", "database_locked", {"seconds": 3.0}, 2, tracked=True),
        Kind("two orchestrators at once", "two_at_once", {"killed": False}, 4, 1),
        Kind("two orchestrators at once", "two_at_once", {"killed": True}, 2),
    ]


KINDS = (*_signals(), *_disks(), *_files(), *_others())

# For every run of the tests, untracked: each chain strikes one run of the toy again and again. Rows of the table.
SAMPLE = (
    ("SIGKILL of all processes at once", "ENOSPC once", "SIGSTOP, later SIGCONT", "identity.json torn or empty"),
    ("SIGKILL of a worker", "a short write", "SIGTERM", "the clock, then SIGKILL"),
    ("SIGKILL of the orchestrator", "SIGKILL of the fork server", "a failing rename", "two orchestrators at once"),
)


def of_row(row: str) -> Kind:
    """The first kind of a row."""
    return next(kind for kind in KINDS if kind.row == row)


def drills(seed: int = SEED) -> list[Drill]:
    """All of them, in an order that mixes long and short ones."""
    draw = random.Random(seed)
    wanted = [(kind, subject) for kind in KINDS for subject in ("toy", "engine") for _ in range(getattr(kind, subject))]
    draw.shuffle(wanted)
    found = []
    for number, (kind, subject) in enumerate(wanted):
        at, tracked = draw.uniform(0.02, 0.98), draw.random() < TRACKED
        found.append(Drill(number, kind, subject, at, tracked or kind.tracked or subject == "engine"))
    return found
