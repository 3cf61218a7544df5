import subprocess
import sys

import pytest

from opdctl.formulas import describe_merge, describe_opd, describe_rlvr
from opdctl.settings import OpdSettings, RlvrSettings
from opdctl.settings.merge import MergeSettings

DATA = {"tasks": ["math"]}
ROLLOUT = {"prompts": 8, "group_size": 4, "max_prompt_tokens": 32, "max_completion_tokens": 24}
TRAIN = {"max_steps": 10, "global_batch_size": 8, "optimizer": {"lr": 1e-3}}
REVERSE = "reverse KL(pi || pi_T)"
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
    ("surrogate", "shown"),
    [
        (
            {"form": "clip", "low": 0.2, "high": 0.28, "dual": 3},
            "-max(min(r A, clip(r, 0.8, 1.28) A), 3 A if A < 0), r = pi/pi_old",
        ),
        (
            {"form": "clip", "low": 0.0003, "high": 0.0004, "level": "sequence"},
            "-min(s A, clip(s, 0.9997, 1.0004) A), s = exp(mean over the sequence of log(pi/pi_old))",
        ),
        ({"form": "cispo", "high": 0.5}, "-sg(min(r, 1.5)) A log pi, r = pi/pi_old"),
        (
            {"form": "log_ratio_clip", "low": -0.5, "high": 0.6, "square": 0.1},
            "-exp(clip(log r, -0.5, 0.6)) A + 0.1 (log r)^2, r = pi/pi_old",
        ),
        ({"form": "reinforce"}, "-A log pi"),
    ],
)
def test_rlvr_shows_its_surrogate(surrogate, shown):
    assert rlvr(surrogate=surrogate).startswith(f"{shown}, A = ")


@pytest.mark.parametrize(
    ("mismatch", "shown"),
    [
        ({"rule": "tis", "floor": 0.2, "cap": 5}, "w = clip(k, 0.2, 5), k = pi_old/pi_infer"),
        ({"rule": "icepop", "low": 0.5, "high": 2}, "w = k if 0.5 <= k <= 2 else 0, k = pi_old/pi_infer"),
        (
            {"rule": "icepop", "low": 0.5, "high": 2, "policy": "current"},
            "w = q if 0.5 <= q <= 2 else 0, q = pi/pi_infer",
        ),
        ({"rule": "dis", "low": 0.3, "high": 5}, "w = q if 0.7 < q < 6 else 0, q = pi/pi_infer"),
        (
            {"rule": "opsm", "delta": 0.1},
            "w = 0 if A < 0 and mean over the sequence of log(pi_infer/pi) > 0.1 else 1",
        ),
        (
            {"rule": "sequence_mask", "low": 0.999, "high": 1.002},
            "w = 1 if 0.999 <= exp(mean over the sequence of log k) <= 1.002 else 0, k = pi_old/pi_infer",
        ),
    ],
)
def test_rlvr_shows_its_mismatch_rule(mismatch, shown):
    first, second = rlvr(mismatch=mismatch).splitlines()
    assert first == f"w [-min(r A, clip(r, 0.8, 1.2) A)], r = pi/pi_old, {shown}"
    assert second.startswith("A = ")


def test_rlvr_shows_how_its_advantages_are_clipped():
    text = rlvr(advantage="leave_one_out_std", max_advantage=20)
    assert "A = clip((r - mean(others of the group)) / (std(others) + 1e-6), -20, 20), group of 4" in text


@pytest.mark.parametrize(
    ("placement", "shown"), [("loss", "loss + 0.05 KL(pi || pi_ref)"), ("reward", "reward - 0.05 KL(")]
)
def test_rlvr_shows_where_its_kl_goes(placement, shown):
    assert shown in rlvr(kl={"estimator": "k3", "coef": 0.05, "placement": placement})


