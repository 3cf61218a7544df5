"""Files and overrides to a pipeline. What `expand` decides on plain trees is in test_pipeline.py."""

import re
from pathlib import Path

import pytest

from opdctl.config import builtin_folder, load_pipeline
from opdctl.errors import ConfigError
from opdctl.settings import TopKOpd

CONF = {
    "conf/stage/sft.yaml": """
kind: sft
backend: embedded
inputs: {init: "model:"}
config:
  data: {tasks: [math]}
  train: {max_steps: "${scale.steps}", global_batch_size: 8, optimizer: {lr: "${scale.lr}"}}
""",
    "conf/scale/small.yaml": "steps: 10\nlr: 1.0e-3\nlosses: {a: 0.1, b: 0.2}\n",
    "conf/scale/large.yaml": "steps: 1000\nlr: 1.0e-4\nlosses: {a: 0.1, b: 0.2}\n",
    "pipelines/small.yaml": """
defaults:
  - /model: tiny_qwen3
  - /scale: small
  - /stage@stages.base: sft
  - /stage@stages.many: sft
  - _self_
name: small
axes: {rung: [a, b], seed: [1, 2]}
tasks: {math: {task: chain, domain: math}}
stages:
  many:
    foreach: {rung: "${axes.rung}", seed: "${axes.seed}"}
    seed: "${each.seed}"
    inputs: {init: "stage:base"}
    config: {train: {optimizer: {lr: "${scale.losses.${each.rung}}"}}}
""",
}
SMALL = "pipelines/small.yaml"


@pytest.fixture
def files(workspace: Path) -> Path:
    for name, text in CONF.items():
        path = workspace / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return workspace


def train(pipeline, name="base"):
    return pipeline.stages[name].settings.config.train


def refused(*overrides, path=SMALL):
    with pytest.raises(ConfigError) as caught:
        load_pipeline(path, overrides)
    return caught.value


def test_a_file_is_composed_of_its_own_groups_then_of_packaged_ones(files):
    pipeline = load_pipeline(SMALL)
    assert train(pipeline).max_steps == 10
    assert pipeline.settings.model.source == "new"  # tiny_qwen3 is packaged only
    assert pipeline.source == SMALL
    assert pipeline.folder == files


def test_values_that_depend_on_an_axis_keep_their_types_and_may_be_nested(files):
    pipeline = load_pipeline(SMALL)
    lrs = {name: train(pipeline, name).optimizer.lr for name in pipeline.stages if name.startswith("many")}
    assert lrs == {
        "many[rung=a,seed=1]": 0.1,
        "many[rung=a,seed=2]": 0.1,
        "many[rung=b,seed=1]": 0.2,
        "many[rung=b,seed=2]": 0.2,
    }
    assert pipeline.stages["many[rung=b,seed=2]"].seed == 2


def test_one_group_moves_the_recipe(files):
    assert train(load_pipeline(SMALL, ["scale=large"])).max_steps == 1000


@pytest.mark.parametrize(
    "override",
    [
        "stages.base.config.train.save_every=5",
        "+stages.base.config.train.save_every=5",
        "++stages.base.config.train.save_every=5",
    ],
)
def test_a_settings_key_can_be_set_whether_the_file_has_it_or_not(files, override):
    assert train(load_pipeline(SMALL, [override])).save_every == 5


def test_a_key_can_be_removed(files):
    assert "many[rung=a,seed=1]" not in load_pipeline(SMALL, ["~stages.many"]).stages


def test_one_instance_can_be_overridden_anywhere_in_the_list(files):
    one = "stages.many[rung=b,seed=1].config.train.optimizer.lr"
    pipeline = load_pipeline(SMALL, ["seed=4", f"{one}=7e-1", "stages.many.config.train.max_steps=30"])
    assert train(pipeline, "many[rung=b,seed=1]").optimizer.lr == 0.7
    assert train(pipeline, "many[rung=b,seed=2]").optimizer.lr == 0.2
    assert {train(pipeline, name).max_steps for name in pipeline.stages if name != "base"} == {30}


