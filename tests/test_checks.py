"""Bad pipelines: every problem at once, each by the key that the user wrote."""

import pytest
from recipes import ABSENT, recipe, tree

from opdctl.errors import ConfigError
from opdctl.pipeline import expand
from opdctl.templates import InstanceOverride


def problems(changes=None, overrides=()):
    with pytest.raises(ConfigError) as caught:
        expand(tree(changes), overrides)
    return caught.value.problems


def _within(effort):
    budget = {"samples": 1, "percentile": 50.0, "over": "finished", "effort": effort}
    return {"stages.eval.config.within": {"tau": {"low": 1.0}, "budget": budget}}


M = "stages.max.config"
BAD = [
    (
        {"stages.eval.resources": {"gradient_checkpointing": True}},
        "stages.eval.resources.gradient_checkpointing",
        "would not be read: kind eval has no backward pass",
    ),
    # keys and types
    ({"stages.max.config.train.lerning": 1}, "stages.max.config.train.lerning", "unknown key (keys here: max_steps, "),
    ({"stages.max.config.train.lr": 1}, "stages.max.config.train.lr", "unknown key (did you mean 'optimizer.lr'?"),
    ({f"{M}.kl.estimatr": "k3"}, "stages.max.config.kl.estimatr", "unknown key (did you mean 'estimator'?"),
    ({"stages.fuse.config.loss": {"form": "topk", "kk": 1, "k": 2}}, "stages.fuse.config.loss.kk", "unknown key"),
    (
        {"stages.fuse.config.loss": {"form": "topp"}},
        "stages.fuse.config.loss.form",
        "'topp' is not known (did you mean 'topk'?",
    ),
    ({"stages.fuse.config.loss": {"k": 2}}, "stages.fuse.config.loss.form", "required, and not set"),
    (
        {"stages.sft.config.train.max_steps": "10"},
        "stages.sft.config.train.max_steps",
        "must be a whole number, not the text '10'",
    ),
    (
        {"stages.sft.config.train.max_steps": 1.5},
        "stages.sft.config.train.max_steps",
        "must be a whole number, not 1.5",
    ),
    (
        {"stages.sft.config.train.max_steps": True},
        "stages.sft.config.train.max_steps",
        "must be a whole number, not true",
    ),
    ({"stages.sft.config.data.tasks": "math"}, "stages.sft.config.data.tasks", "must be a list, not the text 'math'"),
    (
        {"stages.sft.config.train.optimizer.lr": float("inf")},
        "stages.sft.config.train.optimizer.lr",
        "must be a finite number",
    ),
    ({"stages.sft.config.train.optimizer.lr": ABSENT}, "stages.sft.config.train.optimizer.lr", "required, and not set"),
    ({"stages.sft.config.train.optimizer.lr": "???"}, "stages.sft.config.train.optimizer.lr", "required, and not set"),
    ({"stages.sft.resources": {"cpus": "???"}}, "stages.sft.resources.cpus", "required, and not set"),
    ({"stages.sft._target_": "os.system"}, "stages.sft._target_", "unknown key"),
    ({"stages.sft.tasks": {}}, "stages.sft.tasks", "unknown key"),
    ({"sede": 3}, "sede", "unknown key (did you mean 'seed'?"),
    ({"tasks.math": {"task": "chian"}}, "tasks.math.task", "'chian' is not known (did you mean 'chain'?"),
    ({"tasks.math": {"path": "x.jsonl"}}, "tasks.math.verifier", "required, and not set"),
    # names and kinds
    ({"name": "../up"}, "name", "'../up' is no name"),
    ({"stages.a/b": {}}, "stages.a/b", "'a/b' is no name"),
    ({"name": "a" * 201}, "name", f"'{'a' * 201}' is no name: use at most 200"),
    ({"axes.domain": ["../x"]}, "axes.domain.0", "must be a name"),
    ({"stages.max.kind": "rlvrr"}, "stages.max.kind", "'rlvrr' is no kind of stage (did you mean 'rlvr'?"),
    ({"stages.max.kind": ABSENT}, "stages.max.kind", "required, and not set"),
    ({"stages.max.backend": "embeded"}, "stages.max.backend", "'embeded' is not known (did you mean 'embedded'?"),
    ({"stages": {}}, "stages", "required, and not set"),
    # fan-out
    (
        {"stages.max.foreach.domain": ["math", "coed"]},
        "stages.max.foreach.domain",
        "axis 'domain' has no value 'coed' (did you mean 'code'?",
    ),
    ({"stages.max.foreach.domain": []}, "stages.max.foreach.domain", "the axis has no values"),
    ({"stages.max.foreach.domain": ["math", "math"]}, "stages.max.foreach.domain", "'math' is there twice"),
    ({"stages.max.foreach.domain": "math"}, "stages.max.foreach.domain", "must be a list"),
    (
        {"stages.max.foreach": {"zip": {"domain": ["math", "code"], "x": ["a"]}}},
        "stages.max.foreach.zip",
        "axes differ in length: domain has 2, x has 1",
    ),
    ({"stages.max.foreach": {}}, "stages.max.foreach", "names no axis"),
    ({"stages.max.labels.domain": "x"}, "stages.max.labels.domain", "is an axis of foreach"),
    # references
    ({"stages.sft.inputs.initt": "model:"}, "stages.sft.inputs.initt", "unknown role (did you mean 'init'?"),
    ({"stages.sft.inputs": {}}, "stages.sft.inputs.init", "required, and not set"),
    ({"stages.sft.inputs.init": ["model:"]}, "stages.sft.inputs.init", "takes one model, not a list"),
    ({"stages.fuse.inputs.teachers": []}, "stages.fuse.inputs.teachers", "is an empty list"),
    (
        {"stages.fuse.inputs.student": "stage:sfft"},
        "stages.fuse.inputs.student",
        "no stage is called 'sfft' (did you mean 'sft'?",
    ),
    (
        {"stages.fuse.inputs.student": "sft"},
        "stages.fuse.inputs.student",
        "'sft' is not a reference; did you mean 'stage:sft'?",
    ),
    ({"stages.fuse.inputs.student": "stage:max"}, "stages.fuse.inputs.student", "'stage:max' is 2 stages"),
    (
        {"stages.fuse.inputs.student": "stage:max[domian=math]"},
        "stages.fuse.inputs.student",
        "stage 'max' has no axis 'domian' (did you mean 'domain'?",
    ),
    (
        {"stages.fuse.inputs.student": "stage:max[domain=mth]"},
        "stages.fuse.inputs.student",
        "'max' has no instance with domain=mth (did you mean 'math'?",
    ),
    ({"stages.fuse.inputs.student": "stage:sft[*]"}, "stages.fuse.inputs.student", "'stage:sft[*]': [*] is for lists"),
    ({"stages.fuse.inputs.student": "hf:org/model"}, "stages.fuse.inputs.student", "'hf:org/model' names no revision"),
    (
        {"stages.fuse.inputs.teachers": [{"ref": "model:", "wieght": 2}]},
        "stages.fuse.inputs.teachers.0.wieght",
        "unknown key (did you mean 'weight'?",
    ),
    ({"stages.sft.inputs.init": "stage:sft"}, "stages.sft.inputs", "the stage reads itself"),
    ({"stages.sft.inputs.init": "stage:fuse"}, "stages", "they read each other in a circle: sft <- fuse"),
    (
        {"stages.eval.inputs.after": ["stage:sft"]},
        "stages.eval.inputs.after",
        "two models of before and after are called 'sft'",
    ),
    # tasks and efforts
    (
        {"stages.sft.config.data.ratios": {"mth": 2}},
        "stages.sft.config.data.ratios.mth",
        "the stage reads no task 'mth' (did you mean 'math'?",
    ),
    ({"stages.sft.config.data.distinct": 1}, "stages.sft.config.data.distinct", "would not be read: kinds rlvr"),
    ({"stages.sft.config.data.ratios": {"math": 0}}, "stages.sft.config.data.ratios.math", "must be greater than"),
    (
        {"stages.eval.config.data.ratios": {"math": 2}},
        "stages.eval.config.data.ratios",
        "would not be read: kind eval asks every task rollout.prompts prompts",
    ),
    (
        {"stages.sft.config.data.tasks": ["mth"]},
        "stages.sft.config.data.tasks",
        "no task is called 'mth' (did you mean 'math'?",
    ),
    (
        {"stages.sft.config.data.efforts": ["lwo"]},
        "stages.sft.config.data.efforts",
        "no effort level is called 'lwo' (did you mean 'low'?",
    ),
    (
        {"efforts.levels.mid": "<mid>", "stages.sft.config.data.efforts": ["mid"]},
        "stages.sft.config.data.efforts",
        "tasks.math.strides has none for effort 'mid'",
    ),
    # numbers that have to agree
    ({f"{M}.train.global_batch_size": 5}, f"{M}.train.global_batch_size", "5 does not divide the 16 sequences"),
    (
        {f"{M}.train.max_steps": 5},
        f"{M}.train.max_steps",
        "5 is no multiple of the 2 optimizer steps per rollout batch",
    ),
    ({f"{M}.train.save_every": 3}, f"{M}.train.save_every", "3 is no multiple of the 2 optimizer steps"),
    (
        {"stages.fuse.config.train.global_batch_size": 3},
        "stages.fuse.config.train.global_batch_size",
        "3 does not divide the 8",
    ),
    (
        {f"{M}.rollout.group_size": 1, f"{M}.train.global_batch_size": 4},
        f"{M}.rollout.group_size",
        "1, but an advantage",
    ),
    ({"stages.sft.resources": {"cpus": 2}}, "stages.sft.resources.cpus", "2, but machine.cpus is 1"),
    ({"stages.sft.resources": {"gpus": 1}}, "stages.sft.resources.gpus", "1, but machine.gpus is 0"),
    (
        {"stages.fuse.config.loss": {"form": "topk", "k": 6}},
        "stages.fuse.config.loss.k",
        "6, but the vocabulary has 5 words",
    ),
    ({"stages.eval.config.pass_k": [8]}, "stages.eval.config.pass_k", "8 needs as many samples per prompt"),
    # inputs that settings ask for
    (
        {f"{M}.kl": {"estimator": "k3", "coef": 0.1}},
        "stages.max.inputs.reference",
        "required, and not set: config.kl.estimator is k3",
    ),
    (
        {"stages.max.inputs.reference": "stage:sft"},
        "stages.max.inputs.reference",
        "would not be read: config.kl.estimator is none",
    ),
    (
        {"stages.max.inputs.budget": "stage:sft"},
        "stages.max.inputs.budget",
        "would not be read: config.effort is not set",
    ),
    ({f"{M}.kl": {"estimator": "k1", "coef": 0.1}}, f"{M}.kl", "estimator: k1 in the loss has a gradient of mean zero"),
    ({"stages.eval.inputs": {}}, "stages.eval.inputs", "names no model"),
    (
        {"stages.eval.inputs.models": ["stage:sft"]},
        "stages.eval.inputs",
        "give either models, or before, teachers and after",
    ),
    ({"stages.eval.inputs.after": ABSENT}, "stages.eval.inputs.after", "required, and not set"),
    (_within("mx"), "stages.eval.config.within.budget.effort", "no effort level is called 'mx' (did you mean 'max'?"),
    (_within("max"), "stages.eval.config.within.tau.max", "required, and not set"),
    # routes
    (
        {"stages.fuse.inputs.teachers": ["stage:max[domain=math]"]},
        "stages.fuse.inputs.teachers",
        "no teacher for domain=code, effort=max",
    ),
    (
        {"stages.fuse.config.data.efforts": ["low", "max"]},
        "stages.fuse.inputs.teachers",
        "no teacher for domain=math, effort=low; domain=code, effort=low",
    ),
    (
        {"stages.fuse.config.data.tasks": ["math"]},
        "stages.fuse.inputs.teachers",
        "'max[domain=code]' is for domain=code, effort=max, which the data cannot hold",
    ),
    (
        {"stages.fuse.config.route_by": ["effort"]},
        "stages.fuse.inputs.teachers",
        "'max[domain=math]' and 'max[domain=code]' are both for effort=max",
    ),
    (
        {"stages.fuse.config.route_by": ["domain", "domain"]},
        "stages.fuse.config.route_by",
        "'domain' is there twice; name it once",
    ),
    (
        {"stages.fuse.config.route_by": ["domian"]},
        "stages.fuse.config.route_by",
        "rows have no column 'domian' (did you mean 'domain'?",
    ),
    (
        {"stages.fuse.config.route_by": ["kind"]},
        "stages.fuse.config.route_by",
        "rows have no column 'kind' (columns: domain, effort); tasks.NAME.columns takes one from a file, "
        "tasks.NAME.constants sets one",
    ),
    (
        {"stages.max.labels": {}},
        "stages.fuse.inputs.teachers",
        "'max[domain=math]' has no label 'effort' to be routed by",
    ),
    (
        {"stages.fuse.config.default_teacher": "max[domain=mth]"},
        "stages.fuse.config.default_teacher",
        "no teacher is called 'max[domain=mth]' (did you mean 'max[domain=math]'?",
    ),
    ({"stages.fuse.config.data.efforts": []}, "stages.fuse.config.route_by", "rows have no effort to route by"),
]


