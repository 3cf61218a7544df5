"""Credit, extrapolation and calibration against loops over floats and hand-computed numbers."""

import pytest
import torch

from opdctl.engine.opd_advantages import balanced, discounted_sum, extrapolated_teacher, later_mean, margin_shifts

torch.set_num_threads(1)
LENGTHS = [3, 1, 5, 2]
VALUES = torch.randn(sum(LENGTHS), generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def completions():
    return [part.tolist() for part in VALUES.split(LENGTHS)]


@pytest.mark.parametrize("discount", [0.0, 0.3, 1.0])
def test_discounted_sum_counts_the_later_tokens_of_the_same_completion(discount):
    expected = [
        sum(discount ** (j - t) * values[j] for j in range(t, len(values)))
        for values in completions()
        for t in range(len(values))
    ]
    torch.testing.assert_close(discounted_sum(VALUES, LENGTHS, discount), torch.tensor(expected, dtype=torch.float64))


def test_without_discount_values_stay_as_they_are():
    assert torch.equal(discounted_sum(VALUES, LENGTHS, 0.0), VALUES)


@pytest.mark.parametrize("discount", [0.1, 0.5, 1.0])
def test_later_mean_is_the_normalised_sum_over_what_follows(discount):
    expected = []
    for values in completions():
        for t in range(len(values)):
            powers = [discount ** (j - t) for j in range(t + 1, len(values))]
            weighted = sum(power * value for power, value in zip(powers, values[t + 1 :], strict=True))
            expected.append(weighted / sum(powers) if powers else 0.0)
    torch.testing.assert_close(later_mean(VALUES, LENGTHS, discount), torch.tensor(expected, dtype=torch.float64))


def test_later_mean_by_hand():
    values = torch.tensor([10.0, 2.0, 4.0, 7.0])
    assert later_mean(values, [3, 1], 1.0).tolist() == [3.0, 4.0, 0.0, 0.0]
    assert later_mean(values, [3, 1], 0.5).tolist() == pytest.approx([(2 + 0.5 * 4) / 1.5, 4.0, 0.0, 0.0])


def test_extrapolated_teacher_goes_from_the_reference_through_the_teacher():
    teacher, reference = torch.tensor([-1.0, -2.0]), torch.tensor([-2.0, -2.0])
    assert extrapolated_teacher(teacher, reference, 1.25).tolist() == [-0.75, -2.0]
    assert torch.equal(extrapolated_teacher(teacher, reference, 1.0), teacher)


@pytest.mark.parametrize(
    ("scores", "correct", "expected"),
    [
        ([-0.1, -0.5], [True, False], [0.0, 0.0]),  # 0.4 apart already
        ([-0.3, -0.3], [True, False], [0.2, -0.2]),
        ([-0.4, -0.2, -0.1, -0.3], [True, False, False, True], [0.3, -0.3, -0.3, 0.3]),  # -.35 to -.15: .6 lacks
        ([-0.3, -0.1], [True, True], [0.0, 0.0]),
        ([-0.3, -0.1], [False, False], [0.0, 0.0]),
    ],
)
def test_margin_shifts_both_halves_until_the_margin_holds(scores, correct, expected):
    shifts = margin_shifts(scores, correct, 0.4)
    assert shifts == pytest.approx(expected)
    if any(shifts):
        after = [score + shift for score, shift in zip(scores, shifts, strict=True)]
        right = [score for score, good in zip(after, correct, strict=True) if good]
        wrong = [score for score, good in zip(after, correct, strict=True) if not good]
        assert sum(right) / len(right) - sum(wrong) / len(wrong) == pytest.approx(0.4)


def test_balance_keeps_as_many_wrong_as_right():
    correct = [True, False, False, True, False, False, False]
    chosen = [balanced(correct, seed) for seed in range(20)]
    for kept in chosen:
        assert kept == sorted(set(kept))
        assert {0, 3} < set(kept)
        assert len(kept) == 4
    assert len({tuple(kept) for kept in chosen}) > 1
    assert balanced(correct, 3) == balanced(correct, 3)
    assert len(balanced([not good for good in correct], 0)) == 4


@pytest.mark.parametrize("correct", [[True, True], [False, False, False]])
def test_balance_leaves_a_batch_of_one_kind_alone(correct):
    assert balanced(correct, 0) == list(range(len(correct)))
