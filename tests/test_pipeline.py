import itertools
import json

import pytest
from recipes import ABSENT, recipe, tree

from opdctl.errors import ConfigError
from opdctl.pipeline import expand
from opdctl.references import select
from opdctl.settings import PolicyGradientOpd
from opdctl.templates import InstanceOverride, marker

SPECIALISTS = ["max[domain=math]", "max[domain=code]"]


def problems(changes=None, overrides=()):
    with pytest.raises(ConfigError) as caught:
        expand(tree(changes), overrides)
    return caught.value.problems


def _alone(base):
    """Leaves only one stage and what it reads."""
    return {f"stages.{name}": ABSENT for name in ("max", "fuse", "eval") if name != base}


# ---------------------------------------------------------------------------------------------- fan-out


def test_stages_are_named_by_their_axes_and_ordered_after_what_they_read():
    assert list(recipe().stages) == ["sft", *SPECIALISTS, "fuse", "eval"]


def test_order_of_the_file_does_not_matter():
    turned = tree()
    turned["stages"] = dict(reversed(turned["stages"].items()))
    names = list(expand(turned).stages)
    for name, stage in expand(turned).stages.items():
        assert all(names.index(parent) < names.index(name) for parent in stage.upstream())


def test_product_makes_every_combination_in_the_order_of_the_axes():
    foreach = {"domain": ["math", "code"], "seed": [0, 1, 2]}
    stages = recipe({"stages.max.foreach": foreach, **_alone("max")}).stages
    expected = [f"max[domain={d},seed={s}]" for d, s in itertools.product(["math", "code"], range(3))]
    assert [name for name in stages if name.startswith("max")] == expected


def test_zip_pairs_values_and_product_repeats_the_pairs():
    foreach = {"product": {"seed": [0, 1]}, "zip": {"domain": ["math", "code"], "rung": ["x", "y"]}}
    stages = recipe({"stages.max.foreach": foreach, **_alone("max")}).stages
    assert [name for name in stages if name.startswith("max")] == [
        "max[seed=0,domain=math,rung=x]",
        "max[seed=0,domain=code,rung=y]",
        "max[seed=1,domain=math,rung=x]",
        "max[seed=1,domain=code,rung=y]",
    ]


def test_a_whole_marker_keeps_the_type_of_the_value_and_a_part_becomes_text():
    foreach = {"seed": [7], "lr": [0.5], "domain": ["math"]}
    changes = {
        "stages.max.foreach": foreach,
        "stages.max.seed": marker("seed"),
        "stages.max.labels.note": f"seed-{marker('seed')}",
        "stages.max.config.train": {"max_steps": 4, "global_batch_size": 8, "optimizer": {"lr": marker("lr")}},
    }
    stage = recipe(changes | _alone("max")).stages["max[seed=7,lr=0.5,domain=math]"]
    assert (stage.seed, stage.settings.config.train.optimizer.lr, stage.labels["note"]) == (7, 0.5, "seed-7")


def test_labels_are_the_axes_then_the_labels_of_the_stage():
    assert recipe().stages["max[domain=code]"].labels == {"domain": "code", "effort": "max"}


def test_a_stage_has_the_seed_of_the_pipeline_unless_it_has_its_own():
    stages = recipe({"seed": 3, "stages.fuse.seed": 5}).stages
    assert (stages["sft"].seed, stages["fuse"].seed) == (3, 5)


def test_settings_hold_the_tasks_that_the_stage_names_and_the_efforts():
    stage = recipe().stages["max[domain=code]"]
    assert list(stage.settings.tasks) == ["code"]
    assert list(stage.settings.efforts.levels) == ["low", "max"]


def test_the_resolved_tree_is_json_and_has_every_instance():
    resolved = json.loads(json.dumps(recipe().resolved))
    assert list(resolved["stages"]) == ["sft", *SPECIALISTS, "fuse", "eval"]
    assert resolved["stages"]["max[domain=code]"]["config"]["data"]["tasks"] == ["code"]


# ---------------------------------------------------------------------------------------------- references


@pytest.mark.parametrize("selector", ["max", "max[*]"])
def test_a_name_and_a_star_select_all_instances(selector):
    assert select(recipe().stages, selector) == SPECIALISTS


