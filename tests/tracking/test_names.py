"""Case 32: nothing that a stage may report is lost or refused on its way into MLflow."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlflow.utils.validation import _validate_metric, _validate_param, _validate_tag

from opdctl.tracking.names import (
    LONGEST_NAME,
    cut,
    fit,
    flatten_metrics,
    flatten_params,
    reported,
    safe_name,
    unsafe_name,
)

NAMES = st.text(min_size=1, max_size=30)  # halves of surrogate pairs included
PATHS = st.text("ab./: []=,@()~_-\\\0\n\U0001f600é", min_size=1, max_size=20)
ADDRESSES = st.from_regex(
    r"[a-z.]{1,5}\[[a-z]{1,3}=[a-z .:]{0,4}(,[a-z]{1,3}=[a-z@]{0,4}){0,2}\](/[a-z]{1,5})?", fullmatch=True
)
OURS = st.sampled_from(
    ["step", "run", "stage", "kind", "mlflow.user", "mlflow.parentRunId", "opdctl.curve", "not_finite/a", "text.a", ""]
)
ANY = NAMES | PATHS | ADDRESSES | OURS


@given(ANY)
def test_every_name_becomes_one_that_mlflow_takes_and_can_be_turned_back(name):
    _validate_metric(safe_name(name), 1.0, 0, 0)
    assert unsafe_name(safe_name(name)) == name


@given(ANY, ANY)
def test_two_names_are_never_one(first, second):
    assert (safe_name(first) == safe_name(second)) == (first == second)


@given(st.text("aé:/ .\U0001f600", min_size=240, max_size=600), st.text("ab", max_size=20))
def test_long_names_are_taken_by_mlflow_and_stay_distinct(name, end):
    safe = safe_name(name + end)
    _validate_metric(safe, 1.0, 0, 0)
    assert safe != safe_name(name + end + "a")
    assert safe != safe_name(safe)  # not even from the name of what stands for it


@pytest.mark.parametrize("name", ["step", "mlflow.user", "opdctl.curve", "not_finite/loss", "stage"])
def test_names_that_mean_something_to_us_or_mlflow_are_left_to_them(name):
    assert safe_name(name) != name
    assert unsafe_name(safe_name(name)) == name


def test_the_address_of_a_stage_stays_readable():
    assert safe_name("max[domain=general,effort=low]/accuracy") == "max domain:general effort:low/accuracy"


def test_keys_longer_than_mlflow_takes_stay_distinct():
    first, second = fit("text." + "a" * 300 + "b"), fit("text." + "a" * 300 + "c")
    assert first != second
    assert len(first) == len(second) == LONGEST_NAME


NUMBERS = st.floats() | st.integers() | st.booleans() | st.sampled_from([10**400, -(10**400), 2**60 + 1])
TREES = st.recursive(
    NUMBERS | st.none() | st.text(max_size=8) | st.lists(st.integers(), max_size=3),
    lambda inner: st.dictionaries(ANY, inner, max_size=3),
    max_leaves=8,
)


def leaves(tree, prefix=""):
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{name}/")
        elif value is not None:
            yield f"{prefix}{name}", value


@given(st.dictionaries(ANY, TREES, max_size=4))
def test_every_value_of_a_tree_of_metrics_is_told_once_and_can_be_turned_back(tree):
    flat = flatten_metrics(tree)
    for key, value in flat.numbers.items():
        _validate_metric(key, value, 0, 0)
        assert math.isfinite(value)
    for key, text in flat.texts.items():
        _validate_tag(fit(f"text.{key}"), text)
        text.encode()
    wanted = list(leaves(tree))
    told = [
        (flat.names.get(key) or reported(key, 0)[0], reported(key, value)[1]) for key, value in flat.numbers.items()
    ]
    assert len(told) == sum(isinstance(value, int | float) for _, value in wanted)
    for name, value in wanted:
        if isinstance(value, int | float) and abs(value) < 2**53:
            assert (name, float(value)) in told
        elif isinstance(value, int | float) and not isinstance(value, float):
            assert name in [found for found, _ in told]
            assert float_or_inf(value) == value or str(value) in flat.texts.values() or len(str(value)) > 300
        elif not isinstance(value, float):
            assert len(flat.texts) > 0
    nans = [name for name, value in wanted if isinstance(value, float) and math.isnan(value)]
    assert sorted(nans) == sorted(name for name, value in told if math.isnan(value))


def float_or_inf(value):
    try:
        return float(value)
    except OverflowError:
        return math.inf


def test_what_is_no_finite_number_keeps_its_step_and_is_turned_back():
    flat = flatten_metrics({"a": math.inf, "b": -math.inf, "c": math.nan, "d": {"e": math.nan}})
    assert flat.numbers == {"not_finite/a": 1.0, "not_finite/b": -1.0, "not_finite/c": 0.0, "not_finite/d/e": 0.0}
    turned = [reported(*item) for item in flat.numbers.items()]
    assert turned[:2] == [("a", math.inf), ("b", -math.inf)]
    assert [name for name, value in turned[2:] if math.isnan(value)] == ["c", "d/e"]


def test_numbers_of_numpy_are_numbers():
    flat = flatten_metrics({"a": np.float32(0.5), "b": np.int64(3), "c": np.bool_(True), "d": np.array([2.0])})
    assert flat.numbers == {"a": 0.5, "b": 3.0, "c": 1.0, "d": 2.0}
    assert flat.texts == {}


def test_whole_numbers_beyond_what_a_float_holds_are_also_kept_as_texts():
    flat = flatten_metrics({"exact": 2**53, "not": 2**53 + 1, "huge": 10**400})
    assert flat.numbers == {"exact": 2.0**53, "not": 2.0**53, "not_finite/huge": 1.0}
    assert flat.texts["not"] == str(2**53 + 1)
    assert flat.texts["huge"] == str(10**400)


def test_one_name_given_twice_loses_neither_value():
    flat = flatten_metrics({"a/b": 1, "a": {"b": 2}})
    assert sorted(flat.numbers.values()) == [1.0, 2.0]
    assert list(flat.names.values()) == ["a/b"]


def test_texts_that_databases_refuse_are_made_ones_that_they_take():
    flat = flatten_metrics({"half": "\ud800", "zero": "a\0b", "long": "x" * 20_000, "list": [1, "\ud800"]})
    assert flat.texts["half"] == "\\ud800"
    assert flat.texts["zero"] == "a\\x00b"
    for text in flat.texts.values():
        _validate_tag("key", text)
        assert len(text) <= 4_900


def test_params_are_leaves_of_the_settings_and_never_too_long_for_mlflow():
    params = flatten_params({"config": {"lr": 1e-3, "words": ["x" * 100] * 300, "none": None}})
    assert params["config.lr"] == "0.001"
    assert params["config.none"] == "null"
    for key, value in params.items():
        _validate_param(key, value)
        assert len(value) < 6000


def test_long_texts_that_differ_at_their_end_differ_when_cut():
    assert cut("x" * 20_000 + "a", 5_900) != cut("x" * 20_000 + "b", 5_900)
    assert len(cut("x" * 20_000, 5_900)) == 5_900
    _validate_tag("key", cut(json.dumps(["x"] * 9_000), 4_900))
