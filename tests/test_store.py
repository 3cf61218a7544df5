import errno
import os
from pathlib import Path

import pytest
from checkpoints import begin, output, record, weights

from opdctl.errors import ConfigError, OpdctlError
from opdctl.garbage import survey
from opdctl.repair import repair
from opdctl.store import RunDir, StageDir, Workspace, disk_errors, write_json
from opdctl.verify import Verifier


@pytest.fixture
def run(workspace: Path) -> RunDir:
    return Workspace(workspace).run("run")


@pytest.fixture
def stage(run: RunDir) -> StageDir:
    return run.stage("sft")


# ---------------------------------------------------------------------------------------------- records


def test_what_is_published_is_read_back_with_its_files(stage):
    published = stage.publish(output(stage), record(parents=["p"]))
    assert stage.record() == published
    assert set(published.files) == {"model.safetensors", "deep/part.json"}
    assert published.parent_ids() == ["p"]


def test_the_checkpoint_has_a_path_for_people(run, stage):
    stage.publish(output(stage), record())
    assert (run.path / "stages" / "sft" / "checkpoint" / "model.safetensors").read_text() == "weights"


def test_an_instance_has_a_folder_of_its_own(run):
    assert run.stage("max[domain=math,seed=1]").path == run.path / "stages" / "max" / "domain=math,seed=1"


def test_a_missing_or_cut_file_is_no_checkpoint(stage):
    stage.publish(output(stage), record())
    (stage.checkpoint / "model.safetensors").write_text("weigh")
    assert stage.record() is None
    assert "has 5 bytes instead of 7" in stage.damage()
    (stage.checkpoint / "model.safetensors").unlink()
    assert stage.record() is None
    assert "model.safetensors is missing" in stage.damage()


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"id": "x"}', '{"parents": [1]}', "\x00"])
def test_a_corrupt_record_is_no_record(stage, text):
    stage.publish(output(stage), record())
    (stage.checkpoint / "record.json").write_text(text)
    assert stage.record() is None
    assert "record unreadable" in stage.damage()


def test_nothing_published_is_no_damage(stage):
    assert stage.record() is None
    assert stage.damage() == ""


def test_digests_find_what_sizes_do_not(stage):
    stage.publish(output(stage), record())
    path = stage.checkpoint / "model.safetensors"
    times = path.stat()
    path.write_text("WEIGHTS")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert stage.record() is not None
    assert stage.verify_digests(full=False) == []
    assert "sha256 is another" in stage.verify_digests(full=True)[0]
    os.utime(path)
    assert "sha256 is another" in stage.verify_digests(full=False)[0]


def test_a_touched_but_equal_file_passes(stage):
    stage.publish(output(stage), record())
    os.utime(stage.checkpoint / "model.safetensors", ns=(1, 1))
    assert stage.verify_digests() == []


# ---------------------------------------------------------------------------------------------- state


def test_state_belongs_to_the_identity_that_began_it(stage):
    begin(stage, {"lr": 1}, ["p"])
    assert (stage.unfinished(), stage.unfinished_parents(), stage.state_step()) == ({"lr": 1}, ["p"], 3)


def test_a_start_without_saved_state_is_nothing_half_trained(stage):
    stage.begin({"lr": 1}, [], resume=False)
    assert stage.unfinished() is None


def test_beginning_anew_empties_the_state_and_resuming_keeps_it(stage):
    begin(stage, {"lr": 1})
    stage.begin({"lr": 2}, [], resume=True)
    assert stage.state_step() == 3
    stage.begin({"lr": 2}, [], resume=False)
    assert stage.state_step() is None


def test_publishing_drops_the_state(stage):
    begin(stage, {"seed": 0})
    stage.publish(output(stage), record())
    assert stage.unfinished() is None
    assert not stage.state.exists()


def test_state_left_by_a_kill_after_publishing_is_not_half_trained(stage, monkeypatch):
    begin(stage, {"seed": 0}, ["p"])
    with monkeypatch.context() as patch:
        patch.setattr(StageDir, "discard_state", lambda self: None)
        stage.publish(output(stage), record(parents=["p"]))
    assert stage.unfinished() is None


def test_state_from_another_parent_stays_half_trained(stage):
    stage.publish(output(stage), record(parents=["old"]))
    begin(stage, {"seed": 0}, ["new"])
    assert stage.unfinished() == {"seed": 0}


def test_a_new_attempt_deletes_what_dead_ones_left(stage):
    left = output(stage)
    part = left.with_name(".worker.json.part")
    part.write_text("{")
    attempt = stage.new_attempt()
    assert (attempt.number, list(attempt.output.iterdir()), left.exists(), part.exists()) == (2, [], False, False)


# ---------------------------------------------------------------------------------------------- reuse


def test_folders_that_are_no_attempts_are_none(stage):
    made = stage.new_attempt()
    for name in ("²", "٣", "-1", "x"):
        (stage.path / "attempts" / name).mkdir()
    assert stage.attempts() == [made]


def test_a_checkpoint_of_another_run_is_found_and_reused_by_reference(workspace):
    other = Workspace(workspace).run("one").stage("sft")
    other.publish(output(other, "theirs"), record("r1", "f", ["p"], run="one"))
    found = Workspace(workspace).find("f", ["p"])
    stage = Workspace(workspace).run("two").stage("first")
    stage.reuse(found)
    assert (weights(stage), stage.record().id) == ("theirs", "r1")
    assert (stage.reference().run, stage.reference().name) == ("one", "sft")
    assert not os.path.isabs(os.readlink(stage.path / "checkpoint"))  # a workspace can be moved


