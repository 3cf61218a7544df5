"""The rules over training steps, one class each: told every step, it says whether its fault is there now."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from opdctl.settings import watch as settings
from opdctl.watchdog.series import Drift, Finding, Jump, Point, Streak, known, since
from opdctl.watchdog.teacher_rules import OneTeacher, TeacherConstant

KL = ("reverse_kl", "reference_kl")
ENTROPY = ("student_entropy", "entropy")
CUT = ("clip_fraction", "ratio_clip_fraction", "mismatch_fraction")
LEARNED = ("accuracy", "acc")


class Detector(Protocol):
    def see(self, point: Point) -> Finding | None:
        """The fault, while it is there."""
        ...

    def forget(self) -> None:
        """What was seen of late: a resumed stage gets its chance. The start is kept."""
        ...


@dataclass
class NotFinite:
    rule: settings.NotFinite
    last: str = "no finite one before"

    def see(self, point: Point) -> Finding | None:
        found = {name: value for name in ("loss", "grad_norm") if (value := point.value(name)) is not None}
        if bad := {name: value for name, value in found.items() if not math.isfinite(value)}:
            told = " and ".join(f"{name} is {value}" for name, value in bad.items())
            return Finding(f"{told} ({self.last})", {})
        if found:
            told = ", ".join(f"{name} {value:.4g}" for name, value in found.items())
            self.last = f"at step {point.step}: {told}"
        return None

    def forget(self) -> None:
        return None


@dataclass
class ZeroAdvantage:
    rule: settings.ZeroAdvantage
    streak: Streak = field(default_factory=Streak)

    def see(self, point: Point) -> Finding | None:
        share = _tied(point)
        if share is None:
            return None
        accuracy = point.finite(*LEARNED)
        dead = share >= self.rule.share and (accuracy is None or accuracy < self.rule.solved)
        if self.streak.add(dead, point.step) < self.rule.steps:
            return None
        reward = point.finite("reward")
        told = "" if reward is None else f"; reward {reward:.3g}"
        told += "" if accuracy is None else f", accuracy {accuracy:.3g}"
        return Finding(
            f"all rewards are equal in {share:.0%} of the groups, {since(self.streak)} "
            f"(zero_advantage.share: {self.rule.share:g}){told}",
            known(tied_groups=share, reward=reward, accuracy=accuracy),
        )

    def forget(self) -> None:
        self.streak = Streak()


def _tied(point: Point) -> float | None:
    """Share of groups without an advantage."""
    if (share := point.finite("tied_groups")) is not None:
        return share
    high, low = point.finite("verl/critic/advantages/max"), point.finite("verl/critic/advantages/min")
    if high is None or low is None:
        return None
    return float(max(abs(high), abs(low)) < 1e-8)


@dataclass
class ZeroGradient:
    rule: settings.ZeroGradient
    streak: Streak = field(default_factory=Streak)

    def see(self, point: Point) -> Finding | None:
        norm, lr = point.finite("grad_norm"), point.finite("lr")
        if norm is None:
            return None
        accuracy = point.finite(*LEARNED)
        solved = accuracy is not None and accuracy >= self.rule.solved
        if self.streak.add((norm == 0.0 or lr == 0.0) and not solved, point.step) < self.rule.steps:
            return None
        what = "the gradient norm is 0" if norm == 0.0 else "the learning rate is 0"
        return Finding(f"{what}, {since(self.streak)}: the weights do not move", known(grad_norm=norm, lr=lr))

    def forget(self) -> None:
        self.streak = Streak()


@dataclass
class Truncated:
    rule: settings.Truncated
    streak: Streak = field(default_factory=Streak)

    def see(self, point: Point) -> Finding | None:
        share, length = point.finite("truncated"), point.finite("length")
        if share is None or self.streak.add(share >= self.rule.share, point.step) < self.rule.steps:
            return None
        long = "" if length is None else f"; {length:.4g} tokens long on average"
        return Finding(
            f"{share:.0%} of the completions are cut at max_completion_tokens, {since(self.streak)} "
            f"(truncated.share: {self.rule.share:g}){long}",
            known(truncated=share, length=length),
        )

    def forget(self) -> None:
        self.streak = Streak()


@dataclass
class KlStuck:
    rule: settings.KlStuck
    streak: Streak = field(default_factory=Streak)

    def see(self, point: Point) -> Finding | None:
        kl = point.finite(*KL)
        if kl is None or self.streak.add(abs(kl) <= self.rule.below, point.step) < self.rule.steps:
            return None
        whom = "teacher" if "reverse_kl" in point.metrics else "reference"
        return Finding(
            f"KL towards the {whom} is {kl:.2g} nats per token, {since(self.streak)} "
            f"(kl_stuck.below: {self.rule.below:g})",
            {"kl": kl},
        )

    def forget(self) -> None:
        self.streak = Streak()


@dataclass
class KlHigh:
    rule: settings.KlHigh
    seen: Drift = field(init=False)
    over: Streak = field(default_factory=Streak)

    def __post_init__(self) -> None:
        self.seen = Drift(self.rule.start, self.rule.steps)

    def see(self, point: Point) -> Finding | None:
        kl = point.finite(*KL)
        if kl is None:
            return None
        enough = self.seen.add(kl)
        if self.over.add(kl > self.rule.above, point.step) >= self.rule.steps:
            return Finding(
                f"KL is {kl:.3g} nats per token, {since(self.over)} (kl_high.above: {self.rule.above:g})", {"kl": kl}
            )
        if not enough:
            return None
        base, now = self.seen.base, self.seen.now
        if "reverse_kl" not in point.metrics:  # a policy leaves its reference: that alone is what it is for
            return None
        grown = now > self.rule.times * base and now > self.rule.least and now - base > self.rule.least
        if not grown:
            return None
        return Finding(
            f"KL grew from {base:.3g} (median of the first {self.rule.start} steps) to {now:.3g} nats per token "
            f"(of the last {self.rule.steps}; kl_high.times: {self.rule.times:g})",
            {"kl": now, "start": base},
        )

    def forget(self) -> None:
        self.over = Streak()
        self.seen.forget_recent()


@dataclass
class Entropy:
    """A policy that distils may move towards its teacher's entropy; one that has solved its prompts may be sure."""

    rule: settings.Entropy
    seen: Drift = field(init=False)

    def __post_init__(self) -> None:
        self.seen = Drift(self.rule.start, self.rule.steps)

    def see(self, point: Point) -> Finding | None:
        if not self.seen.add(point.finite(*ENTROPY)):
            return None
        base, now = self.seen.base, self.seen.now
        teacher = point.finite("teacher_entropy")
        low, high = (base, base) if teacher is None else (min(base, teacher), max(base, teacher))
        beyond = self.rule.z * self.seen.deviation
        accuracy = point.finite(*LEARNED)
        solved = accuracy is not None and accuracy >= self.rule.solved
        if now < self.rule.fall * low and now < base - beyond and not solved:
            how = f"fell below {self.rule.fall:g} times"
        elif now > self.rule.rise * high and now > base + max(beyond, self.rule.least):
            how = f"rose above {self.rule.rise:g} times"
        else:
            return None
        told = "" if teacher is None else f"; the teacher's is {teacher:.3g}"
        return Finding(
            f"entropy {how} its start: {base:.3g} (median of the first {self.rule.start} steps, deviation "
            f"{self.seen.deviation:.2g}) to {now:.3g} nats per token (of the last {self.rule.steps}){told}",
            known(entropy=now, start=base, deviation=self.seen.deviation, teacher=teacher, accuracy=accuracy),
        )

    def forget(self) -> None:
        self.seen.forget_recent()


