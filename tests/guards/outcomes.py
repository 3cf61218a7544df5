"""What comes of the planted faults, each tried once a process: the tests judge it, docs/guards.md tells it."""

import atexit
import contextlib
import shutil
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from guards import world
from guards.gate_faults import GATE, GateFault
from guards.plan_faults import CONFIG, SAVES
from guards.streams import watched
from guards.watch_faults import STREAMS

from opdctl.verdicts import Verdict
from opdctl.watchdog import Alarm

SEVERITY = ["go", "warn", "cold start first", "refuse"]


def severity(outcome: str) -> int:
    return SEVERITY.index(outcome)


@cache
def models() -> Path:
    """The workspace of `world`."""
    folder = Path(tempfile.mkdtemp(prefix="opdctl-guards-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return world.build(folder)


def judged(fault: GateFault, stage: str) -> list[Verdict]:
    """`stage`: with the fault ("faulty") or without ("healthy")."""
    made = getattr(fault, stage)(models())
    return world.verdicts(world.pipeline(models(), made, fault.tasks, gate=dict(fault.gate)))


@cache
def of_gate(name: str) -> Verdict | None:
    """The worst verdict of the fault's own check."""
    [fault] = [fault for fault in GATE if fault.name == name]
    told = [verdict for verdict in judged(fault, "faulty") if verdict.check == fault.check]
    return max(told, key=lambda verdict: severity(verdict.outcome), default=None)


@cache
def of_stream(name: str) -> Sequence[Alarm]:
    [fault] = [fault for fault in STREAMS if fault.name == name]
    return watched(fault.stream)


@cache
def of_config(name: str) -> Sequence[str]:
    [fault] = [fault for fault in CONFIG if fault.name == name]
    return fault.said()


@cache
def of_save(name: str) -> str:
    [fault] = [fault for fault in SAVES if fault.name == name]
    with tempfile.TemporaryDirectory(prefix="opdctl-guards-") as folder, contextlib.chdir(folder):
        return fault.said()
