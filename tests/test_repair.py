"""`opdctl repair`: what a kill left is finished or undone, twice is once, and what runs next ends as if undisturbed."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import toy
from checkpoints import begin, output, record, weights
from killing import CHANGING, Killed

from opdctl.repair import repair
from opdctl.store import StageDir, Workspace, write_json
from opdctl.verify import Verifier

# MLflow's own use of its libraries is not ours to mend
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::PendingDeprecationWarning")


@contextmanager
def killed_at(number, *methods):
    """The number-th call that changes or flushes something on disk, inside these methods of StageDir, dies before it
    does. Yields what tells whether it came to that."""
    with pytest.MonkeyPatch.context() as patch:
        count, inside, died = iter(range(10**9)), [], []

        def dying(real):
            def call(*args, **kwargs):
                if inside and next(count) == number:
                    died.append(True)
                    raise Killed
                return real(*args, **kwargs)

            return call

        def marked(real):
            def call(*args, **kwargs):
                inside.append(real)
                try:
                    return real(*args, **kwargs)
                finally:
                    inside.pop()

            return call

        for name in methods:
            patch.setattr(StageDir, name, marked(getattr(StageDir, name)))
        for name in CHANGING:
            patch.setattr(os, name, dying(getattr(os, name)))
        yield died


@contextmanager
def killed_before(name):
    """A file is being renamed to `name`, or into a folder of that name."""

    def dying(source, target, real=os.replace):
        if name in Path(target).parts[-2:]:
            raise Killed
        real(source, target)

    with pytest.MonkeyPatch.context() as patch, suppress(Killed):
        patch.setattr(os, "replace", dying)
        yield
        pytest.fail(f"nothing was renamed to {name}")


def mend(workspace, run="r", **options):
    place = Workspace(workspace)
    return list(repair(place, [place.run(run)], **options))


def told(found):
    return [(one.stage, one.state, one.what) for one in found]


def tree(folder: Path):
    """Every file below, but for the lock."""
    return {
        path.relative_to(folder).as_posix(): os.readlink(path) if path.is_symlink() else path.read_bytes()
        for path in folder.rglob("*")
        if (path.is_file() or path.is_symlink()) and path.name != ".lock"
    }


# ---------------------------------------------------------------------------------------------- kills


@pytest.mark.parametrize(("methods", "least"), [(("publish",), 9), (("begin", "new_attempt"), 1)])
def test_after_a_kill_at_any_call_a_repair_and_a_run_end_with_the_undisturbed_weights(workspace, methods, least):
    wanted = toy.pipeline({"sft": toy.sft(steps=2)})
    toy.run(wanted, "undisturbed")
    expected, mended = toy.digests(wanted, "undisturbed"), 0
    for number in range(100):
        shutil.rmtree(workspace / "runs")
        with killed_at(number, *methods) as died, suppress(Killed):
            toy.run(wanted)
        if not died:
            break
        found = mend(workspace)
        mended += bool(found)
        assert {one.state for one in found} <= {"mended"}
        assert mend(workspace) == []  # twice is once
        toy.run(wanted)
        assert toy.digests(wanted) == expected
        assert mend(workspace) == []
        assert Verifier(Workspace(workspace)).verify().findings == ()
        assert not list((workspace / "runs").rglob(".*.part"))
    assert number > 6
    assert mended >= least


def test_a_kill_at_any_call_of_a_repair_leaves_what_the_next_repair_finishes(workspace):
    for number in range(100):
        run = Workspace(workspace).run(f"r{number}")
        stage = run.stage("sft")
        begin(stage, {"seed": 0})
        write_json(stage.result, {"step": 5, "metrics": {}})
        with killed_before("checkpoints"):  # complete, not moved yet
            stage.publish(output(stage, "new"), record("r2"))
        with killed_at(number, "publish", "discard_state") as died, suppress(Killed):
            mend(workspace, run.name)
        mend(workspace, run.name)
        assert mend(workspace, run.name) == []
        assert stage.record() is None or weights(stage) == "new"
        assert stage.record() is not None or stage.unfinished() == {"seed": 0}
        if not died:
            break
    assert number > 5
    assert weights(stage) == "new"


def test_a_killed_orchestrator_is_repaired_and_the_run_goes_on(workspace):
    """With SIGKILL and MLflow: an orphan is named and left, and stopped with `stop`."""
    command = [sys.executable, toy.__file__, workspace, "tracked"]
    wanted = toy.killable(workspace, tracking={"enabled": True})
    log = workspace / "runs/r/stages/sft/attempts/1/events.jsonl"
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        wait_for(lambda: log.exists() and log.read_text().count("\n") > 2, 300)
        [attempt] = Workspace(workspace).run("r").stage("sft").attempts()
        os.kill(json.loads(attempt.worker.read_text())["pid"], signal.SIGSTOP)  # it outlives its orchestrator
        assert [one.state for one in mend(workspace) if one.stage == ""] == ["skipped"]
        process.kill()
    [orphan] = mend(workspace)[:1]
    assert (orphan.stage, orphan.state) == ("sft", "left")
    assert "--stop" in orphan.told
    assert attempt.lives()
    os.kill(json.loads(attempt.worker.read_text())["pid"], signal.SIGCONT)
    found = mend(workspace, stop=True)
    assert {one.state for one in found} == {"mended"}
    assert not attempt.lives()
    assert any("its orchestrator died" in one.what for one in found)
    assert mend(workspace) == []
    assert toy.run(wanted).failed == {}
    toy.run(toy.killable(workspace), "undisturbed")
    assert toy.digests(wanted) == toy.digests(wanted, "undisturbed")


def wait_for(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.02)


# ---------------------------------------------------------------------------------------------- one at a time


@pytest.fixture
def stage(workspace):
    run = Workspace(workspace).run("r")
    run.write_pipeline({"name": "p", "stages": {"sft": {"kind": "sft"}}, "tracking": {"enabled": False}})
    run.write_info(name="r", argv=["/bin/opdctl", "run", "p.yaml"])
    return run.stage("sft")


def test_nothing_is_found_in_a_whole_run(workspace, stage):
    stage.publish(output(stage), record())
    assert mend(workspace) == []


def test_a_dry_run_says_the_same_and_changes_nothing(workspace, stage):
    begin(stage, {"seed": 0})
    with killed_before("checkpoints"):
        stage.publish(output(stage, "new"), record("r2"))
    (stage.path / ".spec.json.part").write_text("{")
    before = tree(workspace)
    foreseen = mend(workspace, dry_run=True)
    assert tree(workspace) == before
    assert {one.state for one in foreseen} == {"would mend"}
    done = mend(workspace)
    assert [(one.stage, one.what) for one in done] == [(one.stage, one.what) for one in foreseen]


def test_a_checkpoint_that_was_moved_and_not_linked_is_put_in_force(workspace, stage):
    stage.publish(output(stage, "old"), record("r1", identity={"seed": 1}, created="2026-01-01T00:00:00+00:00"))
    begin(stage, {"seed": 0})
    folder = output(stage, "new")
    write_json(stage.result, {"step": 5, "metrics": {}})
    with killed_before("checkpoint"):
        stage.publish(folder, record("r2", created="2026-01-02T00:00:00+00:00"))
    assert weights(stage) == "old"
    staging, found = mend(workspace)
    assert ".checkpoint.part was being written" in staging.what
    assert "not put in force" in found.what
    assert weights(stage) == "new"
    assert not stage.state.exists()


def made_here(number, **more):
    return record(f"r{number}", run="r", created=f"2026-01-0{number}T00:00:00+00:00", **more)


@pytest.mark.parametrize("how", ["missing", "dangling"])
def test_a_link_that_is_gone_is_put_back_and_half_trained_state_stays(workspace, stage, how):
    stage.publish(output(stage, "old"), made_here(1, identity={"seed": 1}))
    stage.publish(output(stage, "new"), made_here(2, identity={"seed": 2}))
    stage.publish(output(stage, "changed"), made_here(3, identity={"seed": 3}))
    (stage.checkpoint / "model.safetensors").write_text("degnahc")
    stage.publish(output(stage, "gone"), made_here(4, identity={"seed": 4}))
    begin(stage, {"seed": 5}, step=7)
    stage.new_attempt()
    shutil.rmtree(stage.checkpoint)
    if how == "missing":
        (stage.path / "checkpoint").unlink()
    found = mend(workspace)
    assert [one.state for one in found] == ["mended"]
    assert "checkpoint r2 is in force again" in found[0].told
    assert weights(stage) == "new"
    assert (stage.state_step(), stage.unfinished()) == (7, {"seed": 5})
    assert mend(workspace) == []


def test_a_link_to_another_run_is_the_next_runs_to_renew(workspace, stage):
    """What was made here before may be of other settings."""
    other = Workspace(workspace).run("other").stage("sft")
    other.publish(output(other, "theirs"), record("o1", run="other"))
    stage.publish(output(stage, "own"), made_here(1))
    stage.reuse(other)
    shutil.rmtree(other.path)
    assert {one.state for one in mend(workspace)} == {"left"}
    [problem] = [one for one in Verifier(Workspace(workspace)).verify().problems if "points to nothing" in one.told]
    assert "opdctl run" in problem.remedy


def test_verify_and_repair_agree_on_a_link_that_is_gone(workspace):
    wanted = toy.pipeline({"sft": toy.sft(steps=2), "max": toy.sft("stage:sft", steps=2)})
    toy.run(wanted)
    (toy.stage(wanted, "sft").path / "checkpoint").unlink()
    [problem] = Verifier(Workspace(workspace)).verify().problems
    assert "opdctl repair r" in problem.remedy
    [found] = mend(workspace)
    assert (found.stage, found.state) == ("sft", "mended")
    assert Verifier(Workspace(workspace)).verify().problems == []
    notes = toy.Notes()
    toy.run(wanted, reporter=notes)
    assert notes.of("started") == []


def test_a_rerun_that_was_killed_does_not_bring_an_older_checkpoint_back(workspace, stage):
    """Its identity is that of the older one; it is the newer one's settings that are in force."""
    stage.publish(output(stage, "first"), record("r1", identity={"seed": 0}, created="2026-01-01T00:00:00+00:00"))
    stage.publish(output(stage, "second"), record("r2", identity={"seed": 1}, created="2026-01-02T00:00:00+00:00"))
    begin(stage, {"seed": 0})
    stage.new_attempt()
    mend(workspace)
    assert weights(stage) == "second"
    assert stage.unfinished() == {"seed": 0}


