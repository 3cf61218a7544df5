"""Several completions of one prompt are no independent trials."""

import random

import pytest

from opdctl.engine.scores import CellCounts, wilson_interval
from opdctl.errors import OpdctlError


def counts(solved, size):
    return CellCounts(
        n=len(solved) * size,
        correct=sum(solved),
        within=None,
        length_sum=0,
        truncated=0,
        group_size=size,
        correct_squares=sum(c * c for c in solved),
    )


def test_completions_that_are_all_alike_count_as_their_prompts():
    found = counts([4, 0] * 50, 4)
    assert found.trials("accuracy") == pytest.approx(100, abs=1.5)
    assert found.estimate("accuracy", 0.95).low == pytest.approx(wilson_interval(50, 100).low, abs=1e-3)


def test_completions_that_differ_by_chance_alone_count_each():
    draw = random.Random(0)
    solved = [sum(draw.random() < 0.5 for _ in range(4)) for _ in range(2000)]
    assert counts(solved, 4).trials("accuracy") == pytest.approx(8000, rel=0.1)


def test_by_hand():
    # rates 1, 1/2, 0, 1/2: mean 1/2, variance between prompts 1/6, of their mean 1/24; 1/4 over 1/24
    assert counts([2, 1, 0, 1], 2).trials("accuracy") == pytest.approx(6)


@pytest.mark.parametrize("solved", [[2, 2, 2], [0, 0, 0]])
def test_without_any_difference_nothing_is_known_beyond_the_prompts(solved):
    assert counts(solved, 2).trials("accuracy") == 3


def test_single_completions_are_wilsons_as_before():
    found = CellCounts(n=300, correct=120, within=100, length_sum=0, truncated=0)
    assert found.estimate("accuracy", 0.95) == wilson_interval(120, 300)
    assert found.estimate("within", 0.95) == wilson_interval(100, 300)


@pytest.mark.parametrize(("skills", "size"), [((0.05, 0.95), 8), ((0.3, 0.7), 4), ((0.5, 0.5), 8)])
def test_intervals_hold_the_true_rate_about_as_often_as_they_say(skills, size):
    draw, held = random.Random(1), 0
    for _ in range(400):
        rates = [draw.choice(skills) for _ in range(60)]
        found = counts([sum(draw.random() < rate for _ in range(size)) for rate in rates], size)
        interval = found.estimate("accuracy", 0.95)
        held += interval.low <= 0.5 <= interval.high
    assert 0.92 <= held / 400 <= 0.99


def test_completions_that_are_no_groups_are_refused():
    with pytest.raises(OpdctlError, match="7 completions are not groups of 2"):
        CellCounts(n=7, correct=1, within=None, length_sum=0, truncated=0, group_size=2)