@dataclass
class ClipSaturated:
    rule: settings.ClipSaturated
    streaks: dict[str, Streak] = field(default_factory=lambda: {name: Streak() for name in CUT})

    def see(self, point: Point) -> Finding | None:
        found: list[str] = []
        values: dict[str, float] = {}
        for name, streak in self.streaks.items():
            share = point.finite(name)
            if share is not None and streak.add(share >= self.rule.share, point.step) >= self.rule.steps:
                found.append(f"{name} is {share:.0%} of the tokens, {since(streak)}")
                values[name] = share
        return Finding(f"{'; '.join(found)} (clip_saturated.share: {self.rule.share:g})", values) if found else None

    def forget(self) -> None:
        self.streaks = {name: Streak() for name in CUT}


@dataclass
class RewardHack:
    rule: settings.RewardHack
    reward: Jump = field(init=False)
    length: Jump = field(init=False)
    earned: Drift = field(init=False)
    accuracy: Drift = field(init=False)

    def __post_init__(self) -> None:
        self.reward, self.length = (Jump(self.rule.start, self.rule.steps) for _ in range(2))
        self.earned, self.accuracy = (Drift(self.rule.start, self.rule.steps) for _ in range(2))

    def see(self, point: Point) -> Finding | None:
        reward, accuracy = point.finite("reward"), point.finite(*LEARNED)
        if reward is None:
            return None
        both = self.reward.add(reward), self.length.add(point.finite("length"))
        parted = self.earned.add(reward), self.accuracy.add(accuracy)
        if all(both) and (found := self._longer()):
            return found
        return self._parted() if all(parted) else None

    def _longer(self) -> Finding | None:
        was, deviation, now = self.reward.medians()
        length, _, longer = self.length.medians()
        if now - was < max(self.rule.least, self.rule.z * deviation) or longer < self.rule.longer * length:
            return None
        return Finding(
            f"reward jumped from {was:.3g} (median of {self.rule.start} steps, deviation {deviation:.2g}) to {now:.3g} "
            f"(of the last {self.rule.steps}), and the length from {length:.4g} to {longer:.4g} tokens",
            {"reward": now, "reward_before": was, "length": longer, "length_before": length},
        )

    def _parted(self) -> Finding | None:
        gained, lost = self.earned.now - self.earned.base, self.accuracy.base - self.accuracy.now
        if gained < self.rule.least or lost < self.rule.loses:
            return None
        return Finding(
            f"reward rose from {self.earned.base:.3g} to {self.earned.now:.3g}, and accuracy fell from "
            f"{self.accuracy.base:.3g} to {self.accuracy.now:.3g} (median of the first {self.rule.start} steps to that "
            f"of the last {self.rule.steps})",
            {"reward": self.earned.now, "accuracy": self.accuracy.now},
        )

    def forget(self) -> None:
        for one in (self.reward, self.length, self.earned, self.accuracy):
            one.forget_recent()


