"""verl's own classes take every loss, rule and form that opdctl gives it, and rows with images."""

import os
from pathlib import Path

import pytest
import yaml
from backends.verl import examples
from engine.stages import ROOT

from opdctl.backends.verl import schema

PYTHON = Path(os.environ.get("OPDCTL_VERL_PYTHON", ROOT / ".venv-verl/bin/python"))
UNDISCLOSED = {"low": 0.2, "high": 0.3, "dual": 4.0, "cap": 2.0, "square": 0.1, "buffer_tokens": 4}
PICTURES = {"task": "file", "path": "rows.jsonl", "prompt": "q", "answer": "a", "verifier": "numeric"}


def filled(node, key=""):
    if isinstance(node, dict):
        return {name: filled(value, name) for name, value in node.items()}
    return UNDISCLOSED[key] if node == "???" else node


def preset(path: Path):
    given = filled(yaml.safe_load(path.read_text()))
    if given["surrogate"]["form"] == "log_ratio_clip":
        given["surrogate"]["low"] = -0.2
    given.pop("dynamic_sampling", None)  # verl knows no limit of rounds, and opdctl refuses it before
    if (given.get("mismatch") or {}).get("floor"):
        given["mismatch"]["floor"] = 0.0
    return given


RLVR = {path.stem: preset(path) for path in sorted((ROOT / "conf/rl").glob("*.yaml"))}
RLVR["dis"] = {"surrogate": {"form": "reinforce"}, "mismatch": {"rule": "dis", "low": 0.3, "high": 4.0}}
PG = {"form": "policy_gradient", "max_advantage": None, "outcome_weight": 0.5}
CURRENT = {"rule": "icepop", "low": 0.5, "high": 2.0, "policy": "current"}
OPD = {
    "outcome": PG,
    "current": PG | {"surrogate": {"form": "reinforce"}, "mismatch": CURRENT},
    "pop": PG | {"mismatch": {"rule": "icepop", "low": 0.5, "high": 2.0}},
    "overlap": {"form": "overlap", "k": 8},
}


@pytest.mark.verl
def test_verl_takes_them_all():
    if not PYTHON.exists():
        pytest.skip(f"no {PYTHON}: make verl-env")
    where = {"workers": {"python": str(PYTHON)}}
    pictures = {"tasks": {"cats": PICTURES | {"template": "chat", "images": "pictures"}}}
    looking = {"data": {"tasks": ["cats"]}}
    specs = [examples.spec("rlvr", config=given, stage=name, **where) for name, given in RLVR.items()]
    specs += [examples.spec("opd", config={"loss": given}, stage=f"opd-{name}", **where) for name, given in OPD.items()]
    specs += [
        examples.spec(kind, config=looking, stage=f"images-{kind}", **where, **pictures) for kind in ("rlvr", "opd")
    ]
    assert {stage: lines for stage, lines in schema.check(specs).items() if lines} == {}
