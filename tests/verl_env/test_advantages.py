"""The plug-in's advantage estimators where verl calls them, against `opdctl.engine`'s."""

import pytest
import torch
from torch.testing import assert_close
from verl.trainer.ppo.core_algos import get_adv_estimator_fn

from opdctl.engine.advantages import group_advantages


@pytest.fixture(autouse=True)
def nothing_told(tell):
    tell({})


def close(found, wanted):
    assert_close(found, wanted, atol=1e-6, rtol=1e-6)


def estimate(name, rewards_PG, mask=None):
    """Advantages of verl's estimator `name`, each group's completions scattered over the batch."""
    groups, size = rewards_PG.shape
    order = torch.randperm(groups * size, generator=torch.Generator().manual_seed(0))
    response_mask = torch.ones(groups * size, 3) if mask is None else mask
    rewards = torch.zeros(groups * size, 3)
    rewards[:, 2] = rewards_PG.flatten()
    index = [f"group {i // size}" for i in range(groups * size)]
    found, _ = get_adv_estimator_fn(name)(
        token_level_rewards=rewards[order],
        response_mask=response_mask[order],
        index=[index[i] for i in order],
        config=None,
    )
    back = torch.empty_like(found)
    back[order] = found
    return back


@pytest.mark.parametrize("how", ["mean", "mean_std", "leave_one_out", "leave_one_out_std"])
def test_estimators_are_the_engines(how):
    rewards_PG = torch.rand(3, 4, generator=torch.Generator().manual_seed(1))
    found = estimate(f"opdctl_{how}", rewards_PG)
    close(found, group_advantages(rewards_PG, how).flatten()[:, None].expand(-1, 3))


@pytest.mark.parametrize(("how", "own"), [("mean_std", "grpo"), ("leave_one_out", "rloo")])
def test_verls_estimators_are_the_engines_where_rewards_differ(how, own):
    rewards_PG = torch.rand(3, 4, generator=torch.Generator().manual_seed(1))
    close(estimate(own, rewards_PG), estimate(f"opdctl_{how}", rewards_PG))


def test_equal_rewards_give_exactly_no_advantage_unlike_verls_own():
    rewards_PG = torch.rand(64, 1, generator=torch.Generator().manual_seed(1)).expand(64, 7)
    assert estimate("opdctl_mean_std", rewards_PG).count_nonzero() == 0
    assert estimate("grpo", rewards_PG).count_nonzero() > 0


def test_advantages_stay_within_the_stages_bound(tell):
    tell({"max_advantage": 0.6})
    found = estimate("opdctl_mean_std", torch.tensor([[1.0, 0.0, 0.0]]))[:, 0]
    close(found, torch.tensor([0.6, -1 / 3**0.5, -1 / 3**0.5]))


def test_rows_that_only_fill_the_batch_up_are_in_no_group():
    rewards_PG = torch.tensor([[1.0, 0.0, 0.0]])
    mask = torch.ones(3, 3)
    mask[2] = 0
    found = estimate("opdctl_mean", rewards_PG, mask)
    close(found[:, 0], torch.tensor([0.5, -0.5, 0.0]))
