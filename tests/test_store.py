import errno
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from opdctl import store as store_module
from opdctl.errors import ConfigError, OpdctlError, RunBusy
from opdctl.store import Parent, Record, RunDir, StageDir, Workspace, disk_errors, write_json


def record(record_id="r1", fingerprint="f", parents=(), **more) -> Record:
    values = {
        "id": record_id,
        "run": "run",
        "stage": "sft",
        "kind": "sft",
        "step": 5,
        "fingerprint": fingerprint,
        "identity": {"seed": 0},
        "parents": [Parent("init", "base", "stage:base", parent) for parent in parents],
        "metrics": {"loss": 0.5},
        "labels": {},
        "created": record_id,
        "opdctl_version": "0",
        "code": "",
        "argv": [],
        "seconds": 1.0,
    }
    return Record(**(values | more))


def output(stage: StageDir, text="weights") -> Path:
    folder = stage.new_attempt().output
    (folder / "model.safetensors").write_text(text)
    (folder / "deep").mkdir()
    (folder / "deep" / "part.json").write_text("{}")
    return folder


@pytest.fixture
def run(workspace: Path) -> RunDir:
    return Workspace(workspace).run("run")


@pytest.fixture
def stage(run: RunDir) -> StageDir:
    return run.stage("sft")


def weights(stage: StageDir) -> str:
    return (stage.checkpoint / "model.safetensors").read_text()


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


def begin(stage, identity, parents=(), step=3, resume=False):
    stage.begin(identity, record(parents=parents).parents, resume=resume)
    write_json(stage.state / "step.json", {"step": step})


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
    attempt = stage.new_attempt()
    assert (attempt.number, list(attempt.output.iterdir()), left.exists()) == (2, [], False)


# ---------------------------------------------------------------------------------------------- kills


class Killed(BaseException):
    """Stands for SIGKILL: nothing that the code does afterwards may be needed."""


CHANGING = ("replace", "symlink", "unlink", "rmdir", "mkdir", "fsync", "open", "link", "rename")


def _killed_at(monkeypatch, number: int):
    """The number-th call that changes or flushes something on disk dies before it does."""
    count = iter(range(10**9))

    def dying(real):
        def call(*args, **kwargs):
            if next(count) == number:
                raise Killed
            return real(*args, **kwargs)

        return call

    for name in CHANGING:
        monkeypatch.setattr(os, name, dying(getattr(os, name)))
    return count


def test_a_kill_at_any_call_of_publish_leaves_the_old_checkpoint_or_the_new(workspace):
    kept = []
    for number in range(200):
        stage = Workspace(workspace).run(f"run{number}").stage("sft")
        stage.publish(output(stage, "old"), record("r1"))
        begin(stage, {"seed": 1})
        folder, done = output(stage, "new!"), False
        with pytest.MonkeyPatch.context() as patch:
            _killed_at(patch, number)
            try:
                stage.publish(folder, record("r2", identity={"seed": 1}))
                done = True
            except Killed:
                pass
        found = stage.record()
        assert found is not None
        assert weights(stage) == {"r1": "old", "r2": "new!"}[found.id]
        if found.id == "r1":
            assert stage.unfinished() == {"seed": 1}  # so the next run resumes
        assert {"r1"} <= {r.id for r in stage.records()}
        kept.append(found.id)
        stage.begin({"seed": 2}, [], resume=False)  # the next attempt works on what is left
        stage.publish(output(stage, "again"), record("r3"))
        assert (weights(stage), stage.unfinished()) == ("again", None)
        if done:
            break
    assert kept == sorted(kept)  # r1 up to one point, r2 from there
    assert len(kept) > 10


def test_a_kill_at_any_call_of_reuse_leaves_a_checkpoint(workspace):
    other = Workspace(workspace).run("other").stage("sft")
    other.publish(output(other, "theirs"), record("r0"))
    for number in range(50):
        stage = Workspace(workspace).run(f"run{number}").stage("sft")
        stage.publish(output(stage, "old"), record("r1"))
        with pytest.MonkeyPatch.context() as patch:
            _killed_at(patch, number)
            try:
                stage.reuse(other)
                return
            except Killed:
                pass
        assert weights(stage) == {"r0": "theirs", "r1": "old"}[stage.record().id]
    pytest.fail("reuse never came to its end")


def test_a_kill_at_any_call_of_write_json_leaves_the_old_or_the_new(workspace):
    path = workspace / "x.json"
    for number in range(20):
        write_json(path, "old")
        with pytest.MonkeyPatch.context() as patch:
            _killed_at(patch, number)
            try:
                write_json(path, "new")
                return
            except Killed:
                pass
        assert json.loads(path.read_text()) in ("old", "new")
    pytest.fail("write_json never came to its end")


# ---------------------------------------------------------------------------------------------- reuse


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


@pytest.mark.parametrize("name", ["", "..", "../x", "a/b", ".hidden", "-rf", "a b"])
def test_a_run_cannot_leave_its_folder(workspace, name):
    with pytest.raises(ConfigError, match="cannot name a run"):
        Workspace(workspace).run(name)


