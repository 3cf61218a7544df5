"""Peak memory and time of the full-vocabulary reverse KL, forward and backward, over the form that holds [N, V].

    python benchmarks/full_vocab_memory.py [--tokens 1024] [--vocab 151936] [--width 256] [--threads 2]

Memory is what the process's high-water mark of resident pages rises above the inputs' level, one fresh process per
form. The kernel's mark is set back (`/proc/self/clear_refs`) once the inputs exist, and a tensor of known size is
measured the same way first: the number printed as `calibration` must be near 1. The gradient of the output matrix,
which both forms must return, is counted in both. Time is the best of three after a warm-up, in seconds of processor
time over all threads, which a busy machine changes little.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from opdctl.engine.vocab import full_vocab_reverse_kl

MIB = 2**20
MEMORY_TARGET, TIME_TARGET = 1 / 8, 1.2


def main() -> int:
    arguments = _arguments()
    if arguments.form:
        print(json.dumps(_measure(arguments)))
        return 0
    command = [sys.executable, __file__, *sys.argv[1:], "--form"]
    naive, chunked = (
        json.loads(subprocess.run([*command, form], check=True, stdout=subprocess.PIPE).stdout) for form in FORMS
    )
    print(f"N = {arguments.tokens}, V = {arguments.vocab}, D = {arguments.width}, float32, {arguments.threads} threads")
    for name, numbers in (("naive", naive), ("chunked", chunked)):
        print(
            f"{name:8} peak {numbers['peak_mib']:8.0f} MiB   time {numbers['seconds']:6.2f} CPU-s   "
            f"loss {numbers['loss']:.6f}   calibration {numbers['calibration']:.3f}"
        )
    memory, seconds = chunked["peak_mib"] / naive["peak_mib"], chunked["seconds"] / naive["seconds"]
    print(f"memory ratio {memory:.4f} = 1/{1 / memory:.1f} (target <= 1/8)")
    print(f"time ratio   {seconds:.2f} (target <= {TIME_TARGET})")
    return 0 if memory <= MEMORY_TARGET and seconds <= TIME_TARGET else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--form", choices=sorted(FORMS), help=argparse.SUPPRESS)
    return parser.parse_args()


def naive_loss(hidden_ND: Tensor, head_VD: Tensor, teacher_hidden_NE: Tensor, teacher_head_VE: Tensor) -> Tensor:
    with torch.no_grad():
        teacher_NV = torch.log_softmax(teacher_hidden_NE @ teacher_head_VE.T, -1)
    student_NV = torch.log_softmax(hidden_ND @ head_VD.T, -1)
    return (student_NV.exp() * (student_NV - teacher_NV)).sum(-1).mean()


def chunked_loss(hidden_ND: Tensor, head_VD: Tensor, teacher_hidden_NE: Tensor, teacher_head_VE: Tensor) -> Tensor:
    weights_N = torch.full((len(hidden_ND),), 1 / len(hidden_ND))
    return full_vocab_reverse_kl(hidden_ND, head_VD, teacher_hidden_NE, teacher_head_VE, weights_N=weights_N)[0]


FORMS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {"naive": naive_loss, "chunked": chunked_loss}


def _measure(arguments: argparse.Namespace) -> dict[str, float]:
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    shapes = [(arguments.tokens, arguments.width), (arguments.vocab, arguments.width)] * 2
    # logits of standard deviation 2: a distribution as wide as a language model's, without denormal probabilities
    inputs = [torch.randn(shape).mul_(2**0.5 / arguments.width**0.25) for shape in shapes]
    for learned in inputs[:2]:
        learned.requires_grad_()
    calibration = _rise_mib(lambda: torch.ones(256 * MIB // 4)) / 256

    def once() -> float:
        loss = FORMS[arguments.form](*inputs)
        loss.backward()
        for learned in inputs[:2]:
            learned.grad = None
        return float(loss.detach())

    peak = _rise_mib(once)
    loss, times = 0.0, []
    for _ in range(3):
        start = time.process_time()
        loss = once()
        times.append(time.process_time() - start)
    return {"peak_mib": peak, "seconds": min(times), "loss": loss, "calibration": calibration}


def _rise_mib(work: Callable[[], object]) -> float:
    """MiB by which resident memory rose at most while `work` ran."""
    Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM back to VmRSS
    before = _status_mib("VmRSS")
    work()
    return _status_mib("VmHWM") - before


def _status_mib(key: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) / 1024
    raise SystemExit(f"/proc/self/status has no {key}: this benchmark needs Linux")


if __name__ == "__main__":
    raise SystemExit(main())