def test_a_partial_selector_overrides_all_that_match(files):
    pipeline = load_pipeline(SMALL, ["stages.many[rung=b].config.train.max_steps=7"])
    assert [train(pipeline, f"many[rung={r},seed={s}]").max_steps for r in "ab" for s in (1, 2)] == [10, 10, 7, 7]


def test_an_instance_override_may_refer_to_other_keys(files):
    text = "stages.many[rung=b].config.train.max_steps=${stages.base.config.train.max_steps}"
    pipeline = load_pipeline(SMALL, ["scale.steps=3", text])
    assert train(pipeline, "many[rung=b,seed=1]").max_steps == 3


def test_instance_overrides_add_and_remove(files):
    added = "++stages.many[seed=1].config.train.save_every=3"
    removed = "~stages.many[seed=1].config.train.optimizer.lr"
    assert train(load_pipeline(SMALL, [added]), "many[rung=a,seed=1]").save_every == 3
    assert refused(removed).problems[0].startswith("stages.many[rung=a,seed=1].config.train.optimizer.lr: required")


def test_any_key_of_a_task_can_be_set_whether_the_file_has_it_or_not(files):
    task = load_pipeline(SMALL, ["tasks.math.links=12", "tasks.math.strides.low=3"]).settings.tasks["math"]
    assert (task.links, task.strides["low"]) == (12, 3)


def test_a_misspelt_task_is_told_with_the_near_one(files):
    [problem] = refused("tasks.mat.links=12").problems
    assert problem.startswith("override tasks.mat.links=12: no task is called 'mat' (did you mean 'math'?")
    assert refused("tasks.math.linkz=12").problems[0].startswith("tasks.math.linkz: unknown key (did you mean 'links'?")


def test_what_refers_to_a_failing_key_is_not_told_as_well(files):
    failing = ["+scale.fit=${scale.fits.none}", "+scale.here=${scale.fit.x}", "seed=${scale.here}"]
    [problem] = refused(*failing).problems
    assert problem.startswith("scale.fit: '${scale.fits.none}' refers to nothing (did you mean 'fit'?")


def test_keys_that_refer_to_each_other_in_a_circle_are_told(files):
    problems = refused("+scale.a=${scale.b}", "+scale.b=${scale.a}").problems
    assert [problem.partition(":")[0] for problem in problems] == ["scale.a", "scale.b"]


def test_folders_with_odd_names_work(files):
    odd = files / "it's, [a] folder=1"
    odd.mkdir()
    (files / "conf").rename(odd / "conf")
    (files / "pipelines").rename(odd / "pipelines")
    assert train(load_pipeline(odd / SMALL)).max_steps == 10