def test_rlvr_shows_who_judges():
    verdicts = {"good": 1.0, "bad": 0.0}
    judge = {"tasks": ["math"], "mode": "rubric", "by": "actor", "template": "{completion}", "verdicts": verdicts}
    shown = rlvr(grader=judge | {"max_tokens": 3})
    assert shown.endswith("mean over all tokens\nrewards of math by a rubric judge (actor)")


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
    ("loss", "formula", "distance", "support"),
    [
        ({"form": "policy_gradient", "max_advantage": 5}, "A = clip(log(pi_T/pi), -5, 5)", REVERSE, "sampled token"),
        ({"form": "policy_gradient", "max_advantage": None}, "A = log(pi_T/pi);", REVERSE, "sampled token"),
        ({"form": "topk", "k": 8}, "sum_S pi log(pi/pi_T) + sum_S (pi_T - pi)", REVERSE, "teacher's top 8"),
        (
            {"form": "topk", "k": 8, "rest": "lumped_tail"},
            "+ P log(P/P_T), P = 1 - sum_S pi",
            REVERSE,
            "teacher's top 8",
        ),
        ({"form": "full_vocab"}, "sum_v pi log(pi/pi_T)", REVERSE, "whole vocabulary"),
        ({"form": "forward_kl"}, "sum_v pi_T log(pi_T/pi)", "forward KL(pi_T || pi)", "whole vocabulary"),
        (
            {"form": "jsd", "beta": 0.25},
            "0.25 KL(pi_T || m) + 0.75 KL(pi || m), m = 0.25 pi_T + 0.75 pi",
            "generalised JSD(0.25) of pi_T and pi",
            "whole vocabulary",
        ),
        (
            {"form": "minillm", "discount": 0},
            "sum_v pi log(pi/pi_T);",
            f"{REVERSE} of the single step",
            "whole vocabul",
        ),
        (
            {"form": "minillm", "discount": 0.9},
            "- A log pi, A = sum_(j>t) 0.9^(j-t) log(pi_T/pi)_j /",
            REVERSE,
            "whole voc",
        ),
        (
            {"form": "overlap", "k": 8},
            "-A log pi, A = sum_S pi log(pi_T/pi) / sum_S pi",
            "overlap advantage (not the gradient of a KL)",
            "top 8 of both (S)",
        ),
    ],
)
def test_opd_shows_its_formula_direction_support_and_routing(loss, formula, distance, support):
    text = opd(loss)
    assert formula in text
    assert f"{distance} on the student's rollouts, support: {support}" in text
    assert text.endswith("teacher by domain, effort")


def test_opd_shows_what_makes_its_advantage():
    loss = {"form": "policy_gradient", "max_advantage": 5, "discount": 0.5, "outcome_weight": 0.3}
    assert (
        "A = sum_(j>=t) 0.5^(j-t) clip(log(pi_T/pi), -5, 5)_j + 0.3 x [(r - mean(group)) / (std(group) + 1e-6)] + "
        "a shift that keeps right 0.4 above wrong, pi_T: pi_ref (pi_T/pi_ref)^1.25;"
    ) in opd(loss | {"margin": {"margin": 0.4}, "teacher_scale": 1.25})


def test_opd_shows_surrogate_and_mismatch_rule():
    rule = {"rule": "icepop", "low": 0.5, "high": 2.0, "policy": "current"}
    loss = {"form": "policy_gradient", "max_advantage": 5, "surrogate": {"form": "reinforce"}, "mismatch": rule}
    assert opd(loss).startswith("w [-A log pi], w = q if 0.5 <= q <= 2 else 0, q = pi/pi_infer, A = clip(")


def test_opd_shows_who_samples_which_weights_and_what_is_left_out():
    settings = OpdSettings.model_validate(
        {
            **COMMON,
            "loss": {"form": "full_vocab"},
            "route_by": ["domain"],
            "sampled_by": "teacher",
            "balance": True,
            "extrapolation": {"steps": [1, 2], "scales": [2, 4], "prompts": 50},
        }
    )
    text = describe_opd(settings, {"math": 2.0, "code": 1.0})
    assert "on its teacher's rollouts (off-policy)" in text
    assert "times w: 2 math, 1 code; as many wrong as right completions; after steps 1, 2 the update" in text
    assert "stretched by 2, 4 while 50 held-out prompts" in text
    assert "times w" not in describe_opd(settings, {"math": 1.0})


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
