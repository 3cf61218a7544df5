import math

import pytest
import torch

from opdctl.engine.losses import token_weights
from opdctl.engine.vocab import (
    distill_health,
    full_vocab_reverse_kl,
    teacher_topk,
    token_logprobs,
    topk_reverse_kl,
)
from opdctl.errors import OpdctlError

torch.set_num_threads(1)
N, V, D, E = 7, 5, 3, 4
CHUNKS = [1, 3, 7, 100, None]


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def student(dtype=torch.float64):
    return draw(N, D, dtype=dtype).requires_grad_(), draw(V, D, seed=1, dtype=dtype).requires_grad_()


def teacher(dtype=torch.float64):
    return draw(N, E, seed=2, dtype=dtype), draw(V, E, seed=3, dtype=dtype)


def targets():
    return torch.tensor([0, 4, 2, 2, 1, 3, 0])


WEIGHTS = draw(N, seed=4).abs()


def probabilities(hidden, head, temperature=1.0):
    """Softmax by plain Python, one list a token."""
    rows = []
    for vector in hidden.tolist():
        logits = [sum(a * b for a, b in zip(vector, row, strict=True)) / temperature for row in head.tolist()]
        total = sum(math.exp(logit) for logit in logits)
        rows.append([math.exp(logit) / total for logit in logits])
    return rows


def reverse_kl(p, q):
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def slow_topk(p, q, k, rest):
    chosen = sorted(range(len(q)), key=lambda v: -q[v])[:k]
    loss = sum(p[v] * math.log(p[v] / q[v]) for v in chosen)
    tail_p, tail_q = 1 - sum(p[v] for v in chosen), 1 - sum(q[v] for v in chosen)
    if rest == "correction":
        return loss + tail_p - tail_q
    return loss + (tail_p * math.log(tail_p / tail_q) if k < len(q) else 0.0)


def gradients(loss, hidden, head):
    return torch.autograd.grad(loss, (hidden, head))


def plain_reverse_kl(hidden, head, teacher_hidden, teacher_head):
    p, q = (hidden @ head.T).log_softmax(-1), (teacher_hidden @ teacher_head.T).log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


# ------------------------------------------------------------------------------------------------ token logprobs


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_token_logprobs_and_entropy_agree_with_plain_python_at_any_chunk(chunk, temperature):
    hidden, head = student()
    logprobs, entropy = token_logprobs(hidden, head, targets(), temperature=temperature, chunk=chunk)
    rows = probabilities(hidden, head, temperature)
    for n, p in enumerate(rows):
        assert float(logprobs[n].detach()) == pytest.approx(math.log(p[targets()[n]]), abs=1e-12)
        assert float(entropy[n]) == pytest.approx(-sum(a * math.log(a) for a in p), abs=1e-12)
    assert not entropy.requires_grad


@pytest.mark.parametrize("chunk", [2, None])
def test_token_logprobs_pass_gradcheck(chunk):
    def values(hidden, head):
        return token_logprobs(hidden, head, targets(), temperature=0.7, chunk=chunk)[0]

    assert torch.autograd.gradcheck(values, student())


def test_gradients_of_token_logprobs_do_not_depend_on_the_chunk():
    hidden, head = student()
    found = [
        gradients((token_logprobs(hidden, head, targets(), chunk=chunk)[0].square() * WEIGHTS).sum(), hidden, head)
        for chunk in CHUNKS
    ]
    for pair in found[1:]:
        torch.testing.assert_close(pair, found[0], rtol=1e-12, atol=1e-13)


def test_cross_entropy_is_not_shifted_against_its_targets():
    hidden = torch.tensor([[0.0, math.log(2.0)], [math.log(3.0), 0.0]])
    logprobs, _ = token_logprobs(hidden, torch.eye(2), torch.tensor([1, 1]))
    assert logprobs.tolist() == pytest.approx([math.log(2 / 3), math.log(1 / 4)], abs=1e-6)