def test_other_parents_or_damage_are_not_found(workspace):
    stage = Workspace(workspace).run("one").stage("sft")
    stage.publish(output(stage), record("r1", "f", ["p"]))
    assert Workspace(workspace).find("f", ["q"]) is None
    assert Workspace(workspace).find("g", ["p"]) is None
    (stage.checkpoint / "model.safetensors").unlink()
    assert Workspace(workspace).find("f", ["p"]) is None


def test_a_replaced_checkpoint_is_still_found_and_can_be_put_back(workspace, stage):
    stage.publish(output(stage, "first"), record("r1", "f1"))
    stage.publish(output(stage, "second"), record("r2", "f2"))
    stage.reuse(Workspace(workspace).find("f1", []))
    assert (weights(stage), stage.reference()) == ("first", None)
    assert Workspace(workspace).checkpoint("r2").record().id == "r2"


def test_a_reference_to_a_deleted_run_is_damage(workspace):
    other = Workspace(workspace).run("one").stage("sft")
    other.publish(output(other), record())
    stage = Workspace(workspace).run("two").stage("sft")
    stage.reuse(other)
    (other.checkpoint / "record.json").unlink()
    assert (stage.record(), stage.reference()) == (None, None)
    assert "is missing" in stage.damage()


def test_stages_of_a_run_are_listed_by_name(run):
    for name in ("sft", "max[domain=b]", "max[domain=a]"):
        stage = run.stage(name)
        stage.publish(output(stage), record(stage=name))
    assert [(stage.name, stage.run) for stage in run.stages()] == [
        ("max[domain=a]", "run"),
        ("max[domain=b]", "run"),
        ("sft", "run"),
    ]


@pytest.mark.parametrize("name", ["", "..", "../x", "a/b", ".hidden", "-rf", "a b", "a" * 201])
def test_a_run_cannot_leave_its_folder(workspace, name):
    with pytest.raises(ConfigError, match="cannot name a run"):
        Workspace(workspace).run(name)


def test_runs_are_listed_newest_first(workspace):
    for name, created in (("b", "2026-01-01"), ("a", "2026-01-02"), ("c", "2025-01-01")):
        Workspace(workspace).run(name).write_info(created=created)
    assert [run.name for run in Workspace(workspace).runs()] == ["a", "b", "c"]


OTHER_TYPES = [
    {"parents": 1},
    {"parents": None},
    {"parents": {}},
    {"parents": [1]},
    {"parents": [["p"]]},
    {"identity": 3},
]


@pytest.mark.parametrize("other", OTHER_TYPES)
def test_a_note_of_half_trained_state_with_values_of_other_types_is_none(run, stage, other):
    stage.new_attempt()
    begin(stage, {"seed": 1}, ["p"])
    write_json(stage.identity, {"identity": {"seed": 1}, "parents": ["p"], **other})
    assert (stage.unfinished(), stage.unfinished_parents()) == (None, [])
    assert "damaged" in " ".join(one.told for one in Verifier(run.workspace).verify().findings)
    run.write_info(created="2026-01-01")
    assert "damaged" in " ".join(one.what for one in repair(run.workspace, [run]))
    assert survey(run.workspace).go == ()
    (stage.state / "step.json").write_text('{"step": "a"}')
    assert stage.state_step() is None


@pytest.mark.parametrize("content", [b"3", b"[1]", b"{}", b"\xff\x00", b'{"pid": 1', b"null", b"[" * 100_000])
def test_files_damaged_on_the_disk_say_nothing_and_crash_nothing(run, stage, content):
    begin(stage, {"seed": 1})
    attempt = stage.new_attempt()
    for path in (stage.identity, attempt.worker, run.path / "run.json", run.path / "pipeline.yaml", run.path / ".lock"):
        path.write_bytes(content)
    (run.path.parent / ".digests.json").write_bytes(content)
    assert [found.name for found in run.workspace.runs()] == [run.name]
    assert (run.info, run.read_pipeline(), run.busy(), stage.unfinished()) == ({}, {}, False, None)
    assert run.workspace.digests().file(stage.identity)


@pytest.mark.parametrize("value", [None, 3, {}, [3], "text\0"])
def test_info_of_other_types_is_none(run, value):
    run.write_info(argv=["opdctl", "run"], created="2026", tracking={})
    write_json(run.path / "run.json", {"argv": value, "created": value, "tracking": value, "source": "s"})
    assert run.info.keys() <= {"source", "tracking"}


def test_info_grows(run):
    run.write_info(user="u")
    run.write_info(mlflow="m")
    assert run.info == {"user": "u", "mlflow": "m"}


def test_digests_are_remembered_until_the_file_changes(workspace, monkeypatch):
    (workspace / "runs").mkdir()
    path = workspace / "rows.jsonl"
    path.write_text("a")
    digests = Workspace(workspace).digests()
    first = digests.file(path)
    digests.save()
    with monkeypatch.context() as patch:
        patch.setattr("opdctl.digests.sha256", lambda path: pytest.fail("read again"))
        assert Workspace(workspace).digests().file(path) == first
    path.write_text("b")
    os.utime(path, ns=(1, 1))
    assert Workspace(workspace).digests().file(path) != first


# ---------------------------------------------------------------------------------------------- disk


@pytest.mark.parametrize(
    ("number", "word"),
    [(errno.ENOSPC, "free space"), (errno.EACCES, "--workspace"), (errno.ENAMETOOLONG, "shorten --run")],
)
def test_a_disk_that_cannot_be_written_is_told_with_the_path_and_a_remedy(workspace, number, word):
    with pytest.raises(OpdctlError, match="cannot write /some/file") as caught, disk_errors(workspace):
        raise OSError(number, os.strerror(number), "/some/file")
    assert word in caught.value.hint


def test_other_errors_of_the_disk_are_not_dressed_up(workspace):
    with pytest.raises(FileNotFoundError), disk_errors(workspace):
        (workspace / "nothing").read_text()
