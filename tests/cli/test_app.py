"""The command line as a whole: help, exit codes, pure JSON, completion."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import opdctl
from opdctl.cli import app

COMMANDS = ["run", "plan", "validate", "status", "logs", "lineage", "runs", "compare", "report", "init"]
COMMANDS += ["export", "ui", "doctor", "check", "repair", "gc", "pin", "unpin", "verify", "import"]
MAX = "max[domain=general]"


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
    assert {command.name or command.callback.__name__ for command in app.registered_commands} == set(COMMANDS)


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


@pytest.mark.parametrize(
    "arguments", [["pin", "x", "--rum", "r", "--json"], ["runs", "--jsn", "--json"], ["status", "--json", "--run", "x"]]
)
def test_with_json_a_wrong_command_line_is_a_document_too(call, arguments):
    code, out, err = call(*arguments)
    document = json.loads(out)
    assert code == document["exit_code"] == 2
    assert document.keys() == {"error", "problems", "hint", "exit_code"}
    assert document["error"] in err
    assert document["hint"] == f"opdctl {arguments[0]} --help"


def test_with_json_an_error_is_a_document_wherever_the_option_stands(call):
    assert json.loads(call("runs", "--workspace", "nowhere", "--json")[1])["exit_code"] == 2


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


def test_a_traceback_that_no_disk_takes_is_told(call, workspace, tmp_path, monkeypatch):
    monkeypatch.setattr("opdctl.store.Workspace.runs", lambda self: 1 / 0)
    (workspace / "runs").write_text("")
    with monkeypatch.context() as patch:
        patch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
        code, out, err = call("runs", "--json")
    assert (code, json.loads(out)["exit_code"]) == (3, 3)
    assert "ZeroDivisionError" in err
    assert "no file, for none can be written" in err


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


@pytest.mark.parametrize(
    ("redirection", "code"),
    [(">&-", 0), ("<&-", 0), ("2>&-", 0), (">/dev/full", 1), ("| head -1", 0)],
)
def test_an_output_that_is_closed_full_or_not_read_on_is_no_bug(workspace, redirection, code):
    command = f"{sys.executable} -m opdctl plan kimi_k3 {redirection}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=workspace, timeout=60)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert ("cannot write the output: No space left on device" in done.stderr) == (code == 1)


@pytest.mark.parametrize("arguments", ["runs", "runs --json", "status first --json", "status x --json", "runs --jsn"])
@pytest.mark.parametrize("stream", ["", "2"])
def test_an_error_that_cannot_be_written_keeps_its_exit_code(workspace, finished, arguments, stream):
    command = f"{sys.executable} -m opdctl {arguments} {stream}>/dev/full"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=workspace, timeout=60)
    wrong = {"status x --json": 2, "runs --jsn": 2}
    assert done.returncode == wrong.get(arguments, 0 if stream else 1)
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_letters_that_the_output_cannot_hold_are_written_as_codes(workspace):
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    for option in ([], ["--json"]):
        command = [sys.executable, "-m", "opdctl", "plan", "kimi_k3", *option]
        done = subprocess.run(command, capture_output=True, cwd=workspace, env=environment, timeout=60)
        assert done.returncode == 0, done.stderr
        assert done.stdout.isascii()
