"""Deleting: safe under a kill at any call, against runs that start, on a full disk; and what dead processes left."""

import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import toy
from checkpoints import begin, output
from kept import declare, must_stay, publish
from killing import CHANGING, Killed, kill_at

from opdctl.errors import RunBusy, StageRefused
from opdctl.garbage import collect, survey
from opdctl.ledger import Ledger
from opdctl.lineage import trace
from opdctl.records import RECORD
from opdctl.store import Workspace
from opdctl.verify import Verifier

CALLS = (*CHANGING, "utime")


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr("os.fsync", lambda descriptor: None)


@pytest.fixture
def found(workspace, quick):
    made = Workspace(workspace)
    for run in ("a", "b"):
        declare(made, run, {name: {"keep_last": 0} for name in ("sft", "mopd", "max[domain=math]")})
    return made


def ids(workspace):
    return {path.parent.name for path in workspace.path.glob("runs/**/checkpoints/*/record.json")}


# ------------------------------------------------------------------------------------------------ three recipes


def test_gc_on_three_recipes_that_share_teachers_deletes_what_it_says_and_verify_misses_nothing(workspace):
    """Run on workers: the second and third recipe reuse the teachers of the first, which are then trained anew."""

    def recipe(name, lr=0.1, **more):
        teachers = {
            "base": toy.sft(),
            "math": toy.sft("stage:base", lr=lr),
            "code": toy.sft("stage:base", lr=0.3),
        }
        retention = {"retention": {"keep_last": 0}}
        return toy.pipeline(teachers | more, folder=workspace, name=name, **retention)

    toy.run(recipe("one", student=toy.sft("stage:math"), eval=toy.evaluation("stage:student", "stage:code")), "one")
    toy.run(recipe("two", student=toy.sft("stage:math", lr=0.2)), "two")
    toy.run(recipe("three", merged=toy.sft("stage:code", lr=0.2)), "three")
    for lr in (0.5, 0.6):  # the first recipe is changed twice: its math teacher, its student, its evaluation
        changed = recipe("one", lr, student=toy.sft("stage:math"), eval=toy.evaluation("stage:student", "stage:code"))
        toy.run(changed, "one")
    found = Workspace(workspace)
    before, stay = ids(found), must_stay(workspace)
    math = {one.pinned for one in found.run("one").stage("math").published()}
    assert len(math) == 3

    said = survey(found)
    assert {item.record.id for item in said.go} == before - stay
    assert len(before - stay) == 5, "math of lr 0.5, and two students and two evaluations"
    assert ids(found) == before, "a dry run changes nothing"

    used = _used(workspace)
    done = collect(found)
    assert [item.path for item in done.go] == [item.path for item in said.go]
    assert used - _used(workspace) == done.freed
    assert ids(found) == stay
    assert Verifier(Workspace(workspace)).verify().findings == ()
    assert len(math & stay) == 2, "the newest is in force, the oldest has taught the student of recipe two"
    assert toy.run(recipe("two", student=toy.sft("stage:math", lr=0.2)), "two").failed == {}


def _used(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.joinpath("runs").rglob("*") if path.is_file())


# --------------------------------------------------------------------------------------------------------- kills


def test_a_kill_at_any_call_of_gc_leaves_a_whole_workspace_and_the_next_gc_ends_the_work(found):
    base = publish(found, "a", "sft", at=0)
    child = publish(found, "a", "max[domain=math]", [base.id], at=1)
    for at, stage in ((2, "sft"), (3, "max[domain=math]")):
        publish(found, "a", stage, at=at)
    output(found.run("b").stage("max[domain=code]"))  # of an attempt that died
    template, stay = found.path.with_name("template"), must_stay(found.path)
    shutil.copytree(found.path, template, symlinks=True)
    states = set()
    for number in range(400):
        shutil.rmtree(found.path / "runs")
        shutil.copytree(template / "runs", found.path / "runs", symlinks=True)
        with pytest.MonkeyPatch.context() as patch:
            kill_at(patch, number, CALLS)
            try:
                collect(found)
                done = True
            except Killed:
                done = False
        left = ids(found)
        states.add(frozenset(left))
        assert stay <= left
        assert Verifier(Workspace(found.path)).verify().problems == []
        if child.id in left:
            assert base.id in left, "children first: what is left has its parents"
        for one in (found.run("a").stage(name) for name in ("sft", "max[domain=math]")):
            assert {record.id for record in one.records()} <= left, "half-deleted and still believed"
        collect(found)
        assert ids(found) == stay
        assert survey(found).go == ()
        assert not [*found.path.glob("runs/**/*.part")]
        if done:
            break
    assert done
    assert number > 30
    assert len(states) == 3, "two checkpoints went one after the other"


