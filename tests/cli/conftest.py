"""The command line called in a workspace, and a run on disk for it to speak of."""

import pytest

from opdctl.cli import main
from opdctl.store import Parent, Record, Workspace

MAX = "max[domain=general]"


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("FORCE_COLOR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def call(workspace, capfd):
    """Run the command line in the workspace: exit code, stdout, stderr."""

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        return ended.value.code or 0, out, err

    return run


@pytest.fixture
def finished(workspace):
    """A run with a base model's SFT stage, a specialist made from it, and a stage that stopped half-way."""
    run = Workspace(workspace).run("first")
    kinds = {"sft": "sft", MAX: "rlvr", "low": "rlvr", "eval": "eval"}
    run.write_pipeline({"name": "small", "stages": {name: {"kind": kind} for name, kind in kinds.items()}})
    run.write_info(name="first", pipeline="small", created="2026-01-02T03:04:05+00:00")
    sft = publish_checkpoint(run, "sft", "sft", [Parent("init", "model:", "model:")], {"loss": 0.25})
    publish_checkpoint(run, MAX, "rlvr", [Parent("init", "sft", "stage:sft", sft.id)], {"reward": 0.5, "length": 7.0})
    low = run.stage("low")
    low.begin({"kind": "rlvr"}, [], resume=False)
    low.new_attempt().log.write_text("low, attempt 1\n")
    (low.state / "step.json").write_text('{"step": 40}')
    low.new_attempt().log.write_text("low, attempt 2\n")
    return run


def publish_checkpoint(run, name, kind, parents, metrics):
    stage = run.stage(name)
    attempt = stage.new_attempt()
    attempt.log.write_text(f"log of {name}\n")
    (attempt.output / "model.safetensors").write_bytes(b"weights of " + name.encode())
    record = Record(
        id=f"20260102T030405-{len(name)}",
        run=run.name,
        stage=name,
        kind=kind,
        step=120,
        fingerprint=f"f-{name}",
        identity={"kind": kind},
        parents=parents,
        metrics=metrics,
        labels={},
        created="2026-01-02T03:04:05+00:00",
        opdctl_version="0",
        code="",
        argv=[],
        seconds=12.0,
    )
    return stage.publish(attempt.output, record)


@pytest.fixture
def publish():
    """Publish a checkpoint of a stage: run, name, kind, parents, metrics."""
    return publish_checkpoint
