"""Overrides: values survive Hydra's grammar, and every key has one owner."""

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from opdctl.backends.verl.overrides import Overrides, written
from opdctl.errors import ConfigError

PARSER = OverridesParser.create()
HARD = [
    "", "a b", "it's", "x=y", "max[domain=general]", "[a,b]", "{a}", "a,b", "1", "1.5", "1e5", "true", "Null", "inf",
    "back\\slash", "end\\", "q\\'x", "\\'", "${x}", "\\${x}", "$a", "%s#", "(x)", "~x", "-x", "line\nbreak\ttab", "ä",
    "choice(1,2)", "/work space/runs/max[domain=math]/x=1.parquet", "pkg://a.b", "a:b",
    "{% if m.role == 'x' %}{{ m['content'] }}{% endif %}",
]  # fmt: skip


def read_back(text):
    return OmegaConf.create({"value": PARSER.parse_override(f"a.b={text}").value()}).value


@pytest.mark.parametrize("text", HARD)
def test_a_text_is_read_back(text):
    assert read_back(written(text)) == text


@given(st.text(st.sampled_from("ab \\'\"${}[](),:=~%#\n1.-+")))
def test_any_text_is_read_back(text):
    assert read_back(written(text)) == text


@pytest.mark.parametrize("value", [None, True, False, 0, -1, 1.5, 1e-8, 1e9, [], [1, "a b", None], {"eps": 1e-8}])
def test_a_value_is_read_back_as_it_was(value):
    assert (read_back(written(value)), type(PARSER.parse_override(f"a={written(value)}").value())) == (
        value,
        type(value),
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf"), object(), {"a b": 1}, {"x=": 1}])
def test_what_the_grammar_cannot_hold_is_refused(value):
    with pytest.raises(ConfigError, match="Hydra cannot write"):
        written(value)


def rendered():
    overrides = Overrides()
    overrides.own("config.rollout.prompts", {"data.train_batch_size": 8, "+model.override.attention": "sdpa"})
    overrides.choose({"data.workers": 0, "+model.fast": True})
    return overrides


@pytest.mark.parametrize("key", ["data.train_batch_size", "+data.train_batch_size", "++data.train_batch_size"])
def test_a_raw_override_of_an_owned_key_is_refused_by_name(key):
    overrides = rendered()
    with pytest.raises(ConfigError) as caught:
        overrides.add_raw({key: 16})
    told = "verl.data.train_batch_size: opdctl sets data.train_batch_size from config.rollout.prompts; change it there"
    assert caught.value.problems == [told]


@pytest.mark.parametrize("key", ["data", "model.override", "model.override.attention.kind"])
def test_so_is_one_that_reaches_over_or_into_an_owned_key(key):
    with pytest.raises(ConfigError, match=r"opdctl sets .* from config\.rollout\.prompts"):
        rendered().add_raw({key: {}})


def test_a_raw_override_takes_the_place_of_a_choice_and_comes_last():
    overrides = rendered()
    overrides.add_raw({"data.workers": 4, "trainer.name": "a b"})
    assert overrides.arguments() == [
        "data.train_batch_size=8",
        "+model.override.attention=sdpa",
        "+model.fast=true",
        "++data.workers=4",
        "++trainer.name='a b'",
    ]


def test_nested_mappings_are_dotted_keys():
    overrides = rendered()
    overrides.add_raw({"data": {"workers": 4}, "x": {"y": {"z": 1}, "none": {}}})
    assert overrides.arguments()[-3:] == ["++data.workers=4", "++x.y.z=1", "++x.none={}"]


def test_a_raw_key_given_twice_is_refused():
    with pytest.raises(ConfigError, match=r"verl\.x\.y: given twice"):
        rendered().add_raw({"x.y": 1, "+x.y": 2})


@pytest.mark.parametrize("key", ["~data.workers", "data workers", "a=b", "", ".a", "a..b"])
def test_what_is_no_key_is_refused(key):
    with pytest.raises(ConfigError, match="not a key of verl"):
        rendered().add_raw({key: 1})
