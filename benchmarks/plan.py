"""Seconds from the command line to the plan: `opdctl plan` of the packaged recipe and of a fan-out of 1,000 stages.

    python benchmarks/plan.py [--repeat 3]

Prints wall and CPU seconds (best of the repeats) beside their limits; exits 1 where a limit is missed.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LIMITS_S = {"--help": 0.4, "plan kimi_k3": 1.5, "plan of 1,000 stages": 3.0}
FAN_OUT = """
defaults:
  - /model: tiny_qwen3
  - /task: kimi_k3_chains
  - /tracking: local
  - /scale: laptop
  - /stage@stages.sft: sft
  - /stage@stages.max: rlvr
  - /stage@stages.high: rlvr
  - _self_
name: thousand
axes:
  at: [%s]
  rung: [max, high]
stages:
  sft:
    inputs: {init: "model:"}
    config: {data: {tasks: [general], efforts: [max]}}
  max:
    foreach: {at: "${axes.at}"}
    seed: "${each.at}"
    inputs: {init: "stage:sft"}
    config:
      data: {tasks: [general], efforts: [max]}
      train: {max_steps: 120, optimizer: {lr: 1.0e-3}}
  high:
    foreach: {zip: {at: "${axes.at}", rung: [%s]}}
    seed: "${each.at}"
    inputs: {init: "stage:max[at=${each.at}]"}
    config:
      data: {tasks: [general], efforts: [high]}
      train: {max_steps: "${scale.rungs.${each.rung}.max_steps}", optimizer: {lr: 1.0e-3}}
"""


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--repeat", type=int, default=3)
    repeat = arguments.parse_args().repeat
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "pipelines", "thousand.yaml")
        file.parent.mkdir()
        numbers = range(500)
        file.write_text(FAN_OUT % (", ".join(map(str, numbers)), ", ".join("max" for _ in numbers)))
        commands = dict(zip(LIMITS_S, (["--help"], ["plan", "kimi_k3"], ["plan", str(file)]), strict=True))
        missed = [name for name, command in commands.items() if not _report(name, command, folder, repeat)]
    return 1 if missed else 0


def _report(name: str, command: list[str], folder: str, repeat: int) -> bool:
    wall, cpu = min(_time(command, folder) for _ in range(repeat))
    print(f"{name:24} {wall:6.2f} s wall {cpu:6.2f} s CPU   limit {LIMITS_S[name]:.1f} s")
    return wall <= LIMITS_S[name]


def _time(command: list[str], folder: str) -> tuple[float, float]:
    before, start = os.times(), time.perf_counter()
    subprocess.run([sys.executable, "-m", "opdctl", *command], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    wall, after = time.perf_counter() - start, os.times()
    return wall, sum(after[2:4]) - sum(before[2:4])


if __name__ == "__main__":
    sys.exit(main())
