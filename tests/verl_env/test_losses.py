"""The plug-in's losses where verl calls them, and verl's own, against `opdctl.engine` on the same tensors."""

import pytest
import torch
from torch.testing import assert_close
from verl.trainer.distillation.losses import distillation_ppo_loss
from verl.trainer.ppo.core_algos import agg_loss, kl_penalty
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights
from verl.utils import tensordict_utils
from verl.workers.utils.losses import ppo_loss
from verl_batch import VOCABULARY, Batch, actor, distillation, padded

from opdctl.engine import losses, vocab
from opdctl.errors import OpdctlError

CLIP = {"form": "clip", "low": 0.2, "high": 0.2}
MODES = {"sequence_mean": "seq-mean-token-mean", "token_mean": "token-mean", "constant": "seq-mean-token-sum-norm"}


@pytest.fixture(autouse=True)
def nothing_told(tell):
    tell({})


def close(found, wanted):
    assert_close(found, wanted, atol=1e-6, rtol=1e-6)


def told(form="policy_gradient", **more):
    weights = {"t0": 1.0, "t1": 1.0}
    opd = {"form": form, "max_advantage": 0.5, "rest": "correction", "weights": weights, "outcome_weight": 0.0}
    return {"opd": opd | {"surrogate": CLIP, "mismatch": None} | more}


def through_verl(batch, config, distill, data):
    """(loss, metrics, gradient of the logits) of a micro-batch, called as an engine does."""
    output = batch.model_output()
    if distill.distillation_loss.loss_settings.use_topk:
        logits_1NV = batch.logits_NV[None]
        made = distillation_ppo_loss(config, distill, data=data, student_logits=logits_1NV, data_format="thd")
        offsets = data["input_ids"].offsets()
        output |= {name: torch.nested.nested_tensor_from_jagged(value[0], offsets) for name, value in made.items()}
    loss, metrics = distillation_ppo_loss(config, distill, model_output=output, data=data)
    return loss, metrics, torch.autograd.grad(loss, batch.logits_NV)[0]


def aggregated(batch, loss_M, how, weights_M=None):
    return losses.aggregate(
        loss_M,
        batch.sequence_M,
        how=how,
        total_tokens=len(loss_M),
        total_sequences=len(batch.completions),
        constant=8.0,
        weights_N=weights_M,
    )


def policy_gradient(batch, how, *, alpha=0.0, weights_M=None, clip=0.2):
    policy_M = batch.logprobs_M(batch.logits_NV.log_softmax(-1))
    advantages_M = losses.opd_advantage(batch.logprobs_M(batch.teacher_NV), policy_M, 0.5)
    advantages_M = advantages_M + alpha * batch.outcome[batch.sequence_M]
    loss_M, _ = losses.clipped_policy_loss(policy_M, batch.old_M, advantages_M, low=clip, high=clip)
    loss = aggregated(batch, loss_M, how, weights_M)
    return loss, torch.autograd.grad(loss, batch.logits_NV)[0]


# ------------------------------------------------------------------------------------------------- policy gradient


@pytest.mark.parametrize("layout", [lambda data: data, padded], ids=["nested", "padded"])
@pytest.mark.parametrize("how", ["sequence_mean", "token_mean"])
def test_policy_gradient_in_verl_is_the_engines(tell, layout, how):
    tell(told())
    batch, config = Batch(), actor(loss_agg_mode=MODES[how])
    loss, _, gradient = through_verl(batch, config, distillation("opdctl_policy_gradient"), layout(batch.data()))
    wanted, wanted_gradient = policy_gradient(batch, how)
    close(loss, wanted)
    close(gradient, wanted_gradient)
    assert gradient.abs().max() > 1e-3


def test_micro_batches_add_up_to_the_batch(tell):
    tell(told())
    batch, config = Batch(), actor(loss_agg_mode="token-mean")
    data, output = batch.data(), batch.model_output()["log_probs"].unbind()
    total = torch.zeros(())
    for rows in ([0, 3], [1, 2]):
        part = torch.nested.as_nested_tensor([output[row] for row in rows], layout=torch.jagged)
        distill = distillation("opdctl_policy_gradient")
        chosen = tensordict_utils.index_select_tensor_dict(data, rows)
        total = total + distillation_ppo_loss(config, distill, model_output={"log_probs": part}, data=chosen)[0]
    close(total, policy_gradient(batch, "token_mean")[0])