@pytest.mark.parametrize(
    ("override", "key", "text"),
    [
        ("scale=smal", SMALL, "no 'smal' in group 'scale' (did you mean 'small'? options: "),
        ("scael=small", "scael", "unknown key (did you mean 'scale'?"),
        ("scale=null", SMALL, "Config group override must be a string or a list"),
        ("seed=\u00fc", "override seed=\u00fc", "a character that needs quotes"),
        ("seed=9223372036854775808", "seed", "must be less than 9223372036854775808"),
        ("scale.stepz=3", "scale.stepz", "there is no such key (did you mean 'steps'? keys of scale: "),
        (
            "stages.bsae.config.train.lr=1",
            "override stages.bsae.config.train.lr=1",
            "no stage is called 'bsae' (did you mean",
        ),
        ("stages.base.config.train.lr=1", "stages.base.config.train.lr", "unknown key (did you mean 'optimizer.lr'?"),
        (
            "stages.base.config.train.max_steps='10'",
            "stages.base.config.train.max_steps",
            "must be a whole number, not the",
        ),
        (
            "stages.base.config.train.max_steps=1,2",
            "override stages.base.config.train.max_steps=1,2",
            "is several values",
        ),
        ("stages.base.config.train.max_steps=[", "override stages.base.config.train.max_steps=[", ""),
        (
            "stages.base.config.train.max_steps=${scale.stepz}",
            "stages.base.config.train.max_steps",
            "'${scale.stepz}' refers",
        ),
        (
            "stages.base.seed=${each.rung}",
            "stages.base.seed",
            "'${each.rung}' refers to nothing ('${each.AXIS}' is for",
        ),
        ("stages.many.seed=${each.rugn}", "stages.many.seed", "'${each.rugn}' refers to nothing (did you mean 'rung'?"),
        ("axes.rung=[c]", "stages.many.config.train.optimizer.lr", "'${scale.losses.${each.rung}}' refers to nothing"),
        (
            "scale.steps=???",
            "stages.base.config.train.max_steps",
            "'${scale.steps}' refers to scale.steps, which is required",
        ),
        ("stages.many[rung=c].seed=1", "override stages.many[rung=c].seed=1", "'many' has no instance with rung=c"),
        (
            "stages.many[rugn=a].seed=1",
            "override stages.many[rugn=a].seed=1",
            "stage 'many' has no axis 'rugn' (did you mean",
        ),
        ("stages.many[rung=a].config.train.x=1", "stages.many[rung=a,seed=1].config.train.x", "unknown key"),
        ("stages.many[rung=a].seed=1,2", "override stages.many[rung=a].seed=1,2", "is several values"),
        ("stages.many[rung=a].seed=[[", "override stages.many[rung=a].seed=[[", ""),
        ("stages.many[rung=a]=1", "override stages.many[rung=a]=1", "names no key"),
        (
            "stage@stages.bas=sft",
            "override stage@stages.bas",
            "the defaults of pipelines/small.yaml have no such entry (did you mean",
        ),
        ("axes.rung={a: 1}", "axes.rung", "must be a list, not a mapping"),
        ("stages.base.config.data=[a]", "stages.base.config.data", "must be a mapping, not a list"),
        ("~stages.nothing", SMALL, "Could not delete from config"),
    ],
)
def test_a_bad_override_is_told_by_its_key(files, override, key, text):
    told = refused(override).problems
    assert any(line.startswith(f"{key}: {text}") for line in told), told


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        (SMALL, "name: [a\nb: c\n", "pipelines/small.yaml:2:2: not valid YAML"),
        ("conf/stage/sft.yaml", "kind: sft\n  x: {\n", "conf/stage/sft.yaml:2:4: not valid YAML"),
        (SMALL, "defaults: [/nogroup: x, _self_]\nname: a\n", f"{SMALL}: no 'x' in group 'nogroup'"),
        (
            SMALL,
            "defaults: [{/stage@a: sft}, {/stage@a: opd}, _self_]\nname: a\n",
            "pipelines/small.yaml: defaults: 'stage@a' is there twice",
        ),
        (
            SMALL,
            "defaults: [{/stage@a: sft}, _self_]\na: [1]\n",
            "pipelines/small.yaml: a key is a list here and a mapping in a",
        ),
        (SMALL, "name: a\neach: {x: 1}\n", "each: unknown key"),
        (SMALL, "name: a\nstages: [1]\n", "stages: required"),
        (SMALL, "- 1\n", "pipelines/small.yaml: "),
        (SMALL, "stages:\n  a: {kind: sft}\n  a: {kind: sft}\n", "small.yaml:3:3: not valid YAML"),
    ],
)
def test_a_bad_file_is_told_with_its_place(files, name, text, expected):
    (files / name).write_text(text)
    told = refused().problems
    assert any(expected in line for line in told), told


def test_a_file_that_is_not_there_is_told_with_the_packaged_ones():
    assert "kimi_k3" in str(refused(path="kimi_k4"))


