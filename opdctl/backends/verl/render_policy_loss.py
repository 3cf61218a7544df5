"""What a policy follows, in verl 0.9.1's keys: its own losses where it has the surrogate, else those of the plug-in
(`plugin.policy_losses`); and its rollout correction, which is on pi_old / pi_infer.
"""

from typing import Any

from opdctl.backends.verl.overrides import Overrides
from opdctl.settings import (
    CispoSurrogate,
    ClippedSurrogate,
    IcePop,
    LogRatioClip,
    Mismatch,
    Reinforce,
    Surrogate,
    Tis,
)
from opdctl.settings.policy_loss import weighs_by_current

PLUGIN = "opdctl_policy_loss"
_NO_CLIP = 1e9  # verl clips on both sides, and cuts ratios for negative advantages (dual-clip PPO), unless told so
_CORRECTION = "algorithm.rollout_correction"


def surrogate(overrides: Overrides, given: Surrogate, at: str, source: str) -> None:
    """`at`: verl's prefix of the actor."""
    bounds = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": _NO_CLIP}
    match given:
        case ClippedSurrogate():
            loss = "vanilla" if given.level == "token" else "gspo"
            bounds |= {"clip_ratio": given.low, "clip_ratio_low": given.low, "clip_ratio_high": given.high}
            bounds |= {"clip_ratio_c": given.dual or _NO_CLIP}
        case CispoSurrogate():
            loss = "cispo"
            bounds |= {"clip_ratio_low": 1.0, "clip_ratio_high": given.high}  # a ratio is above 0 anyway
        case LogRatioClip() | Reinforce():
            loss = PLUGIN
    own = {f"{at}.{key}": value for key, value in bounds.items()}
    overrides.own(source, own | {f"{at}.policy_loss.loss_mode": loss})


def mismatch(overrides: Overrides, given: Mismatch | None, source: str, *, asynchronous: bool) -> None:
    """Rules on the current policy need the sampler's log-probabilities in the place of pi_old: verl's bypass mode."""
    keys: dict[str, Any] = {
        "rollout_is": None,
        "rollout_is_threshold": 2.0,
        "rollout_rs": None,
        "bypass_mode": weighs_by_current(given),
    }
    match given:
        case Tis(cap=cap):
            keys |= {"rollout_is": "token", "rollout_is_threshold": cap}
        case IcePop(policy="old", low=low, high=high):
            keys |= {"rollout_is": "token", "rollout_is_threshold": f"{low}_{high}"}
        case None if asynchronous:
            # completions that several versions of the policy wrote: IcePop, with Ring-1T's bounds (arXiv 2510.18855)
            keys |= {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"}
    placed = {f"{_CORRECTION}.{key}": value for key, value in keys.items()}
    if given is None:
        overrides.choose(placed)
    else:
        overrides.own(source, placed)
