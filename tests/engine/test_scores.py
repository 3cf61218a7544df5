import itertools
import json
import math

import pytest

from opdctl.engine.scores import (
    CellCounts,
    Estimate,
    difference,
    fusion_table,
    fusion_tables,
    mean_interval,
    normalised_domains,
    normalised_score,
    pass_at_k,
    student_quantile,
    weighted_sum,
    wilson_interval,
)
from opdctl.errors import OpdctlError

# ------------------------------------------------------------------------------------------------------ intervals


@pytest.mark.parametrize(("successes", "n"), [(0, 10), (1, 10), (7, 20), (119, 120), (200, 200)])
@pytest.mark.parametrize("confidence", [0.8, 0.95])
def test_wilson_ends_are_the_rates_that_the_observed_one_is_just_not_unlikely_under(successes, n, confidence):
    found = wilson_interval(successes, n, confidence)
    z = {0.8: 1.2815515655446004, 0.95: 1.959963984540054}[confidence]
    for end in (found.low, found.high):
        assert abs(found.value - end) == pytest.approx(z * math.sqrt(end * (1 - end) / n), abs=1e-12)
    assert 0 <= found.low <= found.value <= found.high <= 1
    assert found.low < found.high


def test_wilson_interval_covers_about_as_often_as_it_says():
    n, rate = 40, 0.3
    covered = sum(
        math.comb(n, c) * rate**c * (1 - rate) ** (n - c)
        for c in range(n + 1)
        if wilson_interval(c, n).low <= rate <= wilson_interval(c, n).high
    )
    assert 0.93 < covered < 0.97


def test_difference_is_newcombes_published_example():
    # R. G. Newcombe (1998), table II, method 10: 56/70 - 48/80
    found = difference(wilson_interval(56, 70), wilson_interval(48, 80))
    assert (found.value, found.low, found.high) == pytest.approx((0.2, 0.0524, 0.3339), abs=1e-4)


def test_mean_of_equal_independent_estimates_narrows_with_the_root_of_their_number():
    one = Estimate(0.5, 0.4, 0.6)
    mean = weighted_sum([(0.25, one)] * 4)
    assert (mean.value, mean.low, mean.high) == pytest.approx((0.5, 0.45, 0.55))


@pytest.mark.parametrize(("successes", "n"), [(3, 2), (-1, 2), (0, 0)])
def test_what_is_no_proportion_is_refused(successes, n):
    with pytest.raises(OpdctlError, match="are not a proportion"):
        wilson_interval(successes, n)


# --------------------------------------------------------------------------------------------------------- pass@k


