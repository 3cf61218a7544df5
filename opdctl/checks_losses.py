"""Settings of a loss that are each valid and together meaningless: refused, with the reason."""

from collections.abc import Iterator

from opdctl.references import Problem
from opdctl.settings import (
    ClippedSurrogate,
    IcePop,
    MiniLlmOpd,
    Mismatch,
    OpdSettings,
    Opsm,
    OverlapOpd,
    PolicyGradientOpd,
    Reinforce,
    RlvrSettings,
    SequenceMask,
    Surrogate,
    Tis,
)
from opdctl.settings.policy_loss import weighs_by_current


def check_losses(config: RlvrSettings | OpdSettings) -> Iterator[Problem]:
    """Key and text of every contradiction in what the stage minimises."""
    if config.rollout.partial is not None:
        yield from _partial(config)
    if isinstance(config, RlvrSettings):
        yield from _policy("config", config.surrogate, config.mismatch, config)
        yield from _rlvr(config)
        return
    if isinstance(config.loss, PolicyGradientOpd):
        yield from _policy("config.loss", config.loss.surrogate, config.loss.mismatch, config)
        yield from _policy_gradient(config, config.loss)
    yield from _opd(config)


# ----------------------------------------------------------------------------------- surrogate and mismatch rule


def _policy(
    key: str, surrogate: Surrogate, rule: Mismatch | None, config: RlvrSettings | OpdSettings
) -> Iterator[Problem]:
    updates, on_current = config.updates, weighs_by_current(rule)
    if isinstance(surrogate, Reinforce) and updates > 1 and not on_current:
        yield (
            f"{key}.surrogate.form",
            f"reinforce has no ratio, and with {updates} optimizer steps per rollout batch the policy is no longer the "
            "one that sampled: make train.global_batch_size equal to rollout.prompts x rollout.group_size, or take "
            "another form, or mismatch rule dis, or icepop with policy: current",
        )
    if on_current and not isinstance(surrogate, Reinforce):
        yield (
            f"{key}.mismatch.rule",
            f"{_shown(rule)} weighs by pi_theta / pi_infer, which holds the ratio of surrogate form {surrogate.form} "
            "already: it would count twice; give surrogate: {form: reinforce}",
        )
    of_sequences = isinstance(surrogate, ClippedSurrogate) and surrogate.level == "sequence"
    if of_sequences and config.aggregation != "sequence_mean":
        yield (
            "config.aggregation",
            f"{config.aggregation} counts a sequence by its length, and surrogate.level: sequence has taken the mean "
            "over its tokens: give aggregation: sequence_mean",
        )
    if rule is not None:
        yield from _rule(key, rule, updates, config.rollout.partial is not None)


def _shown(rule: Mismatch | None) -> str:
    return "icepop with policy: current" if isinstance(rule, IcePop) else "dis"


def _rule(key: str, rule: Mismatch, updates: int, waits: bool) -> Iterator[Problem]:
    match rule:
        case Tis(floor=low, cap=high):
            names = "floor", "cap"
        case IcePop(low=low, high=high) | SequenceMask(low=low, high=high):
            names = "low", "high"
        case Opsm():
            if updates == 1 and not waits:
                yield (
                    f"{key}.mismatch.rule",
                    "opsm drops sequences that the policy has moved away from since they were sampled, and with one "
                    "optimizer step per rollout batch it has not moved: it would never act",
                )
            return
        case _:
            return
    if low > high:
        yield f"{key}.mismatch.{names[0]}", f"{low:g} is above {names[1]}, {high:g}"
    elif not low <= 1 <= high:
        yield (
            f"{key}.mismatch.{names[0] if low > 1 else names[1]}",
            f"{names[0]} {low:g} to {names[1]} {high:g} does not hold 1, so the rule would change tokens on which the "
            "trainer and the sampler agree",
        )


# ----------------------------------------------------------------------------------------------- partial rollouts


