"""`policy_loss`: each surrogate and mismatch rule against loops over python numbers, its gradient against algebra."""

import math

import pytest
import torch
from pydantic import TypeAdapter

from opdctl.engine.losses import clipped_policy_loss, policy_loss, sequence_ratio, token_weights
from opdctl.settings import ClippedSurrogate, Mismatch, Surrogate

torch.set_num_threads(1)

LENGTHS = [3, 1, 7, 5, 2, 6, 4, 8]
SEQUENCE = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
N = sum(LENGTHS)
SURROGATES = {
    "clip": {"form": "clip", "low": 0.2, "high": 0.28},
    "dual": {"form": "clip", "low": 0.2, "high": 0.28, "dual": 1.5},
    "sequence": {"form": "clip", "low": 0.05, "high": 0.08, "level": "sequence"},
    "sequence_dual": {"form": "clip", "low": 0.05, "high": 0.08, "level": "sequence", "dual": 1.1},
    "cispo": {"form": "cispo", "high": 0.3},
    "log_ratio_clip": {"form": "log_ratio_clip", "low": -0.3, "high": 0.4, "square": 0.1},
    "reinforce": {"form": "reinforce"},
}
RULES = {
    "tis": {"rule": "tis", "cap": 1.4},
    "tis_floor": {"rule": "tis", "floor": 0.7, "cap": 1.4},
    "icepop": {"rule": "icepop", "low": 0.7, "high": 1.4},
    "icepop_current": {"rule": "icepop", "low": 0.7, "high": 1.4, "policy": "current"},
    "dis": {"rule": "dis", "low": 0.3, "high": 0.4},
    "opsm": {"rule": "opsm", "delta": 0.05},
    "sequence_mask": {"rule": "sequence_mask", "low": 0.9, "high": 1.1},
}


def surrogate(name):
    return TypeAdapter(Surrogate).validate_python(SURROGATES[name])


def rule(name):
    return TypeAdapter(Mismatch).validate_python(RULES[name]) if name else None


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Tokens:
    """Three policies' log-probabilities of N tokens; advantages by sequence, or by token."""

    def __init__(self, *, by_token=False):
        self.policy = (draw(N) * 0.4 - 2).requires_grad_()
        self.old = self.policy.detach() + draw(N, seed=1) * 0.4
        self.infer = self.old + draw(N, seed=2) * 0.3
        self.advantages = draw(N, seed=8) if by_token else draw(len(LENGTHS), seed=8)[SEQUENCE]

    def loss(self, form, mismatch=None):
        given = surrogate(form), rule(mismatch), self.policy, self.old, self.infer, self.advantages, SEQUENCE
        return policy_loss(*given)


# ---------------------------------------------------------------------------------------------- against slow loops


def sequences(values):
    found, at = [], 0
    for length in LENGTHS:
        found.append(values[at : at + length])
        at += length
    return found


def slow_surrogate(form, policy, old, advantages):
    """(loss, cut) of each token of one sequence."""
    given = SURROGATES[form]
    ratios = [math.exp(p) / math.exp(o) for p, o in zip(policy, old, strict=True)]
    if given.get("level") == "sequence":
        ratios = [math.prod(ratios) ** (1 / len(ratios))] * len(ratios)
    for ratio, logprob, a in zip(ratios, policy, advantages, strict=True):
        match given["form"]:
            case "clip":
                top, bottom = 1 + given["high"], 1 - given["low"]
                held = min(ratio, top) if a >= 0 else max(ratio, bottom)
                if a < 0 and "dual" in given:
                    held = min(held, given["dual"])
                yield -held * a, held != ratio
            case "cispo":
                yield -min(ratio, 1 + given["high"]) * a * logprob, ratio > 1 + given["high"]
            case "log_ratio_clip":
                x = math.log(ratio)
                held = sorted((given["low"], x, given["high"]))[1]
                yield -math.exp(held) * a + given["square"] * x * x, not math.isclose(held, x)
            case "reinforce":
                yield -a * logprob, False


def slow_weights(name, policy, old, infer, advantages):
    """(ratio that the rule reads, weight) of each token of one sequence."""
    given, count = RULES[name], len(policy)
    k = [math.exp(o) / math.exp(i) for o, i in zip(old, infer, strict=True)]
    q = [math.exp(p) / math.exp(i) for p, i in zip(policy, infer, strict=True)]
    drift = sum(i - p for p, i in zip(policy, infer, strict=True)) / count
    for token in range(count):
        match name:
            case "tis" | "tis_floor":
                yield k[token], max(min(k[token], given["cap"]), given.get("floor", 0.0))
            case "icepop":
                yield k[token], k[token] if given["low"] <= k[token] <= given["high"] else 0.0
            case "icepop_current":
                yield q[token], q[token] if given["low"] <= q[token] <= given["high"] else 0.0
            case "dis":
                yield q[token], q[token] if 1 - given["low"] < q[token] < 1 + given["high"] else 0.0
            case "opsm":
                yield q[token], 0.0 if sum(advantages) < 0 and drift > given["delta"] else 1.0
            case "sequence_mask":
                kept = given["low"] <= math.prod(k) ** (1 / count) <= given["high"]
                yield k[token], float(kept)


