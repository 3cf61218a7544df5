"""SIGKILL of worker, orchestrator or both at random moments: what runs next ends with the undisturbed weights."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import toy

from opdctl.lock import worker_lives

TOY = [sys.executable, toy.__file__]
KILLS = 20
SEED = 0


def test_a_run_killed_at_random_moments_ends_with_the_undisturbed_weights(tmp_path):
    draw = random.Random(SEED)
    seconds = finish(TOY, tmp_path / "undisturbed")
    expected = toy.digests(toy.killable(tmp_path / "undisturbed"))
    kills = {"worker": 0, "orchestrator": 0, "both": 0}
    for number in range(100):
        workspace = tmp_path / str(number)
        while sum(kills.values()) < KILLS:
            victim = min(kills, key=kills.__getitem__)
            if run_and_kill(TOY, workspace, victim, draw.uniform(0, seconds)):
                kills[victim] += 1
            else:
                break
        finish(TOY, workspace)
        assert toy.digests(toy.killable(workspace)) == expected
        assert not living_workers(workspace)
        if sum(kills.values()) >= KILLS:
            return
    raise AssertionError(f"100 runs gave {kills} kills only")


def finish(command: list[str], workspace: Path) -> float:
    """Run to the end; seconds that it took."""
    workspace.mkdir(exist_ok=True)
    began = time.monotonic()
    ended = subprocess.run([*command, workspace], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return time.monotonic() - began


def run_and_kill(command: list[str], workspace: Path, victim: str, after_s: float) -> bool:
    """False if the run was over before anything could be killed."""
    workspace.mkdir(exist_ok=True)
    with subprocess.Popen([*command, workspace], stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        time.sleep(after_s)
        workers = living_workers(workspace)
        while victim != "orchestrator" and not workers and process.poll() is None:
            time.sleep(0.002)
            workers = living_workers(workspace)
        if process.poll() is not None:
            return False
        if victim != "worker":
            process.kill()
        if victim != "orchestrator":
            for pid in workers:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    return victim == "both"
        if victim == "worker":
            process.wait(timeout=60)
    return True


def living_workers(workspace: Path) -> list[int]:
    notes = list(workspace.glob("runs/*/stages/**/attempts/*/worker.json"))
    return [json.loads(note.read_text())["pid"] for note in notes if worker_lives(note)]