def test_an_output_that_changed_after_its_record_was_written_is_not_published(workspace, stage):
    begin(stage, {"seed": 0})
    with killed_before("checkpoints"):
        stage.publish(output(stage, "new"), record("r2"))
    (stage.attempts()[-1].output / "model.safetensors").write_text("wen")
    [found] = mend(workspace)
    assert "half-written" in found.what
    assert stage.record() is None
    assert stage.unfinished() == {"seed": 0}


def test_half_trained_state_is_kept(workspace, stage):
    begin(stage, {"seed": 0}, step=7)
    (stage.new_attempt().output / "model.safetensors").write_text("half")
    [found] = mend(workspace)
    assert "4 bytes" in found.what
    assert stage.state_step() == 7
    assert stage.unfinished() == {"seed": 0}


def test_state_without_an_owner_and_half_written_files_are_removed(workspace, stage):
    stage.publish(output(stage), record())
    begin(stage, {"seed": 2})
    stage.identity.unlink()
    run = workspace / "runs/r"
    for path in (stage.path / ".spec.json.part", stage.path / ".x.part", run / ".run.json.part"):
        path.write_text("{")
    (stage.path / ".checkpoint.part").symlink_to("checkpoints/none")
    assert {one.state for one in mend(workspace)} == {"mended"}
    assert not stage.state.exists()
    assert not list((workspace / "runs").rglob(".*.part"))
    assert mend(workspace) == []