# --------------------------------------------------------------------------------------------- full vocabulary


@pytest.mark.parametrize("chunk", CHUNKS)
def test_full_reverse_kl_agrees_with_enumeration_at_any_chunk(chunk):
    hidden, head = student()
    loss, health = full_vocab_reverse_kl(hidden, head, *teacher(), weights_N=WEIGHTS, chunk=chunk)
    expected = [reverse_kl(p, q) for p, q in zip(probabilities(hidden, head), probabilities(*teacher()), strict=True)]
    torch.testing.assert_close(health["reverse_kl"], torch.tensor(expected, dtype=torch.float64))
    torch.testing.assert_close(loss, (health["reverse_kl"] * WEIGHTS).sum())
    want = gradients((plain_reverse_kl(hidden, head, *teacher()) * WEIGHTS).sum(), hidden, head)
    torch.testing.assert_close(gradients(loss, hidden, head), want)


@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_full_reverse_kl_passes_gradcheck(weights):
    assert torch.autograd.gradcheck(
        lambda h, w: full_vocab_reverse_kl(h, w, *teacher(), weights_N=weights, chunk=2)[0], student()
    )


def test_gradient_of_full_reverse_kl_is_the_mean_policy_gradient():
    hidden, head = student()
    loss, _ = full_vocab_reverse_kl(hidden, head, *teacher(), chunk=2)
    expected = torch.zeros((), dtype=torch.float64)
    q = probabilities(*teacher())
    for v in range(V):
        logprobs, _ = token_logprobs(hidden, head, torch.full((N,), v))
        probs = logprobs.detach().exp()
        advantage = torch.tensor([math.log(row[v]) for row in q], dtype=torch.float64) - logprobs.detach()
        expected = expected - (probs * advantage * logprobs).sum()
    torch.testing.assert_close(gradients(loss, hidden, head), gradients(expected, hidden, head))


def test_teacher_equal_to_student_gives_zero_full_loss_and_gradient():
    hidden, head = student()
    loss, health = full_vocab_reverse_kl(hidden, head, hidden.detach(), head.detach(), health_topk=2, chunk=2)
    assert loss == 0
    assert all(grad.abs().max() == 0 for grad in gradients(loss, hidden, head))
    assert health["overlap"].tolist() == [1.0] * N


def test_an_upstream_factor_scales_the_gradients_and_a_second_pass_repeats_them():
    hidden, head = student()
    loss, _ = full_vocab_reverse_kl(hidden, head, *teacher(), chunk=2)
    once = torch.autograd.grad(loss, (hidden, head), retain_graph=True)
    scaled = torch.autograd.grad(3 * loss + 1, (hidden, head), retain_graph=True)
    again = torch.autograd.grad(loss, (hidden, head))
    torch.testing.assert_close(scaled, tuple(3 * grad for grad in once))
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))


@pytest.mark.parametrize("needed", ["hidden", "head", "none"])
def test_only_the_gradients_that_are_needed_are_made(needed):
    hidden, head = (part.detach() for part in student())
    hidden.requires_grad_(needed == "hidden")
    head.requires_grad_(needed == "head")
    full, _ = full_vocab_reverse_kl(hidden, head, *teacher(), chunk=2)
    logprobs, _ = token_logprobs(hidden, head, targets(), chunk=2)
    if needed != "none":
        (full + logprobs.sum()).backward()
    assert (hidden.grad is not None) == (needed == "hidden")
    assert (head.grad is not None) == (needed == "head")
    assert full.requires_grad == logprobs.requires_grad == (needed != "none")


def test_gradients_add_up_over_micro_batches():
    hidden, head = student()
    weights = token_weights(torch.arange(N), how="token_mean", total_tokens=N, total_sequences=N).double()
    whole, _ = full_vocab_reverse_kl(hidden, head, *teacher(), weights_N=weights)
    want = gradients(whole, hidden, head)
    teacher_hidden, teacher_head = teacher()
    for rows in (slice(0, 3), slice(3, N)):
        part, _ = full_vocab_reverse_kl(
            hidden[rows], head, teacher_hidden[rows], teacher_head, weights_N=weights[rows], chunk=2
        )
        part.backward()
    torch.testing.assert_close((hidden.grad, head.grad), want)


