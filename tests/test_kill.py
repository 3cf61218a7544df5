"""SIGKILL of worker, orchestrator or both at random moments: what runs next ends with the undisturbed weights."""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import toy
import yaml

from opdctl.lock import worker_lives

SEED = 0
VICTIMS = ("worker", "orchestrator", "both")


def run_toy(workspace: Path) -> list[str | Path]:
    """Hashing instead of training: start-up and the moments between two stages weigh more."""
    return [sys.executable, toy.__file__, workspace]


def run_engine(workspace: Path) -> list[str | Path]:
    """The whole recipe in small, by the command line."""
    small = ["scale=smoke", "scale.agents.sft.global_batch_size=24", "axes.domain=[general]", "axes.loss=[full_vocab]"]
    command = [sys.executable, "-m", "opdctl", "run", "kimi_k3", *small, "tracking.enabled=false"]
    return [*command, "--workspace", workspace]


@pytest.mark.parametrize(
    ("command", "kills"),
    [
        pytest.param(run_toy, 9, id="toy"),
        pytest.param(run_engine, 3, id="engine"),
        pytest.param(run_engine, 20, id="engine-at-length", marks=pytest.mark.recipe),
    ],
)
def test_a_run_killed_at_random_moments_ends_with_the_undisturbed_weights(tmp_path, command, kills):
    draw = random.Random(SEED)
    seconds = finish(command, tmp_path / "undisturbed")
    expected = digests(tmp_path / "undisturbed")
    assert expected
    done = number = 0
    while done < kills:
        workspace = tmp_path / str(number)
        while done < kills and run_and_kill(command, workspace, VICTIMS[done % 3], draw.uniform(0, seconds)):
            done += 1
        finish(command, workspace)
        assert digests(workspace) == expected
        assert not living_workers(workspace)
        number += 1


LONG = {
    "name": "long",
    "defaults": [{"/model": "tiny_qwen3"}, "_self_"],
    "tasks": {"math": {"task": "chain", "domain": "math", "strides": {"max": 1}}},
    "tracking": {"enabled": False},
    "machine": {"slots": 1, "cpus": 1},
    "stages": {
        "rl": {
            "kind": "rlvr",
            "backend": "embedded",
            "inputs": {"init": "model:"},  # made at random: its completions are long, and of any length
            "config": {
                "data": {"tasks": ["math"]},
                "rollout": {
                    "prompts": 8,
                    "group_size": 8,
                    "max_prompt_tokens": 12,
                    "max_completion_tokens": 112,
                    "journal": {"every_tokens": 4},
                },
                "train": {"max_steps": 2, "global_batch_size": 64, "save_every": 2, "optimizer": {"lr": 1e-3}},
                "unfinished_reward": -1.0,
            },
        }
    },
}


def run_long(workspace: Path) -> list[str | Path]:
    (workspace / "long.yaml").write_text(yaml.safe_dump(LONG))
    return [sys.executable, "-m", "opdctl", "run", workspace / "long.yaml", "--workspace", workspace]


def test_a_rollout_phase_killed_amid_its_completions_goes_on_from_the_journal(tmp_path):
    """No step of the second phase is saved, so that all it has is its journal; the first phase's is there as well."""
    finish(run_long, tmp_path / "undisturbed")
    workspace = tmp_path / "killed"
    workspace.mkdir()
    journal = workspace / "runs/long/stages/rl/state/journal"
    with subprocess.Popen(run_long(workspace), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while not (journal / "step-1.log").exists() or (journal / "step-1.log").stat().st_size < 10_000:
            assert process.poll() is None
            time.sleep(0.001)
        process.kill()
        assert all(_kill(pid) for pid in living_workers(workspace))
    assert not (journal.parent / "step.json").exists()
    held = [file.name for file in journal.iterdir()]
    assert sorted(held) == ["step-0.log", "step-1.log"]
    finish(run_long, workspace)
    assert digests(workspace) == digests(tmp_path / "undisturbed")


def finish(command: Callable[[Path], list[str | Path]], workspace: Path) -> float:
    """Run to the end; seconds that it took."""
    workspace.mkdir(exist_ok=True)
    began = time.monotonic()
    ended = subprocess.run(command(workspace), capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return time.monotonic() - began


def run_and_kill(command: Callable[[Path], list[str | Path]], workspace: Path, victim: str, after_s: float) -> bool:
    """False if the run was over before anything could be killed."""
    workspace.mkdir(exist_ok=True)
    with subprocess.Popen(command(workspace), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + after_s
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
        workers = living_workers(workspace)
        while process.poll() is None and victim != "orchestrator" and not workers:
            time.sleep(0.002)
            workers = living_workers(workspace)
        if process.poll() is not None:
            return False
        if victim != "worker":
            process.kill()
        killed = [_kill(pid) for pid in workers if victim != "orchestrator"]
    return victim != "worker" or any(killed)


def _kill(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def living_workers(workspace: Path) -> list[int]:
    notes = list(workspace.glob("runs/*/stages/**/attempts/*/worker.json"))
    return [json.loads(note.read_text())["pid"] for note in notes if worker_lives(note)]


def digests(workspace: Path) -> dict[str, str]:
    """Stage's folder -> sha256 of the weights or the report that are in force."""
    links = sorted(workspace.glob("runs/*/stages/**/checkpoint"))
    files = [file for link in links for file in (link / "model.safetensors", link / "report.json") if file.exists()]
    return {str(file.relative_to(workspace)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
