"""What verl reports while it trains, as opdctl's events: its JSONL, its log, and opdctl's names for its metrics."""

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

OURS = "opdctl/"  # the plug-in's own metrics: known to the embedded engine by the rest of the name
THEIRS = "verl/"  # all that has no counterpart

# share of the tokens whose weight the rule cut or masked: IcePop, a mask, TIS
_MISMATCH = {
    "rollout_corr/rollout_is_oob_ratio": "mismatch_fraction",
    "rollout_corr/rollout_rs_masked_fraction": "mismatch_fraction",
    "rollout_corr/rollout_is_ratio_fraction_high": "mismatch_fraction",
}
# verl's name -> the embedded engine's. Where a stage has several of the same meaning the first one counts.
NAMES: Mapping[str, Mapping[str, str]] = {
    "sft": {
        "train/loss": "loss",
        "train/grad_norm": "grad_norm",
        "train/lr": "lr",
    },
    "rlvr": {
        "actor/loss": "loss",
        "actor/pg_loss": "loss",  # without the KL term
        "actor/grad_norm": "grad_norm",
        "actor/lr": "lr",
        "actor/entropy": "entropy",
        "actor/pg_clipfrac": "clip_fraction",
        "actor/kl_loss": "reference_kl",
        "actor/reward_kl_penalty": "reference_kl",
        "critic/rewards/mean": "reward",
        "response_length/mean": "length",
        "response_length/clip_ratio": "truncated",  # verl counts an EOS in the very last place as cut too
        **_MISMATCH,
    },
    "opd": {
        "actor/loss": "loss",
        "actor/grad_norm": "grad_norm",
        "actor/lr": "lr",
        "actor/entropy": "student_entropy",
        "actor/distillation/reverse_kl": "reverse_kl",  # this and the next three as the plug-in's losses report them
        "actor/distillation/clip_fraction": "clip_fraction",
        "actor/distillation/overlap": "overlap",
        "actor/distillation/ratio_clip_fraction": "ratio_clip_fraction",
        "response_length/mean": "length",
        "response_length/clip_ratio": "truncated",
        **_MISMATCH,
    },
}
_TRAINED = {"sft": "train/loss", "rlvr": "training/global_step", "opd": "training/global_step"}

# what verl's log says of the step that it goes on from; the first one found in a line counts
_START = (
    re.compile(r"Resuming from .*, setting global step to (?P<step>\d+)"),
    re.compile(r"Found latest checkpoint: .* \(step (?P<step>\d+)\)"),
    re.compile(r"Training from scratch|Checkpoint tracker file does not exist"),
)
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_ERROR = re.compile(r"^(?:\([^)]*\) )?(?P<error>(?:[\w.]+\.)?\w*(?:Error|Exception|Interrupt|Exit)\b: .+)$")


@dataclass(frozen=True)
class Trained:
    """One line of verl's JSONL about a training step, in verl's steps."""

    step: int
    metrics: Mapping[str, float]


@dataclass
class Lines:
    """The whole lines that a growing file got since the last look. It may be emptied and begun anew."""

    path: Path
    offset: int = field(default=0)

    def read(self) -> list[str]:
        try:
            with self.path.open("rb") as stream:
                if stream.seek(0, 2) < self.offset:
                    self.offset = 0
                stream.seek(self.offset)
                content = stream.read()
        except FileNotFoundError:
            return []
        whole = content[: content.rfind(b"\n") + 1]
        self.offset += len(whole)
        return whole.decode(errors="replace").splitlines()


def trained(kind: str, lines: list[str]) -> Iterator[Trained]:
    """The training steps among lines of verl's JSONL, with opdctl's names; validations and torn lines are left out."""
    for line in lines:
        try:
            given = json.loads(line)
            step, data = int(given["step"]), dict(given["data"])
        except (ValueError, TypeError, KeyError):
            continue
        if _TRAINED[kind] in data:
            yield Trained(step, renamed(kind, data))


def renamed(kind: str, data: Mapping[str, Any]) -> dict[str, float]:
    """verl's metrics of a step under opdctl's names; what is no finite or infinite number is left out."""
    numbers = {name: float(value) for name, value in data.items() if isinstance(value, int | float)}
    found: dict[str, float] = {}
    for name, ours in NAMES[kind].items():
        if name in numbers:
            found.setdefault(ours, numbers[name])
    found |= {name.removeprefix(OURS): value for name, value in numbers.items() if name.startswith(OURS)}
    known = NAMES[kind].keys()
    found |= {
        THEIRS + name: value for name, value in numbers.items() if name not in known and not name.startswith(OURS)
    }
    if kind != "sft":
        found |= _throughput(numbers)
    return found


def _throughput(numbers: Mapping[str, float]) -> dict[str, float]:
    """Tokens drawn a second: all tokens of the batch less those of its prompts, of which verl gives means."""
    try:
        drawn = numbers["response_length/mean"] / (numbers["response_length/mean"] + numbers["prompt_length/mean"])
        rate = drawn * numbers["perf/total_num_tokens"] / numbers["perf/time_per_step"]
    except (KeyError, ZeroDivisionError):
        return {}
    return {"tokens_per_s": rate} if math.isfinite(rate) else {}


def start_step(lines: list[str]) -> int | None:
    """The step of verl's that its log says it goes on from; None where it says nothing of it yet."""
    for line in lines:
        for pattern in _START:
            if match := pattern.search(line):
                return int(match.groupdict().get("step") or 0)
    return None


def last_error(text: str) -> str:
    """The last line of a log that looks like an exception; empty where there is none."""
    for line in reversed(text.splitlines()):
        if match := _ERROR.match(_COLOURS.sub("", line).strip()):
            return match["error"][:500]
    return ""
