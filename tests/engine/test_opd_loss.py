"""What a piece costs, against loops over floats, and against exact gradients by enumerating all completions.

Hidden states are the logits themselves here (the output matrix is the identity), V words, completions of two tokens.
"""

import itertools
import math

import pytest
import torch
from engine.test_vocab import draw

from opdctl.engine.batch import Sequence
from opdctl.engine.opd_loss import DistillLoss, Piece
from opdctl.engine.opd_rollouts import Scored
from opdctl.settings import OpdSettings

torch.set_num_threads(1)
V = 3
EYE = torch.eye(V, dtype=torch.float64)
PAIRS = list(itertools.product(range(V), repeat=2))
FIRST, SECOND = draw(V, seed=5), draw(V, V, seed=6)  # the teacher's logits, of the second token given the first
OTHER_FIRST, OTHER_SECOND = draw(V, seed=7), draw(V, V, seed=8)
PG = {"form": "policy_gradient", "max_advantage": None, "surrogate": {"form": "reinforce"}}
FORMS = [
    PG,
    PG | {"surrogate": {"form": "clip"}, "discount": 0.9},
    {"form": "topk", "k": 2},
    {"form": "overlap", "k": 2},
    {"form": "full_vocab"},
    {"form": "forward_kl"},
    {"form": "jsd", "beta": 0.3},
    {"form": "minillm", "discount": 0.0},
    {"form": "minillm", "discount": 0.8},
]


def student():
    return draw(V, seed=1).requires_grad_(), draw(V, V, seed=2).requires_grad_()


def scored(index, completion, **known):
    given = {"infer_logprobs": torch.zeros(len(completion)), "old_logprobs": None, "reference_logprobs": None}
    return Scored(index, Sequence((0,), tuple(completion)), 0, **(given | {"bonus": 0.0} | known))


def logits(first, second, completions):
    """[2 S, V]: of both tokens of each completion."""
    return torch.stack([part for a, _ in completions for part in (first, second[a])])


def piece(model, completions, weights=None, rows=None, teacher=(FIRST, SECOND)):
    targets = torch.tensor([token for completion in completions for token in completion])
    weights = torch.ones(len(targets), dtype=torch.float64) if weights is None else weights
    rows = rows or [scored(i, completion) for i, completion in enumerate(completions)]
    return Piece(rows, logits(*model, completions), EYE, targets, weights, logits(*teacher, completions), EYE)


def distill(form, **options):
    return DistillLoss(OpdSettings.model_construct(loss=_form(form), health_topk=2, **options))


def _form(form):
    common = {
        "data": {"tasks": ["a"]},
        "rollout": {"prompts": 1, "max_prompt_tokens": 1, "max_completion_tokens": 2},
        "train": {"max_steps": 1, "global_batch_size": 1, "optimizer": {"lr": 1.0}},
    }
    return OpdSettings.model_validate({**common, "loss": form, "route_by": ["domain"]}).loss


def logprob(model, completion):
    """(log p(y_1), log p(y_2 | y_1)) by plain Python."""
    found = []
    for row, token in zip((model[0], model[1][completion[0]]), completion, strict=True):
        values = row.tolist()
        found.append(values[token] - math.log(sum(math.exp(value) for value in values)))
    return found


def sequence_probs(model):
    """[V * V], in the order of PAIRS, differentiable."""
    first, second = model[0].log_softmax(-1), model[1].log_softmax(-1)
    return (first[:, None] + second).flatten()


def expected_gradient(form, model):
    """Of the loss, over all completions by their probability, which is held fixed."""
    loss = distill(form)
    probs = sequence_probs(model).detach().exp()
    total = sum(prob * loss(piece(model, [completion])) for prob, completion in zip(probs, PAIRS, strict=True))
    return torch.autograd.grad(total, model)


def sequence_kl_gradient(model):
    own, theirs = sequence_probs(model), sequence_probs((FIRST, SECOND))
    return torch.autograd.grad((own.exp() * (own - theirs)).sum(), model)


def positions_kl_gradient(model):
    """Of the reverse KL of each position where the sampling is held fixed."""
    fixed = model[0].detach().softmax(-1)
    total = 0.0
    for row, theirs, weight in [(model[0], FIRST, 1.0), *zip(model[1], SECOND, fixed, strict=True)]:
        p, q = row.log_softmax(-1), theirs.log_softmax(-1)
        total = total + weight * (p.exp() * (p - q)).sum()
    return torch.autograd.grad(total, model)


@pytest.mark.parametrize("form", [PG, {"form": "full_vocab"}, {"form": "minillm", "discount": 0.0}])
def test_without_discount_the_mean_gradient_is_that_of_each_positions_reverse_kl(form):
    model = student()
    torch.testing.assert_close(expected_gradient(form, model), positions_kl_gradient(model))


@pytest.mark.parametrize("form", [PG | {"discount": 1.0}, {"form": "minillm", "discount": 1.0}])
def test_at_discount_one_the_mean_gradient_is_that_of_the_reverse_kl_of_sequences(form):
    """MiniLLM's normalisation divides by the one later token there is."""
    model = student()
    torch.testing.assert_close(expected_gradient(form, model), sequence_kl_gradient(model))


def test_a_clip_breaks_the_gradient_of_the_kl():
    model = student()
    clipped, exact = expected_gradient(PG | {"max_advantage": 0.1}, model), positions_kl_gradient(model)
    assert (clipped[0] - exact[0]).abs().max() > 1e-2


