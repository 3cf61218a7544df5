"""What a stage minimises, in words for `opdctl plan`: formula, KL direction, support, clip, aggregation. Of a merge,
how it computes.

The computations are in `opdctl/engine/losses.py`, `vocab.py`, `divergences.py`, `advantages.py`, `opd_advantages.py`,
and `merge_methods.py`.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from opdctl.settings import (
    CispoSurrogate,
    ClippedSurrogate,
    Dis,
    EffortBudget,
    ForwardKlOpd,
    FullVocabOpd,
    IcePop,
    JsdOpd,
    LogRatioClip,
    MiniLlmOpd,
    Mismatch,
    OpdLoss,
    OpdSettings,
    Opsm,
    OverlapOpd,
    PolicyGradientOpd,
    Reinforce,
    RlvrSettings,
    SequenceMask,
    Surrogate,
    Tis,
    TopKOpd,
)
from opdctl.settings.merge import (
    ConvexMerge,
    DareMerge,
    LinearMerge,
    LongcatFusionMerge,
    MergeSettings,
    SceMerge,
    TaskArithmeticMerge,
    TiesMerge,
)

_ADVANTAGE = {
    "mean": "r - mean(group)",
    "mean_std": "(r - mean(group)) / (std(group) + 1e-6)",
    "leave_one_out": "r - mean(others of the group)",
    "leave_one_out_std": "(r - mean(others of the group)) / (std(others) + 1e-6)",
}
_AGGREGATION = {
    "sequence_mean": "mean over sequences of their token means",
    "token_mean": "mean over all tokens",
    "constant": "token sum / {max_tokens}, mean over sequences",
}
_KL = {
    "k1": "k1 = log(pi/pi_ref)",
    "k2": "k2 = log(pi/pi_ref)^2 / 2",
    "k3": "k3 = pi_ref/pi - 1 - log(pi_ref/pi)",
}


def describe_rlvr(settings: RlvrSettings) -> str:
    """One to three lines of plain text."""
    advantage = _ADVANTAGE[settings.advantage]
    if settings.max_advantage is not None:
        advantage = f"clip({advantage}, -{settings.max_advantage:g}, {settings.max_advantage:g})"
    aggregation = _AGGREGATION[settings.aggregation].format(max_tokens=settings.rollout.max_completion_tokens)
    policy = describe_policy(settings.surrogate, settings.mismatch)
    joint = ", " if settings.mismatch is None else "\n"
    first = f"{policy}{joint}A = {advantage}, group of {settings.rollout.group_size}; {aggregation}"
    extras = []
    if settings.kl.estimator != "none":
        sign, place = ("-", "reward") if settings.kl.placement == "reward" else ("+", "loss")
        extras.append(f"{place} {sign} {settings.kl.coef:g} KL(pi || pi_ref), {_KL[settings.kl.estimator]}")
    if (grader := settings.grader) is not None:
        extras.append(f"rewards of {', '.join(grader.tasks)} by a {grader.mode} judge ({grader.by})")
    if settings.effort is not None:
        extras.append(f"reward -1 if T(y) > tau b0(x), {_tau(settings.effort)}")
    if settings.overlong.handling == "mask":
        extras.append("cut completions left out of the loss")
    if settings.overlong.handling == "soft_penalty":
        extras.append(f"reward falls by 1 over the last {settings.overlong.buffer_tokens} tokens")
    if settings.dynamic_sampling is not None:
        extras.append(f"tied groups replaced, up to {settings.dynamic_sampling.max_rounds} rollout batches")
    return "\n".join([first, *(["; ".join(extras)] if extras else [])])


def describe_policy(surrogate: Surrogate, mismatch: Mismatch | None) -> str:
    """The loss of a token of advantage A, and its symbols, in one line."""
    ratio = "r = pi/pi_old"
    match surrogate:
        case ClippedSurrogate(low=low, high=high, dual=dual, level=level):
            r = "s" if level == "sequence" else "r"
            kept = f"min({r} A, clip({r}, {1 - low:g}, {1 + high:g}) A)"
            formula = f"-{kept}" if dual is None else f"-max({kept}, {dual:g} A if A < 0)"
            ratio = "s = exp(mean over the sequence of log(pi/pi_old))" if level == "sequence" else ratio
        case CispoSurrogate(high=high):
            formula = f"-sg(min(r, {1 + high:g})) A log pi"
        case LogRatioClip(low=low, high=high, square=square):
            formula = f"-exp(clip(log r, {low:g}, {high:g})) A + {square:g} (log r)^2"
        case Reinforce():
            formula, ratio = "-A log pi", ""
    if mismatch is not None:
        formula = f"w [{formula}]"
    return ", ".join(part for part in (formula, ratio, _mismatch(mismatch)) if part)


def _mismatch(rule: Mismatch | None) -> str:
    k, q = "k = pi_old/pi_infer", "q = pi/pi_infer"
    match rule:
        case None:
            return ""
        case Tis(floor=floor, cap=cap):
            return f"w = clip(k, {floor:g}, {cap:g}), {k}"
        case IcePop(low=low, high=high, policy="old"):
            return f"w = k if {low:g} <= k <= {high:g} else 0, {k}"
        case IcePop(low=low, high=high):
            return f"w = q if {low:g} <= q <= {high:g} else 0, {q}"
        case Dis(low=low, high=high):
            return f"w = q if {1 - low:g} < q < {1 + high:g} else 0, {q}"
        case Opsm(delta=delta):
            return f"w = 0 if A < 0 and mean over the sequence of log(pi_infer/pi) > {delta:g} else 1"
        case SequenceMask(low=low, high=high):
            mean = "exp(mean over the sequence of log k)"
            return f"w = 1 if {low:g} <= {mean} <= {high:g} else 0, {k}"


def describe_opd(settings: OpdSettings, weights: Mapping[str, float] = MappingProxyType({})) -> str:
    """Two or three lines of plain text. `weights`: of the teachers, by label."""
    formula, distance, support = _divergence(settings.loss)
    sampler = "the student's rollouts" if settings.sampled_by == "student" else "its teacher's rollouts (off-policy)"
    lines = [
        f"{formula}; {_AGGREGATION[settings.aggregation]}",
        f"{distance} on {sampler}, support: {support}; teacher by {', '.join(settings.route_by)}",
    ]
    extras = []
    if any(weight != 1 for weight in weights.values()):
        extras.append("times w: " + ", ".join(f"{weight:g} {label}" for label, weight in weights.items()))
    if settings.balance:
        extras.append("as many wrong as right completions")
    if settings.extrapolation is not None:
        steps, scales = (
            ", ".join(f"{x:g}" for x in given)
            for given in (settings.extrapolation.steps, settings.extrapolation.scales)
        )
        extras.append(
            f"after steps {steps} the update since the last of them is stretched by {scales} while "
            f"{settings.extrapolation.prompts} held-out prompts are answered no worse"
        )
    return "\n".join([*lines, *(["; ".join(extras)] if extras else [])])


def _divergence(loss: OpdLoss) -> tuple[str, str, str]:
    """Formula, what is measured between student and teacher, on which tokens of the vocabulary."""
    reverse = "reverse KL(pi || pi_T)"
    match loss:
        case PolicyGradientOpd():
            policy = describe_policy(loss.surrogate, loss.mismatch)
            target = "" if loss.teacher_scale == 1 else f", pi_T: pi_ref (pi_T/pi_ref)^{loss.teacher_scale:g}"
            return f"{policy}, A = {_opd_advantage(loss)}{target}", reverse, "sampled token"
        case TopKOpd(k=k, rest=rest):
            remainder = "sum_S (pi_T - pi)" if rest == "correction" else "P log(P/P_T), P = 1 - sum_S pi"
            return f"sum_S pi log(pi/pi_T) + {remainder}", reverse, f"teacher's top {k} (S)"
        case OverlapOpd(k=k):
            formula = "-A log pi, A = sum_S pi log(pi_T/pi) / sum_S pi, 0 where S is empty"
            return (
                formula,
                "overlap advantage (not the gradient of a KL)",
                f"top {k} of both (S), and the sampled token",
            )
        case FullVocabOpd():
            return "sum_v pi log(pi/pi_T)", reverse, "whole vocabulary"
        case ForwardKlOpd():
            return "sum_v pi_T log(pi_T/pi)", "forward KL(pi_T || pi)", "whole vocabulary"
        case JsdOpd(beta=b):
            formula = f"{b:g} KL(pi_T || m) + {1 - b:g} KL(pi || m), m = {b:g} pi_T + {1 - b:g} pi"
            return formula, f"generalised JSD({b:g}) of pi_T and pi", "whole vocabulary"
        case MiniLlmOpd(discount=0):
            return "sum_v pi log(pi/pi_T)", f"{reverse} of the single step", "whole vocabulary"
        case MiniLlmOpd(discount=d):
            mean = f"A = sum_(j>t) {d:g}^(j-t) log(pi_T/pi)_j / sum_(j>t) {d:g}^(j-t)"
            return f"sum_v pi log(pi/pi_T) - A log pi, {mean}", reverse, "whole vocabulary, and later sampled tokens"


def _opd_advantage(loss: PolicyGradientOpd) -> str:
    """A of the sampled token."""
    ratio = "log(pi_T/pi)"
    if loss.max_advantage is not None:
        ratio = f"clip({ratio}, -{loss.max_advantage:g}, {loss.max_advantage:g})"
    if loss.discount:
        ratio = f"sum_(j>=t) {loss.discount:g}^(j-t) {ratio}_j"
    terms = [ratio]
    if loss.outcome_weight:
        terms.append(f"{loss.outcome_weight:g} x [{_ADVANTAGE[loss.outcome_advantage]}]")
    if loss.margin is not None:
        terms.append(f"a shift that keeps right {loss.margin.margin:g} above wrong")
    return " + ".join(terms)


def describe_merge(settings: MergeSettings, weights: Sequence[float]) -> str:
    """Two lines of plain text. theta_i: merged models; theta_0: the base."""
    agreeing = "a_i: t'_i has the sign of sum w_i t'_i"
    match settings.merge:
        case LinearMerge():
            formula = "sum w_i theta_i / sum w_i"
        case ConvexMerge():
            formula = "sum w_i theta_i, sum w_i = 1"
        case TaskArithmeticMerge(scale=scale):
            formula = f"theta_0 + {scale:g} sum w_i t_i, {_TASK}"
        case TiesMerge(density=density, scale=scale):
            formula = f"{_mean(scale)}, {_TASK}; t'_i: largest {density:g} of t_i; {agreeing}"
        case DareMerge(sign="ties") as given:
            formula = f"{_mean(given.scale)}, {_TASK}; t'_i: t_i {_dropped(given)}; {agreeing}"
        case DareMerge() as given:
            formula = f"theta_0 + {given.scale:g} sum w_i t'_i, {_TASK}; t'_i: t_i {_dropped(given)}"
        case SceMerge(select=select):
            formula = (
                f"theta_0 + sum e_i t'_i a_i / sum e_i a_i, {_TASK}; t'_i: t_i where the models' variance is in its "
                f"largest {select:g}; e_i: mean t'_i^2 over their sum; a_i: t'_i has the sign of sum t'_i"
            )
        case LongcatFusionMerge() as given:
            sum_of = f"theta_0 + {given.scale:g} sum w_i t'_i a_i" if given.combine == "sum" else _mean(given.scale)
            normalised = f"t_i of one {given.norm} norm a {given.scope}"
            formula = f"{sum_of}, {_TASK}; t'_i: {normalised}, {_dropped(given)}; {agreeing}"
    listed = ", ".join(f"{weight:g}" for weight in weights)
    return f"{formula}\nw = {listed}; computed in float32, published in {settings.precision}"


_TASK = "t_i = theta_i - theta_0"


def _mean(scale: float) -> str:
    return f"theta_0 + {scale:g} sum w_i t'_i a_i / sum w_i a_i"


def _dropped(given: DareMerge | LongcatFusionMerge) -> str:
    return f"dropped at random with p = {given.drop_rate:g}" + (", the rest / (1 - p)" if given.rescale else "")


def _tau(effort: EffortBudget) -> str:
    if effort.anneal == "hard" or effort.tau_from in (None, effort.tau):
        return f"tau {effort.tau:g}"
    return f"tau {effort.tau_from:g} -> {effort.tau:g}"
