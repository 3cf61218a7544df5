"""Peak memory and time of merging eight checkpoints of a 0.6B shape (Qwen3-0.6B's), in bf16 files.

    python benchmarks/merge.py [--models 8] [--methods linear ties] [--folder DIR]

The files are written first, 1.2 GB each with one more for the base, into a temporary folder. The peak is that of a
process of its own, Python and PyTorch included. Exit code 1 where it exceeds 1.5 times the size of one checkpoint.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor
from transformers import Qwen3Config

from opdctl.backends.contract import InputSpec, StageSpec
from opdctl.engine import merge
from opdctl.engine.qwen3 import Qwen3Policy
from opdctl.engine.tensors import TensorWriter
from opdctl.engine.tokenizer import word_tokenizer

TARGET = 1.5
PART = 1 << 22  # values written at a time
SHAPE = {
    "vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True,
    "eos_token_id": 2, "pad_token_id": 0, "bos_token_id": 1,
}  # fmt: skip
METHODS: Mapping[str, Mapping[str, object]] = {
    "linear": {"method": "linear"},
    "convex": {"method": "convex"},
    "task_arithmetic": {"method": "task_arithmetic", "scale": 0.5},
    "ties": {"method": "ties", "density": 0.2, "scale": 1.0},
    "dare": {"method": "dare", "drop_rate": 0.9, "sign": "ties", "scale": 1.0},
    "sce": {"method": "sce", "select": 0.1},
    "longcat_fusion": {
        "method": "longcat_fusion", "norm": "l2", "scope": "model", "drop_rate": 0.5, "rescale": True,
        "combine": "sum", "scale": 1.0,
    },
}  # fmt: skip


class Control:
    def stop_requested(self) -> bool:
        return False

    def emit(self, step: int, total: int, metrics: Mapping[str, float], phase: str = "train") -> None:
        return None


def main() -> int:
    arguments = _arguments()
    if arguments.child:
        print(json.dumps(_measure(arguments.child, Path(arguments.folder), arguments.models)))
        return 0
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        began = time.perf_counter()
        size = [_write(Path(folder) / str(number), number) for number in range(arguments.models + 1)][0]
        print(
            f"wrote {arguments.models + 1} checkpoints of {size / 2**20:.0f} MiB in {time.perf_counter() - began:.0f} s"
        )
        worst = 0.0
        for method in arguments.methods:
            command = [
                sys.executable,
                __file__,
                "--child",
                method,
                "--folder",
                folder,
                "--models",
                str(arguments.models),
            ]
            numbers = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            ratio = numbers["peak_kib"] * 1024 / size
            worst = max(worst, ratio)
            print(
                f"{method:16} peak {numbers['peak_kib'] / 1024:6.0f} MiB = {ratio:.2f} checkpoints "
                f"({numbers['before_kib'] / 1024:.0f} MiB before it began)   time {numbers['seconds']:5.0f} s",
                flush=True,
            )
    print(f"memory ratio {worst:.2f} (target <= {TARGET})")
    return 0 if worst <= TARGET else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=8)
    parser.add_argument("--methods", nargs="+", choices=sorted(METHODS), default=["linear", "ties"])
    parser.add_argument("--folder", help="where to write the checkpoints; the system's temporary folder where absent")
    parser.add_argument("--child", choices=sorted(METHODS), help=argparse.SUPPRESS)
    return parser.parse_args()


def _write(folder: Path, seed: int) -> int:
    """Random weights; returns the size in bytes."""
    folder.mkdir()
    config = Qwen3Config(**SHAPE)
    with torch.device("meta"):
        shapes = {name: tuple(p.shape) for name, p in sorted(Qwen3Policy(config, (2,), 0).named_parameters())}
    generator = torch.Generator().manual_seed(seed)

    def tensors() -> Iterator[tuple[str, Iterator[Tensor]]]:
        for name, shape in shapes.items():
            count = torch.Size(shape).numel()
            sizes = [min(PART, count - at) for at in range(0, count, PART)]
            yield name, (torch.empty(size).uniform_(-0.05, 0.05, generator=generator) for size in sizes)

    TensorWriter(folder, shapes, torch.bfloat16).write(tensors())
    config.save_pretrained(folder)
    word_tokenizer(["<pad>", "<bos>", "<eos>", "a"]).save_pretrained(folder)
    return (folder / "model.safetensors").stat().st_size


def _measure(method: str, folder: Path, models: int) -> dict[str, float]:
    torch.set_num_threads(1)
    inputs = [InputSpec("models", str(n), str(folder / str(n)), weight=1 / models) for n in range(1, models + 1)]
    if method not in ("linear", "convex"):
        inputs.append(InputSpec("base", "base", str(folder / "0")))
    output = folder / f"merged-{method}"
    output.mkdir()
    spec = StageSpec(
        stage="merge", kind="merge", backend="embedded", seed=0,
        config={"merge": METHODS[method], "precision": "bfloat16"}, tasks={}, efforts=None, resources={}, workers={},
        verl={}, devices=[], inputs=inputs, workspace=str(folder), new_model=None, state=str(folder / "state"),
        output=str(output), events="", result="",
    )  # fmt: skip
    before, began = _peak_kib(), time.perf_counter()
    merge.run(spec, Control())
    return {"peak_kib": _peak_kib(), "before_kib": before, "seconds": time.perf_counter() - began}


def _peak_kib() -> float:
    """Of this program: what `getrusage` says would include its parent's before the exec."""
    status = Path("/proc/self/status").read_text()
    return float(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")))


if __name__ == "__main__":
    sys.exit(main())
