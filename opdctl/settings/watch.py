"""The watchdog's rules: when a running stage is said to go wrong. Nothing here enters a stage's identity.

A "step" of a threshold is an event of the stage: one rollout batch, or one optimizer step of SFT. Thresholds without a
source were measured: 29 streams of training stages with more than ten events (kimi_k3, mimo_v2_flash and keye_vl2 with
fewer steps than at laptop scale, and word_problems, pretrained) raise no alarm, and three of the rules would at about
half of their thresholds.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from opdctl.fields import OFF, Count, Fraction, NonNegative, Positive, Settings

Action = Annotated[Literal["off", "warn", "pause", "stop"], OFF]  # pause and stop save the state; stop fails the stage
TRAINING = ("sft", "rlvr", "opd")
ON_POLICY = ("rlvr", "opd")
Above = Annotated[float, Field(gt=1)]


class Rule(Settings):
    """What every rule has. `KINDS`: of stages that it looks at."""

    KINDS: ClassVar[tuple[str, ...]] = ON_POLICY

    action: Action = "warn"


class NoProgress(Rule):
    """No event for longer than any step takes."""

    KINDS = (*TRAINING, "eval", "merge", "sample", "select")

    action: Action = "stop"  # a stage without steps of its own is only warned of: see OF_KINDS
    times: Above = 10.0  # the median time of this stage's last steps
    least_s: Positive = 1800.0  # and at least this
    start_s: Positive = 7200.0  # before the second step and after the last, when models are loaded and published


class NotFinite(Rule):
    """A loss or gradient norm that is no finite number."""

    KINDS = TRAINING

    action: Action = "stop"


class ZeroAdvantage(Rule):
    """Groups whose rewards are all equal give no advantage."""

    KINDS = ("rlvr",)

    share: Fraction = 0.98  # of the groups
    steps: Count = 5  # in a row
    solved: Fraction = 0.95  # accuracy from which equal rewards are the end of learning rather than a fault


class ZeroGradient(Rule):
    """The gradient is 0, or the learning rate."""

    KINDS = TRAINING

    steps: Count = 5  # in a row
    solved: Fraction = 0.95  # as of zero_advantage


class Truncated(Rule):
    """Completions cut at max_completion_tokens."""

    share: Fraction = 0.9
    steps: Count = 5  # in a row


class KlStuck(Rule):
    """The KL towards the teacher, or the reference, is 0."""

    below: NonNegative = 1e-6  # nats per token
    steps: Count = 5  # in a row


class KlHigh(Rule):
    """The KL towards the teacher, or the reference, is large, or has grown."""

    above: Positive = 8.0  # nats per token, at any time: the other model finds the tokens 3,000 times less likely
    times: Above = 3.0  # its start: median of the first `start` steps
    least: NonNegative = 0.2  # nats per token: growth below this is none (0.19: a distant teacher, see gate.far)
    start: Count = 8  # steps
    steps: Count = 3  # of late, by their median


class Entropy(Rule):
    """The policy's entropy has left its start: by more than `z` deviations (MAD) and by a factor."""

    z: Positive = 6.0
    fall: Fraction = 0.05  # of the start: a policy that learns well falls to a tenth (the pretrained example)
    rise: Above = 3.0  # times the start
    least: NonNegative = 0.3  # nats per token: a rise by less is none
    start: Count = 8  # steps
    steps: Count = 3  # of late, by their median
    solved: Fraction = 0.95  # accuracy from which a low entropy is the end of learning


class TeacherConstant(Rule):
    """A teacher that says the same of every token has lost its weights. In verl the loss itself looks (losses.py)."""

    KINDS = ("opd",)

    action: Action = "stop"
    uniform: Fraction = 0.98  # entropy over ln V
    spread: NonNegative = 1e-3  # nats: log-probabilities, or entropies above `sure`, closer together are of no text
    sure: NonNegative = 0.1  # nats: below this a teacher that is sure of every token looks alike
    drift: Positive = 0.05  # nats: of a teacher's log-probabilities of the canary's tokens since the start
    off_uniform: NonNegative = 0.01  # nats: of these from -ln V
    steps: Count = 2  # in a row; of the canary one is enough


class ClipSaturated(Rule):
    """Clip, clamp or mismatch rule active almost everywhere."""

    share: Fraction = 0.8  # of the tokens
    steps: Count = 5  # in a row


class RewardHack(Rule):
    """A jump of the reward together with much longer answers, or a reward that rises while accuracy falls."""

    z: Positive = 6.0  # deviations (MAD) of the window before the jump
    least: Positive = 0.1  # of the reward
    longer: Above = 2.0  # times the length
    loses: Positive = 0.1  # of the accuracy, while the reward gains `least`
    start: Count = 8  # steps of the window before
    steps: Count = 3  # of late, by their median


class Throughput(Rule):
    """Steps take much longer than they did, and fewer tokens a second are drawn."""

    KINDS = TRAINING

    times: Above = 5.0
    least_s: Positive = 10.0  # a shorter step varies with whatever else the machine does
    start: Count = 16  # steps that give the usual time
    steps: Count = 5  # of late, by their median


class SaveTooOld(Rule):
    """What a kill would cost now."""

    KINDS = TRAINING

    saves: Above = 3.0  # times config.train.save_every steps without a save
    age_s: Positive = 14400.0  # or this long without one


class OneTeacher(Rule):
    """All rows of one teacher after another, rather than mixed."""

    KINDS = ("opd",)

    share: Fraction = 0.999  # of a batch's rows, the same teacher's
    steps: Count = 5  # in a row


# what the defaults of a rule are for some kinds of stages
OF_KINDS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    # an evaluation tells of each model, a merge of its tensors: how long one takes is not known before
    "no_progress": {kind: {"action": "warn"} for kind in ("eval", "merge", "sample", "select")},
}


class WatchSettings(Settings):
    """One key a rule."""

    enabled: bool = True
    no_progress: NoProgress = NoProgress()
    not_finite: NotFinite = NotFinite()
    zero_advantage: ZeroAdvantage = ZeroAdvantage()
    zero_gradient: ZeroGradient = ZeroGradient()
    truncated: Truncated = Truncated()
    kl_stuck: KlStuck = KlStuck()
    kl_high: KlHigh = KlHigh()
    entropy: Entropy = Entropy()
    teacher_constant: TeacherConstant = TeacherConstant()
    clip_saturated: ClipSaturated = ClipSaturated()
    reward_hack: RewardHack = RewardHack()
    throughput: Throughput = Throughput()
    save_too_old: SaveTooOld = SaveTooOld()
    one_teacher: OneTeacher = OneTeacher()

    def with_own(self, own: "WatchSettings | None") -> "WatchSettings":
        """With what a stage says itself laid over it, threshold by threshold."""
        if own is None:
            return self
        ours, theirs = (given.model_dump(exclude_unset=True) for given in (self, own))
        for name, value in theirs.items():
            ours[name] = {**ours.get(name, {}), **value} if isinstance(value, dict) else value
        return WatchSettings.model_validate(ours)

    def rules(self, kind: str) -> dict[str, Rule]:
        """Those that look at stages of this kind, with the kind's defaults where the user gave none."""
        found: dict[str, Rule] = {}
        for name, given in self:
            if isinstance(given, Rule) and kind in given.KINDS:
                own = {key: getattr(given, key) for key in given.model_fields_set}
                rule = type(given)(**{**OF_KINDS.get(name, {}).get(kind, {}), **own})
                if rule.action != "off":
                    found[name] = rule
        return found
