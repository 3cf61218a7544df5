"""Each way to merge against a slow version written entry by entry, hand-computed cases, and its properties."""

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from opdctl.engine import merge_methods as methods
from opdctl.engine.merge_methods import Dropout, Part, Parts, kth_largest, task_norms

torch.set_num_threads(1)


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def parts_of(thetas, base=None, size=7):
    """`size`: entries of a part, so that every tensor of a test comes in several."""
    thetas = torch.as_tensor(thetas, dtype=torch.float32)
    base = None if base is None else torch.as_tensor(base, dtype=torch.float32)

    def read():
        for at in range(0, thetas.shape[1], size):
            yield Part(thetas[:, at : at + size], None if base is None else base[at : at + size])

    return Parts(thetas.shape[1], read)


def whole(parts):
    return torch.cat(list(parts))


def ones(count):
    return torch.ones(count)


# ------------------------------------------------------------------------------------------ slow and independent


def slow_mean_of_agreeing(deltas, weights):
    """Entry by entry, in Python's floats."""
    merged = []
    for column in zip(*deltas, strict=True):
        total = sum(w * d for w, d in zip(weights, column, strict=True))
        agreeing = [(w, d) for w, d in zip(weights, column, strict=True) if (d > 0 if total >= 0 else d < 0)]
        weight = sum(w for w, _ in agreeing)
        merged.append(sum(w * d for w, d in agreeing) / weight if weight else 0.0)
    return merged


def slow_ties(thetas, base, weights, density, scale):
    deltas = [[t - b for t, b in zip(theta, base, strict=True)] for theta in thetas]
    kept = []
    for delta in deltas:
        count = max(1, int(density * len(delta)))
        bound = sorted((abs(d) for d in delta), reverse=True)[count - 1]
        kept.append([d if abs(d) >= bound else 0.0 for d in delta])
    return [b + scale * m for b, m in zip(base, slow_mean_of_agreeing(kept, weights), strict=True)]


def slow_sce(thetas, base, select):
    deltas = [[t - b for t, b in zip(theta, base, strict=True)] for theta in thetas]
    variances = []
    for column in zip(*deltas, strict=True):
        mean = sum(column) / len(column)
        variances.append(sum((d - mean) ** 2 for d in column) / len(column))
    count = int(select * sum(v > 0 for v in variances))
    chosen = (
        set(sorted(range(len(base)), key=lambda at: -variances[at])[:count]) if select < 1 else set(range(len(base)))
    )
    kept = [[d if at in chosen else 0.0 for at, d in enumerate(delta)] for delta in deltas]
    energies = [sum(d * d for d in delta) / len(base) for delta in kept]
    etas = [energy / sum(energies) for energy in energies]
    merged = []
    for column in zip(*kept, strict=True):
        positive = sum(column) >= 0
        agreeing = [(e, d) for e, d in zip(etas, column, strict=True) if (d > 0 if positive else d < 0)]
        weight = sum(e for e, _ in agreeing)
        merged.append(sum(e * d for e, d in agreeing) / weight if weight else 0.0)
    return [b + m for b, m in zip(base, merged, strict=True)]


def slow_masks(rate, seeds, count):
    """The stream of each model, drawn at once."""
    return [torch.rand(count, generator=torch.Generator().manual_seed(seed)) >= rate for seed in seeds]


THETAS, BASE, WEIGHTS = draw(4, 60), draw(60, seed=1), torch.tensor([1.0, 0.5, 2.0, 0.25])