def _partial(config: RlvrSettings | OpdSettings) -> Iterator[Problem]:
    """Completions of several weights need a loss that knows by which they were drawn, or that does not ask."""
    key, why = "config.rollout.partial", "a completion that waited was drawn by older weights"
    if config.rollout.turns is not None:
        yield key, "an episode cannot wait, for its environment goes on in this step: leave out partial, or turns"
    if isinstance(config, RlvrSettings):
        if config.mismatch is None:
            yield "config.mismatch", f"required by rollout.partial: {why}; give a rule, such as {{rule: tis, cap: 2}}"
        return
    loss = config.loss
    if config.sampled_by == "teacher":
        yield key, "waits for the student's next weights, and with sampled_by: teacher the student writes nothing"
    if isinstance(loss, PolicyGradientOpd) and loss.mismatch is None:
        yield "config.loss.mismatch", f"required by rollout.partial: {why}; give a rule, such as {{rule: tis, cap: 2}}"
    if isinstance(loss, OverlapOpd) or (isinstance(loss, MiniLlmOpd) and loss.discount > 0):
        yield key, f"{why}, and form {loss.form} is a policy gradient without a ratio to them: take policy_gradient"


# ------------------------------------------------------------------------------------------------------------- RL


def _rlvr(config: RlvrSettings) -> Iterator[Problem]:
    in_reward = config.kl.estimator != "none" and config.kl.placement == "reward"
    if in_reward and config.dynamic_sampling is not None:
        yield (
            "config.dynamic_sampling",
            "replaces groups whose rewards are all equal, and kl.placement: reward makes every reward differ: it would "
            "never act; give kl.placement: loss",
        )
    if config.kl.estimator == "none" and config.kl.coef > 0:
        yield "config.kl.coef", f"{config.kl.coef:g} would not be read: kl.estimator is none; give k2 or k3"


# ------------------------------------------------------------------------------------------------------------ OPD


def _policy_gradient(config: OpdSettings, loss: PolicyGradientOpd) -> Iterator[Problem]:
    rollout = config.rollout
    if loss.outcome_weight > 0 and rollout.group_size < 2:
        yield (
            "config.loss.outcome_weight",
            f"{loss.outcome_weight:g} adds an advantage that compares the completions of a group: give "
            "rollout.group_size 2 or more",
        )
    if loss.margin is not None and rollout.group_size < 2:
        yield (
            "config.loss.margin",
            "compares the right with the wrong completions of a group: give rollout.group_size 2 or more",
        )
    if loss.mismatch is not None and (rollout.temperature != 1 or rollout.top_p < 1 or rollout.top_k > 0):
        yield (
            "config.loss.mismatch",
            "compares the policy with the sampler, and the sampler drew from another distribution by "
            "rollout.temperature, top_p or top_k: give 1, 1 and 0",
        )


def _opd(config: OpdSettings) -> Iterator[Problem]:
    loss, updates = config.loss, config.updates
    long_term = isinstance(loss, MiniLlmOpd) and loss.discount > 0
    shown = f"{loss.form} with discount > 0" if long_term else loss.form
    if config.sampled_by == "teacher" and (long_term or isinstance(loss, PolicyGradientOpd | OverlapOpd)):
        yield (
            "config.sampled_by",
            f"teacher, and form {shown} is a policy gradient: it needs the student's own samples; the forms that need "
            "none are topk, full_vocab, forward_kl, jsd and minillm with discount: 0",
        )
    if (long_term or isinstance(loss, OverlapOpd)) and updates > 1:
        yield (
            "config.loss.form",
            f"{shown} has no ratio to the policy that sampled, and there are {updates} optimizer steps per rollout "
            "batch: make train.global_batch_size equal to rollout.prompts x rollout.group_size",
        )
    steps = config.extrapolation.steps if config.extrapolation else []
    if twice := next((step for step in steps if steps.count(step) > 1), None):
        yield "config.extrapolation.steps", f"{twice} is there twice; name it once"
    if config.extrapolation and (late := max(config.extrapolation.steps)) > config.train.max_steps:
        yield (
            "config.extrapolation.steps",
            f"{late} is never reached: train.max_steps is {config.train.max_steps}",
        )
