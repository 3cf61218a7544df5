"""A teacher that turns uniform while the student trains is noticed in the batch that it scores."""

import json
import math

import pytest
from verl.trainer.distillation.losses import distillation_ppo_loss
from verl_batch import VOCABULARY, Batch, actor, distillation

from opdctl.errors import OpdctlError

LOSSES = ["opdctl_policy_gradient", "opdctl_reverse_kl_topk"]


def loss(mode, batch, tell, failure):
    opd = {
        "max_advantage": 5.0,
        "rest": "correction",
        "weights": {"t0": 1.0, "t1": 1.0},
        "outcome_weight": 0.0,
        "surrogate": {"form": "clip"},
        "mismatch": None,
    }
    labels = {"t0": "max[domain=general]", "t1": "max[domain=code]"}
    tell({"opd": opd | {"labels": labels}, "failure": str(failure)})
    config, distill, data = actor(loss_agg_mode="token-mean"), distillation(mode, topk=batch.k), batch.data()
    output = batch.model_output()
    if mode == LOSSES[1]:
        output |= {"distillation_losses": output["log_probs"]}
    return distillation_ppo_loss(config, distill, model_output=output, data=data)


def batch_of(mode, lost, routes=("t0", "t1", "t0", "t1")):
    """Two sequences a teacher, of 40 tokens each; the teachers in `lost` give -ln V to every token."""
    batch = Batch(completions=(40, 40, 40, 40), k=1 if mode == LOSSES[0] else 5, routes=routes)
    for route, part in zip(routes, batch.teacher_NV.split(batch.lengths), strict=True):
        if route in lost:
            part.fill_(-math.log(VOCABULARY))
    return batch


@pytest.mark.parametrize("mode", LOSSES)
def test_one_lost_teacher_of_two_ends_the_stage_by_its_name(tell, tmp_path, mode):
    failure = tmp_path / "failure.json"
    with pytest.raises(OpdctlError, match=r"teacher max\[domain=code\] gives all 80 tokens .* -2\.565"):
        loss(mode, batch_of(mode, {"t1"}), tell, failure)
    told = json.loads(failure.read_text())
    assert told["message"].startswith("teacher max[domain=code] ")
    assert told["hint"]


@pytest.mark.parametrize("mode", LOSSES)
def test_teachers_that_tell_tokens_apart_pass(tell, tmp_path, mode):
    loss(mode, batch_of(mode, set()), tell, tmp_path / "failure.json")
    assert not (tmp_path / "failure.json").exists()


def test_a_teacher_that_is_sure_of_every_token_passes(tell, tmp_path):
    batch = batch_of(LOSSES[0], set())
    batch.teacher_NV.fill_(-1e-5)
    loss(LOSSES[0], batch, tell, tmp_path / "failure.json")
    assert not (tmp_path / "failure.json").exists()


def test_a_few_tokens_judge_no_teacher(tell, tmp_path):
    batch = Batch(completions=(4, 1, 6, 3), routes=("t0", "t1", "t0", "t1"))
    batch.teacher_NV.fill_(-math.log(VOCABULARY))
    loss(LOSSES[0], batch, tell, tmp_path / "failure.json")