def test_a_partial_selector_selects_what_matches():
    names = ["x[a=1,b=1]", "x[a=1,b=2]", "x[a=2,b=1]", "y"]
    assert select(names, "x[b=1]") == ["x[a=1,b=1]", "x[a=2,b=1]"]
    assert select(names, "x[b=2,a=1]") == ["x[a=1,b=2]"]


def test_a_list_takes_all_instances_with_their_labels_as_routes():
    teachers = [given for given in recipe().stages["fuse"].inputs if given.role == "teachers"]
    assert [(given.target, dict(given.route)) for given in teachers] == [
        ("max[domain=math]", {"domain": "math", "effort": "max"}),
        ("max[domain=code]", {"domain": "code", "effort": "max"}),
    ]


def test_a_route_weight_and_label_of_its_own_win():
    given = {"ref": "stage:sft", "route": {"domain": "code", "effort": "max"}, "weight": 2.0, "label": "old"}
    fuse = recipe({"stages.fuse.inputs.teachers": ["stage:max[domain=math]", given]}).stages["fuse"]
    assert (fuse.inputs[2].label, fuse.inputs[2].weight, fuse.inputs[2].route["domain"]) == ("old", 2.0, "code")


def test_model_stands_for_the_folder_that_the_pipeline_names():
    folder = {"source": "folder", "ref": "hf:org/model@1234abc"}
    given = recipe({"model": folder}).stages["sft"].inputs[0]
    assert (given.kind, given.target, given.ref) == ("hf", "org/model@1234abc", "hf:org/model@1234abc")


# ---------------------------------------------------------------------------------------------- instance overrides


def _override(selector, path, value=None, delete=False):
    return InstanceOverride("text", selector, tuple(path.split(".")), value, delete)


def test_an_override_reaches_the_instances_it_selects():
    lr = "config.train.optimizer.lr"
    stages = expand(tree(), [_override("max[domain=code]", lr, 0.25)]).stages
    assert [stages[name].settings.config.train.optimizer.lr for name in SPECIALISTS] == [1e-3, 0.25]


def test_overrides_add_and_remove_keys():
    made = expand(
        tree({"stages.max.config.surrogate": {"form": "clip", "low": 0.1}}),
        [
            _override("max[*]", "config.aggregation", "constant"),
            _override("max[domain=math]", "config.surrogate", delete=True),
        ],
    )
    first, second = (made.stages[name].settings.config for name in SPECIALISTS)
    assert (first.aggregation, first.surrogate.low, second.surrogate.low) == ("constant", 0.2, 0.1)


def test_an_override_that_selects_nothing_is_a_problem():
    assert (
        "override text: 'max' has no instance with domain=cod"
        in problems(overrides=[_override("max[domain=cod]", "seed", 1)])[0]
    )


def test_removing_a_key_that_is_not_there_is_a_problem():
    assert (
        "there is no key 'config.surrogate' to remove"
        in problems(overrides=[_override("max[*]", "config.surrogate", delete=True)])[0]
    )


def test_late_values_are_looked_up_for_each_instance():
    forms = {"math": {"form": "policy_gradient", "max_advantage": 5.0}, "code": {"form": "full_vocab"}}
    changes = {
        "stages.fuse.foreach": {"domain": ["math", "code"]},
        "stages.fuse.config.loss": lambda each: forms[each["domain"]],
        "stages.eval.inputs.after": ["stage:fuse[*]"],
    }
    stages = recipe(changes).stages
    assert isinstance(stages["fuse[domain=math]"].settings.config.loss, PolicyGradientOpd)
    assert stages["fuse[domain=code]"].settings.config.loss.form == "full_vocab"


def test_a_value_missing_in_the_last_of_nine_instances_stops_all_of_them():
    """Nothing is launched, since there is no pipeline to launch."""
    names = [f"d{number}" for number in range(9)]
    tasks = {f"tasks.{name}": {"task": "chain", "domain": "math"} for name in names}
    missing = InstanceOverride("~", "max[domain=d8]", ("config", "train", "optimizer", "lr"), None, delete=True)
    with pytest.raises(ConfigError) as refused:
        recipe({"axes.domain": names, "stages.max.foreach.domain": names, **tasks}, instance_overrides=[missing])
    assert any(
        text.startswith("stages.max[domain=d8].config.train.optimizer.lr: required") for text in refused.value.problems
    )