def test_low_precision_weights_get_gradients_of_their_dtype_summed_in_float32():
    hidden, head = student(torch.bfloat16)
    loss, health = full_vocab_reverse_kl(hidden, head, *teacher(torch.bfloat16), chunk=2)
    loss.backward()
    assert loss.dtype == health["reverse_kl"].dtype == torch.float32
    assert hidden.grad.dtype == head.grad.dtype == torch.bfloat16
    exact_hidden, exact_head = (part.detach().double().requires_grad_() for part in (hidden, head))
    exact = plain_reverse_kl(exact_hidden, exact_head, *(part.double() for part in teacher(torch.bfloat16)))
    _, want = gradients(exact.sum(), exact_hidden, exact_head)
    torch.testing.assert_close(head.grad.double(), want, rtol=0.05, atol=0.05)


# -------------------------------------------------------------------------------------------------------- top-k


@pytest.mark.parametrize("rest", ["correction", "lumped_tail"])
@pytest.mark.parametrize("k", [1, 2, 4, 5])
@pytest.mark.parametrize("chunk", [2, None])
def test_topk_loss_agrees_with_enumeration(rest, k, chunk):
    hidden, head = student()
    indices, logprobs = teacher_topk(*teacher(), k, chunk=chunk)
    loss, loss_N = topk_reverse_kl(hidden, head, indices, logprobs, rest=rest, weights_N=WEIGHTS, chunk=chunk)
    pairs = zip(probabilities(hidden, head), probabilities(*teacher()), strict=True)
    expected = torch.tensor([slow_topk(p, q, k, rest) for p, q in pairs], dtype=torch.float64)
    torch.testing.assert_close(loss_N, expected)
    torch.testing.assert_close(loss, (expected * WEIGHTS).sum())
    assert (loss_N >= 0).all()


@pytest.mark.parametrize("rest", ["correction", "lumped_tail"])
@pytest.mark.parametrize("k", [1, 3, 5])
def test_topk_loss_passes_gradcheck(rest, k):
    indices, logprobs = teacher_topk(*teacher(), k)

    def loss(hidden, head):
        return topk_reverse_kl(hidden, head, indices, logprobs, rest=rest, weights_N=WEIGHTS, chunk=2)[0]

    assert torch.autograd.gradcheck(loss, student())


@pytest.mark.parametrize("rest", ["correction", "lumped_tail"])
def test_topk_over_the_whole_vocabulary_is_the_full_reverse_kl(rest):
    hidden, head = student()
    indices, logprobs = teacher_topk(*teacher(), V)
    loss, _ = topk_reverse_kl(hidden, head, indices, logprobs, rest=rest, weights_N=WEIGHTS)
    full, _ = full_vocab_reverse_kl(hidden, head, *teacher(), weights_N=WEIGHTS)
    torch.testing.assert_close(loss, full)
    torch.testing.assert_close(gradients(loss, hidden, head), gradients(full, hidden, head))


@pytest.mark.parametrize("rest", ["correction", "lumped_tail"])
def test_topk_loss_and_gradient_vanish_where_student_is_teacher(rest):
    hidden, head = student()
    indices, logprobs = teacher_topk(hidden.detach(), head.detach(), 2)
    loss, _ = topk_reverse_kl(hidden, head, indices, logprobs, rest=rest)
    assert loss.abs() < 1e-14
    assert all(grad.abs().max() < 1e-14 for grad in gradients(loss, hidden, head))


