"""What a policy follows, once a token has an advantage A: the surrogate, and corrections for a sampler that differs
from the trainer. Presets of whole recipes are in conf/rl.

r = pi_theta / pi_old (how far training has moved), k = pi_old / pi_infer, both of the same weights (how much the
trainer differs from the engine that sampled). The computations are in `opdctl/engine/losses.py`.
"""

from typing import Annotated, Literal

from pydantic import Field

from opdctl.fields import NonNegative, Positive, Settings


class ClippedSurrogate(Settings):
    """-min(r A, clip(r, 1 - low, 1 + high) A); with `dual`, for A < 0 at most -dual A. PPO, DAPO; with level: sequence
    GSPO; with dual LongCat's triplet."""

    form: Literal["clip"] = "clip"
    low: Annotated[float, Field(gt=0, le=1)] = 0.2
    high: Positive = 0.2
    dual: Annotated[float, Field(gt=1)] | None = None
    level: Literal["token", "sequence"] = "token"  # sequence: r is the geometric mean over the completion's tokens


class CispoSurrogate(Settings):
    """-sg(min(r, 1 + high)) A log pi_theta: no token loses its gradient."""

    form: Literal["cispo"]
    high: Positive


class LogRatioClip(Settings):
    """Kimi K2.5: -r A where low <= log r <= high, else no gradient, whatever A's sign; + square (log r)^2."""

    form: Literal["log_ratio_clip"]
    low: Annotated[float, Field(lt=0)]
    high: Positive
    square: NonNegative  # tau' of the report, a weight and no effort


class Reinforce(Settings):
    """-A log pi_theta: for one optimizer step per rollout batch, where r is 1."""

    form: Literal["reinforce"]


Surrogate = Annotated[
    ClippedSurrogate | CispoSurrogate | LogRatioClip | Reinforce,
    Field(discriminator="form"),
]


class Tis(Settings):
    """Truncated importance sampling: weight clamp(k, floor, cap)."""

    rule: Literal["tis"]
    cap: Positive
    floor: NonNegative = 0.0


class IcePop(Settings):
    """Weight k where low <= k <= high, ends included, else 0. `current`: pi_theta in the place of pi_old."""

    rule: Literal["icepop"]
    low: Positive
    high: Positive
    policy: Literal["old", "current"] = "old"


class Dis(Settings):
    """GLM-5's agentic RL: weight q = pi_theta / pi_infer where 1 - low < q < 1 + high, ends excluded, else 0."""

    rule: Literal["dis"]
    low: Annotated[float, Field(gt=0, le=1)]  # 0 would drop q = 1, where trainer and sampler agree
    high: Positive


class Opsm(Settings):
    """DeepSeek-V3.2: a sequence with A < 0 whose mean log(pi_infer / pi_theta) is above delta counts nothing."""

    rule: Literal["opsm"]
    delta: Positive


class SequenceMask(Settings):
    """A sequence counts only where the geometric mean of k over its tokens lies in [low, high]."""

    rule: Literal["sequence_mask"]
    low: Positive
    high: Positive


Mismatch = Annotated[Tis | IcePop | Dis | Opsm | SequenceMask, Field(discriminator="rule")]


def weighs_by_current(rule: Mismatch | None) -> bool:
    """Is the weight of a token pi_theta / pi_infer, of the policy under training?"""
    return isinstance(rule, Dis) or (isinstance(rule, IcePop) and rule.policy == "current")


Baseline = Literal["mean", "mean_std", "leave_one_out", "leave_one_out_std"]
Aggregation = Literal["sequence_mean", "token_mean", "constant"]
