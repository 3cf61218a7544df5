"""Every surrogate and rule of the settings is one of verl's, or one of the plug-in's; verl's own keys say which."""

import pytest
from backends.verl import examples

from opdctl.backends.verl import data, render

ACTOR, CORRECTION = "actor_rollout_ref.actor", "algorithm.rollout_correction"


def overrides(config, kind="rlvr", **more):
    command = render.command(examples.spec(kind, config=config, **more))
    return dict(argument.lstrip("+").split("=", 1) for argument in command.argv if "=" in argument)


@pytest.mark.parametrize(
    ("surrogate", "loss", "bounds"),
    [
        ({"form": "clip", "low": 0.1, "high": 0.3}, "vanilla", ("0.1", "0.3", "1000000000.0")),
        ({"form": "clip", "low": 0.1, "high": 0.3, "dual": 4.0}, "vanilla", ("0.1", "0.3", "4.0")),
        (
            {"form": "clip", "low": 3e-4, "high": 4e-4, "level": "sequence"},
            "gspo",
            ("0.0003", "0.0004", "1000000000.0"),
        ),
        ({"form": "cispo", "high": 0.5}, "cispo", ("1.0", "0.5", "1000000000.0")),
        ({"form": "reinforce"}, "opdctl_policy_loss", ("0.2", "0.2", "1000000000.0")),
        (
            {"form": "log_ratio_clip", "low": -1.0, "high": 1.0, "square": 0.1},
            "opdctl_policy_loss",
            ("0.2", "0.2", "1000000000.0"),
        ),
    ],
)
def test_a_surrogate_has_a_loss_and_its_bounds(surrogate, loss, bounds):
    given = overrides({"surrogate": surrogate})
    assert given[f"{ACTOR}.policy_loss.loss_mode"] == loss
    assert tuple(given[f"{ACTOR}.clip_ratio_{name}"] for name in ("low", "high", "c")) == bounds


@pytest.mark.parametrize(
    ("rule", "level", "threshold", "bypass"),
    [
        (None, "null", "2.0", "false"),
        ({"rule": "tis", "cap": 2.5}, "token", "2.5", "false"),
        ({"rule": "icepop", "low": 0.5, "high": 5.0}, "token", "'0.5_5.0'", "false"),
        ({"rule": "icepop", "low": 0.5, "high": 2.0, "policy": "current"}, "null", "2.0", "true"),
        ({"rule": "dis", "low": 0.3, "high": 4.0}, "null", "2.0", "true"),
    ],
)
@pytest.mark.parametrize("kind", ["rlvr", "opd"])
def test_a_rule_is_verls_correction_or_reads_the_sampler(kind, rule, level, threshold, bypass):
    loss = {"form": "policy_gradient", "max_advantage": 5.0, "surrogate": {"form": "reinforce"}, "mismatch": rule}
    given = overrides({"loss": loss} if kind == "opd" else {"mismatch": rule, "surrogate": {"form": "reinforce"}}, kind)
    assert given[f"{CORRECTION}.rollout_is"] == level
    assert given[f"{CORRECTION}.rollout_is_threshold"] == threshold
    assert given[f"{CORRECTION}.bypass_mode"] == bypass


def test_a_stages_own_rule_goes_before_that_of_asynchronous_rollouts():
    given = overrides({"mismatch": {"rule": "tis", "cap": 3.0}}, verl={"mode": "async"})
    assert given[f"{CORRECTION}.rollout_is_threshold"] == "3.0"
    assert overrides({}, verl={"mode": "async"})[f"{CORRECTION}.rollout_is_threshold"] == "'0.5_5.0'"


def test_the_outcomes_advantage_is_the_stages_where_the_loss_weighs_it():
    loss = {"form": "policy_gradient", "max_advantage": 5.0, "outcome_weight": 0.5, "outcome_advantage": "mean"}
    assert overrides({"loss": loss}, "opd")["algorithm.adv_estimator"] == "opdctl_mean"
    assert overrides({"loss": loss | {"outcome_weight": 0.0}}, "opd")["algorithm.adv_estimator"] == "grpo"


def test_overlap_asks_the_teacher_for_its_top_k():
    given = overrides({"loss": {"form": "overlap", "k": 8}}, "opd")
    assert given["distillation.distillation_loss.topk"] == "8"
    assert given["distillation.teacher_models.t0.inference.engine_kwargs.vllm.max_logprobs"] == "8"


def test_the_plug_in_is_told_what_the_stage_says(tmp_path):
    rule = {"rule": "dis", "low": 0.3, "high": 4.0}
    spec = examples.spec(
        "rlvr", config={"surrogate": {"form": "reinforce"}, "mismatch": rule, "max_advantage": 20.0}, new_model=None
    )
    told = data.rl_settings(spec)
    assert told["policy_loss"] == {"surrogate": {"form": "reinforce"}, "mismatch": rule}
    assert told["max_advantage"] == 20.0
