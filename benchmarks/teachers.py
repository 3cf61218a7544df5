"""Peak memory and time per token of distillation from 1, 4 and 13 teachers with `teacher_states: cached`.

    python benchmarks/teachers.py [--teachers 1 4 13] [--prompts 52] [--tokens 40] [--how cached]

Whole `opd` stages with the exact full-vocabulary reverse KL, each in a process of its own: the same number of prompts,
whose completions are as long, divided evenly among the teachers, distinct checkpoints of 29 M parameters (vocabulary
32,768, width 512, 4 layers), all of which every step needs. Targets against one teacher: memory at most 1.10 times,
time at most 1.15 times.

Memory is the high-water mark of the process's resident pages, which those of mapped weight files belong to; its rise
above what was resident before the stage (Python, PyTorch) is the ratio that counts. Time is processor time of all
threads between the events of two steps, the least of several; the first step, which opens and checks the models, does
not count. Wall-clock time is shown beside it.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import torch

from opdctl.backends.contract import InputSpec, StageSpec
from opdctl.engine import opd
from opdctl.engine.checkpoint import save_new_model
from opdctl.settings import NewModel

MEMORY_TARGET, TIME_TARGET = 1.10, 1.15
VOCABULARY = 32_768
SHAPE = {"num_hidden_layers": 4, "hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8}
SHAPE |= {"num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 512}
EFFORTS = {
    f"e{number}": f"<e{number}>" for number in range(13)
}  # name -> word, of the prompts; a row's effort chooses its teacher
WORDS = [
    "<pad>",
    "<bos>",
    "<eos>",
    "<math>",
    "+1",
    "-1",
    "*2",
    "=0",
    "=3",
    "0",
    "1",
    "2",
    "3",
    "4",
    "5",
    "6",
    *EFFORTS.values(),
]


def main() -> int:
    arguments = _arguments()
    if arguments.folder:
        print(json.dumps(_measure(arguments, arguments.teachers[0])))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(max(arguments.teachers) + 1):
            save_new_model(_new_model(), seed, Path(folder, f"model-{seed}"))
        command = [sys.executable, __file__, *sys.argv[1:], "--folder", folder, "--teachers"]
        found = [
            json.loads(subprocess.run([*command, str(number)], check=True, stdout=subprocess.PIPE).stdout)
            for number in arguments.teachers
        ]
    print(f"{arguments.how}, {arguments.prompts} x {arguments.tokens} tokens a step, {arguments.threads} threads")
    good = True
    for number, one in zip(arguments.teachers, found, strict=True):
        memory, seconds = one["rise_mib"] / found[0]["rise_mib"], one["cpu_ms"] / found[0]["cpu_ms"]
        good &= memory <= MEMORY_TARGET and seconds <= TIME_TARGET
        print(
            f"{number:3} teachers   peak {one['peak_mib']:6.0f} MiB, rise {one['rise_mib']:6.0f} MiB ({memory:.3f})   "
            f"time per token {one['cpu_ms']:6.3f} CPU-ms ({seconds:.3f}), {one['wall_ms']:6.3f} ms"
        )
    print(f"targets: memory {MEMORY_TARGET:.2f}, time {TIME_TARGET:.2f}")
    return 0 if good else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teachers", type=int, nargs="+", default=[1, 4, 13])
    parser.add_argument("--prompts", type=int, default=52)
    parser.add_argument("--tokens", type=int, default=40, help="of a completion")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--how", choices=["cached", "direct"], default="cached")
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    return parser.parse_args()


def _new_model() -> NewModel:
    words = WORDS + [f"w{number}" for number in range(VOCABULARY - len(WORDS))]
    return NewModel.model_validate({"source": "new", "shape": SHAPE, "tokenizer": {"words": words}})


class _Clock:
    """A stage's control that notes when steps end."""

    def __init__(self) -> None:
        self.cpu: list[float] = []
        self.wall: list[float] = []
        self.tokens = 0.0

    def stop_requested(self) -> bool:
        return False

    def emit(self, step: int, total: int, metrics: Mapping[str, float], phase: str = "train") -> None:
        self.cpu.append(time.process_time())
        self.wall.append(time.perf_counter())
        self.tokens = metrics["length"]


def _measure(arguments: argparse.Namespace, teachers: int) -> dict[str, float]:
    torch.set_num_threads(arguments.threads)
    before, clock = _status_mib("VmRSS"), _Clock()
    with tempfile.TemporaryDirectory() as folder:
        opd.run(_spec(arguments, teachers, Path(folder)), clock)
    peak, tokens = _status_mib("VmHWM"), arguments.prompts * clock.tokens
    cpu, wall = (min(b - a for a, b in zip(t, t[1:], strict=False)) * 1000 / tokens for t in (clock.cpu, clock.wall))
    return {"peak_mib": peak, "rise_mib": peak - before, "cpu_ms": cpu, "wall_ms": wall}


def _spec(arguments: argparse.Namespace, teachers: int, folder: Path) -> StageSpec:
    efforts = list(EFFORTS)[:teachers]
    (folder / "out").mkdir()
    config = {
        "data": {"tasks": ["math"], "efforts": efforts},
        "rollout": {
            "prompts": arguments.prompts,
            "group_size": 1,
            "max_prompt_tokens": 16,
            "max_completion_tokens": arguments.tokens,
        },
        "train": {
            "max_steps": arguments.steps,
            "global_batch_size": arguments.prompts,
            "save_every": arguments.steps,
            "optimizer": {"lr": 1e-5},
        },
        "loss": {"form": "full_vocab"},
        "route_by": ["effort"],
    }
    models = [Path(arguments.folder, f"model-{number}") for number in range(teachers + 1)]
    return StageSpec(
        stage="opd",
        kind="opd",
        backend="embedded",
        seed=0,
        config=config,
        tasks={"math": {"task": "chain", "domain": "math", "links": 8, "strides": dict.fromkeys(EFFORTS, 1)}},
        efforts={"by": "control_token", "levels": EFFORTS},
        resources={"micro_batch_tokens": 16_384, "resident_teachers": 2, "teacher_states": arguments.how},
        workers={},
        verl={},
        devices=[],
        inputs=[
            InputSpec("student", "student", str(models[0])),
            *(
                InputSpec("teachers", effort, str(model), {"effort": effort})
                for effort, model in zip(efforts, models[1:], strict=True)
            ),
        ],
        workspace=str(folder),
        new_model=None,
        state=str(folder / "state"),
        output=str(folder / "out"),
        events=str(folder / "events.jsonl"),
        result=str(folder / "result.json"),
    )


def _status_mib(key: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) / 1024
    raise SystemExit(f"/proc/self/status has no {key}: this benchmark needs Linux")


if __name__ == "__main__":
    raise SystemExit(main())
