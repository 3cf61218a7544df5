import json
import math

from hypothesis import given
from hypothesis import strategies as st
from mlflow.utils.validation import _validate_metric, _validate_param, _validate_tag

from opdctl.tracking.names import cut, flatten_metrics, flatten_params, original_name, safe_name

NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30)
PATHS = st.text("ab./: []=,@()~_-", min_size=1, max_size=20)
ADDRESSES = st.from_regex(
    r"[a-z.]{1,5}\[[a-z]{1,3}=[a-z .:]{0,4}(,[a-z]{1,3}=[a-z@]{0,4}){0,2}\](/[a-z]{1,5})?", fullmatch=True
)


@given(NAMES | PATHS | ADDRESSES)
def test_every_name_becomes_one_that_mlflow_takes_and_can_be_turned_back(name):
    _validate_metric(safe_name(name), 1.0, 0, 0)
    assert original_name(safe_name(name)) == name


def test_the_address_of_a_stage_stays_readable():
    assert safe_name("max[domain=general,effort=low]/accuracy") == "max domain:general effort:low/accuracy"


def test_names_longer_than_mlflow_takes_stay_distinct():
    first, second = safe_name("a" * 300 + "b"), safe_name("a" * 300 + "c")
    assert first != second
    assert len(first) == len(second) == 250


def test_metrics_are_flattened_and_what_is_no_finite_number_is_kept_apart():
    flat = flatten_metrics(
        {
            "a": {"b": {"c": 1}},
            "inf": math.inf,
            "nan": math.nan,
            "huge": 10**400,
            "text": "words",
            "none": None,
            "on": True,
        }
    )
    assert flat.numbers == {"a/b/c": 1.0, "on": 1.0}
    assert flat.not_finite == ["inf", "nan", "huge"]
    assert flat.texts == {"text": "words"}


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
