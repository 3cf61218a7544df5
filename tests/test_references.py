"""Names without their seed, and inputs that change from round to round."""

from typing import get_args

import pytest
from recipes import recipe

from opdctl.errors import ConfigError
from opdctl.references import add_axis, near_miss, unseeded, without_seeds
from opdctl.settings import GateCheck
from opdctl.templates import marker


@pytest.mark.parametrize(
    ("name", "plain", "seed"),
    [
        ("sft", "sft", None),
        ("sft[seed=0]", "sft", 0),
        ("mopd[loss=topk,seed=12]", "mopd[loss=topk]", 12),
        ("mopd[seed=-1,loss=topk]", "mopd[loss=topk]", -1),
        ("mopd[a=b,seed=1,loss=topk]", "mopd[a=b,loss=topk]", 1),
        ("mopd[reseed=1]", "mopd[reseed=1]", None),
    ],
)
def test_the_axis_seed_is_taken_out(name, plain, seed):
    assert unseeded(name) == (plain, seed)
    assert without_seeds(f"{name}/x and {name}") == f"{plain}/x and {plain}"
    if seed is not None:
        assert unseeded(add_axis(plain, "seed", seed)) == (plain, seed)


def rounds(**changes):
    """Specialists, then fusion, twice: the second round starts from what the first one fused."""
    return {
        "stages.max.foreach": {"domain": ["math", "code"], "round": [1, 2]},
        "stages.max.inputs": {"init": {"first": "stage:sft", "then": "stage:fuse"}},
        "stages.fuse.foreach": {"round": [1, 2]},
        "stages.fuse.inputs": {
            "student": {"first": "stage:sft", "then": "stage:fuse"},
            "teachers": [f"stage:max[round={marker('round')}]"],
        },
        "stages.eval.inputs.teachers": ["stage:max[round=2]"],
        "stages.eval.inputs.after": ["stage:fuse[*]"],
        **{f"stages.{key}": value for key, value in changes.items()},
    }


def inputs(changes=None):
    stages = recipe(rounds(**(changes or {}))).stages
    return {name: [given.target for given in stage.inputs] for name, stage in stages.items()}


def problems(changes):
    with pytest.raises(ConfigError) as caught:
        recipe(rounds(**changes))
    return caught.value.problems


def test_the_first_round_reads_first_and_later_ones_the_round_before():
    read = inputs()
    assert read["fuse[round=1]"] == ["sft", "max[domain=math,round=1]", "max[domain=code,round=1]"]
    assert read["fuse[round=2]"] == ["fuse[round=1]", "max[domain=math,round=2]", "max[domain=code,round=2]"]
    assert read["max[domain=code,round=1]"] == ["sft"]
    assert read["max[domain=code,round=2]"] == ["fuse[round=1]"]


def test_then_is_of_the_same_other_axes():
    read = inputs({"max.inputs": {"init": {"first": "stage:sft", "then": "stage:max"}}})
    assert read["max[domain=code,round=2]"] == ["max[domain=code,round=1]"]


def test_axes_in_brackets_win_over_those_of_the_stage():
    read = inputs({"max.inputs": {"init": {"first": "stage:sft", "then": "stage:max[domain=math]"}}})
    assert read["max[domain=code,round=2]"] == ["max[domain=math,round=1]"]


def test_a_star_takes_all_of_the_round_before():
    teachers = [{"first": "stage:max[round=1]", "then": "stage:max[*]"}]
    read = inputs({"fuse.inputs.teachers": teachers})
    assert read["fuse[round=2]"] == ["fuse[round=1]", "max[domain=math,round=1]", "max[domain=code,round=1]"]


def test_rounds_go_by_their_order_in_the_file_not_by_their_numbers():
    axis = {"round": ["cold", "warm", "hot"]}
    read = inputs({"fuse.foreach": axis, "max.foreach": {"domain": ["math", "code"], **axis},
                   "eval.inputs.teachers": ["stage:max[round=hot]"]})  # fmt: skip
    assert read["fuse[round=hot]"][0] == "fuse[round=warm]"
    assert read["max[domain=math,round=cold]"] == ["sft"]


BAD = [
    (
        {"sft.inputs": {"init": {"first": "model:", "then": "stage:fuse"}}},
        "stages.sft.inputs.init: first and then need",
    ),
    (
        {"fuse.inputs.student": {"first": "stage:sft", "then": "stage:sft"}},
        "stages.fuse[round=2].inputs.student: stage 'sft' has no axis 'round'",
    ),
    (
        {"fuse.inputs.student": {"first": "stage:sft", "then": "model:"}},
        "stages.fuse[round=2].inputs.student: then: 'model:' is no stage",
    ),
    (
        {"fuse.inputs.student": {"first": "stage:sft", "then": "stage:fuse[round=1]"}},
        "stages.fuse[round=2].inputs.student: 'stage:fuse[round=1]' names its round",
    ),
    (
        {"fuse.inputs.student": {"first": "stage:sft", "then": "stage:max"}},
        "stages.fuse[round=2].inputs.student: 'stage:max[round=1]' is 2 stages",
    ),
    ({"fuse.inputs.student": {"first": "stage:sft"}}, "stages.fuse.inputs.student.then: required, and not set"),
]


@pytest.mark.parametrize(("changes", "text"), BAD, ids=[text[:70] for _, text in BAD])
def test_a_bad_round_is_told_by_its_key(changes, text):
    told = problems(changes)
    assert any(line.startswith(text) for line in told), told


def test_rounds_that_read_each_other_in_a_circle_are_found():
    changes = {"fuse.inputs.student": {"first": "stage:max[domain=math,round=2]", "then": "stage:fuse"}}
    told = problems(changes)
    assert any("they read each other in a circle" in line for line in told), told


def test_an_unknown_word_is_told_with_all_that_are_known_while_they_fit_in_a_message():
    assert " more)" not in near_miss("near", get_args(GateCheck), "checks")
    assert near_miss("near", map(str, range(40)), "numbers").endswith("22, 23 and 16 more)")