@pytest.mark.parametrize("density", [0.01, 0.2, 0.75, 1.0])
def test_ties_is_its_definition_entry_by_entry(density):
    fast = whole(methods.ties(parts_of(THETAS, BASE), WEIGHTS, density, 0.7))
    slow = slow_ties(THETAS.tolist(), BASE.tolist(), WEIGHTS.tolist(), density, 0.7)
    torch.testing.assert_close(fast, torch.tensor(slow), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("select", [0.1, 0.5, 1.0])
def test_sce_is_its_definition_entry_by_entry(select):
    fast = whole(methods.sce(parts_of(THETAS, BASE), select))
    torch.testing.assert_close(
        fast, torch.tensor(slow_sce(THETAS.tolist(), BASE.tolist(), select)), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("sign", ["none", "ties"])
@pytest.mark.parametrize("rescale", [True, False])
def test_dare_is_its_definition_entry_by_entry(sign, rescale):
    seeds = [3, 4, 5, 6]
    fast = whole(methods.dare(parts_of(THETAS, BASE), WEIGHTS, 0.6, 0.9, seeds, rescale=rescale, sign=sign))
    factor = 1 / 0.4 if rescale else 1.0
    dropped = [
        [float(d) * factor if kept else 0.0 for d, kept in zip(theta - BASE, mask.tolist(), strict=True)]
        for theta, mask in zip(THETAS, slow_masks(0.6, seeds, 60), strict=True)
    ]
    weights = WEIGHTS.tolist()
    if sign == "ties":
        merged = slow_mean_of_agreeing(dropped, weights)
    else:
        merged = [sum(w * d for w, d in zip(weights, column, strict=True)) for column in zip(*dropped, strict=True)]
    slow = torch.tensor([b + 0.9 * m for b, m in zip(BASE.tolist(), merged, strict=True)])
    torch.testing.assert_close(fast, slow, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("norm", ["l1", "l2"])
@pytest.mark.parametrize("combine", ["sum", "mean"])
def test_longcat_fusion_is_its_definition_entry_by_entry(norm, combine):
    seeds, parts = [3, 4, 5, 6], parts_of(THETAS, BASE)
    sums = task_norms(parts, norm)
    norms = sums.sqrt() if norm == "l2" else sums
    fast = whole(methods.longcat_fusion(parts, WEIGHTS, norms, 0.5, 0.8, seeds, rescale=True, combine=combine))
    deltas = (THETAS - BASE).double().tolist()
    slow_norms = [
        sum(abs(d) for d in delta) if norm == "l1" else math.sqrt(sum(d * d for d in delta)) for delta in deltas
    ]
    common = sum(slow_norms) / len(slow_norms)
    dropped = [
        [d * common / own / 0.5 if kept else 0.0 for d, kept in zip(delta, mask.tolist(), strict=True)]
        for delta, own, mask in zip(deltas, slow_norms, slow_masks(0.5, seeds, 60), strict=True)
    ]
    weights = WEIGHTS.tolist()
    merged = slow_mean_of_agreeing(dropped, weights)
    if combine == "sum":
        for at, column in enumerate(zip(*dropped, strict=True)):
            total = sum(w * d for w, d in zip(weights, column, strict=True))
            merged[at] *= sum(w for w, d in zip(weights, column, strict=True) if (d > 0 if total >= 0 else d < 0))
    slow = torch.tensor([b + 0.8 * m for b, m in zip(BASE.tolist(), merged, strict=True)])
    torch.testing.assert_close(fast, slow, rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------------------------------------- by hand


def test_linear_by_hand():
    merged = whole(methods.linear(parts_of([[1.0, 2.0], [4.0, -2.0]]), torch.tensor([1.0, 2.0])))
    assert merged.tolist() == pytest.approx([3.0, -2 / 3])


def test_convex_by_hand():
    merged = whole(methods.convex(parts_of([[1.0, 2.0], [5.0, -2.0]]), torch.tensor([0.25, 0.75])))
    assert merged.tolist() == [4.0, -1.0]


def test_task_arithmetic_by_hand():
    parts = parts_of([[1.0, 2.0], [3.0, -2.0]], [1.0, 1.0])
    assert whole(methods.task_arithmetic(parts, ones(2), 0.5)).tolist() == [2.0, 0.0]


def test_ties_by_hand():
    # half of each task vector: [4, 3, ., .], [-5, ., 2, .]; signs by the sums -1, 3, 2; only -5, 3 and 2 agree
    parts = parts_of([[4.0, 3.0, 0.5, 0.1], [-5.0, 1.0, 2.0, 0.2]], [0.0] * 4)
    assert whole(methods.ties(parts, ones(2), 0.5, 1.0)).tolist() == [-5.0, 3.0, 2.0, 0.0]


def test_signs_in_balance_count_as_positive():
    merged = methods.ties(parts_of([[1.0, -2.0], [-1.0, 2.0]], [0.0, 0.0]), ones(2), 1.0, 1.0)
    assert whole(merged).tolist() == [1.0, 2.0]


def test_sce_by_hand():
    # variances 16, 1, 0.25 and none: two of the three are selected; energies 9 + 9 and 25 + 1 give 18/44, 26/44
    parts = parts_of([[3.0, 3.0, 1.0, 2.0], [-5.0, 1.0, 2.0, 2.0]], [0.0] * 4)
    merged = whole(methods.sce(parts, 0.7))
    assert merged.tolist() == pytest.approx([-5.0, (18 * 3 + 26) / 44, 0.0, 0.0])


def test_longcat_fusion_by_hand():
    # l1 norms 2 and 6 become 4: [4, 0, .] and [-2, 2, .]; the first entry goes to the positive one
    parts = parts_of([[2.0, 0.0], [-3.0, 3.0]], [0.0, 0.0])
    norms = task_norms(parts, "l1")
    assert norms.tolist() == [2.0, 6.0]
    merged = whole(methods.longcat_fusion(parts, ones(2), norms, 0.0, 1.0, [0, 1], rescale=True, combine="sum"))
    assert merged.tolist() == [4.0, 2.0]


# ------------------------------------------------------------------------------------------------- properties

ALL = {
    "linear": methods.linear,
    "convex": lambda parts, w: methods.convex(parts, w / w.sum()),
    "task_arithmetic": lambda parts, w: methods.task_arithmetic(parts, w, 0.8),
    "ties": lambda parts, w: methods.ties(parts, w, 0.4, 0.8),
    "sce": lambda parts, w: methods.sce(parts, 0.4),
    "dare": lambda parts, w: methods.dare(parts, w, 0.5, 0.8, range(len(w))),
    "dare_ties": lambda parts, w: methods.dare(parts, w, 0.5, 0.8, range(len(w)), sign="ties"),
    "longcat_fusion": lambda parts, w: methods.longcat_fusion(
        parts, w, task_norms(parts, "l2").sqrt(), 0.5, 0.8, range(len(w)), rescale=True, combine="sum"
    ),
}


@pytest.mark.parametrize("name", ALL)
def test_parts_of_any_size_give_the_same_tensor(name):
    whole_tensor, *cut = (whole(ALL[name](parts_of(THETAS, BASE, size), WEIGHTS)) for size in (60, 1, 7, 16, 59))
    for other in cut:
        torch.testing.assert_close(other, whole_tensor, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["linear", "convex", "task_arithmetic", "ties", "sce"])
def test_the_order_of_the_models_does_not_matter(name):
    order = [2, 0, 3, 1]
    merged = whole(ALL[name](parts_of(THETAS, BASE), WEIGHTS))
    shuffled = whole(ALL[name](parts_of(THETAS[order], BASE), WEIGHTS[order]))
    torch.testing.assert_close(shuffled, merged, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["linear", "convex", "sce"])
def test_equal_models_merge_to_themselves(name):
    merged = whole(ALL[name](parts_of(THETAS[:1].repeat(3, 1), BASE), torch.tensor([1.0, 2.0, 0.5])))
    expected = BASE if name == "sce" else THETAS[0]  # sce selects where models differ, and these differ nowhere
    torch.testing.assert_close(merged, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "method",
    [
        lambda parts: methods.task_arithmetic(parts, ones(1), 1.0),
        lambda parts: methods.ties(parts, ones(1), 1.0, 1.0),
        lambda parts: methods.dare(parts, ones(1), 0.0, 1.0, [0]),
        lambda parts: methods.sce(parts, 1.0),
        lambda parts: methods.longcat_fusion(
            parts, ones(1), task_norms(parts, "l1"), 0.0, 1.0, [0], rescale=True, combine="mean"
        ),
    ],
)
def test_one_task_vector_added_whole_is_the_model(method):
    torch.testing.assert_close(whole(method(parts_of(THETAS[:1], BASE))), THETAS[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", sorted(ALL.keys() - {"linear", "convex"}))
def test_models_that_are_the_base_leave_it_as_it_is(name):
    assert torch.equal(whole(ALL[name](parts_of(BASE.repeat(3, 1), BASE), torch.ones(3))), BASE)


def test_dare_is_the_same_for_the_same_seeds_and_another_for_others():
    def merged(seeds):
        return whole(methods.dare(parts_of(THETAS, BASE), WEIGHTS, 0.5, 1.0, seeds))

    assert torch.equal(merged([1, 2, 3, 4]), merged([1, 2, 3, 4]))
    assert not torch.equal(merged([1, 2, 3, 4]), merged([1, 2, 3, 5]))


def test_dare_keeps_the_expectation():
    kept = Dropout(0.9, [0], rescale=True)(torch.ones(1, 200_000))
    assert float((kept == 0).float().mean()) == pytest.approx(0.9, abs=0.005)
    assert float(kept.mean()) == pytest.approx(1.0, abs=0.03)


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.floats(0, 2.0**100, width=32), min_size=1, max_size=40),
    k=st.integers(1, 40),
    size=st.integers(1, 11),
)
def test_the_kth_largest_is_that_of_sorting(values, k, size):
    k, shuffled = min(k, len(values)), random.Random(0).sample(values, len(values))
    rows = torch.tensor([values, shuffled], dtype=torch.float32)
    found = kth_largest(lambda: iter(rows.split(size, 1)), torch.tensor([k, 1]))
    expected = rows.sort(1, descending=True).values
    assert found.tolist() == [float(expected[0, k - 1]), float(expected[1, 0])]
