import subprocess
import sys

import pytest

from opdctl.formulas import describe_merge, describe_opd, describe_rlvr
from opdctl.settings import OpdSettings, RlvrSettings
from opdctl.settings.merge import MergeSettings

DATA = {"tasks": ["math"]}
ROLLOUT = {"prompts": 8, "group_size": 4, "max_prompt_tokens": 32, "max_completion_tokens": 24}
TRAIN = {"max_steps": 10, "global_batch_size": 8, "optimizer": {"lr": 1e-3}}
COMMON = {"data": DATA, "rollout": ROLLOUT, "train": TRAIN}


def rlvr(**changed):
    return describe_rlvr(RlvrSettings.model_validate({**COMMON, **changed}))


def opd(loss, **changed):
    return describe_opd(
        OpdSettings.model_validate({**COMMON, "loss": loss, "route_by": ["domain", "effort"], **changed})
    )


def test_rlvr_shows_its_clip_its_advantage_and_its_aggregation():
    text = rlvr(surrogate={"form": "clip", "low": 0.2, "high": 0.28}, advantage="leave_one_out", aggregation="constant")
    assert text == (
        "-min(r A, clip(r, 0.8, 1.28) A), r = pi/pi_old, A = r - mean(others of the group), group of 4; "
        "token sum / 24, mean over sequences"
    )


@pytest.mark.parametrize(
    ("placement", "shown"), [("loss", "loss + 0.05 KL(pi || pi_ref)"), ("reward", "reward - 0.05 KL(")]
)
def test_rlvr_shows_where_its_kl_goes(placement, shown):
    assert shown in rlvr(kl={"estimator": "k3", "coef": 0.05, "placement": placement})


def test_rlvr_shows_what_changes_its_rewards_and_groups():
    budget = {"samples": 4, "percentile": 50, "over": "finished", "effort": "max"}
    text = rlvr(
        effort={"tau": 0.5, "tau_from": 2.0, "budget": budget},
        overlong={"handling": "soft_penalty", "buffer_tokens": 6},
        dynamic_sampling={"max_rounds": 3},
    )
    assert "reward -1 if T(y) > tau b0(x), tau 2 -> 0.5" in text
    constant = {"tau": 0.5, "tau_from": 0.5, "budget": budget}
    assert "tau b0(x), tau 0.5" in rlvr(effort=constant).replace("\n", "; ")
    assert "->" not in rlvr(effort=constant)
    assert "reward falls by 1 over the last 6 tokens" in text
    assert "tied groups replaced, up to 3 rollout batches" in text
    assert text.count("\n") == 1


@pytest.mark.parametrize(
    ("loss", "formula", "support"),
    [
        ({"form": "policy_gradient", "max_advantage": 5}, "A = clip(log(pi_T/pi), -5, 5)", "sampled token"),
        ({"form": "topk", "k": 8}, "sum_S pi log(pi/pi_T) + sum_S (pi_T - pi)", "teacher's top 8"),
        ({"form": "topk", "k": 8, "rest": "lumped_tail"}, "+ P log(P/P_T), P = 1 - sum_S pi", "teacher's top 8"),
        ({"form": "full_vocab"}, "sum_v pi log(pi/pi_T)", "whole vocabulary"),
    ],
)
def test_opd_shows_its_formula_direction_support_and_routing(loss, formula, support):
    text = opd(loss)
    assert formula in text
    assert f"reverse KL(pi || pi_T) on the student's rollouts, support: {support}" in text
    assert text.endswith("teacher by domain, effort")


def test_opd_shows_its_aggregation():
    assert "mean over sequences of their token means" in opd({"form": "full_vocab"})
    assert "mean over all tokens" in opd({"form": "full_vocab"}, aggregation="token_mean")


def test_formulas_need_no_torch():
    code = "import sys, opdctl.formulas; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def merged(how, weights=(1.0, 1.0)):
    settings = MergeSettings.model_validate({"merge": how, "precision": "bfloat16"})
    return describe_merge(settings, weights).splitlines()


@pytest.mark.parametrize(
    ("how", "formula"),
    [
        ({"method": "linear"}, "sum w_i theta_i / sum w_i"),
        ({"method": "convex"}, "sum w_i theta_i, sum w_i = 1"),
        ({"method": "task_arithmetic", "scale": 0.4}, "theta_0 + 0.4 sum w_i t_i, t_i = theta_i - theta_0"),
        (
            {"method": "ties", "density": 0.2, "scale": 1.0},
            "theta_0 + 1 sum w_i t'_i a_i / sum w_i a_i, t_i = theta_i - theta_0; t'_i: largest 0.2 of t_i; "
            "a_i: t'_i has the sign of sum w_i t'_i",
        ),
        (
            {"method": "dare", "drop_rate": 0.9, "scale": 1.0},
            "theta_0 + 1 sum w_i t'_i, t_i = theta_i - theta_0; "
            "t'_i: t_i dropped at random with p = 0.9, the rest / (1 - p)",
        ),
        (
            {"method": "longcat_fusion", "norm": "l2", "scope": "model", "drop_rate": 0.5, "rescale": False,
             "combine": "sum", "scale": 1.0},
            "theta_0 + 1 sum w_i t'_i a_i, t_i = theta_i - theta_0; t'_i: t_i of one l2 norm a model, dropped at "
            "random with p = 0.5; a_i: t'_i has the sign of sum w_i t'_i",
        ),
    ],
)  # fmt: skip
def test_a_merge_shows_its_formula(how, formula):
    assert merged(how)[0] == formula


def test_a_merge_shows_weights_and_precision():
    assert merged({"method": "linear"}, [0.25, 2])[1] == "w = 0.25, 2; computed in float32, published in bfloat16"