def test_runs_are_listed_newest_first(workspace):
    for name, created in (("b", "2026-01-01"), ("a", "2026-01-02"), ("c", "2025-01-01")):
        Workspace(workspace).run(name).write_info(created=created)
    assert [run.name for run in Workspace(workspace).runs()] == ["a", "b", "c"]


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


@pytest.mark.parametrize(("number", "word"), [(errno.ENOSPC, "free space"), (errno.EACCES, "--workspace")])
def test_a_disk_that_cannot_be_written_is_told_with_the_path_and_a_remedy(workspace, number, word):
    with pytest.raises(OpdctlError, match="cannot write /some/file") as caught, disk_errors(workspace):
        raise OSError(number, os.strerror(number), "/some/file")
    assert word in caught.value.hint


def test_other_errors_of_the_disk_are_not_dressed_up(workspace):
    with pytest.raises(FileNotFoundError), disk_errors(workspace):
        (workspace / "nothing").read_text()


# ---------------------------------------------------------------------------------------------- lock

HOLD = """
import sys, time
from pathlib import Path
from opdctl.store import Workspace
with Workspace(Path(sys.argv[1])).run("run").lock() as fd:
    print("held", flush=True)
    {then}
"""
ORPHAN = """
    import os, signal
    attempt = Workspace(Path(sys.argv[1])).run("run").stage("sft").new_attempt()
    if os.fork() == 0:
        os.setsid()
        signal.signal(signal.SIGTERM, {handler})
        attempt.note_worker(os.getpid())
        print(os.getpid(), flush=True)
        time.sleep(300)
    time.sleep(300)
"""


def _holder(workspace: Path, then="time.sleep(300)") -> subprocess.Popen:
    code = HOLD.format(then=then)
    process = subprocess.Popen([sys.executable, "-c", code, str(workspace)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    return process


@pytest.fixture
def holder(workspace):
    with _holder(workspace) as process:
        yield process
        process.kill()


def test_a_run_is_held_by_one(run, holder):
    with pytest.raises(RunBusy, match=rf"in use by process {holder.pid} on .*, since 20") as caught, run.lock():
        pass
    assert f"kill {holder.pid}" in caught.value.hint


def test_a_run_held_by_a_killed_process_is_free(run, holder):
    holder.kill()
    holder.wait()
    with run.lock():
        assert json.loads((run.path / ".lock").read_text())["pid"] == os.getpid()


def test_a_lock_is_inherited_and_ends_with_the_block(run):
    with run.lock() as descriptor:
        assert os.get_inheritable(descriptor)
    with run.lock():
        pass


@pytest.mark.parametrize(
    ("handler", "patience", "told"),
    [("lambda *a: os._exit(0)", 30.0, ["stopping worker"]), ("signal.SIG_IGN", 0.3, ["stopping worker", "killing"])],
)
def test_workers_left_behind_are_stopped(run, workspace, monkeypatch, handler, patience, told):
    monkeypatch.setattr("opdctl.lock.PATIENCE_S", patience)
    with _holder(workspace, ORPHAN.format(handler=handler).strip()) as process:
        worker = int(process.stdout.readline())
        process.kill()
    texts: list[str] = []
    with run.lock(texts.append):
        assert [any(text.startswith(word) and str(worker) in text for text in texts) for word in told] == [True] * len(
            told
        )
    assert not run.stage("sft").attempts()[0].lives()


def test_a_recycled_process_number_is_never_signalled(run):
    bystander = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        attempt = run.stage("sft").new_attempt()
        attempt.note_worker(bystander.pid)
        note = json.loads(attempt.worker.read_text())
        assert attempt.lives()
        write_json(attempt.worker, note | {"start": note["start"] - 1})
        assert not attempt.lives()
        store_module.lock._stop([attempt.worker], pytest.fail)
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_a_lock_file_that_says_nothing_is_still_a_lock(run, workspace, monkeypatch):
    monkeypatch.setattr("opdctl.lock.UNKNOWN_S", 0.1)
    with _holder(workspace) as process:
        (run.path / ".lock").write_text("")
        with pytest.raises(RunBusy, match="in use"), run.lock():
            pass
        process.kill()


def test_an_orchestrator_killed_while_publishing_loses_nothing(workspace):
    """SIGKILL at random instants of a process that publishes over and over: always a whole checkpoint in force."""
    code = """
import sys; sys.path[:0] = sys.argv[2:]
from pathlib import Path
from test_store import output, record
from opdctl.store import Workspace
stage = Workspace(Path(sys.argv[1])).run("run").stage("sft")
while True:
    number = Workspace.new_record_id()
    stage.publish(output(stage, number), record(number))
    print(number, flush=True)
"""
    stage = Workspace(workspace).run("run").stage("sft")
    for at in range(4):
        command = [sys.executable, "-c", code, str(workspace), str(Path(__file__).parent)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            process.stdout.readline()
            time.sleep(0.005 * at)
            process.kill()
        assert weights(stage) == stage.record().id
        assert stage.verify_digests(full=True) == []