def test_the_ratio_clip_is_the_stages(tell):
    tell(told(surrogate={"form": "clip", "low": 0.05, "high": 0.05}))
    batch, distill = Batch(), distillation("opdctl_policy_gradient")
    _, metrics, gradient = through_verl(batch, actor(loss_agg_mode="token-mean"), distill, batch.data())
    close(gradient, policy_gradient(batch, "token_mean", clip=0.05)[1])
    assert metrics["distillation/ratio_clip_fraction"].aggregate() > 0


def test_the_outcome_joins_the_advantage(tell):
    tell(told(outcome_weight=0.7))
    batch, config = Batch(), actor(loss_agg_mode="token-mean")
    loss, _, gradient = through_verl(batch, config, distillation("opdctl_policy_gradient"), batch.data())
    wanted, wanted_gradient = policy_gradient(batch, "token_mean", alpha=0.7)
    close(loss, wanted)
    close(gradient, wanted_gradient)
    assert not torch.allclose(loss, policy_gradient(batch, "token_mean")[0])


def test_without_a_bound_the_advantage_is_the_whole_log_ratio(tell):
    tell(told(max_advantage=None))
    batch, distill = Batch(), distillation("opdctl_policy_gradient")
    _, metrics, gradient = through_verl(batch, actor(loss_agg_mode="token-mean"), distill, batch.data())
    policy_M = batch.logprobs_M(batch.logits_NV.log_softmax(-1))
    advantages_M = (batch.logprobs_M(batch.teacher_NV) - policy_M).detach()
    loss_M, _ = losses.clipped_policy_loss(policy_M, batch.old_M, advantages_M, low=0.2, high=0.2)
    close(gradient, torch.autograd.grad(loss_M.mean(), batch.logits_NV)[0])
    assert metrics["distillation/clip_fraction"].aggregate() == 0


@pytest.mark.parametrize("mode", ["opdctl_policy_gradient", "opdctl_reverse_kl_topk"])
def test_a_teachers_weight_scales_its_rows(tell, mode):
    tell(told(weights={"t0": 0.25, "t1": 2.0}))
    batch, config = Batch(k=5, routes=("t0", "t1", "t1", "t0")), actor(loss_agg_mode="token-mean")
    if mode == "opdctl_policy_gradient":
        batch.k = 1
    _, _, gradient = through_verl(batch, config, distillation(mode, topk=batch.k), batch.data())
    tell(told())
    _, _, even = through_verl(batch, config, distillation(mode, topk=batch.k), batch.data())
    factors = torch.tensor([0.25, 2.0, 2.0, 0.25]).repeat_interleave(torch.tensor(batch.lengths))
    close(gradient, even * factors[:, None])


def test_verls_correction_for_the_sampler_multiplies_the_loss(tell):
    tell(told())
    batch, config = Batch(), actor(loss_agg_mode="token-mean")
    data = batch.data()
    weights_M = torch.linspace(0, 2, sum(batch.completions))
    parts = weights_M.split(batch.completions)
    data["rollout_is_weights"] = torch.nested.as_nested_tensor(list(parts), layout=torch.jagged)
    _, _, gradient = through_verl(batch, config, distillation("opdctl_policy_gradient"), data)
    close(gradient, policy_gradient(batch, "token_mean", weights_M=weights_M)[1])


def test_a_masked_token_is_out_of_the_loss(tell):
    tell(told())
    batch, config = Batch(), actor(loss_agg_mode="token-mean")
    data = batch.data()
    data["response_mask"].values()[2] = 0
    _, _, gradient = through_verl(batch, config, distillation("opdctl_policy_gradient"), data)
    weights_M = torch.ones(sum(batch.completions))
    weights_M[2] = 0
    close(gradient, policy_gradient(batch, "token_mean", weights_M=weights_M)[1])


def test_metrics_are_means_over_tokens(tell):
    tell(told())
    batch, config = Batch(), actor(loss_agg_mode="seq-mean-token-mean")
    _, metrics, _ = through_verl(batch, config, distillation("opdctl_policy_gradient"), batch.data())
    gap_M = batch.logprobs_M(batch.logits_NV.log_softmax(-1)) - batch.logprobs_M(batch.teacher_NV)
    assert metrics["distillation/reverse_kl"].aggregate() == pytest.approx(gap_M.mean().item(), abs=1e-6)
    share = (gap_M.abs() >= 0.5).float().mean().item()
    assert metrics["distillation/clip_fraction"].aggregate() == pytest.approx(share, abs=1e-6)


