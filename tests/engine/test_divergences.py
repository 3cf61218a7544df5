"""Divergences against plain Python on a vocabulary of five words."""

import math

import pytest
import torch
from engine.test_vocab import CHUNKS, WEIGHTS, N, V, draw, gradients, probabilities, reverse_kl, student, teacher

from opdctl.engine.divergences import forward_kl, generalised_jsd, overlap_advantage
from opdctl.engine.vocab import distill_health, full_vocab_reverse_kl
from opdctl.errors import OpdctlError

torch.set_num_threads(1)
BETAS = [0.1, 0.5, 0.9]


def slow_jsd(p, q, beta):
    total = 0.0
    for a, b in zip(p, q, strict=True):
        m = beta * b + (1 - beta) * a
        total += beta * b * math.log(b / m) + (1 - beta) * a * math.log(a / m)
    return total


def slow_overlap(p, q, k):
    def top(x):
        return set(sorted(range(V), key=lambda v: -x[v])[:k])

    both = top(p) & top(q)
    if not both:
        return 0.0, 0
    mass = sum(p[v] for v in both)
    return sum(p[v] / mass * math.log(q[v] / p[v]) for v in both), len(both)


def pairs():
    return list(zip(probabilities(*student()), probabilities(*teacher()), strict=True))


def plain(hidden, head, beta):
    """The loss as a formula on whole tensors, for autograd; beta None: forward KL."""
    p, q = (hidden @ head.T).softmax(-1), (teacher()[0] @ teacher()[1].T).softmax(-1)
    if beta is None:
        return (q * (q / p).log()).sum(-1)
    m = beta * q + (1 - beta) * p
    return beta * (q * (q / m).log()).sum(-1) + (1 - beta) * (p * (p / m).log()).sum(-1)


def loss_of(beta, hidden, head, *other, **options):
    if beta is None:
        return forward_kl(hidden, head, *other, **options)
    return generalised_jsd(hidden, head, *other, beta=beta, **options)


@pytest.mark.parametrize("beta", [None, *BETAS])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_loss_agrees_with_enumeration_at_any_chunk(beta, chunk):
    hidden, head = student()
    loss, values = loss_of(beta, hidden, head, *teacher(), weights_N=WEIGHTS, chunk=chunk)
    slow = [reverse_kl(q, p) if beta is None else slow_jsd(p, q, beta) for p, q in pairs()]
    torch.testing.assert_close(values["loss"], torch.tensor(slow, dtype=torch.float64))
    torch.testing.assert_close(loss, (values["loss"] * WEIGHTS).sum())
    want = gradients((plain(hidden, head, beta) * WEIGHTS).sum(), hidden, head)
    torch.testing.assert_close(gradients(loss, hidden, head), want)


@pytest.mark.parametrize("beta", [None, *BETAS])
def test_loss_passes_gradcheck(beta):
    assert torch.autograd.gradcheck(
        lambda h, w: loss_of(beta, h, w, *teacher(), weights_N=WEIGHTS, chunk=2)[0], student()
    )


@pytest.mark.parametrize("beta", [None, *BETAS])
def test_teacher_equal_to_student_gives_no_loss_and_no_gradient(beta):
    hidden, head = student()
    loss, values = loss_of(beta, hidden, head, hidden.detach(), head.detach(), chunk=2)
    assert values["loss"].abs().max() < 1e-15
    assert all(grad.abs().max() < 1e-14 for grad in gradients(loss, hidden, head))


@pytest.mark.parametrize("beta", [None, *BETAS])
def test_loss_reports_the_health_of_the_pair(beta):
    hidden, head = student()
    _, values = loss_of(beta, hidden, head, *teacher(), health_topk=2, chunk=3)
    for name, expected in distill_health(hidden, head, *teacher(), k=2).items():
        torch.testing.assert_close(values[name], expected)
        assert not values[name].requires_grad


