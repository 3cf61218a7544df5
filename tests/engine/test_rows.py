"""How a mixture's rows are dealt: by their numbers alone, each task its share."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opdctl.engine.rows import Deal, Mixer
from opdctl.settings import ChainTask, EffortSettings, Mixture
from opdctl.tasks import load_task

EFFORTS = EffortSettings(by="control_token", levels={"low": "<low>", "max": "<max>"})
TASKS = {
    name: load_task(name, ChainTask(task="chain", domain=domain), EFFORTS)
    for name, domain in (("general", "math"), ("coding", "code"), ("agents", "if"))
}
SHARES = st.lists(st.integers(1, 7), min_size=1, max_size=5)


def mixer(ratios=None, efforts=("low", "max"), split="train"):
    return Mixer(TASKS, Mixture(tasks=list(TASKS), efforts=list(efforts), ratios=ratios or {}), split, 5)


def hand(deal, hands, row):
    """Whom a row is dealt to."""
    (got,) = [h for h in range(hands) if deal.before(h, row + 1) > deal.before(h, row)]
    return got


@given(SHARES, st.integers(0, 200))
def test_every_row_goes_to_one_hand(shares, row):
    hand(Deal(shares), len(shares), row)


@given(SHARES, st.integers(0, 50))
def test_any_turn_of_rows_holds_every_share(shares, start):
    deal = Deal(shares)
    turn = sum(shares)
    assert [deal.before(h, start + turn) - deal.before(h, start) for h in range(len(shares))] == shares


@given(SHARES, st.integers(0, 50), st.integers(0, 50))
def test_a_hand_is_never_two_rows_from_its_share(shares, start, count):
    deal, turn = Deal(shares), sum(shares)
    for h, share in enumerate(shares):
        assert abs(deal.before(h, start + count) - deal.before(h, start) - count * share / turn) < 2


@given(st.integers(1, 9), st.integers(1, 5), st.integers(0, 100))
def test_equal_shares_are_dealt_as_in_a_plain_round(hands, share, row):
    assert hand(Deal([share] * hands), hands, row) == hands - 1 - row % hands


def test_a_turn_by_hand():
    deal = Deal([3, 1])  # places of 3: 1/6, 3/6, 5/6; of 1: 1/2, after the equal place of the hand before it
    assert [hand(deal, 2, row) for row in range(8)] == [0, 1, 0, 0, 0, 1, 0, 0]


def test_ratios_count_in_rows_and_in_every_effort():
    rows = mixer({"coding": 4, "agents": 2}).rows(0, 14 * 3)
    cells = Counter((row.prompt.columns["domain"], row.prompt.columns["effort"]) for row in rows)
    assert cells == {
        (task, effort): 3 * share
        for task, share in (("general", 1), ("coding", 4), ("agents", 2))
        for effort in ("low", "max")
    }


@pytest.mark.parametrize("ratios", [{}, {"coding": 3, "general": 2}])
@pytest.mark.parametrize(("start", "count"), [(0, 1), (3, 17), (16, 1), (40, 0)])
def test_any_slicing_gives_the_same_rows(ratios, start, count):
    dealt = mixer(ratios)
    one_by_one = [row for at in range(start, start + count) for row in dealt.rows(at, 1)]
    assert dealt.rows(start, count) == sorted(one_by_one, key=lambda row: (row.cell, row.index))


@pytest.mark.parametrize("ratios", [{}, {"coding": 3, "general": 2}])
def test_no_row_of_a_cell_is_left_out_or_dealt_twice(ratios):
    rows = [row for batch in range(4) for row in mixer(ratios).rows(5 * batch, 5)]
    for cell in range(6):
        indices = [row.index for row in rows if row.cell == cell]
        assert indices == list(range(len(indices)))


def test_without_ratios_rows_are_those_of_a_plain_round():
    rows = mixer().rows(4, 9)  # numbers 4..12 fall on cells 1, 0, 5, 4, 3, 2, 1, 0, 5
    assert [(row.cell, row.index) for row in rows] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
        (2, 1),
        (3, 1),
        (4, 1),
        (5, 1),
        (5, 2),
    ]


def test_demonstrations_follow_the_ratios():
    shown = mixer({"coding": 4, "agents": 2}).demonstrations(21, 14)
    assert Counter(name for name, _ in shown) == {"general": 2, "coding": 8, "agents": 4}
    coding = [demonstration for name, demonstration in shown if name == "coding"]
    assert coding == TASKS["coding"].demonstrations(5, 12, 8, ["low", "max"])


def test_without_ratios_demonstrations_are_dealt_evenly():
    names = [name for name, _ in mixer().demonstrations(1, 4)]  # numbers 1..4 fall on tasks 1, 0, 2, 1
    assert names == ["general", "coding", "coding", "agents"]


@pytest.mark.parametrize("distinct", [1, 3])
def test_distinct_prompts_come_again_and_again_with_numbers_of_their_own(distinct):
    mixture = Mixture(tasks=["general"], efforts=["max"], distinct=distinct)
    rows = Mixer(TASKS, mixture, "train", 5).rows(2, 10)
    all_of_them = Mixer(TASKS, Mixture(tasks=["general"], efforts=["max"]), "train", 5).rows(0, distinct)
    assert [row.prompt for row in rows] == [all_of_them[i % distinct].prompt for i in range(2, 12)]
    assert len({row.key for row in rows}) == 10  # so that each draws completions of its own


def test_distinct_is_of_training_prompts_alone():
    mixture = Mixture(tasks=["general"], efforts=["max"], distinct=1)
    assert len({row.prompt.text for row in Mixer(TASKS, mixture, "eval", 5).rows(0, 10)}) == 10
