"""No name leaves the run's folder, and no pipeline file makes an object or runs code; all through the command line."""

import json
import os
import sys
from pathlib import Path

import pytest
import yaml

from opdctl.cli import main

STAGE = {
    "kind": "sft",
    "backend": "embedded",
    "inputs": {"init": "model:"},
    "config": {
        "data": {"tasks": ["chain"]},
        "train": {"max_steps": 1, "global_batch_size": 1, "optimizer": {"lr": 0.1}},
    },
}
SHAPE = {
    "num_hidden_layers": 1,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 8,
}
PIPELINE = {
    "name": "small",
    "model": {"source": "new", "shape": SHAPE, "tokenizer": {"words": ["<pad>", "<bos>", "<eos>", "a"]}},
    "tasks": {"chain": {"task": "chain", "domain": "math"}},
    "stages": {"sft": STAGE},
}
NAMES = {
    "parent": "..",
    "climbs": "../../outside",
    "absolute": "/tmp/outside",
    "folder": "a/b",
    "hidden": ".hidden",
    "backslash": "a\\..\\b",
    "blank": "a b",
    "newline": "a\n",
    "null": "a\0b",
    "marker": "\0each.domain\0",
    "fullwidth": "．．／outside",
    "one-dot-leader": "․․",
    "division-slash": "a∕b",
    "right-to-left": "a\u202eb",
    "zero-width": "a\u200bb",
    "accent": "é",
    "home": "~root",
    "option": "-rf",
    "variable": "$HOME",
    "empty": "",
}


@pytest.fixture
def call(workspace, capfd):
    """Run the command line: exit code and all that it printed."""

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        return ended.value.code or 0, "".join(capfd.readouterr())

    return run


@pytest.fixture
def nothing_written(workspace, tmp_path):
    """Afterwards there is no file but the pipeline."""
    yield
    assert [path.name for path in tmp_path.rglob("*") if not path.is_dir()] in ([], ["p.yaml"])


def write(tree) -> None:
    Path("p.yaml").write_text(tree if isinstance(tree, str) else yaml.safe_dump(tree, allow_unicode=True))


def stages(of) -> dict:
    """One stage for each name, so that each is told of."""
    return PIPELINE | {"stages": {f"s{at}": STAGE | of(name) for at, name in enumerate(NAMES.values())}}


PLACES = {  # a pipeline with all the names -> how a problem tells each of them
    "stage": (PIPELINE | {"stages": dict.fromkeys(NAMES.values(), STAGE)}, "stages.{name}: "),
    "task": (PIPELINE | {"tasks": dict.fromkeys(NAMES.values(), PIPELINE["tasks"]["chain"])}, "tasks.{name}"),
    "axis": (stages(lambda name: {"foreach": {name: ["a"]}}), "stages.s{at}.foreach"),
    "value": (stages(lambda name: {"foreach": {"axis": ["a", name]}}), "stages.s{at}.foreach"),
    "label": (stages(lambda name: {"labels": {name: "x"}}), "stages.s{at}.labels"),
}


@pytest.mark.usefixtures("nothing_written")
@pytest.mark.parametrize("place", PLACES)
def test_names_that_could_lead_elsewhere_are_refused_in_a_pipeline(call, place):
    tree, told_as = PLACES[place]
    write(tree)
    code, told = call("run", "p.yaml", "--json")
    assert code == 2, told
    problems = json.JSONDecoder().raw_decode(told)[0]["problems"]
    expected = [told_as.format(name=name, at=at) for at, name in enumerate(NAMES.values())]
    assert [start for start in expected if not any(problem.startswith(start) for problem in problems)] == []


@pytest.mark.usefixtures("nothing_written")
@pytest.mark.parametrize("name", ["../../outside", "/tmp/outside", "a\n", "\0each.domain\0", "．．／outside"])
def test_so_is_that_of_a_pipeline(call, name):
    write(PIPELINE | {"name": name})
    code, told = call("run", "p.yaml")
    assert code == 2, told
    assert "name: " in told


COMMANDS = [
    ("run", "p.yaml", "--run"),
    ("plan", "p.yaml", "--run"),
    ("lineage", "--run"),
    ("logs", "sft", "--run"),
    ("status", "--"),
    ("report", "--"),
    ("compare", "small", "--"),
]


@pytest.mark.usefixtures("nothing_written")
@pytest.mark.parametrize("words", COMMANDS, ids=[words[0] for words in COMMANDS])
def test_so_is_the_name_of_a_run_by_every_command(call, words):
    """Of the command line; a null byte cannot be in an argument."""
    write(PIPELINE)
    given = ["../../outside"] if words[0] in ("run", "plan") else [name for name in NAMES.values() if "\0" not in name]
    for name in given:
        code, told = call(*words, name) if words[-1] == "--" else call(*words[:-1], f"{words[-1]}={name}")
        assert (code, "unexpected error" in told) == (2, False), (name, told)


@pytest.mark.usefixtures("nothing_written")
@pytest.mark.parametrize("name", ["..", "a/b"])
def test_so_are_names_that_overrides_make(call, name):
    write(PIPELINE)
    for override in (
        f"name={name}",
        f"+stages.sft.foreach.axis=['{name}']",
        f"+tasks.'{name}'={{task: chain, domain: math}}",
    ):
        code, told = call("run", "p.yaml", override)
        assert code == 2, told


