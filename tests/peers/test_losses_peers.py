"""Our losses against the same quantities of verl and TRL, where these are installed."""

import pytest
import torch

from opdctl.engine.advantages import group_advantages
from opdctl.engine.losses import aggregate, clipped_policy_loss, kl_penalty
from opdctl.engine.vocab import full_vocab_reverse_kl, token_logprobs

pytestmark = [pytest.mark.peer, pytest.mark.filterwarnings("default")]  # the peers' own warnings are not ours
torch.set_num_threads(1)

LENGTHS = torch.tensor([3, 1, 7, 2])
MASK = (torch.arange(7) < LENGTHS[:, None]).float()
SEQUENCE = torch.repeat_interleave(torch.arange(4), LENGTHS)


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def verl():
    return pytest.importorskip("verl.trainer.ppo.core_algos", exc_type=ImportError)


@pytest.mark.parametrize(
    ("how", "mode"),
    [
        ("token_mean", "token-mean"),
        ("sequence_mean", "seq-mean-token-mean"),
        ("constant", "seq-mean-token-sum-norm"),
    ],
)
def test_clipped_loss_and_aggregation_are_those_of_verl(verl, how, mode):
    workers = pytest.importorskip("verl.workers.config", exc_type=ImportError)
    policy, old, advantages = draw(4, 7) * 0.3, draw(4, 7, seed=1) * 0.3, draw(4, 7, seed=2)
    # a dual-clip bound so high that it never acts: we have none
    config = workers.FSDPActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio_low=0.2, clip_ratio_high=0.28,
        clip_ratio_c=1e9,
    )  # fmt: skip
    theirs, metrics = verl.compute_policy_loss_vanilla(
        old_log_prob=old, log_prob=policy, advantages=advantages, response_mask=MASK, loss_agg_mode=mode, config=config
    )
    kept = MASK.bool()
    loss, clipped = clipped_policy_loss(policy[kept], old[kept], advantages[kept], low=0.2, high=0.28)
    ours = aggregate(loss, SEQUENCE, how=how, total_tokens=13, total_sequences=4, constant=7)
    torch.testing.assert_close(ours, theirs)
    assert float(clipped.float().mean()) == pytest.approx(metrics["actor/pg_clipfrac"])


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimators_are_those_of_verl(verl, estimator):
    policy, reference = draw(50) * 0.5, draw(50, seed=1) * 0.5
    theirs = verl.kl_penalty_forward(policy, reference, estimator)
    torch.testing.assert_close(kl_penalty(policy, reference, estimator), theirs)


@pytest.mark.parametrize(("how", "by_std"), [("mean", False), ("mean_std", True)])
def test_group_advantages_are_those_of_verl(verl, how, by_std):
    rewards = draw(3, 4)
    theirs, _ = verl.compute_grpo_outcome_advantage(
        rewards.reshape(12, 1).clone(),
        torch.ones(12, 1),
        torch.arange(3).repeat_interleave(4).numpy(),
        norm_adv_by_std_in_grpo=by_std,
    )
    torch.testing.assert_close(group_advantages(rewards, how), theirs.reshape(3, 4))


def test_leave_one_out_is_that_of_verl(verl):
    rewards = draw(3, 4)
    theirs, _ = verl.compute_rloo_outcome_advantage(
        rewards.reshape(12, 1).clone(), torch.ones(12, 1), torch.arange(3).repeat_interleave(4).numpy()
    )
    torch.testing.assert_close(group_advantages(rewards, "leave_one_out"), theirs.reshape(3, 4))


@pytest.mark.parametrize("chunk", [3, None])
def test_token_logprobs_and_entropy_are_those_of_trl(chunk):
    peer = pytest.importorskip("trl.trainer.utils", exc_type=ImportError)
    hidden, head, targets = draw(20, 8), draw(50, 8, seed=1), torch.arange(20)
    logits = hidden @ head.T / 0.7
    logprobs, entropy = token_logprobs(hidden, head, targets, temperature=0.7, chunk=chunk)
    torch.testing.assert_close(logprobs, peer.selective_log_softmax(logits, targets))
    torch.testing.assert_close(entropy, peer.entropy_from_logits(logits))


def test_full_reverse_kl_is_the_divergence_of_trl_at_beta_one():
    peer = pytest.importorskip("trl.experimental.gkd", exc_type=ImportError)
    hidden, head = draw(20, 8).requires_grad_(), draw(50, 8, seed=1).requires_grad_()
    teacher_hidden, teacher_head = draw(20, 6, seed=2), draw(50, 6, seed=3)
    student, teacher = (hidden @ head.T)[None], (teacher_hidden @ teacher_head.T)[None]
    theirs = peer.GKDTrainer.generalized_jsd_loss(student, teacher, beta=1.0, reduction="sum")
    ours, _ = full_vocab_reverse_kl(hidden, head, teacher_hidden, teacher_head, chunk=6)
    torch.testing.assert_close(ours, theirs)
    pairs = (torch.autograd.grad(loss, (hidden, head)) for loss in (ours, theirs))
    torch.testing.assert_close(*pairs)
