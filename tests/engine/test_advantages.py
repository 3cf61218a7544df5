import math
import statistics

import pytest
import torch
from hypothesis import given, strategies

from opdctl.engine.advantages import (
    annealed_tau,
    group_advantages,
    over_budget,
    soft_overlong_penalty,
    tied_groups,
)
from opdctl.errors import OpdctlError
from opdctl.settings import Budget, EffortBudget

torch.set_num_threads(1)

REWARDS = [[1.0, 0.0, 0.0, 1.0], [0.5, -1.0, 2.0, 0.25], [0.1, 0.1, 0.1, 0.1], [0.1, 0.7, 0.1, 0.1]]
BASELINES = ["mean", "mean_std", "leave_one_out", "leave_one_out_std"]


def slow(group, how):
    if how == "mean":
        return [r - sum(group) / len(group) for r in group]
    if how == "leave_one_out":
        return [r - sum(group[:i] + group[i + 1 :]) / (len(group) - 1) for i, r in enumerate(group)]
    if how == "leave_one_out_std":
        rest = [group[:i] + group[i + 1 :] for i in range(len(group))]
        stds = [statistics.pstdev(others) for others in rest]
        return [
            (r - statistics.fmean(others)) / (std + 1e-6 if std else 1)
            for r, others, std in zip(group, rest, stds, strict=True)
        ]
    return [(r - statistics.fmean(group)) / (statistics.stdev(group) + 1e-6) for r in group]


@pytest.mark.parametrize("how", BASELINES)
def test_advantages_agree_with_a_loop_over_groups(how):
    found = group_advantages(torch.tensor(REWARDS, dtype=torch.float64), how)
    expected = torch.tensor([slow(group, how) for group in REWARDS], dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("how", BASELINES)
@given(reward=strategies.floats(-100, 100, width=32), size=strategies.integers(2, 64))
def test_a_tied_group_teaches_exactly_nothing(how, reward, size):
    rewards = torch.full((1, size), reward)
    assert tied_groups(rewards).tolist() == [True]
    assert group_advantages(rewards, how).abs().max() == 0


def test_tied_groups_are_those_with_equal_rewards():
    assert tied_groups(torch.tensor(REWARDS)).tolist() == [False, False, True, False]


def test_one_right_among_wrong_ones_is_not_divided_by_the_others_std_of_zero():
    right, *wrong = group_advantages(torch.tensor([[1.0, 0.0, 0.0, 0.0]], dtype=torch.float64), "leave_one_out_std")[0]
    assert right == 1.0
    assert wrong == pytest.approx([-(1 / 3) / math.sqrt(2 / 9)] * 3, rel=1e-5)


def test_a_group_of_one_has_no_baseline():
    with pytest.raises(OpdctlError, match="group_size: 1 gives no baseline for advantage: mean_std"):
        group_advantages(torch.zeros(3, 1), "mean_std")


@pytest.mark.parametrize(("length", "penalty"), [(1, 0), (80, 0), (85, -0.25), (90, -0.5), (100, -1), (120, -1)])
def test_soft_overlong_penalty_falls_over_the_buffer(length, penalty):
    assert soft_overlong_penalty(length, 100, 20) == penalty


def test_budget_itself_is_within_budget():
    assert not over_budget(30, 1.5, 20.0)
    assert over_budget(31, 1.5, 20.0)


def effort(**changed):
    budget = Budget(samples=1, percentile=50, over="finished", effort="max")
    return EffortBudget(**{"tau": 1.0, "tau_from": 3.0, "anneal_fraction": 0.5, "budget": budget, **changed})


def test_gradual_tau_falls_linearly_over_its_fraction_and_stays():
    taus = [annealed_tau(effort(), step, 20) for step in range(20)]
    assert taus[0] == 3.0
    assert taus[5] == pytest.approx(2.0)
    assert taus[10:] == [1.0] * 10
    assert taus == sorted(taus, reverse=True)


def test_hard_tau_is_the_same_at_every_step():
    assert {annealed_tau(effort(anneal="hard", tau_from=None), step, 20) for step in range(20)} == {1.0}