def test_a_gc_that_is_killed_at_any_moment_is_ended_by_the_next(found):
    for at in range(20):
        publish(found, "a", "sft", [f"{at - 1:03}-a-0"] if at % 3 else [], at=at)
    publish(found, "a", "sft", at=20)
    code = "import sys, pathlib; from opdctl.garbage import collect; from opdctl.store import Workspace\n"
    code += "print('ready', flush=True); sys.stdin.readline(); collect(Workspace(pathlib.Path(sys.argv[1])))"
    command = [sys.executable, "-c", code, str(found.path)]
    for at in range(3):
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            process.stdout.readline()
            process.stdin.write("go\n")
            process.stdin.flush()
            time.sleep(0.004 * (at + 1))
            process.kill()
        assert Verifier(Workspace(found.path)).verify().problems == []
    collect(found)
    assert ids(found) == {"020-a-0"}
    assert not [*found.path.glob("runs/**/*.part")]


def test_gc_writes_nothing_that_a_full_disk_would_refuse(found):
    publish(found, "a", "sft", at=0)
    publish(found, "a", "sft", at=1)
    output(found.run("b").stage("sft"))
    code = "import sys, pathlib; from opdctl.garbage import collect; from opdctl.store import Workspace\n"
    code += "collect(Workspace(pathlib.Path(sys.argv[1])))"

    def no_byte():
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))

    done = subprocess.run(
        [sys.executable, "-B", "-c", code, str(found.path)], preexec_fn=no_byte, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert ids(found) == {"001-a-0"}


# ---------------------------------------------------------------------------------------------- runs that start


def test_a_run_that_starts_waits_for_gc_and_gc_for_it(found, monkeypatch):
    monkeypatch.setattr("opdctl.ledger.WAIT_S", 0.1)
    other = Ledger(found.path / "runs")
    with (
        found.ledger.steady(alone=True),
        pytest.raises(RunBusy, match="held by opdctl gc"),
        found.run("a").lock(),
    ):
        pass
    with other.steady(), found.run("a").lock(), pytest.raises(RunBusy, match="held by runs that are starting"):
        collect(found)
    with found.run("a").lock():
        collect(found)  # a run that has started is in nobody's way


def test_what_gc_deleted_since_the_plan_is_not_reused(found):
    old = publish(found, "a", "sft", at=0)
    publish(found, "a", "sft", at=1)
    planned = found.find(old.fingerprint, [])
    collect(found)
    with pytest.raises(StageRefused, match="cannot reuse the checkpoint of run a, stage sft") as caught:
        found.run("b").stage("sft").reuse(planned)
    assert "run the same command again" in caught.value.hint
    assert not found.run("b").stage("sft").linked


def test_runs_that_reuse_while_gc_deletes_never_end_with_a_broken_link(found):
    """A process that takes checkpoints of one run over into others, as fast as it can, beside gc upon gc."""
    code = """
import sys, pathlib
from opdctl.errors import StageRefused
from opdctl.store import Workspace
workspace, at = Workspace(pathlib.Path(sys.argv[1])), 0
while not (workspace.path / "end").exists():
    stage = workspace.run(f"other{at % 7}").stage("sft")
    with stage.run_dir.lock():
        for one in workspace.run("a").stage("sft").published():
            try: stage.reuse(one)
            except StageRefused: print("refused", flush=True)
            else: print("reused", flush=True)
    at += 1
"""
    publish(found, "a", "sft", at=0)
    command = [sys.executable, "-c", code, str(found.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        process.stdout.readline()
        for at in range(1, 20):
            publish(found, "a", "sft", at=at)
            collect(found)
        (found.path / "end").touch()
        told = process.stdout.read()
        assert process.wait() == 0
    assert "reused" in told
    for stage in found.stages():
        assert not stage.linked or stage.record() is not None
    assert len(ids(found)) < 20


# ---------------------------------------------------------------------------------------------------- remains


def test_remains_of_dead_processes_go_and_logs_stay(found):
    stage = found.run("a").stage("sft")
    output(stage)
    attempt = stage.attempts()[-1]
    attempt.log.write_text("log")
    (stage.path / ".record.json.part").write_text("half")
    (stage.path / ".checkpoint.part").symlink_to("nowhere")
    sweep = collect(found)
    assert sorted(item.what for item in sweep.go) == ["output", "part", "part"]
    assert attempt.log.read_text() == "log"
    assert not attempt.output.exists()


def test_state_goes_once_nothing_can_resume_it(found, monkeypatch):
    stage = found.run("a").stage("sft")
    begin(stage, {"seed": 5})
    (stage.state / "step-3.part").mkdir()
    (stage.state / "step-3.part" / "x").write_text("half")
    assert [item.path.name for item in collect(found).go] == ["step-3.part"]
    assert stage.unfinished() == {"seed": 5}
    stage.identity.write_text("{")  # damaged: it may be worth hours
    assert survey(found).go == ()
    stage.identity.unlink()  # as a kill leaves it while the state is dropped
    assert [item.what for item in collect(found).go] == ["state"]
    assert not stage.state.exists()


def test_what_a_worker_finished_and_nobody_published_is_left_for_repair(found):
    stage = found.run("a").stage("sft")
    folder = output(stage)
    stage.result.write_text("{}")
    sweep = collect(found)
    assert sweep.go == ()
    assert f"{folder} was finished and not published: opdctl repair a" in sweep.notes
    assert (folder / "model.safetensors").exists()


def test_what_the_user_calls_part_is_no_half(found):
    """A run, a stage, a value of an axis, and files beside the runs."""
    stages = {"sft.part": toy.sft(steps=1), "max": {**toy.sft(steps=1, seed=1), "foreach": {"domain": ["math.part"]}}}
    toy.run(toy.pipeline(stages, folder=found.path), "r.part")
    made = ids(found)
    assert len(made) == 2
    for path in (found.path / "data" / "rows.part", found.path / "models" / "m.part"):
        path.parent.mkdir(exist_ok=True)
        path.write_text("the user's own")
    long_ago = time.time() - 3 * 86400
    for path in found.path.rglob("*"):
        os.utime(path, (long_ago, long_ago), follow_symlinks=False)
    assert collect(found).go == ()
    assert ids(found) == made
    assert (found.path / "data" / "rows.part").exists()


def test_halves_outside_runs_go_once_they_are_old_and_their_writer_is_dead(found):
    old, new = found.path / "models" / ".a.999999999.part", found.path / "models" / ".b.999999999.part"
    own = found.path / "models" / f".c.{os.getpid()}.part"
    for folder in (old, new, own):
        folder.mkdir(parents=True)
        (folder / "x").write_text("half")
    long_ago = time.time() - 3 * 86400
    for path in (old / "x", old, own / "x", own):
        os.utime(path, (long_ago, long_ago))
    assert [item.path for item in collect(found).go] == [old]
    assert (new / "x").exists()
    assert (own / "x").exists()


def test_bytes_are_counted_once_their_last_name_goes(found):
    """A select stage publishes hard links of the model that it chose."""
    old = publish(found, "a", "sft", at=0)
    publish(found, "a", "sft", at=1)
    path = found.run("a").stage("sft").at(old.id).checkpoint / "part.bin"
    path.write_bytes(b"x" * 10_000)
    twice = survey(found)
    assert twice.freed == twice.go[0].size > 10_000
    os.link(path, found.path / "elsewhere")
    assert survey(found).freed == twice.freed - 10_000


# ------------------------------------------------------------------------------------------------------- lineage


def test_lineage_still_describes_what_gc_deleted(found):
    base = publish(found, "a", "sft", at=0)
    child = publish(found, "a", "mopd", [base.id], at=1)
    publish(found, "a", "sft", at=2)
    publish(found, "a", "mopd", at=3)
    collect(found)
    assert base.id not in ids(found)
    last = publish(found, "b", "mopd", [child.id], at=4)  # as of a workspace that was put back from a copy
    nodes = trace(found, [found.run("b").stage("mopd")])
    assert set(nodes) == {last.id, child.id, base.id}
    assert nodes[base.id].note.startswith("deleted by gc on 20")
    assert (nodes[base.id].title, nodes[base.id].gone) == ("sft", False)
    (finding,) = Verifier(found).verify().findings
    assert not finding.problem
    assert "gc deleted it on 20" in finding.told


def test_lineage_of_a_model_read_as_a_folder_goes_on_behind_it(found):
    base = publish(found, "a", "sft", at=0)
    teacher = publish(found, "a", "mopd", [base.id], at=1)
    publish(found, "b", "mopd", at=2, by_path=[teacher])
    nodes = trace(found, [found.run("b").stage("mopd")])
    assert {teacher.id, base.id} < set(nodes)
    (found.run("a").stage("mopd").checkpoint / RECORD).unlink()
    assert f"path:{teacher.id}" in trace(found, [found.run("b").stage("mopd")])


def test_a_link_that_leads_to_itself_ends_nothing(found):
    publish(found, "a", "sft", at=0)
    link = found.run("a").stage("sft").path / "checkpoint"
    link.unlink()
    link.symlink_to("checkpoint")
    assert survey(found) is not None