def test_the_mean_gradient_of_the_overlap_advantage_is_zero_at_every_position():
    """It does not depend on the sampled token: it weighs the token, and is no KL's gradient."""
    for grad in expected_gradient({"form": "overlap", "k": 2}, student()):
        assert grad.abs().max() < 1e-14


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_student_that_is_its_teacher_has_no_gradient(form):
    model = student()
    own = tuple(part.detach() for part in model)
    loss = distill(form)(piece(model, PAIRS, teacher=own))
    grads = torch.autograd.grad(loss, model)
    assert max(float(grad.abs().max()) for grad in grads) < 1e-14


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_token_weights_and_pieces_add_up(form):
    model, weights = student(), draw(2 * len(PAIRS), seed=9).abs()
    loss = distill(form)
    whole = torch.autograd.grad(loss(piece(model, PAIRS, weights)), model)
    parts = [torch.autograd.grad(loss(piece(model, PAIRS[s], weights[t])), model)
             for s, t in ((slice(0, 4), slice(0, 8)), (slice(4, 9), slice(8, 18)))]  # fmt: skip
    torch.testing.assert_close(tuple(a + b for a, b in zip(*parts, strict=True)), whole)


def test_every_addition_to_the_advantage_agrees_with_a_loop():
    """Extrapolated teacher, clip, discount, bonus, ratio to an older policy, IcePop on the sampler's ratio."""
    form = PG | {"max_advantage": 0.7, "discount": 0.5, "teacher_scale": 1.25,
                 "surrogate": {"form": "clip", "low": 0.2, "high": 0.28},
                 "mismatch": {"rule": "icepop", "low": 0.9, "high": 1.1}}  # fmt: skip
    model, reference = student(), (OTHER_FIRST, OTHER_SECOND)
    noise = draw(len(PAIRS), 2, 2, seed=3) * 0.15
    rows, expected, masked, cut = [], 0.0, 0, 0
    for i, completion in enumerate(PAIRS):
        own, theirs, base = (logprob(m, completion) for m in (model, (FIRST, SECOND), reference))
        old = [own[t] + float(noise[i, t, 0]) for t in range(2)]
        infer = [old[t] + float(noise[i, t, 1]) for t in range(2)]
        bonus = 0.1 * i - 0.3
        gaps = [base[t] + 1.25 * (theirs[t] - base[t]) - own[t] for t in range(2)]
        clipped = [max(-0.7, min(0.7, gap)) for gap in gaps]
        cut += sum(abs(gap) >= 0.7 for gap in gaps)
        for t, advantage in enumerate((clipped[0] + 0.5 * clipped[1] + bonus, clipped[1] + bonus)):
            ratio, mismatch = math.exp(own[t] - old[t]), math.exp(old[t] - infer[t])
            masked += not 0.9 <= mismatch <= 1.1
            weight = mismatch if 0.9 <= mismatch <= 1.1 else 0.0
            expected -= weight * min(ratio * advantage, max(0.8, min(1.28, ratio)) * advantage)
        known = {"old_logprobs": old, "infer_logprobs": infer, "reference_logprobs": base}
        given = {name: torch.tensor(values, dtype=torch.float64) for name, values in known.items()}
        rows.append(scored(i, completion, bonus=bonus, **given))
    loss = distill(form)
    assert float(loss(piece(model, PAIRS, rows=rows)).detach()) == pytest.approx(expected)
    metrics = loss.metrics()
    assert 0 < masked < 18
    assert 0 < cut < 18
    assert metrics["mismatch_fraction"] == pytest.approx(masked / 18)
    assert metrics["clip_fraction"] == pytest.approx(cut / 18)


@pytest.mark.parametrize("discount", [0.4, 1.0])
def test_minillm_agrees_with_a_loop(discount):
    model, expected = student(), 0.0
    for completion in PAIRS:
        own, theirs = logprob(model, completion), logprob((FIRST, SECOND), completion)
        for row, other in ((model[0], FIRST), (model[1][completion[0]], SECOND[completion[0]])):
            p, q = row.softmax(-1).tolist(), other.softmax(-1).tolist()
            expected += sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
        expected -= (theirs[1] - own[1]) * own[0]  # one later token: its own weighted mean at any discount
    loss = distill({"form": "minillm", "discount": discount})(piece(model, PAIRS))
    assert float(loss.detach()) == pytest.approx(expected)


def test_overlap_agrees_with_a_loop_and_notes_its_size():
    model, expected, sizes = student(), 0.0, []
    for completion in PAIRS:
        own = logprob(model, completion)
        for t, (row, other) in enumerate(((model[0], FIRST), (model[1][completion[0]], SECOND[completion[0]]))):
            p, q = row.softmax(-1).tolist(), other.softmax(-1).tolist()
            both = [v for v in range(V) if sorted(p)[-2] <= p[v] and sorted(q)[-2] <= q[v]]
            sizes.append(len(both))
            mass = sum(p[v] for v in both)
            expected -= sum(p[v] / mass * math.log(q[v] / p[v]) for v in both) * own[t]
    loss = distill({"form": "overlap", "k": 2})
    assert float(loss(piece(model, PAIRS)).detach()) == pytest.approx(expected)
    assert loss.metrics()["overlap_size"] == pytest.approx(sum(sizes) / len(sizes))


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_health_is_told_for_every_form(form):
    loss = distill(form)
    loss(piece(student(), PAIRS))
    metrics = loss.metrics()
    assert {"reverse_kl", "overlap", "overlap_mass_teacher", "student_entropy", "entropy_gap"} <= metrics.keys()
    gradient = distill({"form": "full_vocab"})
    gradient(piece(student(), PAIRS))
    assert metrics["reverse_kl"] == pytest.approx(gradient.metrics()["reverse_kl"])
