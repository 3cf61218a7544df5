"""Two specialists side by side over one after the other, on 2 cores. Target: at least 1.7 times as fast.

Both are trained by the real runner and the embedded engine from one SFT checkpoint; only `machine.slots` differs.
Import times are out of the comparison: the first run of each workspace trains the checkpoint that both start from.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

from opdctl.config import load_pipeline
from opdctl.plan import make_plan
from opdctl.runner import Silent, execute
from opdctl.store import Workspace

TARGET = 1.7
SPECIALISTS = ["max[domain=general]", "max[domain=general_agents]"]


def seconds(workspace: Path, slots: int, steps: int) -> float:
    """To train both specialists anew with so many slots."""
    overrides = [
        "scale.agents.sft.max_steps=20",
        f"scale.agents.rungs.max.max_steps={steps}",
        f"machine.slots={slots}",
        "machine.cpus=2",
        "tracking.enabled=false",
    ]
    pipeline = load_pipeline("kimi_k3", overrides, workspace=workspace)
    run = Workspace(workspace).run("benchmark")
    first = make_plan(pipeline, run, only=["sft"])
    execute(first, reporter=Silent())
    plan = make_plan(pipeline, run, only=SPECIALISTS, rerun=SPECIALISTS)
    began = time.perf_counter()
    outcome = execute(plan, reporter=Silent())
    if outcome.failed or outcome.interrupted:
        sys.exit(f"{outcome.failed or 'interrupted'}")
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps of each specialist")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each kind; the fastest counts")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        times: dict[int, list[float]] = {1: [], 2: []}
        for _ in range(options.rounds):  # in turn, so that a busy minute does not hit one kind alone
            for slots, measured in times.items():
                measured.append(seconds(Path(folder), slots, options.steps))
    after, beside = min(times[1]), min(times[2])
    busy = os.getloadavg()[0]
    print(f"one after the other {after:6.2f} s   {' '.join(f'{t:.2f}' for t in times[1])}")
    print(f"side by side        {beside:6.2f} s   {' '.join(f'{t:.2f}' for t in times[2])}")
    print(f"{after / beside:.2f} times as fast (target {TARGET}); {os.cpu_count()} cores, load {busy:.1f}")


if __name__ == "__main__":
    main()
