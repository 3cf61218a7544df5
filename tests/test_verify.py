"""What verify finds in a workspace, each planted once; nothing in one that is whole."""

import os
import shutil

import pytest
from checkpoints import begin, output, weights
from kept import declare, publish

from opdctl.ledger import Pin
from opdctl.records import RECORD, read_json, write_json
from opdctl.store import Workspace
from opdctl.verify import Verifier


@pytest.fixture
def whole(workspace, monkeypatch):
    """Run `a` with a base and its child, replaced once, and run `b` that reuses the base."""
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    made = Workspace(workspace)
    for run in ("a", "b"):
        declare(made, run)
    base = publish(made, "a", "sft", at=0)
    publish(made, "a", "mopd", [base.id], at=1)
    publish(made, "a", "mopd", [base.id], at=2)
    made.run("b").stage("sft").reuse(made.run("a").stage("sft"))
    made.ledger.pin(Pin("001-a-3", "a", "mopd"))
    return made


def told(workspace, *runs):
    chosen = [workspace.run(name) for name in runs] or None
    return [(found.subject, found.told) for found in Verifier(workspace, chosen).verify().problems]


def test_nothing_is_wrong_with_a_whole_workspace(whole):
    seen = []
    found = Verifier(whole).verify(lambda name, count: seen.append(count))
    assert found.findings == ()
    assert found.checkpoints == 3
    assert sum(seen) == found.bytes_read == Verifier(whole).bytes_to_read > 0


def test_a_flipped_byte_of_a_replaced_checkpoint_is_found_although_size_and_time_are_as_before(whole):
    path = whole.run("a").stage("mopd").at("001-a-3").checkpoint / "model.safetensors"
    times = path.stat()
    path.write_text(path.read_text().swapcase())
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    ((subject, problem),) = told(whole)
    assert subject == "a:mopd"
    assert problem.startswith(f"{path} has changed since it was published")
    assert Verifier(whole).verify().problems[0].remedy


def test_missing_cut_added_and_unreadable_files_are_named(whole):
    folder = whole.run("a").stage("mopd").checkpoint
    (folder / "part.bin").unlink()
    (folder / "model.safetensors").write_text("cut")
    (folder / "stray.txt").write_text("mine")
    problems = [problem for _, problem in told(whole)]
    assert [f"{folder / 'part.bin'} is missing" in problems, len(problems)] == [True, 3]
    assert any("has 3 bytes instead of 8" in problem for problem in problems)
    assert f"{folder / 'stray.txt'} is not in the record" in problems


@pytest.mark.parametrize("text", ["", "{", "null", "[]"])
def test_an_unreadable_record_is_found(whole, text):
    (whole.run("a").stage("mopd").at("001-a-3").checkpoint / RECORD).write_text(text)
    ((subject, problem),) = told(whole)
    assert (subject, problem[:17]) == ("a:mopd", "record unreadable")


@pytest.mark.parametrize(
    ("key", "value", "word"),
    [
        ("id", "other", "has the id 'other', and lies where '001-a-3' belongs"),
        ("run", "b", "has the run 'b', and lies where 'a' belongs"),
        ("stage", "sft", "has the stage 'sft', and lies where 'mopd' belongs"),
        ("fingerprint", "f", "the fingerprint f is not that of the identity"),
        ("identity", {"seed": 9}, "is not that of the identity beside it"),
        ("files", {}, "lists no file"),
    ],
)
def test_a_record_that_contradicts_its_place_or_itself_is_found(whole, key, value, word):
    path = whole.run("a").stage("mopd").at("001-a-3").checkpoint / RECORD
    write_json(path, {**read_json(path), key: value})
    assert any(word in problem for _, problem in told(whole))


def test_a_missing_ancestor_is_found_in_every_child_and_every_link(whole):
    shutil.rmtree(whole.run("a").stage("sft").checkpoint)
    problems = told(whole)
    assert {subject for subject, _ in problems} == {"a:sft", "b:sft", "a:mopd"}
    assert sum("is missing" in problem for _, problem in problems) == 2
    assert sum("points to nothing" in problem for _, problem in problems) == 2


def test_half_trained_state_without_what_it_started_from_is_found(whole):
    begin(whole.run("b").stage("mopd"), {"seed": 1}, ["gone"])
    ((subject, problem),) = told(whole)
    assert (subject, problem) == ("b:mopd", "its half-trained state started from checkpoint gone, which is missing")


def test_half_trained_state_that_nobody_knows_any_more_is_found(whole):
    stage = whole.run("b").stage("mopd")
    begin(stage, {"seed": 1})
    assert told(whole) == []
    stage.identity.write_text("{")
    assert told(whole) == [("b:mopd", f"{stage.identity} is damaged: the next run starts the stage anew")]


def test_damage_of_a_checkpoint_that_lies_outside_of_all_runs_is_found(whole, tmp_path):
    stage = whole.run("a").stage("mopd")
    outside = tmp_path / "other" / stage.checkpoint.relative_to(whole.path)  # of another workspace
    shutil.copytree(stage.checkpoint, outside)
    (stage.path / "checkpoint").unlink()
    (stage.path / "checkpoint").symlink_to(outside)
    assert told(whole) == []
    (outside / "part.bin").unlink()
    assert told(whole) == [("a:mopd", f"checkpoint damaged: {outside / 'part.bin'} is missing")]


def test_a_pin_that_points_to_nothing_is_found(whole):
    whole.ledger.pin(Pin("gone", "a", "mopd"))
    assert told(whole) == [("pin gone", "points to a checkpoint that is missing")]
    assert told(whole, "b") == []


def test_half_publishes_are_found(whole):
    stage = whole.run("b").stage("mopd")
    folder = output(stage)
    write_json(folder / RECORD, {})
    other = whole.run("b").stage("max[domain=math]")
    publish(whole, "b", "max[domain=math]", at=5)
    (other.path / "checkpoint").unlink()
    problems = dict(told(whole))
    assert problems.keys() == {"b:max[domain=math]", "b:mopd"}
    assert "was published and is not in force" in problems["b:max[domain=math]"]
    assert "was being published when its process died" in problems["b:mopd"]
    with whole.run("b").lock():  # perhaps somebody publishes just now
        assert told(whole) == []


def test_one_run_is_verified_with_what_it_refers_to(whole):
    path = whole.run("a").stage("sft").checkpoint / "model.safetensors"
    path.write_text(path.read_text().swapcase())
    (whole.run("a").stage("mopd").checkpoint / "part.bin").unlink()
    assert [subject for subject, _ in told(whole, "b")] == ["a:sft"]
    assert weights(whole.run("b").stage("sft")) == path.read_text()
    path.unlink()
    assert [subject for subject, _ in told(whole, "b")] == ["b:sft"]
