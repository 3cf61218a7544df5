"""Cases of runbooks/failure-cases.md that no single module answers: through the real path, on small models."""

import pytest
import torch
import toy

from opdctl.engine.losses import token_weights
from opdctl.errors import StageRefused


def half_trained(**more):
    """A stage that crashed at its sixth step and saved its fourth, on a machine with two GPUs."""
    stages = {"sft": toy.sft(steps=6, task="faulty", **more)}
    machine = {"slots": 2, "cpus": 2, "gpus": 2}
    return toy.pipeline(stages, knobs={"faulty": {"crash_at": 5}}, machine=machine)


def test_a_resume_with_another_learning_rate_is_refused_and_with_another_gpu_count_goes_on(workspace):
    wanted = half_trained()
    assert "ZeroDivisionError" in toy.run(wanted).failed["sft"]
    with pytest.raises(StageRefused, match=r"config\.train\.optimizer\.lr: 0\.1 -> 0\.2"):
        toy.run(half_trained(lr=0.2))
    notes = toy.Notes()
    toy.run(half_trained(resources={"gpus": 2}), reporter=notes)
    assert [step for _, step in notes.of("progress")] == [5, 6]


def test_the_mean_over_tokens_of_ranks_with_unequal_counts_is_that_of_one_process():
    """Ranks know the whole batch's tokens and add up; the mean of their own means would weigh the short rank more."""
    lengths = [1, 2, 7, 2]
    sequence_N = torch.arange(4).repeat_interleave(torch.tensor(lengths))
    loss_N = torch.linspace(-1, 2, 12, dtype=torch.float64) ** 3
    ranks = [slice(0, 3), slice(3, 12)]

    def summed(of, tokens):
        weights = token_weights(sequence_N[of], how="token_mean", total_tokens=tokens, total_sequences=4)
        return (loss_N[of] * weights.double()).sum()

    added = torch.stack([summed(rank, 12) for rank in ranks]).sum()
    averaged = torch.stack([summed(rank, rank.stop - rank.start) for rank in ranks]).mean()
    torch.testing.assert_close(added, loss_N.mean(), rtol=1e-6, atol=0)
    assert (averaged - added).abs() > 0.1