@dataclass
class Throughput:
    rule: settings.Throughput
    time: Jump = field(init=False)
    rate: Jump = field(init=False)

    def __post_init__(self) -> None:
        self.time, self.rate = (Jump(self.rule.start, self.rule.steps) for _ in range(2))

    def see(self, point: Point) -> Finding | None:
        if point.seconds is None:
            return None
        slow = self.time.add(point.seconds)
        known = self.rate.add(point.finite("tokens_per_s"))
        if not slow:
            return None
        was, _, now = self.time.medians()
        if now < self.rule.least_s or now < self.rule.times * was:
            return None
        values = {"step_s": now, "step_s_before": was}
        told = ""
        if known:
            rate_was, _, rate = self.rate.medians()
            if rate > rate_was / self.rule.times:  # longer steps with as many tokens a second have more to do
                return None
            told = f", and {rate:.3g} tokens a second are drawn rather than {rate_was:.3g}"
            values["tokens_per_s"] = rate
        return Finding(
            f"a step takes {now:.3g} s (median of {self.rule.steps}), and took {was:.3g} s (of {self.rule.start} "
            f"before){told} (throughput.times: {self.rule.times:g})",
            values,
        )

    def forget(self) -> None:
        self.time.forget_recent()
        self.rate.forget_recent()


DETECTORS: Mapping[str, Callable[[Any], Detector]] = {
    "not_finite": NotFinite,
    "zero_advantage": ZeroAdvantage,
    "zero_gradient": ZeroGradient,
    "truncated": Truncated,
    "kl_stuck": KlStuck,
    "kl_high": KlHigh,
    "entropy": Entropy,
    "teacher_constant": TeacherConstant,
    "clip_saturated": ClipSaturated,
    "reward_hack": RewardHack,
    "throughput": Throughput,
    "one_teacher": OneTeacher,
}
