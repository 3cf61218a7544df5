"""What the Kimi K3 recipe reaches at laptop scale, on prompts held out by hash. Minutes a seed: `make recipe`."""

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.stages import Recorder
from safetensors.torch import load_file, save_file

from opdctl import Workspace
from opdctl.backends import embedded
from opdctl.backends.contract import InputSpec, StageSpec

pytestmark = pytest.mark.recipe
EFFORTS = ("low", "high", "max")
DOMAINS = ("general", "general_agents", "coding_agents")
IN_TURNS = DOMAINS[1:]


@dataclass(frozen=True)
class Outcome:
    workspace: Path
    report: Mapping[str, Any]

    def table(self, form: str) -> Mapping[str, Any]:
        model = f"mopd[loss={form}]"
        tables = self.report["fusion"]
        return next(t for t in tables if t["model"] == model and t["metric"] == "accuracy")

    def mean(self, form: str, column: str) -> float:
        return float(self.table(form)["mean"][column]["value"])

    def played(self, model: str, domain: str, effort: str) -> Mapping[str, float]:
        """Means over the episodes."""
        found: Mapping[str, float] = self.report["models"][model][f"{domain}.{effort}"]["episodes"]
        return found

    def length(self, model: str, domain: str, effort: str) -> float:
        return float(self.report["models"][model][f"{domain}.{effort}"]["length_mean"])


@pytest.fixture(scope="module", params=[0, 1, 2])
def outcome(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    workspace = tmp_path_factory.mktemp(f"seed{request.param}")
    command = [sys.executable, "-m", "opdctl", "run", "kimi_k3", f"seed={request.param}", "--workspace", str(workspace)]
    subprocess.run(command, check=True)
    report = Workspace(workspace).run("kimi_k3").stage("eval").checkpoint / "report.json"
    return Outcome(workspace, json.loads(report.read_text()))


def test_specialists_are_far_above_sft(outcome):
    assert outcome.mean("full_vocab", "teacher") - outcome.mean("full_vocab", "before") >= 0.15


def test_max_effort_specialists_master_their_cells(outcome):
    """Eight of nine in three seeds. That of `general` in seed 1 ends at 77 %, 14 points above SFT, after 100 steps."""
    cells = {row["cell"]: row["teacher"]["value"] for row in outcome.table("full_vocab")["rows"]}
    least, *others = sorted(cells[f"{domain}.max"] for domain in DOMAINS)
    assert least >= 0.75
    assert min(others) >= 0.92


@pytest.mark.parametrize(("form", "share"), [("full_vocab", 0.95), ("policy_gradient", 0.90), ("topk", 0.90)])
def test_the_student_keeps_what_its_teachers_know(outcome, form, share):
    assert outcome.mean(form, "after") >= share * outcome.mean(form, "teacher")


@pytest.mark.parametrize("form", ["full_vocab", "policy_gradient", "topk"])
def test_more_effort_is_longer(outcome, form):
    student = f"mopd[loss={form}]"
    for domain in DOMAINS:
        lengths = [outcome.length(student, domain, effort) for effort in EFFORTS]
        assert lengths == sorted(set(lengths)), domain
        taught = [outcome.length(f"{effort}[domain={domain}]", domain, effort) for effort in EFFORTS]
        assert taught == sorted(set(taught)), domain


@pytest.mark.parametrize("column", ["teacher", "after"])
def test_accuracy_does_not_fall_with_effort(outcome, column):
    rows = {row["cell"]: row[column] for row in outcome.table("full_vocab")["rows"]}
    for domain in DOMAINS:
        for less, more in (("low", "high"), ("high", "max")):
            assert rows[f"{domain}.{more}"]["high"] >= rows[f"{domain}.{less}"]["low"], (domain, less, more)


def test_specialists_call_their_tools_as_they_are_to_be_called_and_the_student_learns_it(outcome):
    before = [outcome.played("sft", domain, effort)["valid_calls"] for domain in IN_TURNS for effort in EFFORTS]
    for model in ("{effort}[domain={domain}]", "mopd[loss=full_vocab]"):
        calls = [
            outcome.played(model.format(domain=domain, effort=effort), domain, effort)["valid_calls"]
            for domain in IN_TURNS
            for effort in EFFORTS
        ]
        assert min(calls) >= 0.98, model
        assert sum(calls) > sum(before), model


@pytest.mark.parametrize("form", ["full_vocab", "policy_gradient", "topk"])
def test_more_effort_is_more_turns(outcome, form):
    for domain in IN_TURNS:
        turns = [outcome.played(f"mopd[loss={form}]", domain, effort)["turns"] for effort in EFFORTS]
        assert turns == sorted(set(turns)), domain


def test_averaging_the_teachers_is_no_substitute(outcome, tmp_path):
    """For following them in all they say; the sampled token alone was 1.4 points better than the mean in seed 1."""
    average = _average(outcome.workspace, tmp_path / "average")
    spec = _eval_of(outcome.workspace, average, tmp_path)
    embedded.run(spec, Recorder())
    report = json.loads(Path(spec.output, "report.json").read_text())
    assert report["means"]["average"]["accuracy"] <= outcome.mean("full_vocab", "after") - 0.02


def _average(workspace: Path, folder: Path) -> Path:
    """Plain mean of the nine specialists' weights, in a folder of its own."""
    run = Workspace(workspace).run("kimi_k3")
    sources = [run.stage(f"{effort}[domain={domain}]").checkpoint for effort in EFFORTS for domain in DOMAINS]
    weights = [load_file(source / "model.safetensors") for source in sources]
    folder.mkdir()
    for file in sources[0].iterdir():
        if file.name not in ("model.safetensors", "record.json"):
            (folder / file.name).write_bytes(file.read_bytes())
    mean = {name: torch.stack([one[name] for one in weights]).mean(0) for name in weights[0]}
    save_file(mean, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _eval_of(workspace: Path, model: Path, folder: Path) -> StageSpec:
    """The recipe's own evaluation, of one further model."""
    stored = json.loads(Workspace(workspace).run("kimi_k3").stage("eval").spec.read_text())
    inputs = [InputSpec(**given) for given in stored.pop("inputs")]
    before = next(given for given in inputs if given.role == "before")
    output = folder / "out"
    output.mkdir()
    spec = StageSpec(**stored, inputs=[before, InputSpec("models", "average", str(model))])
    return replace(spec, state=str(folder / "state"), output=str(output))