@pytest.mark.parametrize(
    "settings", [{"use_task_rewards": True}, {"use_policy_gradient": True}, {"loss_max_clamp": 10.0}], ids=str
)
@pytest.mark.parametrize("mode", ["opdctl_policy_gradient", "opdctl_reverse_kl_topk"])
def test_settings_that_would_change_the_loss_are_refused(tell, mode, settings):
    tell(told())
    batch = Batch(k=5 if "topk" in mode else 1)
    with pytest.raises(OpdctlError, match=f"{mode} is the whole loss"):
        through_verl(batch, actor(), distillation(mode, topk=5, **settings), batch.data())


# ------------------------------------------------------------------------------------------------------------ top-k


def topk(batch, how, rest):
    at = batch.positions_M
    top = batch.teacher_NV[at].topk(batch.k)
    ones, total = torch.eye(VOCABULARY), len(at)
    weights_M = losses.token_weights(
        batch.sequence_M, how=how, total_tokens=total, total_sequences=len(batch.completions)
    )
    hidden_MV = batch.logits_NV[at]
    loss, _ = vocab.topk_reverse_kl(hidden_MV, ones, top.indices, top.values, rest=rest, weights_N=weights_M)
    return loss, torch.autograd.grad(loss, batch.logits_NV)[0]


@pytest.mark.parametrize("layout", [lambda data: data, padded], ids=["nested", "padded"])
@pytest.mark.parametrize("how", ["sequence_mean", "token_mean"])
@pytest.mark.parametrize("rest", ["correction", "lumped_tail"])
@pytest.mark.parametrize("k", [5, VOCABULARY])
def test_topk_in_verl_is_the_engines(tell, layout, how, rest, k):
    tell(told(rest=rest))
    batch, config = Batch(k=k), actor(loss_agg_mode=MODES[how])
    loss, metrics, gradient = through_verl(
        batch, config, distillation("opdctl_reverse_kl_topk", topk=k), layout(batch.data())
    )
    wanted, wanted_gradient = topk(batch, how, rest)
    close(loss, wanted)
    close(gradient, wanted_gradient)
    assert gradient.abs().max() > 1e-3
    if k == VOCABULARY:
        assert metrics["distillation/overlap"].aggregate() == pytest.approx(1.0)


def test_topk_by_chunks_of_tokens_is_the_same(tell, monkeypatch):
    from opdctl.backends.verl.plugin import losses as plugin

    tell(told())
    monkeypatch.setattr(plugin, "CHUNK_BYTES", 4 * VOCABULARY * 3)
    batch = Batch(k=5)
    distill = distillation("opdctl_reverse_kl_topk", topk=5)
    loss, _, gradient = through_verl(batch, actor(loss_agg_mode="token-mean"), distill, batch.data())
    wanted, wanted_gradient = topk(batch, "token_mean", "correction")
    close(loss, wanted)
    close(gradient, wanted_gradient)


def test_topk_of_bfloat16_logits_is_computed_in_float32(tell):
    from opdctl.backends.verl.plugin.losses import topk_of_logits

    tell(told())
    batch = Batch(k=5)
    rounded_NV = batch.logits_NV.detach().bfloat16()
    data = batch.data()
    given = data["teacher_logprobs"], data["teacher_ids"], None, "thd"
    narrow = topk_of_logits(rounded_NV[None], *given)["distillation_losses"]
    close(narrow, topk_of_logits(rounded_NV.float()[None], *given)["distillation_losses"])


def test_other_topk_losses_stay_verls_own(tell):
    batch = Batch(k=VOCABULARY)
    distill = distillation("forward_kl_topk", topk=VOCABULARY)
    loss, metrics, gradient = through_verl(batch, actor(loss_agg_mode="token-mean"), distill, batch.data())
    policy_MV, teacher_MV = batch.logits_NV.log_softmax(-1)[batch.positions_M], batch.teacher_NV[batch.positions_M]
    wanted = (teacher_MV.exp() * (teacher_MV - policy_MV)).sum(-1).mean()
    close(loss, wanted)
    close(gradient, torch.autograd.grad(wanted, batch.logits_NV)[0])
    assert "distillation/overlap_ratio" in metrics


def test_topk_on_megatron_is_refused(tell):
    from opdctl.backends.verl.plugin.losses import reverse_kl_topk

    tell(told())
    batch, config = Batch(k=5), actor()
    object.__setattr__(config, "strategy", "megatron")
    with pytest.raises(OpdctlError, match="megatron splits"):
        reverse_kl_topk(config, distillation("opdctl_reverse_kl_topk", topk=5), {}, batch.data())


