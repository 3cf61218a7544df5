"""Stage kind `opd`: on-policy distillation."""

from typing import Annotated, Literal

from pydantic import Field

from opdctl.fields import Count, NonNegative, Positive, Settings
from opdctl.settings.policy_loss import Baseline, ClippedSurrogate, Mismatch, Surrogate
from opdctl.settings.train import OnPolicy


class MarginCalibration(Settings):
    """Uni-OPD: where a group's right completions do not score `margin` above its wrong ones, both are shifted, by half
    of what lacks each. Needs group_size >= 2."""

    margin: Positive  # of the mean log-ratio per token


class PolicyGradientOpd(Settings):
    """Sampled-token form, A = clip(log pi_T - log pi_theta, +-max_advantage). MOPD paper; Kimi K3 eq. 15."""

    form: Literal["policy_gradient"]
    max_advantage: Positive | None  # 5 in the MOPD paper, undisclosed for K3; null: no clip
    surrogate: Surrogate = ClippedSurrogate()
    mismatch: Mismatch | None = None
    outcome_weight: NonNegative = 0.0  # alpha of MiMo-V2-Flash: A + alpha * advantage of the verifier's reward
    outcome_advantage: Baseline = "mean_std"  # of the group; outcome_weight > 0 needs group_size >= 2
    teacher_scale: Positive = 1.0  # lambda of G-OPD: log pi_ref + lambda (log pi_T - log pi_ref) for log pi_T
    discount: Annotated[float, Field(ge=0, le=1)] = 0.0  # credit that later tokens' log-ratios give to earlier tokens
    margin: MarginCalibration | None = None


Rest = Literal["correction", "lumped_tail"]  # what stands for the tokens outside the top-k: + C_k, or one token


class TopKOpd(Settings):
    """Reverse KL on the teacher's top-k."""

    form: Literal["topk"]
    k: Count
    rest: Rest = "correction"


class OverlapOpd(Settings):
    """Keye-VL-2.0: the tokens in both top-k give one advantage, which weighs the sampled token, whichever that is: in
    expectation the gradient is 0, so a student trained by this form alone drifts."""

    form: Literal["overlap"]
    k: Count


class FullVocabOpd(Settings):
    """Exact reverse KL over the vocabulary, in chunks of tokens."""

    form: Literal["full_vocab"]


class ForwardKlOpd(Settings):
    """Exact forward KL(pi_T || pi_theta) over the vocabulary."""

    form: Literal["forward_kl"]


class JsdOpd(Settings):
    """GKD: generalised Jensen-Shannon divergence; beta near 0 behaves as forward, near 1 as reverse KL."""

    form: Literal["jsd"]
    beta: Annotated[float, Field(gt=0, lt=1)]


class MiniLlmOpd(Settings):
    """MiniLLM: exact reverse KL of the single step, and by policy gradient what a token does to later ones."""

    form: Literal["minillm"]
    discount: Annotated[float, Field(ge=0, le=1)]  # 0: the single step only, as in TRL


class UpdateExtrapolation(Settings):
    """EffOPD: after these steps the update so far is stretched, and kept where held-out prompts are not worse."""

    steps: Annotated[list[Count], Field(min_length=1)]  # optimizer steps
    scales: Annotated[list[Annotated[float, Field(gt=1)]], Field(min_length=1)]  # tried in turn until one is worse
    prompts: Count  # held-out prompts that score a candidate


OpdLoss = Annotated[
    PolicyGradientOpd | TopKOpd | OverlapOpd | FullVocabOpd | ForwardKlOpd | JsdOpd | MiniLlmOpd,
    Field(discriminator="form"),
]


class OpdSettings(OnPolicy):
    loss: OpdLoss
    route_by: Annotated[list[str], Field(min_length=1)]  # columns of a row that choose its teacher
    default_teacher: str | None = None  # stage address of the teacher for rows without a route; else refused
    aggregation: Literal["sequence_mean", "token_mean"] = "sequence_mean"  # 1/|y| per sequence, or over all tokens
    sampled_by: Literal["student", "teacher"] = "student"  # teacher: off-policy, for comparison
    balance: bool = False  # Uni-OPD: as many wrong as right completions of a rollout batch, the surplus out of the loss
    extrapolation: UpdateExtrapolation | None = None
    health_topk: Count = 16  # of the overlap metrics
