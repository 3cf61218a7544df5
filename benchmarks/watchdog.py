"""What the watchdog costs: microseconds an event and a look, against the steps of real stages.

    python benchmarks/watchdog.py [--limit 0.01]

Carries out three stages of a packaged recipe at the scale of seconds, whose steps are the shortest there are, then
replays their own events. A step is charged for its event and for every look that the orchestrator takes while the step
lasts (ten a second). Prints a line a stage; exits 1 where a share is above the limit.
"""

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

from opdctl.backends.contract import Event
from opdctl.backends.events import EventTail
from opdctl.settings import WatchSettings
from opdctl.store import Workspace
from opdctl.watchdog import Watch

STAGES = {"sft": "sft", "rl_teacher": "rlvr", "student": "opd"}
QUICK = [
    "scale=smoke",
    "tracking.enabled=false",
    "gate.enabled=false",
]
LOOKS_PER_S = 10.0  # 1 / runner.POLL_S
EVENTS, LOOKS = 5_000, 50_000


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--limit", type=float, default=0.01)
    limit = arguments.parse_args().limit
    with tempfile.TemporaryDirectory() as folder:
        events = _events(folder)
    missed = False
    for name, kind in STAGES.items():
        step_s = median(after.time - before.time for before, after in itertools.pairwise(events[name]))
        see_s, look_s = _see_s(kind, events[name]), _look_s(kind, events[name])
        share = (see_s + look_s * LOOKS_PER_S * step_s) / step_s
        missed |= share > limit
        print(
            f"{name:20} step {1e3 * step_s:8.1f} ms   event {1e6 * see_s:6.1f} us   look {1e6 * look_s:5.2f} us   "
            f"{share:8.4%} of a step   limit {limit:.0%}"
        )
    return int(missed)


def _events(folder: str) -> dict[str, list[Event]]:
    only = [part for name in (*STAGES, "accepted", "sft_teacher") for part in ("--only", name)]
    command = [sys.executable, "-m", "opdctl", "run", "mimo_v2_flash", *QUICK, "--run", "r", *only]
    subprocess.run(command, cwd=folder, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True, capture_output=True)
    run = Workspace(Path(folder)).run("r")
    names = [stage.name for stage in run.stages()]
    found = {name: next(own for own in names if own == name or own.startswith(f"{name}[")) for name in STAGES}
    return {name: EventTail(run.stage(own).attempts()[-1].events).read() for name, own in found.items()}


def _see_s(kind: str, events: list[Event]) -> float:
    """Of an event, all windows full: the stage's own events again and again, each a step further on."""
    watch = Watch(kind, WatchSettings())
    shown = itertools.cycle(events)
    stream = [replace(next(shown), step=step, total=EVENTS, time=float(step)) for step in range(1, EVENTS + 1)]
    began = time.perf_counter()
    for event in stream:
        watch.see(event)
    return (time.perf_counter() - began) / EVENTS


def _look_s(kind: str, events: list[Event]) -> float:
    watch = Watch(kind, WatchSettings())
    for event in events:
        watch.see(event)
    began = time.perf_counter()
    for look in range(LOOKS):
        watch.tick(0.1 * look)
    return (time.perf_counter() - began) / LOOKS


if __name__ == "__main__":
    sys.exit(main())
