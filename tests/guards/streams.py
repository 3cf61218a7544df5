"""Event streams of stages, made up: a healthy one of each kind, and what faults do to it.

Numbers are of the size of the demo's.

A fault is a function of (step, the healthy metrics of that step) -> metrics, in force from a step on.
"""

import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from opdctl.backends.contract import Event
from opdctl.settings import WatchSettings
from opdctl.watchdog import Alarm, Watch

STEPS = 60
START = 1000.0
STEP_S = 2.0  # seconds between two events
SAVE_EVERY = 10
Metrics = dict[str, float]


def healthy(kind: str, steps: int = STEPS, seed: int = 0) -> list[Metrics]:
    """Metrics of the steps of a stage that learns, with the noise of small batches."""
    draw = random.Random(f"{kind}{seed}")
    return [KINDS[kind](step / steps, lambda spread: draw.gauss(0, spread)) for step in range(1, steps + 1)]


Noise = Callable[[float], float]


def _sft(at: float, noise: Noise) -> Metrics:
    """`at`: the share of the stage that is done."""
    loss = 0.9 + 2.5 * math.exp(-6 * at)
    return {
        "loss": loss + noise(0.03),
        "entropy": loss + noise(0.05),
        "grad_norm": 0.8 + abs(noise(0.2)),
        "lr": 5e-3 * (1.02 - at),
        "tokens_per_s": 3000 + noise(200),
    }


def _rlvr(at: float, noise: Noise) -> Metrics:
    accuracy = min(max(0.2 + 0.4 * at + noise(0.05), 0), 1)
    return {
        "reward": 1.5 * accuracy - 0.5,
        "accuracy": accuracy,
        "length": 9 + noise(0.3),
        "truncated": abs(noise(0.02)),
        "entropy": 0.9 - 0.3 * at + noise(0.03),
        "tied_groups": min(max(0.35 + 0.2 * at + noise(0.1), 0), 0.9),
        "reference_kl": 0.02 * at + abs(noise(0.001)),
        "loss": noise(0.05),
        "grad_norm": 0.6 + abs(noise(0.2)),
        "lr": 1e-3,
        "clip_fraction": abs(noise(0.02)),
        "mismatch_fraction": abs(noise(0.001)),
        "tokens_per_s": 2000 + noise(150),
    }


def _opd(at: float, noise: Noise) -> Metrics:
    reverse_kl = 0.03 + 0.12 * math.exp(-5 * at)
    return {
        "accuracy": min(max(0.4 + 0.2 * at + noise(0.05), 0), 1),
        "reward": 0.4 + 0.2 * at + noise(0.05),
        "length": 10 + noise(0.3),
        "truncated": abs(noise(0.02)),
        "loss": reverse_kl + noise(0.005),
        "grad_norm": 0.4 + abs(noise(0.1)),
        "lr": 1e-3,
        "reverse_kl": reverse_kl + abs(noise(0.003)),
        "overlap": 0.93 - reverse_kl + noise(0.005),
        "student_entropy": 0.75 + noise(0.03),
        "teacher_entropy": 0.70 + noise(0.03),
        "entropy_gap": 0.05 + abs(noise(0.01)),
        "teacher_entropy_share": 0.18 + noise(0.005),
        "teacher_entropy_std": 0.60 + noise(0.02),
        "clip_fraction": abs(noise(0.01)),
        "tokens_per_s": 900 + noise(60),
    }


KINDS: Mapping[str, Callable[[float, Noise], Metrics]] = {"sft": _sft, "rlvr": _rlvr, "opd": _opd}


@dataclass(frozen=True)
class Stream:
    """What a watchdog is shown: events, what passes between them, and saves."""

    kind: str
    steps: list[Metrics]
    gaps: Mapping[int, float] = field(default_factory=dict)  # before this step so many seconds, in the place of STEP_S
    saves: bool = True  # every SAVE_EVERY steps

    def events(self) -> Iterator[Event]:
        at = START
        for step, metrics in enumerate(self.steps, start=1):
            at += self.gaps.get(step, STEP_S)
            yield Event(step, len(self.steps), metrics, "train", at)


def watched(stream: Stream, settings: WatchSettings | None = None) -> list[Alarm]:
    """Alarms in their order. Between events the watchdog is asked as the runner asks it, only more seldom."""
    watch = Watch(stream.kind, settings or WatchSettings(), save_every=SAVE_EVERY)
    alarms, now, saved = [], START, None
    for event in stream.events():
        stride = max(STEP_S, (event.time - now) / 50)
        while now + stride < event.time:
            now += stride
            alarms += watch.tick(now)
        alarms += watch.see(event)
        if stream.saves and event.step % SAVE_EVERY == 0:
            saved = event.step
        alarms += watch.saved(saved, event.time)
    return alarms


def planted(kind: str, change: Callable[[int, Metrics], Metrics], start: int) -> Stream:
    """The healthy stream, other from step `start` on. `change` is given how many steps the fault has lasted."""
    steps = healthy(kind)
    return Stream(kind, [m if s < start else change(s - start + 1, m) for s, m in enumerate(steps, start=1)])