@pytest.mark.parametrize(
    ("mode", "k"),
    [("opdctl_policy_gradient", 1), ("opdctl_reverse_kl_topk", 5), ("opdctl_reverse_kl_topk", VOCABULARY)],
)
@pytest.mark.parametrize("rest", ["correction", "lumped_tail"])
def test_a_teacher_equal_to_the_student_teaches_nothing(tell, mode, k, rest):
    tell(told(rest=rest))
    batch = Batch(k=k)
    batch.teacher_NV = batch.logits_NV.detach().log_softmax(-1)
    loss, _, gradient = through_verl(batch, actor(), distillation(mode, topk=k), batch.data())
    close(loss, torch.zeros(()))
    close(gradient, torch.zeros_like(gradient))


# ------------------------------------------------------------------------------------------------------- verl's own


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_verls_kl_estimators_are_the_engines(estimator):
    batch = Batch()
    policy_M, teacher_M = batch.logprobs_M(batch.logits_NV.log_softmax(-1)), batch.logprobs_M(batch.teacher_NV)
    found = kl_penalty(policy_M, teacher_M, estimator)
    wanted = losses.kl_penalty(policy_M, teacher_M, estimator)
    close(found, wanted)
    pair = [torch.autograd.grad(value.sum(), batch.logits_NV, retain_graph=True)[0] for value in (found, wanted)]
    close(*pair)


def test_verls_k1_distillation_is_the_engines_without_a_clip_of_the_advantage(tell):
    batch = Batch()
    batch.old_noise.zero_()
    distill = distillation("k1", use_policy_gradient=True)
    _, _, gradient = through_verl(batch, actor(loss_agg_mode="token-mean"), distill, batch.data())
    policy_M = batch.logprobs_M(batch.logits_NV.log_softmax(-1))
    advantages_M = losses.opd_advantage(batch.logprobs_M(batch.teacher_NV), policy_M, 1e9)
    loss_M, _ = losses.clipped_policy_loss(policy_M, batch.old_M, advantages_M, low=0.2, high=0.2)
    close(gradient, torch.autograd.grad(loss_M.mean(), batch.logits_NV)[0])


@pytest.mark.parametrize("how", list(MODES))
def test_verls_policy_loss_is_the_engines_once_its_second_clip_is_out_of_reach(how):
    batch = Batch()
    batch.old_noise *= 8  # ratios beyond 3, where the second clip acts
    config = actor(
        loss_agg_mode=MODES[how], loss_scale_factor=8, clip_ratio_low=0.2, clip_ratio_high=0.3, clip_ratio_c=1e9
    )
    loss, _ = ppo_loss(config, batch.model_output(), batch.data())
    policy_M = batch.logprobs_M(batch.logits_NV.log_softmax(-1))
    advantages_M = batch.outcome[batch.sequence_M]
    loss_M, _ = losses.clipped_policy_loss(policy_M, batch.old_M, advantages_M, low=0.2, high=0.3)
    wanted = aggregated(batch, loss_M, how)
    close(loss, wanted)
    pair = [torch.autograd.grad(value, batch.logits_NV, retain_graph=True)[0] for value in (loss, wanted)]
    close(*pair)


@pytest.mark.parametrize("how", list(MODES))
def test_verls_means_are_the_engines(how):
    batch = Batch()
    loss_M = torch.rand(sum(batch.completions))
    mask = batch.data()["response_mask"].to_padded_tensor(0)
    loss_BR = torch.nested.as_nested_tensor(list(loss_M.split(batch.completions)), layout=torch.jagged)
    found = agg_loss(
        loss_BR.to_padded_tensor(0.0),
        mask,
        MODES[how],
        batch_num_tokens=len(loss_M),
        global_batch_size=len(batch.completions),
        loss_scale_factor=8,
    )
    close(found, aggregated(batch, loss_M, how))


@pytest.mark.parametrize(
    ("threshold", "wanted"),
    [
        ("0.5_5.0", lambda ratio: losses.icepop_weight(ratio, 0.5, 5.0)),
        (2.0, lambda ratio: losses.tis_weight(ratio, 2.0)),
    ],
    ids=["icepop", "tis"],
)
def test_verls_weights_for_the_sampler_are_the_engines(threshold, wanted):
    log_ratio = torch.tensor([[0.499, 0.501, 1.0, 1.999, 4.999, 5.001, 10.0]]).log()
    found, _ = compute_rollout_correction_weights(
        log_ratio, torch.ones_like(log_ratio), rollout_is="token", rollout_is_threshold=threshold
    )
    close(found, wanted(log_ratio.exp()))