@pytest.mark.parametrize(
    "where", ["runs/small", "runs/small/stages/sft", "runs/small/stages", "runs/small/stages/sft/state"]
)
def test_a_link_in_the_place_of_a_folder_is_not_followed(call, workspace, tmp_path, where):
    outside = tmp_path / "outside"
    (outside / "state").mkdir(parents=True)
    (outside / "state" / "precious").write_text("of somebody else")
    (outside / "precious").write_text("of somebody else")
    link = workspace / where
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(outside)
    write(PIPELINE)
    code, told = call("run", "p.yaml", "tracking.enabled=false", "--rerun", "sft")
    assert code == 1, told
    assert "is a link" in told
    assert sorted(str(path.relative_to(outside)) for path in outside.rglob("*")) == [
        "precious",
        "state",
        "state/precious",
    ]


# ------------------------------------------------------------------------------------------------------ objects

TAGS = {
    "apply": "!!python/object/apply:os.system ['touch CANARY']",
    "new": "!!python/object/new:os.system ['touch CANARY']",
    "object": "!!python/object:opdctl.errors.ConfigError {}",
    "name": "!!python/name:os.system",
    "module": "!!python/module:antigravity",
    "tuple": "!!python/tuple [1, 2]",
    "short": "!python/object/apply:os.system ['touch CANARY']",
    "own": "!ENV HOME",
}


@pytest.mark.usefixtures("nothing_written")
@pytest.mark.parametrize("tag", TAGS.values(), ids=TAGS.keys())
def test_tags_make_no_objects(call, tmp_path, tag):
    write(yaml.safe_dump(PIPELINE) + f"scale:\n  it: {tag.replace('CANARY', str(tmp_path / 'canary'))}\n")
    code, told = call("run", "p.yaml")
    assert code == 2, told
    assert "could not determine a constructor for the tag" in told


TARGET = {"_target_": "os.system", "_args_": ["touch CANARY"], "command": "touch CANARY"}
PLANTS = {
    "setting": lambda found: {"tracking": found},
    "stage": lambda found: {"stages": {"sft": STAGE | {"config": STAGE["config"] | found}}},
    "task": lambda found: {"tasks": PIPELINE["tasks"] | {"own": found | {"task": "chain", "domain": "math"}}},
    "whole": lambda found: found,
}


@pytest.mark.usefixtures("nothing_written")
@pytest.mark.parametrize("place", PLANTS)
def test_a_target_is_no_more_than_an_unknown_key(call, tmp_path, place):
    found = yaml.safe_load(yaml.safe_dump(TARGET).replace("CANARY", str(tmp_path / "canary")))
    write(PIPELINE | PLANTS[place](found))
    code, told = call("run", "p.yaml")
    assert code == 2, told
    assert "_target_: unknown key" in told


def test_a_target_in_a_free_mapping_stays_text(call, tmp_path):
    write(PIPELINE | {"scale": {"it": {"_target_": "os.system", "command": f"touch {tmp_path / 'canary'}"}}})
    code, told = call("plan", "p.yaml")
    assert code == 0, told
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize(
    "hydra",
    [
        {"callbacks": {"it": {"_target_": "canary.Touch"}}},
        {"launcher": {"_target_": "canary.Touch"}},
        {"sweeper": {"_target_": "canary.Touch"}},
        {"searchpath": ["pkg://canary"]},
        {"run": {"dir": "canary"}},
        {"job_logging": {"handlers": {"it": {"()": "canary.Touch"}}}},
    ],
    ids=lambda given: next(iter(given)),
)
def test_hydras_own_settings_run_nothing(call, workspace, tmp_path, monkeypatch, hydra):
    (tmp_path / "modules").mkdir()
    touch = f"open({str(tmp_path / 'canary')!r}, 'w').close()"
    (tmp_path / "modules" / "canary.py").write_text(
        f"{touch}\nclass Touch:\n    def __init__(self, **given): {touch}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    write(PIPELINE | {"hydra": hydra})
    code, told = call("plan", "p.yaml")
    assert code in (0, 2), told
    assert "canary" not in sys.modules
    assert not (tmp_path / "canary").exists()
    assert sorted(os.listdir(workspace)) == ["p.yaml"]


@pytest.mark.usefixtures("nothing_written")
@pytest.mark.parametrize(
    "text",
    [
        "${file:/etc/passwd}",
        "${read:/etc/passwd}",
        "${eval:'1+1'}",
        "${python:1+1}",
        "${shell:id}",
        "${import:os}",
        "${oc.create:${eval:'{}'}}",
        "${oc.decode:'!!python/name:os.system'}",
        "${instantiate:os.system}",
        "${now:%Y}",
    ],
)
def test_resolvers_read_no_file_and_run_nothing(call, text):
    write(PIPELINE | {"tracking": {"experiment": text}})
    code, told = call("plan", "p.yaml")
    assert code == (0 if "now" in text else 2), told  # the time is all that a resolver of Hydra's tells
    assert "root:" not in told
    assert "uid=" not in told
    assert "unexpected error" not in told