@pytest.mark.parametrize("correct", range(7))
@pytest.mark.parametrize("k", [1, 2, 5, 6])
def test_pass_at_k_is_the_share_of_draws_that_hold_a_right_sample(correct, k):
    samples = [True] * correct + [False] * (6 - correct)
    draws = list(itertools.combinations(samples, k))
    assert pass_at_k(6, correct, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_pass_at_k_is_unbiased_for_independent_samples():
    n, k, rate = 8, 3, 0.2
    mean = sum(math.comb(n, c) * rate**c * (1 - rate) ** (n - c) * pass_at_k(n, c, k) for c in range(n + 1))
    assert mean == pytest.approx(1 - (1 - rate) ** k)


def test_pass_at_more_than_the_samples_is_refused():
    with pytest.raises(OpdctlError, match="pass@5 needs at least 5 samples per prompt, and there are 4"):
        pass_at_k(4, 1, 5)


# ----------------------------------------------------------------------------------------------- normalised score

BENCHMARKS = [("math", "AIME25"), ("math", "AIME26"), ("if", "IFBench"), ("if", "IFEval"), ("swe", "SWE-V")]
SFT = [45.42, 54.48, 42.69, 84.17, 35.80]
TEACHERS = [54.79, 63.65, 78.40, 95.50, 51.20]
PUBLISHED = {
    "mix_rl": ([52.71, 63.75, 75.00, 94.58, 48.80], 0.8818),
    "cascade_rl": ([48.54, 61.88, 77.11, 95.80, 47.80], 0.7752),
    "off_policy": ([51.56, 63.44, 80.95, 93.35, 45.80], 0.8241),
    "weight_average": ([47.81, 59.58, 53.74, 88.79, 39.60], 0.3280),
    "task_arithmetic": ([49.38, 63.96, 78.23, 95.81, 48.80], 0.8574),
    "mopd": ([51.46, 65.31, 77.89, 93.84, 50.40], 0.9373),
    "round_2_teachers": ([54.27, 65.52, 81.46, 95.65, 50.40], 1.0297),
    "round_2_mopd": ([53.44, 64.90, 79.76, 95.44, 50.20], 0.9858),
}


def by_domain(scores):
    found = {}
    for (domain, benchmark), score in zip(BENCHMARKS, scores, strict=True):
        found.setdefault(domain, {})[benchmark] = score
    return found


@pytest.mark.parametrize("method", PUBLISHED)
def test_normalised_score_reproduces_the_table_of_the_mopd_paper(method):
    scores, printed = PUBLISHED[method]
    found = normalised_score(by_domain(SFT), by_domain(TEACHERS), by_domain(scores))
    assert found == pytest.approx(printed, abs=5.1e-5)


def test_normalised_score_is_zero_before_and_one_for_the_teachers():
    assert normalised_score(by_domain(SFT), by_domain(TEACHERS), by_domain(SFT)) == 0
    assert normalised_score(by_domain(SFT), by_domain(TEACHERS), by_domain(TEACHERS)) == 1


def test_a_teacher_that_gained_nothing_leaves_the_score_undefined():
    before, after = {"a": {"x": 1.0}, "b": {"x": 1.0}}, {"a": {"x": 2.0}, "b": {"x": 2.0}}
    teacher = {"a": {"x": 3.0}, "b": {"x": 1.0}}
    assert normalised_domains(before, teacher, after) == {"a": 0.5, "b": None}
    assert normalised_score(before, teacher, after) is None


def test_scores_of_different_domains_are_refused():
    with pytest.raises(OpdctlError, match="domains differ"):
        normalised_score({"a": {"x": 1.0}}, {"a": {"x": 2.0}}, {"b": {"x": 1.0}})


# --------------------------------------------------------------------------------------------------- fusion table


def counts(correct, within=None, n=100):
    return CellCounts(n=n, correct=correct, within=within, length_sum=n * 12, truncated=n // 10)


CELLS = ("math/low", "code/low")
BEFORE = dict(zip(CELLS, [counts(40, 30), counts(20, 10)], strict=True))
TAUGHT = {
    "math_teacher": dict(zip(CELLS, [counts(80, 70), counts(65, 40)], strict=True)),
    "code_teacher": dict(zip(CELLS, [counts(45, 31), counts(60, 50)], strict=True)),
}
AFTER = dict(zip(CELLS, [counts(78, 69), counts(63, 51)], strict=True))
ROUTES = {"math/low": "math_teacher", "code/low": "code_teacher"}


def test_fusion_rows_hold_the_routed_teacher_and_the_differences_to_it_and_to_before():
    table = fusion_table(BEFORE, TAUGHT, AFTER, ROUTES, model="mopd")
    row = table.rows[0]
    assert (row.cell, row.n, row.teacher_label) == ("math/low", 100, "math_teacher")
    assert (row.before, row.teacher, row.after) == tuple(wilson_interval(c, 100) for c in (40, 80, 78))
    assert row.gain == difference(wilson_interval(78, 100), wilson_interval(40, 100))
    assert row.delta == difference(wilson_interval(78, 100), wilson_interval(80, 100))


def test_fusion_rows_name_the_best_teacher_even_where_it_is_not_the_routed_one():
    math_row, code_row = fusion_table(BEFORE, TAUGHT, AFTER, ROUTES, model="mopd").rows
    assert (math_row.best_label, math_row.best.value) == ("math_teacher", 0.80)
    assert (code_row.teacher_label, code_row.best_label, code_row.best.value) == ("code_teacher", "math_teacher", 0.65)


def test_of_equally_good_teachers_the_routed_one_is_best():
    taught = {label: {"code/low": counts(60)} for label in ("math_teacher", "code_teacher")}
    table = fusion_table(BEFORE, taught, {"code/low": counts(63)}, ROUTES, model="mopd")
    assert table.rows[0].best_label == "code_teacher"


def test_fusion_mean_weighs_cells_equally_and_is_narrower_than_its_cells():
    after = {**AFTER, "code/low": counts(630, 510, n=1000)}
    table = fusion_table(BEFORE, TAUGHT, after, ROUTES, model="mopd")
    assert table.mean.after.value == pytest.approx((0.78 + 0.63) / 2)
    assert table.mean.gain.value == pytest.approx((0.38 + 0.43) / 2)
    assert table.mean.before.high - table.mean.before.low < table.rows[1].before.high - table.rows[1].before.low


def test_fusion_tables_hold_within_budget_accuracy_where_all_counts_know_it():
    tables = fusion_tables(BEFORE, TAUGHT, {"a": AFTER, "b": AFTER}, ROUTES, confidence=0.9)
    assert [(t.model, t.metric, t.confidence) for t in tables] == [
        ("a", "accuracy", 0.9), ("a", "within", 0.9), ("b", "accuracy", 0.9), ("b", "within", 0.9),
    ]  # fmt: skip
    assert tables[1].rows[0].after.value == 0.69
    unknown = {cell: counts(50) for cell in CELLS}
    assert [t.metric for t in fusion_tables(unknown, TAUGHT, {"a": AFTER}, ROUTES)] == ["accuracy"]


def test_fusion_table_is_plain_json():
    table = fusion_table(BEFORE, TAUGHT, AFTER, ROUTES, model="mopd")
    read = json.loads(json.dumps(table.as_json()))
    assert read["rows"][0]["after"]["value"] == 0.78
    assert read["mean"]["cell"] == "mean"


@pytest.mark.parametrize(
    ("before", "routes"), [({}, ROUTES), (BEFORE, {}), (BEFORE, {**ROUTES, "math/low": "unknown"})]
)
def test_a_cell_without_score_or_teacher_is_refused_by_name(before, routes):
    with pytest.raises(OpdctlError, match="math/low"):
        fusion_table(before, TAUGHT, AFTER, routes, model="mopd")


def test_within_without_a_budget_is_refused():
    with pytest.raises(OpdctlError, match="within-budget accuracy"):
        counts(50).successes("within")


@pytest.mark.parametrize("wrong", [{"n": 0}, {"correct": 11}, {"within": 6}, {"correct": -1}])
def test_impossible_counts_are_refused(wrong):
    with pytest.raises(OpdctlError, match="impossible counts"):
        CellCounts(**{"n": 10, "correct": 5, "within": 5, "length_sum": 1, "truncated": 0, **wrong})


def test_counts_give_mean_length_and_truncation_rate():
    assert (counts(50).mean_length, counts(50).truncation_rate) == (12.0, 0.1)


# ------------------------------------------------------------------------------------------------------ over seeds


@pytest.mark.parametrize(
    ("freedom", "printed"), [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (10, 2.228), (30, 2.042)]
)
def test_students_quantile_is_that_of_the_printed_tables(freedom, printed):
    assert student_quantile(0.95, freedom) == pytest.approx(printed, abs=5e-4)


def test_interval_of_a_mean_by_hand():
    found = mean_interval([1.0, 2.0, 3.0])
    assert found.value == 2
    assert (found.high - 2, 2 - found.low) == pytest.approx((4.302653 / 3**0.5,) * 2)


def test_an_interval_needs_two_seeds():
    with pytest.raises(OpdctlError, match="at least two, and there are 1"):
        mean_interval([1.0])