def test_jsd_divided_by_beta_tends_to_the_forward_kl():
    hidden, head = student()
    jsd, _ = generalised_jsd(hidden, head, *teacher(), beta=1e-7)
    forward, _ = forward_kl(hidden, head, *teacher())
    torch.testing.assert_close(jsd / 1e-7, forward, rtol=1e-4, atol=0)
    scaled = [grad / 1e-7 for grad in gradients(jsd, hidden, head)]
    torch.testing.assert_close(scaled, list(gradients(forward, hidden, head)), rtol=1e-3, atol=1e-5)


def test_jsd_divided_by_one_minus_beta_tends_to_the_reverse_kl():
    hidden, head = student()
    jsd, _ = generalised_jsd(hidden, head, *teacher(), beta=1 - 1e-7)
    reverse, _ = full_vocab_reverse_kl(hidden, head, *teacher())
    torch.testing.assert_close(jsd / 1e-7, reverse, rtol=1e-4, atol=0)
    scaled = [grad / 1e-7 for grad in gradients(jsd, hidden, head)]
    torch.testing.assert_close(scaled, list(gradients(reverse, hidden, head)), rtol=1e-3, atol=1e-5)


def test_jsd_at_one_half_does_not_tell_student_from_teacher():
    hidden, head = (part.detach() for part in student())
    there, _ = generalised_jsd(hidden, head, *teacher(), beta=0.5)
    back, _ = generalised_jsd(*teacher(), hidden, head, beta=0.5)
    torch.testing.assert_close(there, back)


def test_jsd_stays_finite_where_one_gives_a_token_no_probability():
    hidden, head = torch.ones(1, 1, requires_grad=True), torch.tensor([[200.0], [0.0], [-200.0]], requires_grad=True)
    loss, _ = generalised_jsd(hidden, head, torch.ones(1, 1), torch.tensor([[-200.0], [0.0], [200.0]]), beta=0.5)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(math.log(2))
    assert torch.isfinite(head.grad).all()


# ----------------------------------------------------------------------------------------------- Keye's advantage


@pytest.mark.parametrize("k", [1, 2, 3, 5])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_overlap_advantage_agrees_with_enumeration(k, chunk):
    advantages, sizes = overlap_advantage(*student(), *teacher(), k=k, chunk=chunk)
    assert not advantages.requires_grad
    for n, (p, q) in enumerate(pairs()):
        expected, size = slow_overlap(p, q, k)
        assert float(advantages[n]) == pytest.approx(expected, abs=1e-12)
        assert int(sizes[n]) == size


def test_overlap_over_the_whole_vocabulary_is_the_mean_log_ratio():
    _, health = full_vocab_reverse_kl(*student(), *teacher())
    for k in (V, V + 3):
        advantages, sizes = overlap_advantage(*student(), *teacher(), k=k)
        torch.testing.assert_close(advantages, -health["reverse_kl"])
        assert sizes.tolist() == [V] * N


def test_without_overlap_there_is_no_advantage():
    head = torch.tensor([[4.0], [1.0], [0.0]])
    advantages, sizes = overlap_advantage(torch.ones(2, 1), head, torch.ones(2, 1), head.flip(0), k=1)
    assert advantages.tolist() == [0.0, 0.0]
    assert sizes.tolist() == [0.0, 0.0]


def test_an_overlap_far_in_the_students_tail_is_renormalised():
    """Both top-2 hold the second token only, to which the student gives e^-120: below float32."""
    own, theirs = torch.tensor([[120.0], [0.0], [-1.0]]), torch.tensor([[-9.0], [0.0], [1.0]])
    advantages, sizes = overlap_advantage(torch.ones(1, 1), own, torch.ones(1, 1), theirs, k=2)
    assert sizes.tolist() == [1.0]
    assert float(advantages[0]) == pytest.approx(120.0 + math.log(1 / (1 + math.e)), abs=1e-3)


def test_teacher_equal_to_student_gives_no_overlap_advantage():
    advantages, sizes = overlap_advantage(*student(), *(part.detach() for part in student()), k=2)
    assert advantages.abs().max() == 0
    assert sizes.tolist() == [2.0] * N


def test_different_vocabularies_are_refused():
    hidden, head = draw(N, 3), draw(4, 3)
    with pytest.raises(OpdctlError, match="student has a vocabulary of 4 tokens, the teacher one of 5"):
        forward_kl(hidden, head, *teacher())
