import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from opdctl import lock
from opdctl.errors import OpdctlError, RunBusy
from opdctl.store import Workspace, write_json


@pytest.fixture
def run(workspace: Path):
    return Workspace(workspace).run("run")


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
        lock._stop([attempt.worker], pytest.fail)
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


LEAVING = """
import os, subprocess, sys
from pathlib import Path
from opdctl.store import RunDir
with RunDir(Path(sys.argv[1])).lock() as held:
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    print(subprocess.Popen(sys.argv[2:], pass_fds=[held], **quiet).pid, flush=True)
    os._exit(0)
"""


def leave_lock_to(run, *command) -> int:
    """An orchestrator dies, and a process that left no note holds its lock; its number."""
    command = [sys.executable, "-c", LEAVING, str(run.path), *command]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def test_a_lock_that_a_dead_orchestrator_left_to_what_it_was_starting_is_waited_for(run, monkeypatch):
    """A request to fork a worker is in flight with the lock's descriptor, and read once the libraries are loaded."""
    monkeypatch.setattr("opdctl.lock.TELL_S", 0.2)
    leave_lock_to(run, "sleep", "1")
    told = []
    with run.lock(told.append):
        pass
    assert [text for text in told if "was starting" in text and str(run.path / ".lock") in text] == told != []
    monkeypatch.setattr("opdctl.lock.UNKNOWN_S", 0.3)
    leave_lock_to(run, "sleep", "2")
    with pytest.raises(RunBusy, match="a process that opdctl does not know"), run.lock():
        pass


def test_a_worker_that_was_stopped_before_it_left_its_note_is_killed(run, monkeypatch):
    monkeypatch.setattr("opdctl.lock.TELL_S", 0.2)
    pid = leave_lock_to(run, sys.executable, "-c", "import time; time.sleep(60)  # multiprocessing.forkserver")
    os.kill(pid, signal.SIGSTOP)
    told = []
    with run.lock(told.append):
        assert lock.process_start(pid) is None
    assert told == [f"killing worker {pid}, which an opdctl that ended was starting"]


def test_a_lock_file_that_says_nothing_is_still_a_lock(run, workspace, monkeypatch):
    monkeypatch.setattr("opdctl.lock.UNKNOWN_S", 0.1)
    with _holder(workspace) as process:
        (run.path / ".lock").write_text("")
        with pytest.raises(RunBusy, match="in use"), run.lock():
            pass
        process.kill()


def test_a_lock_that_is_a_folder_or_leads_to_itself_is_refused_with_what_to_do(run):
    path = run.path / ".lock"
    path.mkdir(parents=True)
    assert not run.busy()
    assert not run.at_work()
    with pytest.raises(OpdctlError, match=f"cannot write {path}: Is a directory") as caught, run.lock():
        pass
    assert "move it away" in caught.value.hint
    path.rmdir()
    path.symlink_to(".lock")
    assert not run.busy()
    assert run.at_work(), "nobody can look who holds it"
    with pytest.raises(OpdctlError, match=f"cannot write {path}: Too many levels of symbolic links"), run.lock():
        pass


def test_a_file_system_without_locks_is_named(run, monkeypatch):
    def refuse(descriptor, how):
        raise OSError(errno.ENOLCK, "No locks available")

    run.path.mkdir(parents=True)
    (run.path / ".lock").touch()
    monkeypatch.setattr("opdctl.lock.fcntl.flock", refuse)
    assert run.at_work()
    for held in (lambda: lock.hold(run.path / ".lock", list, pytest.fail), run.workspace.ledger.steady):
        with pytest.raises(OpdctlError, match="No locks available") as caught, held():
            pass
        assert "the file system gives no locks" in caught.value.hint


@pytest.mark.parametrize("wrong", [{"pid": "a\0"}, {"pid": None}, {"pid": -1}, {"pid": 1.5}, {"host": None}])
def test_a_signature_with_other_types_is_none(run, wrong):
    path = run.path / ".lock"
    note = {"pid": 1, "host": lock.socket.gethostname(), "started": "", "start": lock.process_start(1)}
    note |= {"boot": lock.processes.boot()}
    write_json(path, note)
    assert lock.held(path)
    write_json(path, note | wrong)
    assert not lock.held(path)
    assert not lock.taken(path)
    assert lock.abandoned(path) == ""
    with run.lock():
        pass


@pytest.mark.parametrize("wrong", [{"pid": "a\0"}, {"pid": []}, {"pgid": "x"}, {"pgid": 0}])
def test_a_note_of_a_worker_with_other_types_is_none(run, wrong):
    attempt = run.stage("sft").new_attempt()
    attempt.note_worker(os.getpid())
    assert attempt.lives()
    write_json(attempt.worker, json.loads(attempt.worker.read_text()) | wrong)
    assert not attempt.lives()
    lock._stop([attempt.worker], pytest.fail)


def test_a_run_is_busy_while_its_orchestrator_lives_and_no_longer(run, holder):
    assert run.busy()
    holder.kill()
    holder.wait()
    assert not run.busy()


def test_a_run_is_not_busy_once_this_process_has_let_go_of_it(run):
    assert not run.busy()
    with run.lock():
        assert run.busy()
    assert not run.busy()