def test_what_the_runbook_writes_around_stages_is_read_from_a_file(tmp_path):
    """YAML reads some words as other than text: a key called `on` would be `true`."""
    runbook = (Path(__file__).parent.parent / "runbooks" / "write-a-pipeline.md").read_text()
    [block] = [text for text in re.findall(r"^```yaml\n(.*?)^```$", runbook, re.M | re.S) if text.startswith("gate:")]
    packaged = (builtin_folder() / "pipelines" / "kimi_k3.yaml").read_text()
    file = tmp_path / "around.yaml"
    file.write_text(packaged.replace("\nname: ", f"\n{block}\nname: ", 1))
    settings = load_pipeline(file).settings
    assert (settings.watch.kl_high.above, settings.watch.kl_high.action) == (4, "pause")
    assert settings.notify.command[0] == "sh"
    assert settings.retention.keep_best.metric == "accuracy"
    assert settings.gate.accept == ["origin"]


def test_a_pipeline_of_the_workspace_is_not_found_by_its_name_alone_and_the_file_is_told(tmp_path, monkeypatch):
    (tmp_path / "pipelines").mkdir()
    (tmp_path / "pipelines" / "mine.yaml").write_text("name: mine")
    monkeypatch.chdir(tmp_path)
    assert refused(path="mine").hint == refused(path="mine.yaml").hint == "is pipelines/mine.yaml meant?"


def test_files_that_are_not_there_are_told_at_once(files):
    task = "{path: no.jsonl, prompt: p, answer: a, verifier: exact}"
    told = refused(f"+tasks.mine={task}", "stages.base.config.data.tasks=[mine]", 'stages.base.inputs.init="path:no"')
    assert told.problems == ["tasks.mine.path: no such file: no.jsonl", "stages.base.inputs.init: no such folder: no"]
    assert str(files) in told.hint


def test_a_model_that_can_be_fetched_is_told_with_the_command(files):
    told = refused('stages.base.inputs.init="path:models/smollm2_135m"').problems
    assert told == [
        "stages.base.inputs.init: no such folder: models/smollm2_135m (opdctl model fetch smollm2_135m makes it)"
    ]
    assert refused('stages.base.inputs.init="gguf:no.gguf"').problems == [
        "stages.base.inputs.init: no such file: no.gguf"
    ]


def test_a_folder_that_an_imported_model_is_called_by_is_told_where_it_is(files):
    (files / "runs/imports/stages/mine/checkpoint").mkdir(parents=True)
    assert refused('stages.base.inputs.init="path:models/mine"').problems == [
        "stages.base.inputs.init: no such folder: models/mine (imported as mine: "
        "path:runs/imports/stages/mine/checkpoint)"
    ]


def test_yaml_makes_no_objects(files):
    (files / "pipelines" / "evil.yaml").write_text("name: !!python/object/apply:os.system ['touch made']\n")
    assert "not valid YAML" in str(refused(path="pipelines/evil.yaml"))
    assert not (files / "made").exists()


def test_off_in_a_file_is_off_although_yaml_reads_it_as_false(files):
    (files / SMALL).write_text(CONF[SMALL] + "watch: {kl_stuck: {action: off}}\ndisk: {forecast: off}\n")
    settings = load_pipeline(SMALL, ["watch.kl_high.action=off"]).settings
    assert {settings.watch.kl_stuck.action, settings.watch.kl_high.action, settings.disk.forecast} == {"off"}
    assert "'True' is not known" in str(refused("watch.kl_stuck.action=true"))


def test_hydra_keys_of_a_file_do_nothing(files):
    (files / SMALL).write_text(CONF[SMALL] + "hydra: {run: {dir: made}, job: {chdir: true}}\n")
    load_pipeline(SMALL)
    assert not (files / "made").exists()
    assert Path.cwd() == files


def test_kimi_k3_is_nine_teachers_and_a_student_for_each_loss(workspace):
    stages = load_pipeline("kimi_k3").stages
    student = stages["mopd[loss=topk]"]
    assert isinstance(student.settings.config.loss, TopKOpd)
    teachers = [given for given in student.inputs if given.role == "teachers"]
    assert len({(given.route["domain"], given.route["effort"]) for given in teachers}) == 9
    assert stages["low[domain=general]"].upstream() == {"high[domain=general]", "sft"}
