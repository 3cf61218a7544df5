import json
import math
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import toy

from opdctl.backends.contract import Event
from opdctl.backends.events import EventTail, EventWriter
from opdctl.errors import StageFailed
from opdctl.lock import worker_lives
from opdctl.store import write_json
from opdctl.worker import WorkerControl, _named, read_spec


def test_a_tail_gives_each_event_once_and_leaves_a_line_without_its_end_for_later(tmp_path):
    file = tmp_path / "events.jsonl"
    tail, writer = EventTail(file), EventWriter(file)
    assert tail.read() == []
    first = Event(1, 4, {"loss": 0.5}, "train", 1.0)
    writer.write(first)
    with file.open("a") as stream:
        stream.write('{"step": 2, "total": 4,')
    assert tail.read() == [first]
    assert tail.read() == []
    with file.open("a") as stream:
        stream.write(' "metrics": {}}\n')
    assert tail.read() == [Event(2, 4, {})]


def test_a_tail_passes_over_lines_that_were_damaged_on_the_disk(tmp_path):
    path = tmp_path / "events.jsonl"
    writer = EventWriter(path)
    writer.write(Event(1, 2, {"loss": 1.0}))
    with path.open("ab") as stream:
        stream.write(b'\xff\x00\x85\n3\n[]\n{}\n\n{"step": "a", "total": 2, "metrics": {}}\n{"step": 1, "to\n')
        for odd in (
            {"step": "1"},
            {"step": 1.5},
            {"step": 10**400},
            {"step": True},
            {"total": None},
            {"total": -(10**30)},
        ):
            stream.write(json.dumps({"step": 1, "total": 2, "metrics": {}} | odd).encode() + b"\n")
        for odd in ({"metrics": [["loss", 1]]}, {"metrics": None}, {"phase": None}, {"time": "1"}, {"time": math.nan}):
            stream.write(json.dumps({"step": 1, "total": 2, "metrics": {}} | odd).encode() + b"\n")
        stream.write(b"[" * 100_000 + b"\n")
    writer.write(Event(2, 2, {"loss": 0.5}))
    assert [event.step for event in EventTail(path).read()] == [1, 2]


def test_an_event_that_finds_no_room_on_the_disk_fails_the_stage():
    control = WorkerControl(Path("/dev/full"))
    with pytest.raises(StageFailed, match="step 3 could not be reported"):
        control.emit(3, 4, {})


def test_a_stop_is_requested_by_sigterm(tmp_path):
    control = WorkerControl(tmp_path / "events.jsonl")
    assert not control.stop_requested()
    control.stop(signal.SIGTERM, None)
    assert control.stop_requested()


def test_a_worker_reads_its_spec_as_it_was_written(workspace):
    wanted = toy.pipeline({"sft": toy.sft(), "a": toy.sft("stage:sft")})
    toy.run(wanted)
    spec = read_spec(toy.stage(wanted, "a").spec)
    assert (spec.stage, spec.kind, spec.config["train"]["max_steps"]) == ("a", "sft", 4)
    assert spec.inputs[0].role == "init"
    assert spec.inputs[0].path == str(toy.stage(wanted, "sft").checkpoint)


def test_a_worker_whose_orchestrator_died_saves_and_ends_by_itself(workspace):
    code = (
        "import sys, pathlib, toy; toy.run(toy.pipeline({'sft': toy.sft(steps=2000)}, "
        "knobs={'plain': {'sleep_ms': 20}}, folder=pathlib.Path(sys.argv[1])))"
    )
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(toy.FOLDER)!r}); {code}", workspace]
    stage = toy.stage(toy.pipeline({"sft": toy.sft()}), "sft")
    with subprocess.Popen(command) as process:
        _wait(lambda: stage.attempts() and stage.attempts()[0].events.exists())
        process.kill()
    [attempt] = stage.attempts()
    _wait(lambda: not worker_lives(attempt.worker))
    last = json.loads(attempt.events.read_text().splitlines()[-1])["step"]
    assert stage.state_step() == last < 2000


def _wait(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_an_engine_that_asks_for_a_rerun_names_the_stage(tmp_path):
    write_json(tmp_path / "spec.json", {"stage": "rl[domain=math]"})
    hint = "put it back as it was, or start the stage anew with --rerun STAGE"
    assert _named(hint, tmp_path / "spec.json").endswith("--rerun 'rl[domain=math]'")
    assert _named(hint, tmp_path / "none.json") == hint
