import json
import os
import signal
import subprocess
import sys
import time
from multiprocessing import shared_memory
from pathlib import Path

import pytest

from opdctl import processes

SLEEPER = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(300)"]
HOLDER = """
import sys, time
from multiprocessing import resource_tracker, shared_memory
segment = shared_memory.SharedMemory(create=True, size=64)
resource_tracker.unregister(segment._name, "shared_memory")
print(segment.name, flush=True)
time.sleep(300)
"""


@pytest.fixture
def attempt(tmp_path):
    folder = tmp_path / "attempts" / "1"
    folder.mkdir(parents=True)
    return folder


def daemon(tree: processes.Tree, command=SLEEPER, **options) -> subprocess.Popen:
    """In a session of its own, as Ray's; for a moment a process that becomes a program shows no environment."""
    process = subprocess.Popen(command, env={**os.environ, **tree.environment}, start_new_session=True, **options)
    deadline = time.monotonic() + 10
    while process.pid not in processes.find(tree.attempt) and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return process


def test_processes_that_left_the_group_are_ended_with_their_temporary_files(attempt):
    with processes.guarded(attempt) as tree:
        process = daemon(tree)
        (tree.temp / "file").touch()
        assert processes.find(attempt) == [process.pid]
    assert process.wait(10) == -signal.SIGKILL
    assert not tree.temp.exists()
    assert not processes.left(attempt)


def test_processes_of_another_attempt_are_left_alone(attempt, tmp_path):
    other = tmp_path / "attempts" / "11"  # its name begins with that of the first
    other.mkdir()
    with processes.guarded(other) as theirs:
        process = daemon(theirs)
        with processes.guarded(attempt):
            pass
        assert process.poll() is None
        assert processes.find(other) == [process.pid]
    process.wait(10)


def test_shared_memory_that_ended_processes_held_is_removed_and_no_other(attempt):
    foreign = shared_memory.SharedMemory(create=True, size=64)
    foreign.close()  # nobody holds it just now
    with processes.guarded(attempt) as tree:
        process = daemon(tree, [sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True)
        name = process.stdout.readline().strip().lstrip("/")
        deadline = time.monotonic() + 20  # the watcher looks once a second
        while not json.loads((attempt / processes.NOTE).read_text())["memory"]:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.kill()  # it cannot be asked any more at the end
        process.wait()
        assert (processes.SHARED_MEMORY / name).exists()
    process.stdout.close()
    assert not (processes.SHARED_MEMORY / name).exists()
    assert (processes.SHARED_MEMORY / foreign.name.lstrip("/")).exists()
    foreign.unlink()


def test_the_watcher_ends_everything_once_its_worker_was_killed(attempt):
    code = (
        "import os, subprocess, sys, time\nfrom pathlib import Path\nfrom opdctl import processes\n"
        "with processes.guarded(Path(sys.argv[1])) as tree:\n"
        f"    subprocess.Popen({SLEEPER!r}, env=dict(os.environ, **tree.environment), start_new_session=True)\n"
        "    print(tree.temp, flush=True)\n    time.sleep(300)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, attempt], stdout=subprocess.PIPE, text=True) as worker:
        temp = Path(worker.stdout.readline().strip())
        deadline = time.monotonic() + 30
        while not processes.find(attempt) and time.monotonic() < deadline:  # what is being started shows itself late
            time.sleep(0.05)
        found = processes.find(attempt)
        worker.kill()
    assert found
    deadline = time.monotonic() + 30
    while processes.left(attempt):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert not processes.find(attempt)
    assert not temp.exists()


def test_a_note_of_another_machine_is_left_to_it(attempt, tmp_path):
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    note = {"temp": str(theirs), "host": "elsewhere", "boot": None, "memory": []}
    (attempt / processes.NOTE).write_text(json.dumps(note))
    assert not processes.left(attempt)
    assert processes.end(attempt) == []
    assert theirs.exists()


DAMAGED = {
    "memory": [5, None, "x", {}, [1], [[1]], [["1", 2]]],
    "temp": [None, 5, "/tmp/opd-\0"],
    "host": [None],
    "boot": [5],
}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        pytest.param("[" * 100_000, id="deep"),
        "{}",
        *((key, value) for key, found in DAMAGED.items() for value in found),
    ],
)
def test_a_damaged_note_is_none(attempt, text):
    whole = {"temp": "/tmp/opd-x", "host": processes.socket.gethostname(), "boot": None, "memory": []}
    (attempt / processes.NOTE).write_text(text if isinstance(text, str) else json.dumps(whole | dict([text])))
    assert not processes.left(attempt)
    assert processes.end(attempt) == []


@pytest.mark.parametrize("name", ["mine", "opd-mine", "tmp/opd-x/../../opd-mine"])
def test_a_note_that_names_a_folder_of_others_deletes_none(attempt, tmp_path, monkeypatch, name):
    monkeypatch.setattr(processes.tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp" / "opd-x").mkdir(parents=True)
    named = tmp_path / name
    named.resolve().mkdir()
    note = {"host": processes.socket.gethostname(), "boot": None, "memory": []}
    (attempt / processes.NOTE).write_text(json.dumps(note | {"temp": str(named)}))
    processes.end(attempt)
    assert named.exists()
    (attempt / processes.NOTE).write_text(json.dumps(note | {"temp": str(tmp_path / "tmp" / "opd-x")}))
    processes.end(attempt)
    assert not (tmp_path / "tmp" / "opd-x").exists()
    assert not processes.left(attempt)


def test_segments_noted_before_the_machine_started_again_are_not_taken_for_new_ones(attempt, tmp_path):
    segment = shared_memory.SharedMemory(create=True, size=64)
    try:
        state = (processes.SHARED_MEMORY / segment.name.lstrip("/")).stat()
        segment.close()
        note = {"temp": str(tmp_path / "t"), "host": processes.socket.gethostname(), "boot": "an earlier one"}
        (attempt / processes.NOTE).write_text(json.dumps({**note, "memory": [[state.st_dev, state.st_ino]]}))
        processes.end(attempt)
        assert (processes.SHARED_MEMORY / segment.name.lstrip("/")).exists()
    finally:
        segment.unlink()


def test_temporary_folders_are_short_enough_for_sockets(attempt, monkeypatch, tmp_path):
    long = tmp_path / ("x" * 60)
    long.mkdir()
    monkeypatch.setattr(processes.tempfile, "tempdir", str(long))
    with processes.guarded(attempt) as tree:
        assert len(str(tree.temp)) <= processes.SHORT + len("/opd-12345678")
