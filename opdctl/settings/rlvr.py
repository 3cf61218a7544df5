"""Stage kind `rlvr`: reinforcement learning with verifiable rewards."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from opdctl.fields import Count, NonNegative, Positive, Settings
from opdctl.settings.grading import Grader
from opdctl.settings.policy_loss import Aggregation, Baseline, ClippedSurrogate, Mismatch, Surrogate
from opdctl.settings.train import Budget, OnPolicy


class EffortBudget(Settings):
    """Kimi K3 section on effort: reward is -1 when T(y) > tau * b0(x), correct or not. Every tau is undisclosed."""

    tau: Positive
    anneal: Literal["gradual", "hard"] = "gradual"
    tau_from: Positive | None = None  # gradual: tau at the start, falling linearly to `tau`; required then
    anneal_fraction: Annotated[float, Field(gt=0, le=1)] = 0.6  # share of the steps that the fall takes
    budget: Budget

    @model_validator(mode="after")
    def _start_is_known(self) -> "EffortBudget":
        if self.anneal == "gradual" and self.tau_from is None:
            raise ValueError("anneal: gradual needs tau_from (for the first rung set it to tau, or anneal: hard)")
        return self


class Kl(Settings):
    """Penalty towards a reference model (input role `reference`): k1, k2, k3 are Schulman's estimators."""

    estimator: Literal["none", "k1", "k2", "k3"] = "none"
    coef: NonNegative = 0.0
    placement: Literal["loss", "reward"] = "loss"

    @model_validator(mode="after")
    def _k1_has_no_gradient(self) -> "Kl":
        if self.estimator == "k1" and self.placement == "loss":
            raise ValueError(
                "estimator: k1 in the loss has a gradient of mean zero; use placement: reward, or estimator: k2 or k3"
            )
        if self.estimator != "none" and self.coef == 0:
            raise ValueError(f"estimator: {self.estimator} with coef 0 does nothing; give coef, or estimator: none")
        return self


class DynamicSampling(Settings):
    """DAPO: groups whose rewards are all equal are replaced by groups of further prompts."""

    max_rounds: Count  # rollout batches tried for one step; then it trains on what it has


class Overlong(Settings):
    """Completions cut at `max_completion_tokens`: reward as it is, left out of the loss, or DAPO's soft penalty."""

    handling: Literal["none", "mask", "soft_penalty"] = "none"
    buffer_tokens: Annotated[int, Field(ge=0)] = 0  # soft_penalty: reward falls by 1 over these last tokens

    @model_validator(mode="after")
    def _buffer(self) -> "Overlong":
        if self.handling == "soft_penalty" and self.buffer_tokens == 0:
            raise ValueError("handling: soft_penalty needs buffer_tokens >= 1")
        return self


class RlvrSettings(OnPolicy):
    advantage: Baseline = "mean_std"
    max_advantage: Positive | None = None  # advantages are clipped to +- this
    surrogate: Surrogate = ClippedSurrogate()
    mismatch: Mismatch | None = None
    aggregation: Aggregation = "token_mean"
    kl: Kl = Kl()
    dynamic_sampling: DynamicSampling | None = None
    overlong: Overlong = Overlong()
    effort: EffortBudget | None = None
    unfinished_reward: float = 0.0  # reward of a completion without EOS
    grader: Grader | None = None  # grades the completions of its tasks in the place of their verifier
