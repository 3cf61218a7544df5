"""Faults that show while a stage runs: each is a stream of events, and the watchdog's rule that has to name it."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from guards.streams import Metrics, Stream, healthy, planted

LATE = 21  # the step from which a fault is planted that is not there from the start


@dataclass(frozen=True)
class StreamFault:
    name: str
    kind: str
    what: str
    rule: str  # of the watchdog
    start: int  # the step from which the fault is there
    stream: Stream


def fault(
    name: str, kind: str, rule: str, what: str, change: Callable[[int, Metrics], Metrics], start: int = LATE
) -> StreamFault:
    return StreamFault(name, kind, what, rule, start, planted(kind, change, start))


def puts(**values: float) -> Callable[[int, Metrics], Metrics]:
    """These metrics in the place of the healthy ones, from the first step on."""
    return lambda lasted, metrics: metrics | values


def drifts(name: str, to: float, steps: int) -> Callable[[int, Metrics], Metrics]:
    """The metric goes to a value within so many steps, and stays there."""

    def change(lasted: int, metrics: Metrics) -> Metrics:
        share = min(lasted / steps, 1.0)
        return metrics | {name: metrics[name] * (1 - share) + to * share}

    return change


def grows(lasted: int, metrics: Metrics) -> Metrics:
    """The reward jumps, and answers become three times as long."""
    return metrics | {"reward": 0.95, "length": 3 * metrics["length"]}


def parts(lasted: int, metrics: Metrics) -> Metrics:
    """What is graded rises, what is right falls."""
    return metrics | {"reward": 0.9, "accuracy": 0.02}


def slow(stream: Stream, start: int) -> Stream:
    """Steps take thirty times as long, and as many tokens a second fewer are drawn."""
    steps = [
        m if s < start else m | {"tokens_per_s": m["tokens_per_s"] / 30} for s, m in enumerate(stream.steps, start=1)
    ]
    return replace(stream, steps=steps, gaps=dict.fromkeys(range(start, len(steps) + 1), 60.0))


def streams() -> list[StreamFault]:
    rlvr, opd, sft = (Stream(kind, healthy(kind)) for kind in ("rlvr", "opd", "sft"))
    uniform = {"teacher_entropy": 3.8, "teacher_entropy_share": 0.998, "teacher_entropy_std": 0.4}
    return [
        fault("loss-nan", "rlvr", "not_finite", "the loss is not a number", puts(loss=math.nan)),
        fault("gradient-infinite", "sft", "not_finite", "the gradient's norm is infinite", puts(grad_norm=math.inf)),
        fault("all-groups-tied", "rlvr", "zero_advantage", "all rewards of every group are equal",
              puts(tied_groups=1.0, reward=0.0, accuracy=0.0), start=1),
        fault("no-gradient", "sft", "zero_gradient", "no token is in the loss: the gradient is 0",
              puts(grad_norm=0.0, loss=0.0), start=1),
        fault("learning-rate-0", "opd", "zero_gradient", "the learning rate is 0", puts(lr=0.0)),
        fault("all-cut-rlvr", "rlvr", "truncated", "every answer is cut", puts(truncated=1.0, length=16.0)),
        fault("all-cut-opd", "opd", "truncated", "every answer of the student is cut, from the first step on",
              puts(truncated=1.0, length=16.0), start=1),
        fault("kl-0", "opd", "kl_stuck", "the teacher is the student: the KL stays 0",
              puts(reverse_kl=0.0, loss=0.0, entropy_gap=0.0), start=1),
        fault("kl-huge", "opd", "kl_high", "student and teacher contradict each other", puts(reverse_kl=12.0), start=1),
        fault("kl-grows", "opd", "kl_high", "the student runs away from its teacher", drifts("reverse_kl", 1.5, 3)),
        fault("entropy-collapse", "rlvr", "entropy", "the policy says one thing only", drifts("entropy", 0.01, 3)),
        fault("entropy-explosion", "rlvr", "entropy", "the policy falls apart", drifts("entropy", 3.5, 3)),
        fault("student-explodes", "opd", "entropy", "the student's entropy grows fivefold, its teacher's not",
              drifts("student_entropy", 3.56, 3)),
        fault("teacher-uniform", "opd", "teacher_constant", "the teacher turns uniform", puts(**uniform)),
        fault("teacher-constant", "opd", "teacher_constant", "the teacher says the same of every token",
              puts(teacher_entropy=1.7, teacher_entropy_std=0.0)),
        fault("canary-moves", "opd", "teacher_constant", "the teacher gives fixed tokens other log-probabilities",
              puts(**{"teacher_canary": 1.3, "teacher_off_uniform": 0.6, "teacher_canary/max[domain=math]": 1.3})),
        fault("canary-uniform", "opd", "teacher_constant", "the teacher gives fixed tokens -ln V",
              puts(teacher_canary=0.04, teacher_off_uniform=0.002)),
        fault("clip-rlvr", "rlvr", "clip_saturated", "nearly every ratio is clipped", puts(clip_fraction=0.97)),
        fault("clamp-opd", "opd", "clip_saturated", "nearly every advantage is clamped", puts(clip_fraction=0.99)),
        fault("mismatch-everywhere", "rlvr", "clip_saturated", "sampler and trainer disagree on nearly every token",
              puts(mismatch_fraction=0.95), start=1),
        fault("longer-for-reward", "rlvr", "reward_hack", "the reward jumps, and answers triple", grows),
        fault("reward-without-accuracy", "rlvr", "reward_hack", "the reward rises while accuracy falls", parts),
        StreamFault("thirty-times-slower", "rlvr", "steps take far longer", "throughput", LATE, slow(rlvr, LATE)),
        StreamFault("hangs", "sft", "no event for hours", "no_progress", LATE, replace(sft, gaps={LATE: 9000.0})),
        StreamFault("never-starts", "opd", "no first step for hours", "no_progress", 1, replace(opd, gaps={1: 9000.0})),
        StreamFault("never-saves", "rlvr", "nothing is saved", "save_too_old", 30, replace(rlvr, saves=False)),
        fault("one-teacher-at-a-time", "opd", "one_teacher", "all rows of a batch are the same teacher's",
              puts(teacher_share=1.0, teacher_most=2.0)),
    ]  # fmt: skip


STREAMS = streams()
