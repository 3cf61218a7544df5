"""Settings of a loss that contradict one another: each is refused by its key, with the reason."""

import pytest
from recipes import recipe, tree

from opdctl.errors import ConfigError
from opdctl.pipeline import expand

M, F = "stages.max.config", "stages.fuse.config"
INPUTS = "stages.fuse.inputs"
REINFORCE, SEQUENCE = {"form": "reinforce"}, {"form": "clip", "level": "sequence"}
ONE_STEP = {f"{M}.train.global_batch_size": 16}  # of the 16 sequences of a rollout batch
TWO_STEPS = {f"{F}.train.global_batch_size": 4}  # of 8
DIS = {"rule": "dis", "low": 0.3, "high": 5.0}
ON_CURRENT = {"rule": "icepop", "low": 0.5, "high": 2.0, "policy": "current"}
KL = {"estimator": "k3", "coef": 0.1, "placement": "reward"}


def icepop(low, high):
    return {"rule": "icepop", "low": low, "high": high}


def policy_gradient(**more):
    return {"form": "policy_gradient", "max_advantage": 5.0, **more}


BAD = [
    ({f"{M}.surrogate": REINFORCE}, f"{M}.surrogate.form", "reinforce has no ratio, and with 2 optimizer steps"),
    ({f"{M}.mismatch": DIS}, f"{M}.mismatch.rule", "dis weighs by pi_theta / pi_infer"),
    ({f"{M}.mismatch": ON_CURRENT}, f"{M}.mismatch.rule", "icepop with policy: current weighs by pi_theta / pi_infer"),
    (
        {f"{M}.mismatch": DIS, f"{M}.surrogate": {"form": "cispo", "high": 0.3}},
        f"{M}.mismatch.rule",
        "the ratio of surrogate form cispo already: it would count twice",
    ),
    ({f"{M}.surrogate": SEQUENCE}, f"{M}.aggregation", "token_mean counts a sequence by its length"),
    ({f"{M}.surrogate": SEQUENCE, f"{M}.aggregation": "constant"}, f"{M}.aggregation", "constant counts a sequence by"),
    ({f"{M}.mismatch": icepop(5.0, 0.5)}, f"{M}.mismatch.low", "5 is above high, 0.5"),
    ({f"{M}.mismatch": icepop(1.5, 5.0)}, f"{M}.mismatch.low", "low 1.5 to high 5 does not hold 1"),
    ({f"{M}.mismatch": icepop(0.2, 0.5)}, f"{M}.mismatch.high", "low 0.2 to high 0.5 does not hold 1"),
    ({f"{M}.mismatch": {"rule": "sequence_mask", "low": 2.0, "high": 1.1}}, f"{M}.mismatch.low", "2 is above high, 1"),
    ({f"{M}.mismatch": {"rule": "tis", "floor": 3.0, "cap": 2.0}}, f"{M}.mismatch.floor", "3 is above cap, 2"),
    ({f"{M}.mismatch": {"rule": "tis", "cap": 0.5}}, f"{M}.mismatch.cap", "floor 0 to cap 0.5 does not hold 1"),
    ({f"{M}.mismatch": DIS | {"low": 0.0}, f"{M}.surrogate": REINFORCE}, f"{M}.mismatch.low", "must be greater than 0"),
    (ONE_STEP | {f"{M}.mismatch": {"rule": "opsm", "delta": 0.1}}, f"{M}.mismatch.rule", "opsm drops sequences that"),
    (
        {f"{M}.kl": KL, f"{M}.dynamic_sampling": {"max_rounds": 2}, "stages.max.inputs.reference": "stage:sft"},
        f"{M}.dynamic_sampling",
        "replaces groups whose rewards are all equal, and kl.placement: reward",
    ),
    ({f"{M}.kl": {"coef": 0.1}}, f"{M}.kl.coef", "0.1 would not be read: kl.estimator is none"),
    (
        {f"{F}.loss": policy_gradient(outcome_weight=0.5), f"{F}.rollout.group_size": 1, f"{F}.rollout.prompts": 8},
        f"{F}.loss.outcome_weight",
        "0.5 adds an advantage that compares the completions of a group",
    ),
    (
        {f"{F}.loss": policy_gradient(mismatch=icepop(0.5, 2.0)), f"{F}.rollout.temperature": 0.8},
        f"{F}.loss.mismatch",
        "compares the policy with the sampler, and the sampler drew from another distribution",
    ),
    (
        TWO_STEPS | {f"{F}.loss": policy_gradient(surrogate=REINFORCE)},
        f"{F}.loss.surrogate.form",
        "reinforce has no ratio, and with 2 optimizer steps",
    ),
    (
        {f"{F}.loss": policy_gradient(surrogate=SEQUENCE), f"{F}.aggregation": "token_mean"},
        f"{F}.aggregation",
        "token_mean counts a sequence by its length",
    ),
    ({f"{F}.loss": policy_gradient(), f"{F}.sampled_by": "teacher"}, f"{F}.sampled_by", "form policy_gradient is"),
    ({f"{F}.loss": {"form": "overlap", "k": 2}, f"{F}.sampled_by": "teacher"}, f"{F}.sampled_by", "form overlap is a"),
    (
        {f"{F}.loss": {"form": "minillm", "discount": 0.5}, f"{F}.sampled_by": "teacher"},
        f"{F}.sampled_by",
        "form minillm with discount > 0 is a policy gradient",
    ),
    (TWO_STEPS | {f"{F}.loss": {"form": "overlap", "k": 2}}, f"{F}.loss.form", "overlap has no ratio to the policy"),
    (
        TWO_STEPS | {f"{F}.loss": {"form": "minillm", "discount": 0.5}},
        f"{F}.loss.form",
        "minillm with discount > 0 has no ratio to the policy that sampled",
    ),
    (
        {f"{F}.loss": policy_gradient(margin={"margin": 0.4}), f"{F}.rollout.group_size": 1, f"{F}.rollout.prompts": 8},
        f"{F}.loss.margin",
        "compares the right with the wrong completions of a group",
    ),
    ({f"{F}.loss": {"form": "overlap", "k": 6}}, f"{F}.loss.k", "6, but the vocabulary has 5 words"),
    (
        {f"{F}.loss": policy_gradient(teacher_scale=1.25)},
        f"{INPUTS}.reference",
        "required, and not set: config.loss.teacher_scale is 1.25",
    ),
    (
        {f"{F}.loss": policy_gradient(), f"{INPUTS}.reference": "stage:sft"},
        f"{INPUTS}.reference",
        "would not be read: config.loss.teacher_scale is 1",
    ),
    (
        {f"{INPUTS}.reference": "stage:sft"},
        f"{INPUTS}.reference",
        "would not be read: config.loss.form is full_vocab",
    ),
    (
        {f"{F}.extrapolation": {"steps": [1, 1], "scales": [2.0], "prompts": 8}},
        f"{F}.extrapolation.steps",
        "1 is there twice; name it once",
    ),
    (
        {f"{F}.extrapolation": {"steps": [1, 64], "scales": [2.0], "prompts": 8}},
        f"{F}.extrapolation.steps",
        "64 is never reached: train.max_steps is",
    ),
]  # fmt: skip
GOOD = [
    {f"{F}.loss": policy_gradient(teacher_scale=1.25, margin={"margin": 0.4}), f"{INPUTS}.reference": "stage:sft"},
    {f"{F}.loss": {"form": "overlap", "k": 5}},
    {f"{F}.extrapolation": {"steps": [1], "scales": [2.0], "prompts": 8}},
    ONE_STEP | {f"{M}.surrogate": REINFORCE},
    {f"{M}.surrogate": REINFORCE, f"{M}.mismatch": DIS},
    {f"{M}.surrogate": REINFORCE, f"{M}.mismatch": ON_CURRENT},
    {f"{M}.surrogate": SEQUENCE, f"{M}.aggregation": "sequence_mean"},
    {f"{M}.mismatch": {"rule": "opsm", "delta": 0.1}},
    {f"{M}.mismatch": icepop(1.0, 1.0)},
    {f"{F}.loss": policy_gradient(outcome_weight=0.5, surrogate=REINFORCE, mismatch=ON_CURRENT)},
    {f"{F}.loss": {"form": "full_vocab"}, f"{F}.sampled_by": "teacher"},
    TWO_STEPS | {f"{F}.loss": {"form": "minillm", "discount": 0.0}, f"{F}.sampled_by": "teacher"},
]


@pytest.mark.parametrize(("changes", "key", "text"), BAD, ids=[f"{key}-{text[:20]}" for _, key, text in BAD])
def test_a_contradiction_is_refused_by_its_key(changes, key, text):
    with pytest.raises(ConfigError) as caught:
        expand(tree(changes))
    assert any(
        given.startswith(f"{place}: ") and text in given for given in caught.value.problems for place in places(key)
    )


def places(key):
    """A problem of a fan-out is told for the stage, or for its first instance."""
    head, _, rest = key.partition(".config")
    return [key, *(f"{head}[domain={domain}].config{rest}" for domain in ("math", "code"))]


@pytest.mark.parametrize("changes", GOOD, ids=str)
def test_what_makes_sense_is_not_refused(changes):
    assert recipe(changes).stages
