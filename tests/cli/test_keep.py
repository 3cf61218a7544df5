"""gc, pin, unpin, verify and import as commands."""

import json

import pytest

from opdctl.identity import fingerprint
from opdctl.records import RECORD
from opdctl.store import Parent, Record


@pytest.fixture
def replaced(workspace, finished, publish):
    """The SFT stage of the run was trained anew, twice; what it had made at first is read by the specialist."""
    stage = finished.stage("sft")
    for record_id in ("20260103T000000-2", "20260104T000000-3"):
        old = stage.record()
        attempt = stage.new_attempt()
        (attempt.output / "model.safetensors").write_bytes(b"w" * 2_000)
        stage.publish(attempt.output, Record(**{**vars(old), "id": record_id, "created": record_id}))
    stages = {name: kind | {"retention": {"keep_last": 0}} for name, kind in finished.read_pipeline()["stages"].items()}
    finished.write_pipeline({"name": "small", "stages": stages})
    return finished


def test_gc_says_what_would_go_and_why_the_rest_stays_and_deletes_when_told(call, replaced):
    code, out, _ = call("gc")
    assert code == 0
    told = " ".join(out.split())
    assert "20260103T000000-2 replaced, and no rule keeps it" in told
    assert "1 item would go: 2.0 kB freed; 3 checkpoints stay" in told
    assert "nothing was deleted: opdctl gc --delete" in told
    assert len(replaced.stage("sft").published()) == 3

    document = json.loads(call("gc", "--json")[1])
    assert [item["record"] for item in document["go"]] == ["20260103T000000-2"]
    reasons = {item["record"]: item["why"] for item in document["stay"]}
    assert reasons["20260102T030405-3"] == ["init of first:max[domain=general], which stays"]
    assert reasons["20260104T000000-3"] == ["in force"]
    done = json.loads(call("gc", "--delete", "--run", "first", "--json")[1])
    assert (done["deleted"], done["freed_bytes"], done["go"]) == (True, document["freed_bytes"], document["go"])
    assert len(replaced.stage("sft").published()) == 2
    assert json.loads(call("gc", "--json")[1])["go"] == []
    assert "nothing to delete" in call("gc")[1]


def test_gc_of_an_unknown_run_is_refused(call, replaced):
    code, _, err = call("gc", "--run", "frist")
    assert code == 2
    assert "did you mean first?" in err


def test_pins_are_set_listed_and_taken_away(call, replaced, monkeypatch):
    old = replaced.stage("sft").at("20260103T000000-2")
    assert call("pin", old.checkpoint, "--reason", "for the paper")[0] == 0
    assert call("pin", "first:sft")[0] == 0
    pins = json.loads(call("pin", "--json")[1])["pins"]
    assert [(pin["record_id"], pin["reason"]) for pin in pins] == [
        ("20260103T000000-2", "for the paper"),
        ("20260104T000000-3", ""),
    ]
    assert "for the paper" in call("pin")[1]
    assert json.loads(call("gc", "--json")[1])["go"] == []
    assert call("unpin", "20260103T000000-2")[0] == 0
    assert call("unpin", "first:sft")[0] == 0
    assert json.loads(call("pin", "--json")[1]) == {"pins": []}
    assert "nothing is pinned" in call("pin")[2]
    code, _, err = call("unpin", "first:sft")
    assert code == 2
    assert "is not pinned" in err


def test_a_stage_may_be_named_with_its_run_beside_it(call, replaced):
    assert call("pin", "sft", "--run", "first")[0] == 0
    assert [pin["stage"] for pin in json.loads(call("pin", "--json")[1])["pins"]] == ["sft"]
    assert call("unpin", "sft", "--run", "first")[0] == 0
    assert json.loads(call("pin", "--json")[1]) == {"pins": []}


def test_a_pin_of_an_older_checkpoint_of_the_stage_is_told_with_the_command_that_takes_it_away(call, replaced):
    call("pin", "20260103T000000-2")
    code, _, err = call("unpin", "first:sft")
    assert code == 2
    told = "pinned of first:sft is another checkpoint: opdctl unpin 20260103T000000-2"
    assert told in " ".join(err.split())


@pytest.mark.parametrize("text", ["nothing", "first:nothing", "other:sft", "../x", ".", "*", "**x", "[0-9]*"])
def test_what_is_no_checkpoint_cannot_be_pinned(call, replaced, text):
    assert call("pin", text)[0] == 2
    assert json.loads(call("pin", "--json")[1]) == {"pins": []}


def test_verify_exits_with_1_and_a_remedy_where_something_is_wrong(call, workspace, publish, finished):
    run = finished
    for stage in run.stages():
        if (record := stage.record()) is not None:  # the fixture's fingerprints are made up
            path = stage.checkpoint / RECORD
            path.write_text(json.dumps(json.loads(path.read_text()) | {"fingerprint": fingerprint(record.identity)}))
    code, out, _ = call("verify")
    assert (code, out) == (0, "workspace: 2 checkpoints, 44 B read: all good\n")
    publish(run, "eval", "eval", [Parent("models", "lost", "stage:lost", "20200101T000000-0")], {})
    code, out, _ = call("verify", "first")
    assert code == 1
    assert "its models lost (record 20200101T000000-0) is missing" in out
    assert "--rerun" in out
    assert "problems" in out
    document = json.loads(call("verify", "--json")[1])
    assert (document["ok"], document["findings"][0]["subject"]) == (False, "first:eval")


def test_an_imported_model_says_how_it_is_referred_to(call, workspace, tmp_path):
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "toy"}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    code, out, _ = call("import", folder, "--as", "base", "--from-ref", "hf:org/model@abc", "--licence", "MIT")
    assert code == 0
    assert "In a pipeline: path:runs/imports/stages/base/checkpoint" in out
    assert "source: hf:org/model@abc" in call("lineage", "base", "--run", "imports")[1]
    assert call("verify")[0] == 0
    (folder / "tokenizer.json").unlink()
    code, _, err = call("import", folder, "--as", "other")
    assert code == 1
    assert "no tokenizer" in err
