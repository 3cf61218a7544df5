"""Real verl under kills: nothing of a stage is left 30 s later, and the next run goes on from the newest save.

Start-up takes most of the time, so each test takes one stage through several deaths.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from opdctl import processes
from opdctl.engine.checkpoint import load_policy
from opdctl.lock import worker_lives

ROOT = Path(__file__).parents[3]
PYTHON = Path(os.environ.get("OPDCTL_VERL_PYTHON", ROOT / ".venv-verl/bin/python")).absolute()
pytestmark = [
    pytest.mark.verl,
    pytest.mark.xdist_group("verl"),  # one at a time: two do not fit into the memory of a small machine
    pytest.mark.skipif(not PYTHON.exists(), reason=f"no {PYTHON}: `make verl-env` makes verl's environment"),
]
START_S = 400.0  # that a trainer gets to its first save, on a busy machine
GONE_S = 30.0
SFT = {
    "kind": "sft",
    "backend": "verl",
    "inputs": {"init": "model:"},
    "config": {
        "data": {"tasks": ["general"], "efforts": ["max"]},
        "max_tokens": 64,
        "train": {"global_batch_size": 16, "save_every": 10, "optimizer": {"lr": 1e-3}},
    },
}
GRPO = {
    "kind": "rlvr",
    "backend": "verl",
    "inputs": {"init": "model:"},
    "resources": {"micro_batch_tokens": 4096, "verl": {"max_num_seqs": 32, "max_batched_tokens": 512}},
    "config": {
        "data": {"tasks": ["general"], "efforts": ["max"]},
        "rollout": {"prompts": 4, "group_size": 4, "max_prompt_tokens": 24, "max_completion_tokens": 8},
        "train": {"global_batch_size": 8, "save_every": 2, "optimizer": {"lr": 1e-3}},
    },
}


class Run:
    """Of a pipeline with one verl stage."""

    def __init__(self, workspace: Path, stage: dict, steps: int, stall_timeout_s: float = 600.0) -> None:
        self.workspace, self.state = workspace, workspace / "runs/r/stages/it/state"
        self.steps, self.stall_timeout_s = steps, stall_timeout_s
        self.stage = stage
        self.held: set[tuple[int, int]] = set()  # shared memory of all attempts
        self.write()

    def write(self) -> None:
        optimizer = self.stage["config"]["train"]["optimizer"] | {"schedule": "constant"}
        train = self.stage["config"]["train"] | {"max_steps": self.steps, "optimizer": optimizer}
        tree = {
            "defaults": [{"/model": "tiny_qwen3_h32"}, {"/task": "kimi_k3_chains"}, "_self_"],
            "name": "killed",
            "machine": {"slots": 1, "cpus": 2, "gpus": 0},
            "workers": {"verl": {"python": str(PYTHON), "device": "cpu", "stall_timeout_s": self.stall_timeout_s}},
            "tracking": {"enabled": False},
            "gate": {"enabled": False},  # an untrained model solves nothing, and that would be refused
            "retry": {"attempts": 0},  # what a kill does is looked at before anything goes on
            "stages": {"it": {**self.stage, "config": {**self.stage["config"], "train": train}}},
        }
        (self.workspace / "p.yaml").write_text(yaml.safe_dump(tree))

    def start(self) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-m", "opdctl", "run", "p.yaml", "--run", "r"],
            cwd=self.workspace,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    @property
    def attempt(self) -> Path:
        return max((self.workspace / "runs/r/stages/it/attempts").iterdir(), key=lambda path: int(path.name))

    def saved(self) -> int:
        pointer = self.state / "step.json"
        return json.loads(pointer.read_text())["step"] if pointer.exists() else 0

    def events(self) -> list[int]:
        return [json.loads(line)["step"] for line in (self.attempt / "events.jsonl").read_text().splitlines()]

    def shared_memory(self) -> set[tuple[int, int]]:
        """(device, inode) of the segments that the running attempt was seen to hold."""
        return {tuple(pair) for pair in json.loads((self.attempt / processes.NOTE).read_text())["memory"]}

    def named(self, word: str) -> int:
        """A process of the attempt whose command line holds a word."""
        found = [pid for pid in processes.find(self.attempt) if word in _arguments(pid)]
        assert found, f"no process with {word}"
        return min(found)

    def worker(self) -> int:
        assert worker_lives(self.attempt / "worker.json")
        return int(json.loads((self.attempt / "worker.json").read_text())["pid"])

    def left(self) -> list[str]:
        """Processes of any attempt, and what they left in memory or in temporary folders."""
        attempts = list((self.workspace / "runs/r/stages/it/attempts").iterdir())
        return [f"{pid} {processes.command_of(pid)}" for attempt in attempts for pid in processes.find(attempt)] + [
            str(path) for attempt in attempts for path in attempt.glob("processes.json")
        ]

    def after_a_save(self, deed: Callable[["subprocess.Popen[str]"], None]) -> str:
        """Start it, do something once it has saved anew, and see that nothing is left; what opdctl printed."""
        before = self.saved()
        with self.start() as process:
            _wait(lambda: self.saved() > before or process.poll() is not None, START_S)
            assert process.poll() is None, process.communicate()[0]
            self.held |= self.shared_memory()
            deed(process)
            _wait(lambda: not self.left(), max(GONE_S, 2 * self.stall_timeout_s if deed.__name__ == "hang" else 0))
            told = process.communicate(timeout=120)[0]
        if before:
            assert self.events()[0] > before
            assert self.events()[0] <= before + self.stage["config"]["train"]["save_every"]
        return told

    def finish(self) -> str:
        before = self.saved()
        ended = subprocess.run(
            [sys.executable, "-m", "opdctl", "run", "p.yaml", "--run", "r"],
            cwd=self.workspace,
            capture_output=True,
            text=True,
            timeout=2 * START_S,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert before < self.events()[0] <= self.events()[-1] == self.steps
        checkpoint = self.workspace / "runs/r/stages/it/checkpoint"
        load_policy(checkpoint)
        assert json.loads((checkpoint / "record.json").read_text())["step"] == self.steps
        assert not self.left()
        return ended.stdout


def _arguments(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def _wait(condition, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.2)


def _segments() -> set[tuple[int, int]]:
    states = [path.lstat() for path in processes.SHARED_MEMORY.iterdir()]
    return {(state.st_dev, state.st_ino) for state in states}


def test_sft_survives_the_kill_of_its_launcher_a_hang_and_a_torn_latest_file(workspace):
    run = Run(workspace, SFT, 200, stall_timeout_s=30.0)

    def kill_launcher(process) -> None:
        os.kill(run.named("torch.distributed.run"), signal.SIGKILL)

    def hang(process) -> None:
        for pid in processes.find(run.attempt):
            os.kill(pid, signal.SIGSTOP)

    told = run.after_a_save(kill_launcher)
    assert "verl was killed by SIGKILL after step" in told
    (run.state / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("")
    told = run.after_a_save(hang)
    assert "verl hangs after step" in told
    stacks = (run.attempt / "stacks.txt").read_text()
    assert "sft_trainer.py" in stacks
    newest = max(run.state.glob("checkpoints/global_step_*"), key=lambda path: int(path.name.rpartition("_")[2]))
    torn = newest.with_name(f"global_step_{run.saved() + 10}")  # half-written, with the newest time stamp
    shutil.copytree(newest, torn)
    (torn / "data_0.pt").unlink()
    (torn.parent / "latest_checkpointed_iteration.txt").write_text(torn.name.rpartition("_")[2])
    run.finish()


def test_grpo_survives_the_kill_of_its_worker_of_ray_and_of_opdctl(workspace):
    run = Run(workspace, GRPO, 40)

    def kill_worker(process) -> None:
        os.kill(run.worker(), signal.SIGKILL)

    def kill_ray(process) -> None:
        os.kill(run.named("gcs_server"), signal.SIGKILL)

    def kill_opdctl(process) -> None:
        process.kill()

    assert "its worker was killed by SIGKILL" in run.after_a_save(kill_worker)
    assert "Ray's" in run.after_a_save(kill_ray)
    run.after_a_save(kill_opdctl)
    assert run.held
    assert not run.held & _segments()
    saves = [int(path.name.rpartition("_")[2]) for path in run.state.glob("checkpoints/global_step_*")]
    assert len(saves) <= 2  # the last one, and perhaps one that was cut short
    run.finish()
