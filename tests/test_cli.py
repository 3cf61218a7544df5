"""The command line: exit codes, one JSON document on stdout, and what each command says of a run on disk."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import opdctl
from opdctl.cli import app, main
from opdctl.store import Parent, Record, Workspace

COMMANDS = ["run", "plan", "validate", "status", "logs", "lineage", "runs", "init", "export", "ui", "doctor"]
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
    sft = publish(run, "sft", "sft", [Parent("init", "model:", "model:")], {"loss": 0.25})
    publish(run, MAX, "rlvr", [Parent("init", "sft", "stage:sft", sft.id)], {"reward": 0.5, "length": 7.0})
    low = run.stage("low")
    low.begin({"kind": "rlvr"}, [], resume=False)
    low.new_attempt().log.write_text("low, attempt 1\n")
    (low.state / "step.json").write_text('{"step": 40}')
    low.new_attempt().log.write_text("low, attempt 2\n")
    return run


def publish(run, name, kind, parents, metrics):
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


# ------------------------------------------------------------------------------------------------ the whole


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself_in_plain_text(call, command):
    code, out, _ = call(command, "--help")
    assert code == 0
    assert out.startswith(f"Usage: opdctl {command}")
    assert "\x1b" not in out
    assert max(map(len, out.split("\n"))) <= 80


def test_the_overview_lists_every_command(call):
    code, out, _ = call("--help")
    assert code == 0
    assert [word for word in COMMANDS if f"  {word} " not in out] == []
    assert {command.callback.__name__ for command in app.registered_commands} == set(COMMANDS)


def test_help_and_version_import_nothing_heavy(workspace):
    script = (
        "import sys, opdctl.cli\n"
        "try: opdctl.cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'rich', 'pydantic', 'hydra', 'torch', 'mlflow', 'numpy', 'opdctl.store'} & set(sys.modules)\n"
        "sys.exit(', '.join(heavy) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_version_is_the_package_version(call):
    assert call("--version")[1] == f"opdctl {opdctl.__version__}\n"


def test_the_public_api_is_what_it_says():
    assert [name for name in opdctl.__all__ if getattr(opdctl, name, None) is None] == []
    assert set(opdctl.__all__) <= set(dir(opdctl))
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = opdctl.nonsense


@pytest.mark.parametrize("arguments", [["nonsense"], ["run"], ["plan", "kimi_k3", "--nonsense"], ["ui", "--port", "x"]])
def test_a_wrong_command_line_exits_2(call, arguments):
    code, out, err = call(*arguments)
    assert (code, out) == (2, "")
    assert "Usage: opdctl" in err


def test_a_wrong_configuration_exits_2_with_every_problem_on_stderr(call):
    code, out, err = call("validate", "kimi_k3", "stages.sft.config.train.max_steps=0", "seed=x")
    assert (code, out) == (2, "")
    assert err.startswith("2 errors:\n")
    assert "stages.sft.config.train.max_steps" in err
    assert "seed" in err
    assert "\x1b" not in err


def test_with_json_an_error_is_a_document_too(call):
    code, out, err = call("validate", "kimi_k3", "seed=x", "--json")
    assert code == 2
    document = json.loads(out)
    assert document["exit_code"] == 2
    assert "seed" in document["problems"][0]
    assert "seed" in err


def test_a_bug_exits_3_and_leaves_its_traceback_in_a_file(call, finished, monkeypatch):
    monkeypatch.setattr("opdctl.store.Workspace.runs", lambda self: 1 / 0)
    code, out, err = call("runs")
    assert (code, out) == (3, "")
    path = Path(err.rpartition(" is in ")[2].strip())
    assert path.parent == finished.path.parent
    assert "ZeroDivisionError" in path.read_text()


def test_a_traceback_goes_to_the_temporary_folder_where_there_are_no_runs(call, tmp_path, monkeypatch):
    monkeypatch.setattr("opdctl.store.Workspace.runs", lambda self: 1 / 0)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert call("runs")[0] == 3
    assert len(list(tmp_path.glob("crash-*.txt"))) == 1


def test_an_interrupt_exits_130(call, monkeypatch):
    def interrupt(self):
        raise KeyboardInterrupt

    monkeypatch.setattr("opdctl.store.Workspace.runs", interrupt)
    assert call("runs")[0] == 130


def test_a_workspace_that_does_not_exist_is_refused(call):
    code, _, err = call("status", "--workspace", "nowhere")
    assert code == 2
    assert "--workspace nowhere: no such folder" in err


def test_the_workspace_can_be_elsewhere(call, finished, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert call("runs", "--workspace", "workspace")[1].count("first") == 1


# ------------------------------------------------------------------------------------------------ plan, validate


def test_plan_shows_decision_reason_and_losses_and_writes_nothing(call, workspace):
    code, out, _ = call("plan", "kimi_k3", "scale=smoke")
    assert code == 0
    assert "kimi_k3, run kimi_k3: 14 stages: 14 run" in out
    assert "├ domain=general_agents  run" in out
    assert out.count("loss: ") == 4
    assert max(map(len, out.split("\n"))) <= 80
    assert list(workspace.iterdir()) == []


def test_plan_as_json_holds_every_stage(call):
    code, out, err = call("plan", "kimi_k3", "--json", "--run", "other")
    document = json.loads(out)
    assert (code, err, document["run"]) == (0, "", "other")
    assert [stage["name"] for stage in document["stages"]][:2] == ["sft", "max[domain=general]"]
    assert {stage["decision"] for stage in document["stages"]} == {"run"}
    assert document["stages"][1]["formula"]


def test_run_dry_run_is_plan(call, workspace):
    assert call("run", "kimi_k3", "--dry-run") == call("plan", "kimi_k3")
    assert list(workspace.iterdir()) == []


def test_validate_says_what_is_valid(call):
    assert call("validate", "kimi_k3")[:2] == (0, "packaged kimi_k3: valid, 14 stages\n")
    assert json.loads(call("validate", "kimi_k3", "--json")[1])["valid"] is True


# ------------------------------------------------------------------------------------------------ what the disk says


def test_status_tells_how_far_each_stage_is(call, finished):
    code, out, _ = call("status")
    assert code == 0
    states = {line.split()[0]: line.split()[1] for line in out.split("\n")[2:] if line}
    assert states == {"sft": "done", MAX: "done", "low": "half-trained", "eval": "not"}
    assert "reward 0.500" in out


def test_status_shows_a_damaged_checkpoint(call, finished):
    (finished.stage("sft").checkpoint / "model.safetensors").write_bytes(b"")
    stages = {stage["stage"]: stage for stage in json.loads(call("status", "first", "--json")[1])["stages"]}
    assert stages["sft"]["state"] == "damaged"
    assert "model.safetensors" in stages["sft"]["note"]


def test_status_shows_the_step_of_a_living_worker(call, finished):
    attempt = finished.stage("low").attempts()[-1]
    attempt.note_worker(os.getpid())
    event = {"step": 55, "total": 200, "metrics": {"reward": 0.75}, "phase": "train", "time": 0.0}
    attempt.events.write_text(json.dumps(event) + "\n")
    code, out, _ = call("status")
    assert code == 0
    (line,) = (line for line in out.split("\n") if line.startswith("low"))
    assert line.split()[:3] == ["low", "running", "55/200"]
    assert "working" in out


def test_runs_lists_what_is_done(call, finished):
    document = json.loads(call("runs", "--json")[1])
    assert [(run["name"], run["pipeline"], run["done"], run["stages"]) for run in document["runs"]] == [
        ("first", "small", 2, 4)
    ]
    assert "first  small" in call("runs")[1]


def test_an_unknown_run_is_refused_with_a_near_one(call, finished):
    code, _, err = call("status", "frist")
    assert code == 2
    assert "did you mean first?" in err


def test_an_unknown_stage_is_refused_with_its_instances(call, finished):
    code, _, err = call("logs", "max")
    assert code == 2
    assert f"name one: {MAX}" in err


def test_logs_prints_the_last_attempt_or_the_one_asked_for(call, finished):
    assert call("logs", "low")[1] == "low, attempt 2\n"
    assert call("logs", "low", "--attempt", "1")[1] == "low, attempt 1\n"
    assert call("logs", "low", "--attempt", "3")[0] == 2
    assert call("logs", "eval")[0] == 2


def test_following_a_finished_stage_ends_at_once(call, finished):
    assert call("logs", "sft", "-f")[:2] == (0, "log of sft\n")


def test_following_goes_on_over_attempts_until_the_stage_ends(finished, workspace):
    """The second attempt is a living process; a third finishes the stage."""
    low = finished.stage("low")
    worker = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True)
    low.attempts()[-1].note_worker(worker.pid)
    command = [sys.executable, "-m", "opdctl", "logs", "low", "-f"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=workspace) as follower:
        assert follower.stdout.readline() == "low, attempt 2\n"
        with low.attempts()[-1].log.open("a") as log:
            log.write("more\n")
        assert follower.stdout.readline() == "more\n"
        publish(finished, "low", "rlvr", [], {})
        worker.communicate(b"\n")
        assert follower.stdout.read() == "log of low\n"
        assert follower.wait(timeout=10) == 0


def test_lineage_goes_back_to_the_base_model(call, finished):
    out = call("lineage", MAX)[1]
    assert [part.strip(" └─").split("  ")[0] for part in out.rstrip().split("\n")] == [
        MAX,
        "init: sft",
        "init: new model",
    ]
    assert call("lineage")[1] == out, "by default, of the stages that nothing else reads"
    assert call("lineage", finished.stage(MAX).checkpoint)[1] == out


def test_lineage_as_data_and_as_a_chart(call, finished):
    document = json.loads(call("lineage", MAX, "--json")[1])
    assert {node["title"] for node in document["checkpoints"].values()} == {MAX, "sft", "new model"}
    assert call("lineage", MAX, "--mermaid")[1].count("-->|init|") == 2


def test_lineage_says_where_an_ancestor_is_gone(call, finished):
    (finished.stage("sft").checkpoint / "record.json").unlink()
    assert "is gone or damaged" in call("lineage", MAX)[1].replace("\n", " ")


def test_lineage_of_an_unfinished_stage_is_refused(call, finished):
    code, _, err = call("lineage", "low")
    assert code == 2
    assert "has not finished" in err


# ------------------------------------------------------------------------------------------------ surroundings


def test_init_copies_pipelines_and_conf_once(call, workspace):
    assert call("init", "new")[0] == 0
    assert (workspace / "new/pipelines/kimi_k3.yaml").exists()
    assert (workspace / "new/conf/scale/laptop.yaml").exists()
    assert call("validate", "new/pipelines/kimi_k3.yaml")[0] == 0
    code, _, err = call("init", "new")
    assert code == 2
    assert "has pipelines/ and conf/ already" in err


def test_doctor_finds_this_machine_fit(call):
    code, out, _ = call("doctor", "--json")
    document = json.loads(out)
    assert [check for check in document["checks"] if check["verdict"] == "broken"] == []
    assert (code, document["ok"]) == (0, True)
    assert {check["topic"] for check in document["checks"]} == {"installed", "machine", "workspace", "tracking"}


@pytest.fixture
def without_torch(monkeypatch):
    """Importing torch takes seconds and is looked at above."""
    monkeypatch.setattr("opdctl.doctor._compute", lambda: [])


def test_doctor_exits_1_for_a_server_that_does_not_answer(call, without_torch):
    code, out, _ = call("doctor", "--tracking-uri", "http://127.0.0.1:9")
    assert code == 1
    assert "1 broken" in out


def test_doctor_exits_1_for_a_store_that_is_none(call, workspace, without_torch):
    (workspace / "mlflow.db").write_text("not a database, but long enough to be looked at")
    assert call("doctor")[0] == 1


def test_ui_without_a_store_is_refused(call):
    code, _, err = call("ui")
    assert code == 2
    assert "nothing was tracked" in err


def test_ui_refuses_a_port_that_is_taken(call, workspace):
    (workspace / "mlflow.db").touch()
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        code, _, err = call("ui", "--port", other.getsockname()[1])
    assert code == 2
    assert "cannot listen on 127.0.0.1" in err


def test_export_is_a_folder_that_transformers_loads_and_agrees_with(call, finished, workspace):
    import torch
    from transformers import AutoModelForCausalLM

    from opdctl.engine.checkpoint import new_policy, save_policy
    from opdctl.settings import NewModel

    torch.set_num_threads(1)
    shape = dict.fromkeys(("num_hidden_layers", "num_key_value_heads"), 1) | {"num_attention_heads": 2, "head_dim": 8}
    shape |= {"hidden_size": 16, "intermediate_size": 32}
    words = ["<pad>", "<bos>", "<eos>", *"abcdefgh"]
    model = NewModel.model_validate({"source": "new", "shape": shape, "tokenizer": {"words": words}})
    checkpoint = finished.stage("sft").checkpoint
    policy, tokenizer = new_policy(model, seed=1)
    save_policy(policy, tokenizer, checkpoint, dtype=torch.float32)
    record = json.loads((checkpoint / "record.json").read_text())
    files = [path for path in checkpoint.iterdir() if path.name != "record.json"]
    record["files"] = {path.name: {"size": path.stat().st_size, "sha256": "", "mtime_ns": 0} for path in files}
    (checkpoint / "record.json").write_text(json.dumps(record))

    code, out, err = call("export", "sft", "out/model")
    assert (code, err) == (0, "")
    assert "greedy tokens" in out
    assert not list((workspace / "out").glob(".*"))
    loaded = AutoModelForCausalLM.from_pretrained(workspace / "out/model").state_dict()
    assert all(torch.equal(loaded[name], weight) for name, weight in policy.state_dict().items())
    code, _, err = call("export", "sft", "out/model")
    assert code == 1
    assert "exists already" in err


def test_export_to_a_place_that_cannot_be_is_refused(call, finished, workspace):
    (workspace / "file").touch()
    code, _, err = call("export", "sft", "file/model")
    assert code == 1
    assert "choose another folder" in err


def test_export_of_an_evaluation_is_refused(call, finished):
    publish(finished, "eval", "eval", [], {})
    code, _, err = call("export", "eval", "out")
    assert code == 2
    assert "has none of its own" in err


# ------------------------------------------------------------------------------------------------ completion


def complete(workspace, words):
    """What the shell is offered for the last word."""
    surroundings = os.environ | {
        "_OPDCTL_COMPLETE": "complete_bash",
        "COMP_WORDS": " ".join(words),
        "COMP_CWORD": str(len(words) - 1),
    }
    script = "from opdctl.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", script], env=surroundings, capture_output=True, text=True, cwd=workspace
    )
    assert done.stderr == ""
    return done.stdout.split()


def test_the_shell_completes_commands_pipelines_runs_and_stages(workspace, finished):
    assert complete(workspace, ["opdctl", "li"]) == ["lineage"]
    assert "kimi_k3" in complete(workspace, ["opdctl", "plan", "ki"])
    assert complete(workspace, ["opdctl", "status", "fi"]) == ["first"]
    assert complete(workspace, ["opdctl", "logs", "ma"]) == [MAX]