@pytest.mark.parametrize(("changes", "key", "text"), BAD, ids=[f"{key}: {text}"[:80] for _, key, text in BAD])
def test_a_bad_input_is_told_by_its_key(changes, key, text):
    told = problems(changes)
    assert any(line.startswith(f"{key}: {text}") for line in told), told


def test_every_problem_is_told_at_once():
    changes = {"stages.sft.config.train.max_steps": "x", "stages.fuse.config.loss": {"form": "topp"}, "sede": 1}
    assert len(problems(changes)) == 3


def test_missing_values_are_told_all_at_once():
    told = problems({"stages.sft.config.train.max_steps": "???", "stages.max.config.train.optimizer.lr": "???"})
    assert [line.partition(":")[0] for line in told] == [
        "stages.sft.config.train.max_steps",
        "stages.max.config.train.optimizer.lr",
    ]


def test_what_all_instances_share_is_told_once():
    assert len(problems({"stages.max.config.train.optimizer.lr": -1.0})) == 1


def test_what_one_instance_has_is_told_by_its_name():
    override = InstanceOverride("o", "max[domain=code]", ("config", "surrogate", "lo"), 0.1)
    assert problems(overrides=[override])[0].startswith("stages.max[domain=code].config.surrogate")


def test_a_broken_fan_out_is_not_told_again_by_those_that_refer_to_it():
    assert len(problems({"stages.max.foreach.domain": ["math", "math"]})) == 1


def test_a_default_teacher_covers_rows_without_a_route():
    changes = {
        "stages.fuse.inputs.teachers": ["stage:max[domain=math]"],
        "stages.fuse.config.default_teacher": "max[domain=math]",
    }
    assert recipe(changes).stages["fuse"].settings.config.default_teacher == "max[domain=math]"
