"""`init`, `export`, `ui`, `doctor`."""

import json
import socket
import subprocess
import sys

import pytest

from opdctl.cli import main


def test_init_copies_pipelines_and_conf_once(call, workspace):
    assert call("init", "new")[0] == 0
    assert (workspace / "new/pipelines/kimi_k3.yaml").exists()
    assert (workspace / "new/conf/scale/laptop.yaml").exists()
    assert call("validate", "new/pipelines/kimi_k3.yaml")[0] == 0
    code, _, err = call("init", "new")
    assert code == 2
    assert "has pipelines/ and conf/ already" in err


INIT = """
import resource
from opdctl.cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
main(["init", "new"])
"""


def test_init_that_the_disk_cuts_short_leaves_no_half_workspace(call, workspace):
    done = subprocess.run([sys.executable, "-c", INIT], capture_output=True, text=True)
    assert done.returncode == 1
    assert "error: cannot write new/.init.part/" in done.stderr
    assert "File too large" in done.stderr
    assert "ulimit -f" in done.stderr
    assert list((workspace / "new").iterdir()) == []
    assert call("init", "new")[0] == 0


def test_init_that_was_killed_is_done_again(call, workspace, monkeypatch):
    class Killed(BaseException):
        """Ends the process where no handler runs: what it leaves, it leaves."""

    def kill(*_):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("opdctl.cli.surroundings.shutil.copy2", kill)
        patch.setattr("opdctl.cli.surroundings.shutil.rmtree", lambda *_, **__: None)
        with pytest.raises(Killed):
            main(["init", "new"])
    assert [path.name for path in (workspace / "new").iterdir()] == [".init.part"]
    (workspace / "new/.init.part/pipelines/half.yaml").write_text("")
    assert call("init", "new")[0] == 0
    assert sorted(path.name for path in (workspace / "new").iterdir()) == ["conf", "pipelines"]
    assert not (workspace / "new/pipelines/half.yaml").exists()


def test_doctor_finds_this_machine_fit(call):
    code, out, _ = call("doctor", "--json")
    document = json.loads(out)
    assert [check for check in document["checks"] if check["verdict"] == "broken"] == []
    assert (code, document["ok"]) == (0, True)
    assert {check["topic"] for check in document["checks"]} == {"installed", "machine", "workspace", "tracking"}


@pytest.fixture
def without_torch(monkeypatch):
    """Importing torch takes seconds and is looked at above."""
    monkeypatch.setattr("opdctl.doctor._compute", list)


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


def test_export_of_an_evaluation_is_refused(call, finished, publish):
    publish(finished, "eval", "eval", [], {})
    code, _, err = call("export", "eval", "out")
    assert code == 2
    assert "has none of its own" in err
