"""The surrogates that verl has and those of the plug-in, where verl calls them, against `opdctl.engine`'s."""

import pytest
import torch
from pydantic import TypeAdapter
from torch.testing import assert_close
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights
from verl.workers.utils.losses import ppo_loss
from verl_batch import VOCABULARY, Batch, actor, distillation

from opdctl.backends.verl.overrides import Overrides
from opdctl.backends.verl.render_policy_loss import mismatch, surrogate
from opdctl.engine import divergences, losses
from opdctl.settings import Mismatch, Surrogate

SURROGATES = {
    "clip": {"form": "clip", "low": 0.1, "high": 0.3},
    "dual": {"form": "clip", "low": 0.1, "high": 0.3, "dual": 1.5},
    "gspo": {"form": "clip", "low": 0.05, "high": 0.1, "level": "sequence"},
    "cispo": {"form": "cispo", "high": 0.2},
    "kimi_k2_5": {"form": "log_ratio_clip", "low": -0.2, "high": 0.3, "square": 0.5},
    "reinforce": {"form": "reinforce"},
}
RULES = {
    "dis": {"rule": "dis", "low": 0.3, "high": 0.4},
    "current": {"rule": "icepop", "low": 0.6, "high": 1.5, "policy": "current"},
}
AGGREGATED = {"gspo": ("seq-mean-token-mean", "sequence_mean")}


def parsed(kind, given):
    return TypeAdapter(kind).validate_python(given)


def rendered(render, *given, **options):
    """What opdctl gives verl, last part of the key -> value."""
    overrides = Overrides()
    render(overrides, *given, **options)
    return {key.rpartition(".")[2]: value for key, value in overrides._values.items()}


def verl_loss(batch, given, data, mode):
    keys = rendered(surrogate, given, "actor", "config.surrogate")
    config = actor(loss_agg_mode=mode, **{key: value for key, value in keys.items() if key != "loss_mode"})
    object.__setattr__(config.policy_loss, "loss_mode", keys["loss_mode"])
    loss, metrics = ppo_loss(config, batch.model_output(), data)
    return loss, metrics, torch.autograd.grad(loss, batch.logits_NV)[0]


def engine_loss(batch, given, rule, how, infer_M=None):
    policy_M = batch.logprobs_M(batch.logits_NV.log_softmax(-1))
    old_M = batch.old_M
    loss_M, _ = losses.policy_loss(
        given,
        rule,
        policy_M,
        old_M,
        old_M if infer_M is None else infer_M,
        batch.outcome[batch.sequence_M],
        batch.sequence_M,
    )
    total = {"total_tokens": len(loss_M), "total_sequences": len(batch.completions)}
    loss = losses.aggregate(loss_M, batch.sequence_M, how=how, **total)
    return loss, torch.autograd.grad(loss, batch.logits_NV)[0]


@pytest.mark.parametrize("name", list(SURROGATES))
def test_a_surrogate_in_verl_is_the_engines(tell, name):
    tell({"policy_loss": {"surrogate": SURROGATES[name], "mismatch": None}})
    batch, given = Batch(), parsed(Surrogate, SURROGATES[name])
    batch.old_noise *= 3
    mode, how = AGGREGATED.get(name, ("token-mean", "token_mean"))
    loss, _, gradient = verl_loss(batch, given, batch.data(), mode)
    wanted, wanted_gradient = engine_loss(batch, given, None, how)
    assert_close(gradient, wanted_gradient, atol=1e-6, rtol=1e-5)
    if name != "cispo":  # whose value means nothing: only its gradient is defined alike
        assert_close(loss, wanted, atol=1e-6, rtol=1e-5)
    assert gradient.abs().max() > 1e-3


@pytest.mark.parametrize("name", list(RULES))
def test_a_rule_on_the_current_policy_reads_the_sampler_in_bypass_mode(tell, name):
    rule, reinforce = parsed(Mismatch, RULES[name]), parsed(Surrogate, SURROGATES["reinforce"])
    assert rendered(mismatch, rule, "config.mismatch", asynchronous=False)["bypass_mode"] is True
    tell({"policy_loss": {"surrogate": SURROGATES["reinforce"], "mismatch": RULES[name]}})
    batch = Batch()
    batch.old_noise *= 2  # in bypass mode verl's old_log_probs are the sampler's
    _, metrics, gradient = verl_loss(batch, reinforce, batch.data(), "token-mean")
    assert_close(gradient, engine_loss(batch, reinforce, rule, "token_mean")[1], atol=1e-6, rtol=1e-5)
    assert metrics["actor/mismatch_fraction"].aggregate() > 0


@pytest.mark.parametrize("given", [{"rule": "tis", "cap": 1.2}, {"rule": "icepop", "low": 0.8, "high": 1.2}], ids=str)
def test_verls_rollout_correction_weighs_as_the_engines_rule(given):
    rule = parsed(Mismatch, given)
    keys = rendered(mismatch, rule, "config.mismatch", asynchronous=False)
    batch, ones = Batch(), torch.ones(1, 14)
    log_k_M = 0.4 * torch.randn(14)
    weights, _ = compute_rollout_correction_weights(
        log_ratio=log_k_M[None],
        response_mask=ones,
        rollout_is=keys["rollout_is"],
        rollout_is_threshold=keys["rollout_is_threshold"],
    )
    policy_M = batch.logprobs_M(batch.logits_NV.detach().log_softmax(-1))
    loss_M, _ = losses.policy_loss(
        parsed(Surrogate, SURROGATES["clip"]),
        rule,
        policy_M,
        policy_M,
        policy_M - log_k_M,
        -torch.ones(14),
        batch.sequence_M,
    )
    assert_close(loss_M, weights[0], atol=1e-6, rtol=1e-5)


def test_keyes_overlap_in_verl_is_the_engines(tell):
    from test_losses import through_verl, told

    tell(told("overlap"))
    batch, config = Batch(k=5), actor(loss_agg_mode="token-mean")
    _, metrics, gradient = through_verl(batch, config, distillation("opdctl_overlap", topk=5), batch.data())
    at, ones = batch.positions_M, torch.eye(VOCABULARY)
    advantages_M, sizes_M = divergences.overlap_advantage(
        batch.logits_NV.detach()[at], ones, batch.teacher_NV[at], ones, k=5
    )
    policy_M = batch.logprobs_M(batch.logits_NV.log_softmax(-1))
    wanted = torch.autograd.grad(-(advantages_M * policy_M).mean(), batch.logits_NV)[0]
    assert_close(gradient, wanted, atol=1e-6, rtol=1e-5)
    assert metrics["distillation/overlap"].aggregate() == pytest.approx(sizes_M.mean().item() / 5, abs=1e-6)
