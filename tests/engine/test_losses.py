import math

import pytest
import torch

from opdctl.engine.losses import (
    aggregate,
    clipped_policy_loss,
    dis_weight,
    icepop_weight,
    kl_penalty,
    opd_advantage,
    tis_weight,
    token_weights,
)
from opdctl.errors import OpdctlError

torch.set_num_threads(1)


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ---------------------------------------------------------------------------------------------- clipped surrogate


def slow_clipped(policy, old, advantages, low, high):
    losses, clipped = [], []
    for new_logprob, old_logprob, advantage in zip(policy, old, advantages, strict=True):
        ratio = math.exp(new_logprob) / math.exp(old_logprob)
        beyond = ratio > 1 + high if advantage > 0 else ratio < 1 - low
        edge = 1 + high if advantage > 0 else 1 - low
        losses.append(-(edge if beyond else ratio) * advantage)
        clipped.append(beyond and advantage != 0)
    return losses, clipped


def test_clipped_loss_agrees_with_a_loop_over_tokens():
    policy, old, advantages = draw(200) * 0.4, draw(200, seed=1) * 0.4, draw(200, seed=2)
    advantages[:5] = 0.0
    loss, clipped = clipped_policy_loss(policy, old, advantages, low=0.2, high=0.28)
    slow_loss, slow_flags = slow_clipped(policy.tolist(), old.tolist(), advantages.tolist(), 0.2, 0.28)
    torch.testing.assert_close(loss, torch.tensor(slow_loss, dtype=torch.float64))
    assert clipped.tolist() == slow_flags
    assert 20 < sum(slow_flags) < 180  # both branches were taken


def test_clipped_loss_has_no_gradient_exactly_where_it_says_clipped():
    policy = (draw(200) * 0.4).requires_grad_()
    loss, clipped = clipped_policy_loss(policy, draw(200, seed=1) * 0.4, draw(200, seed=2), low=0.2, high=0.28)
    (grad,) = torch.autograd.grad(loss.sum(), policy)
    assert torch.equal(grad == 0, clipped)


def test_clipped_loss_is_the_policy_gradient_where_old_is_the_policy():
    policy, advantages = draw(50).requires_grad_(), draw(50, seed=1)
    loss, clipped = clipped_policy_loss(policy, policy, advantages, low=0.2, high=0.2)
    (grad,) = torch.autograd.grad(loss.sum(), policy)
    torch.testing.assert_close(grad, -advantages)
    assert not clipped.any()


def test_clipped_loss_passes_gradcheck():
    policy = (draw(12) * 0.4).requires_grad_()
    old, advantages = draw(12, seed=1) * 0.4, draw(12, seed=2)
    assert torch.autograd.gradcheck(
        lambda x: clipped_policy_loss(x, old, advantages, low=0.2, high=0.28)[0], policy, atol=1e-7
    )


# ------------------------------------------------------------------------------------------------------------- KL


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimators_agree_with_their_formulas(estimator):
    policy, reference = draw(20), draw(20, seed=1)
    slow = {
        "k1": lambda p, q: math.log(p / q),
        "k2": lambda p, q: math.log(p / q) ** 2 / 2,
        "k3": lambda p, q: q / p - 1 - math.log(q / p),
    }[estimator]
    expected = [slow(math.exp(p), math.exp(q)) for p, q in zip(policy.tolist(), reference.tolist(), strict=True)]
    found = kl_penalty(policy, reference, estimator)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))
    assert torch.autograd.gradcheck(lambda x: kl_penalty(x, reference, estimator), policy.requires_grad_())


def test_k1_and_k3_are_unbiased_over_all_tokens_and_k2_has_the_unbiased_gradient():
    logits, reference = draw(5).requires_grad_(), draw(5, seed=1).log_softmax(0)
    logprobs = logits.log_softmax(0)
    probs = logprobs.detach().exp()
    exact = (logprobs.exp() * (logprobs - reference)).sum()
    for estimator in ("k1", "k3"):
        torch.testing.assert_close((probs * kl_penalty(logprobs, reference, estimator)).sum(), exact)
    (want,) = torch.autograd.grad(exact, logits, retain_graph=True)
    (found,) = torch.autograd.grad((probs * kl_penalty(logprobs, reference, "k2")).sum(), logits)
    torch.testing.assert_close(found, want)


def test_kl_penalty_is_zero_for_equal_models():
    logprobs = draw(9)
    for estimator in ("k1", "k2", "k3"):
        assert kl_penalty(logprobs, logprobs, estimator).abs().max() == 0


# ------------------------------------------------------------------------------------------------ OPD's advantage


def test_mean_policy_gradient_over_tokens_is_the_gradient_of_the_full_reverse_kl():
    logits, teacher = draw(3, 5).requires_grad_(), draw(3, 5, seed=1).log_softmax(-1)
    logprobs = logits.log_softmax(-1)
    advantage = opd_advantage(teacher, logprobs, math.inf)
    loss, _ = clipped_policy_loss(logprobs, logprobs, advantage, low=0.2, high=0.2)
    (found,) = torch.autograd.grad((logprobs.detach().exp() * loss).sum(), logits, retain_graph=True)
    (want,) = torch.autograd.grad((logprobs.exp() * (logprobs - teacher)).sum(), logits)
    torch.testing.assert_close(found, want, rtol=0, atol=1e-15)