def test_what_cannot_be_mended_is_told_with_its_remedy(workspace, stage):
    stage.publish(output(stage), record())
    (stage.checkpoint / "model.safetensors").unlink()
    begin(stage.__class__(stage.path, "sft"), {"seed": 5})
    stage.identity.write_text("{")
    (workspace / "runs/r/pipeline.yaml").write_text("{")
    found = {one.what.partition(":")[0]: one for one in mend(workspace)}
    assert {one.state for one in found.values()} == {"left"}
    assert "opdctl run p.yaml" in found["pipeline.yaml is damaged"].told
    assert "--rerun 'sft'" in found["checkpoint damaged"].told
    assert "identity.json is damaged" in found
    (workspace / "runs/r/run.json").write_text("[1")
    assert any(one.what == "run.json is damaged" for one in mend(workspace))


@pytest.mark.parametrize(
    "content", ["{", "[1]", '{"stages": [1]}', '{"stages": {"sft": 1}}', '{"stages": {}, "tracking": [1]}']
)
def test_any_damage_to_the_pipeline_of_a_run_is_told(workspace, stage, content):
    stage.publish(output(stage), record())
    (workspace / "runs/r/pipeline.yaml").write_text(content)
    (workspace / "runs/r/run.json").write_text('{"tracking": {"id": "a", "pending": true}}')
    assert [one.what for one in mend(workspace)] == ["pipeline.yaml is damaged"]


def test_a_run_that_an_orchestrator_works_in_is_left_alone(workspace, stage):
    begin(stage, {"seed": 0})
    stage.path.joinpath(".spec.json.part").write_text("{")
    run = Workspace(workspace).run("r")
    with run.lock():
        [found] = mend(workspace)
        assert (found.state, found.run) == ("skipped", "r")
        assert str(os.getpid()) in found.told
    assert [one.state for one in mend(workspace)] == ["mended"]


# ---------------------------------------------------------------------------------------------- MLflow


def test_a_run_whose_folder_is_gone_is_no_longer_running_in_mlflow(workspace):
    """Case 33."""
    from tracking.test_tracker import Store

    wanted = toy.pipeline({"sft": toy.sft()}, tracking={"enabled": True})
    toy.run(wanted)
    store = Store(workspace)
    for run in (store.run(), store.run("sft")):
        store.client.update_run(run.info.run_id, status="RUNNING")
    foreign = store.client.create_run(store.experiment, tags={"stage": "theirs"})
    shutil.rmtree(workspace / "runs")
    place = Workspace(workspace)
    assert {one.state for one in repair(place, [], dry_run=True)} == {"would mend"}
    assert store.run("sft").info.status == "RUNNING"
    assert len(list(repair(place, []))) == 2
    assert {store.run().info.status, store.run("sft").info.status} == {"KILLED"}
    assert store.client.get_run(foreign.info.run_id).info.status == "RUNNING"
    assert list(repair(place, [])) == []