@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("form", SURROGATES)
def test_a_surrogate_agrees_with_a_loop_over_tokens(form, by_token):
    tokens = Tokens(by_token=by_token)
    loss, statistics = tokens.loss(form)
    both = [sequences(values.tolist()) for values in (tokens.policy, tokens.old, tokens.advantages)]
    slow = [pair for one in zip(*both, strict=True) for pair in slow_surrogate(form, *one)]
    torch.testing.assert_close(loss, torch.tensor([value for value, _ in slow], dtype=torch.float64))
    assert statistics.keys() == {"clip_fraction"}
    assert statistics["clip_fraction"].tolist() == [cut for _, cut in slow]
    assert form == "reinforce" or 0 < statistics["clip_fraction"].sum() < N  # both branches were taken


@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("name", RULES)
def test_a_mismatch_rule_agrees_with_a_loop_over_tokens(name, by_token):
    tokens = Tokens(by_token=by_token)
    bare, _ = tokens.loss("reinforce")
    loss, statistics = tokens.loss("reinforce", name)
    given = (tokens.policy, tokens.old, tokens.infer, tokens.advantages)
    both = [sequences(values.tolist()) for values in given]
    slow = [pair for one in zip(*both, strict=True) for pair in slow_weights(name, *one)]
    weights = torch.tensor([weight for _, weight in slow], dtype=torch.float64)
    torch.testing.assert_close(loss, bare * weights)
    torch.testing.assert_close(statistics["mismatch_ratio"], torch.tensor([r for r, _ in slow], dtype=torch.float64))
    cut = [not math.isclose(w, r) for r, w in slow] if name.startswith("tis") else [w == 0 for _, w in slow]
    assert statistics["mismatch_fraction"].tolist() == cut
    assert 0 < sum(cut) < N  # both branches were taken


# ------------------------------------------------------------------------------------------------------- gradients


def factors(form, tokens):
    """d loss / d log pi_theta of each token by hand: -factor A + pull."""
    given, ratio = SURROGATES[form], (tokens.policy - tokens.old).exp().detach()
    _, statistics = tokens.loss(form)
    free = ~statistics["clip_fraction"]
    match given["form"]:
        case "clip" if given.get("level") == "sequence":
            mean = torch.cat([part.log().mean().exp().expand(len(part)) for part in ratio.split(LENGTHS)])
            return mean * free, 0.0
        case "clip":
            return ratio * free, 0.0
        case "cispo":
            return ratio.clamp(max=1 + given["high"]), 0.0
        case "log_ratio_clip":
            return ratio * free, 2 * given["square"] * ratio.log()
    return torch.ones(N, dtype=torch.float64), 0.0


@pytest.mark.parametrize("name", [None, *RULES])
@pytest.mark.parametrize("form", SURROGATES)
def test_the_gradient_is_what_the_algebra_says(form, name):
    tokens = Tokens()
    bare, _ = tokens.loss(form)
    loss, _ = tokens.loss(form, name)
    weights = (loss / bare).detach() if name else torch.ones(N, dtype=torch.float64)
    (grad,) = torch.autograd.grad(loss.sum(), tokens.policy)
    factor, pull = factors(form, tokens)
    torch.testing.assert_close(grad, weights * (-factor * tokens.advantages + pull))


@pytest.mark.parametrize("form", ["clip", "dual", "log_ratio_clip", "reinforce"])
def test_the_gradient_of_a_surrogate_passes_gradcheck(form):
    tokens = Tokens()

    def of(policy):
        return policy_loss(
            surrogate(form), rule("icepop"), policy, tokens.old, tokens.infer, tokens.advantages, SEQUENCE
        )[0]

    assert torch.autograd.gradcheck(of, tokens.policy, atol=1e-7)


def test_the_sequence_ratio_moves_as_the_geometric_mean_does():
    """GSPO's objective with its ratio as a function of all tokens of the sequence, differentiated whole."""
    tokens = Tokens()
    loss, _ = tokens.loss("sequence")
    weights = token_weights(SEQUENCE, how="sequence_mean", total_tokens=N, total_sequences=len(LENGTHS))
    (found,) = torch.autograd.grad((loss * weights).sum(), tokens.policy)
    given = SURROGATES["sequence"]

    def objective(policy):
        terms = []
        for logprobs, old, advantages in zip(
            policy.split(LENGTHS), tokens.old.split(LENGTHS), tokens.advantages.split(LENGTHS), strict=True
        ):
            s, a = (logprobs - old).mean().exp(), advantages[0]
            terms.append(-torch.minimum(s * a, s.clamp(1 - given["low"], 1 + given["high"]) * a))
        return torch.stack(terms).mean()

    (wanted,) = torch.autograd.grad(objective(tokens.policy), tokens.policy)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close((loss * weights).sum(), objective(tokens.policy), rtol=1e-6, atol=1e-9)
    assert torch.autograd.gradcheck(objective, tokens.policy, atol=1e-7)