def test_opd_advantage_is_clipped_on_both_sides_and_constant():
    policy = torch.tensor([-1.0, -9.0, -1.0], requires_grad=True)
    advantage = opd_advantage(torch.tensor([-2.5, -1.0, -9.0]), policy, 5.0)
    assert advantage.tolist() == [-1.5, 5.0, -5.0]
    assert not advantage.requires_grad


def test_teacher_equal_to_student_gives_zero_advantage_loss_and_gradient():
    policy = draw(7).requires_grad_()
    advantage = opd_advantage(policy, policy, 5.0)
    loss, _ = clipped_policy_loss(policy, policy, advantage, low=0.2, high=0.2)
    (grad,) = torch.autograd.grad(loss.sum(), policy)
    assert advantage.abs().max() == loss.abs().max() == grad.abs().max() == 0


# ---------------------------------------------------------------------------------------------------- aggregation

LENGTHS = [3, 0, 1, 7, 2]


def slow_aggregate(loss, lengths, how, constant):
    sequences, at = [], 0
    for length in lengths:
        sequences.append(loss[at : at + length])
        at += length
    if how == "sequence_mean":
        return sum(sum(part) / len(part) for part in sequences if part) / len(lengths)
    if how == "token_mean":
        return sum(map(sum, sequences)) / sum(lengths)
    return sum(map(sum, sequences)) / constant / len(lengths)


def numbers(lengths):
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))


@pytest.mark.parametrize("how", ["sequence_mean", "token_mean", "constant"])
def test_aggregation_agrees_with_a_loop_over_sequences_one_of_them_empty(how):
    loss = draw(sum(LENGTHS)).float()
    found = aggregate(
        loss, numbers(LENGTHS), how=how, total_tokens=sum(LENGTHS), total_sequences=len(LENGTHS), constant=16
    )
    assert float(found) == pytest.approx(slow_aggregate(loss.tolist(), LENGTHS, how, 16), rel=1e-5)


@pytest.mark.parametrize("how", ["sequence_mean", "token_mean", "constant"])
@pytest.mark.parametrize("cuts", [[2], [1, 3], [1, 2, 3, 4]])
def test_unequal_micro_batches_add_up_to_the_single_batch(how, cuts):
    loss, weights = draw(sum(LENGTHS)).float(), draw(sum(LENGTHS), seed=1).float()
    totals = {"how": how, "total_tokens": sum(LENGTHS), "total_sequences": len(LENGTHS), "constant": 16}
    whole = aggregate(loss, numbers(LENGTHS), weights_N=weights, **totals)
    shares, at = [], 0
    for start, end in zip([0, *cuts], [*cuts, len(LENGTHS)], strict=True):
        lengths = LENGTHS[start:end]
        rows = slice(at, at + sum(lengths))
        shares.append(aggregate(loss[rows], numbers(lengths), weights_N=weights[rows], **totals))
        at += sum(lengths)
    torch.testing.assert_close(sum(shares), whole)


@pytest.mark.parametrize("how", ["sequence_mean", "token_mean", "constant"])
def test_a_batch_without_tokens_has_loss_zero(how):
    none = torch.zeros(0, dtype=torch.long)
    assert aggregate(torch.zeros(0), none, how=how, total_tokens=0, total_sequences=0, constant=16) == 0


def test_constant_aggregation_refuses_to_guess_its_constant():
    with pytest.raises(OpdctlError, match="constant needs a positive constant, got None"):
        token_weights(numbers([2]), how="constant", total_tokens=2, total_sequences=1)


# ------------------------------------------------------------------------------------------------------- mismatch


def test_icepop_keeps_its_ends_and_drops_what_is_beyond():
    ratio = torch.tensor([0.499, 0.5, 1.0, 5.0, 5.001], dtype=torch.float64)
    assert icepop_weight(ratio, 0.5, 5.0).tolist() == [0.0, 0.5, 1.0, 5.0, 0.0]


def test_tis_cuts_ten_to_its_cap():
    assert tis_weight(torch.tensor([10.0, 1.5, 0.01]), 2.0).tolist() == pytest.approx([2.0, 1.5, 0.01])


def test_dis_drops_its_ends():
    ratio = torch.tensor([0.75, 0.7501, 1.0, 4.999, 5.0], dtype=torch.float64)
    assert dis_weight(ratio, 0.25, 4.0).tolist() == [0.0, 0.7501, 1.0, 4.999, 0.0]


def test_mismatch_weights_are_constants_of_the_loss():
    ratio = torch.ones(2, requires_grad=True)
    weights = [icepop_weight(ratio, 0.5, 5), tis_weight(ratio, 2), dis_weight(ratio, 0.2, 0.2)]
    assert not any(weight.requires_grad for weight in weights)
