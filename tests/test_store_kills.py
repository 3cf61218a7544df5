"""SIGKILL between any two system calls of the store loses nothing finished and makes nothing half-done believed."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from checkpoints import begin, output, record, weights
from killing import Killed, kill_at

from opdctl.store import Workspace, write_json


def test_a_kill_at_any_call_of_publish_leaves_the_old_checkpoint_or_the_new(workspace):
    kept = []
    for number in range(200):
        stage = Workspace(workspace).run(f"run{number}").stage("sft")
        stage.publish(output(stage, "old"), record("r1"))
        begin(stage, {"seed": 1})
        folder, done = output(stage, "new!"), False
        with pytest.MonkeyPatch.context() as patch:
            kill_at(patch, number)
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
            kill_at(patch, number)
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
            kill_at(patch, number)
            try:
                write_json(path, "new")
                return
            except Killed:
                pass
        assert json.loads(path.read_text()) in ("old", "new")
    pytest.fail("write_json never came to its end")


def test_an_orchestrator_killed_while_publishing_loses_nothing(workspace):
    """SIGKILL at random instants of a process that publishes over and over: always a whole checkpoint in force."""
    code = """
import sys; sys.path[:0] = sys.argv[2:]
from pathlib import Path
from checkpoints import output, record
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