def test_without_its_correction_the_topk_loss_would_push_a_matching_student_away():
    hidden, head = student()
    indices, logprobs = teacher_topk(hidden.detach(), head.detach(), 2)
    own = (hidden @ head.T).log_softmax(-1).gather(-1, indices)
    raw = (own.exp() * (own - logprobs)).sum()
    assert gradients(raw, hidden, head)[0].abs().max() > 1e-2


def test_lumped_tail_stays_finite_where_the_teacher_leaves_nothing_to_the_tail():
    hidden, head = draw(1, 2, dtype=torch.float32).requires_grad_(), torch.zeros(4, 2, requires_grad=True)
    teacher_head = torch.tensor([[200.0], [100.0], [0.0], [0.0]])
    indices, logprobs = teacher_topk(torch.ones(1, 1), teacher_head, 1)
    loss, _ = topk_reverse_kl(hidden, head, indices, logprobs, rest="lumped_tail")
    loss.backward()
    assert 5 < float(loss.detach()) < 20
    assert torch.isfinite(head.grad).all()


def test_teacher_topk_gives_the_most_likely_tokens_with_logprobs_of_the_full_softmax():
    for chunk in CHUNKS:
        indices, logprobs = teacher_topk(*teacher(), 3, chunk=chunk)
        for n, q in enumerate(probabilities(*teacher())):
            best = sorted(range(V), key=lambda v: -q[v])[:3]
            assert indices[n].tolist() == best
            assert logprobs[n].tolist() == pytest.approx([math.log(q[v]) for v in best], abs=1e-12)


# ------------------------------------------------------------------------------------------------------- health


@pytest.mark.parametrize("chunk", CHUNKS)
def test_health_agrees_with_enumeration(chunk):
    hidden, head = student()
    health = distill_health(hidden, head, *teacher(), k=2, chunk=chunk)
    for n, (p, q) in enumerate(zip(probabilities(hidden, head), probabilities(*teacher()), strict=True)):
        top_p, top_q = (set(sorted(range(V), key=lambda v: -x[v])[:2]) for x in (p, q))
        both = top_p & top_q
        assert float(health["reverse_kl"][n]) == pytest.approx(reverse_kl(p, q), abs=1e-12)
        assert float(health["student_entropy"][n]) == pytest.approx(-sum(a * math.log(a) for a in p), abs=1e-12)
        assert float(health["teacher_entropy"][n]) == pytest.approx(-sum(a * math.log(a) for a in q), abs=1e-12)
        assert float(health["overlap"][n]) == len(both) / 2
        assert float(health["overlap_mass_student"][n]) == pytest.approx(sum(p[v] for v in both), abs=1e-12)
        assert float(health["overlap_mass_teacher"][n]) == pytest.approx(sum(q[v] for v in both), abs=1e-12)


def test_full_loss_reports_the_same_health():
    hidden, head = student()
    _, reported = full_vocab_reverse_kl(hidden, head, *teacher(), health_topk=2, chunk=3)
    alone = distill_health(hidden, head, *teacher(), k=2)
    assert reported.keys() == alone.keys()
    for name, values in reported.items():
        torch.testing.assert_close(values, alone[name])
        assert not values.requires_grad


def test_health_without_tokens_is_empty():
    health = distill_health(torch.zeros(0, D), torch.zeros(V, D), torch.zeros(0, E), torch.zeros(V, E), k=2)
    assert {len(values) for values in health.values()} == {0}


# ------------------------------------------------------------------------------------------------------ refusals


def test_different_vocabularies_are_refused_by_name():
    hidden, head = student()
    teacher_hidden, teacher_head = teacher()
    for compare in (full_vocab_reverse_kl, lambda *tensors: distill_health(*tensors, k=2)):
        with pytest.raises(OpdctlError, match="student has a vocabulary of 5 tokens, the teacher one of 4"):
            compare(hidden, head, teacher_hidden, teacher_head[:4])


def test_k_beyond_the_vocabulary_is_refused():
    with pytest.raises(OpdctlError, match="k: 6 is more than the vocabulary of 5"):
        teacher_topk(*teacher(), 6)