@pytest.mark.parametrize(
    ("form", "name"),
    [
        ({"form": "reinforce"}, {"rule": "dis", "low": 1.0, "high": 1e3}),
        ({"form": "reinforce"}, {"rule": "icepop", "low": 1e-3, "high": 1e3, "policy": "current"}),
        ({"form": "clip", "low": 1.0, "high": 1e3}, {"rule": "tis", "cap": 1e3}),
        ({"form": "cispo", "high": 1e3}, {"rule": "icepop", "low": 1e-3, "high": 1e3}),
    ],
)
def test_without_bounds_tokens_of_another_sampler_give_the_policy_gradient(form, name):
    """Over a vocabulary of 6, drawn as pi_infer draws: the exact mean of the gradient is that of -E_pi A."""
    logits, others, advantages = draw(6).requires_grad_(), draw(2, 6, seed=1).log_softmax(-1), draw(6, seed=2)
    given = TypeAdapter(Surrogate).validate_python(form), TypeAdapter(Mismatch).validate_python(name)
    policy, (old, infer) = logits.log_softmax(0), others
    loss, _ = policy_loss(*given, policy, old, infer, advantages, torch.arange(6))
    (found,) = torch.autograd.grad((infer.exp() * loss).sum(), logits, retain_graph=True)
    (wanted,) = torch.autograd.grad(-(policy.exp() * advantages).sum(), logits)
    torch.testing.assert_close(found, wanted)


def test_nothing_but_the_policy_has_a_gradient():
    tokens = Tokens()
    for given in (tokens.old, tokens.infer, tokens.advantages):
        given.requires_grad_()
    for form in SURROGATES:
        for name in (None, *RULES):
            loss, statistics = tokens.loss(form, name)
            assert not any(value.requires_grad for value in statistics.values())
            others = torch.autograd.grad(loss.sum(), (tokens.old, tokens.infer, tokens.advantages), allow_unused=True)
            assert others == (None, None, None)


@pytest.mark.parametrize("form", SURROGATES)
def test_on_policy_every_surrogate_is_the_policy_gradient(form):
    tokens = Tokens()
    tokens.old = tokens.infer = tokens.policy.detach()
    for name in (None, *RULES):
        loss, statistics = tokens.loss(form, name)
        (grad,) = torch.autograd.grad(loss.sum(), tokens.policy)
        torch.testing.assert_close(grad, -tokens.advantages)
        assert not any(value.any() for key, value in statistics.items() if key.endswith("fraction"))


# ------------------------------------------------------------------------------------------------------ properties


def test_the_default_is_the_clipped_loss_bit_by_bit():
    policy, old, advantages = (draw(N, seed=seed).float() * 0.4 for seed in range(3))
    loss, statistics = policy_loss(ClippedSurrogate(), None, policy, old, old, advantages, SEQUENCE)
    wanted, clipped = clipped_policy_loss(policy, old, advantages, low=0.2, high=0.2)
    assert torch.equal(loss, wanted)
    assert torch.equal(statistics["clip_fraction"], clipped)


def test_the_dual_clip_holds_only_negative_advantages():
    """LongCat's e_nh = 3 as its prose has it: a ratio of 5 is held at 3 where A < 0, and by 1 + e_ph where A > 0."""
    policy = torch.full((2,), math.log(5.0)).requires_grad_()
    loss, _ = clipped_policy_loss(policy, torch.zeros(2), torch.tensor([-1.0, 1.0]), low=0.2, high=4.5, dual=3.0)
    assert loss.tolist() == pytest.approx([3.0, -5.0])
    (grad,) = torch.autograd.grad(loss.sum(), policy)
    assert grad.tolist() == pytest.approx([0.0, -5.0])


@pytest.mark.parametrize(("k", "weight"), [(0.499, 0), (0.5, 0.5), (5.0, 5.0), (5.001, 0)])
def test_icepop_of_ring_keeps_its_ends(k, weight):
    ratio = torch.tensor([k], dtype=torch.float64).log()
    given = TypeAdapter(Mismatch).validate_python({"rule": "icepop", "low": 0.5, "high": 5.0})
    nothing, one = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    policy = -one  # so that the loss is the weight
    loss, _ = policy_loss(surrogate("reinforce"), given, policy, ratio, nothing, one, torch.zeros(1, dtype=torch.long))
    assert loss.item() == pytest.approx(weight)


def test_a_sequence_may_lie_anywhere_in_the_numbering():
    """Rows of one teacher are cut out of a micro-batch, so that numbers begin late and leave gaps."""
    policy, old = draw(6), draw(6, seed=1)
    dense, gaps = torch.tensor([0, 0, 1, 1, 1, 2]), torch.tensor([3, 3, 5, 5, 5, 9])
    assert torch.equal(sequence_ratio(policy, old, dense), sequence_ratio(policy, old, gaps))


def test_a_batch_without_tokens_has_no_loss():
    none = torch.zeros(0, dtype=torch.float64)
    for form in SURROGATES:
        for name in (None, *RULES):
            loss, _ = policy_loss(surrogate(form), rule(name), none, none, none, none, none.long())
            assert loss.shape == (0,)
