"""What grew while a server was away is read in pieces: memory stays that of a piece."""

import json
import tracemalloc

import numpy as np
import pytest

from opdctl.backends.contract import Event
from opdctl.backends.events import EventTail, EventWriter


@pytest.fixture
def grown(tmp_path):
    path = tmp_path / "events.jsonl"
    line = {"total": 9000, "metrics": {f"metric{number}": 0.5 for number in range(40)}, "time": 1.0}
    path.write_text("".join(json.dumps({"step": step, **line}) + "\n" for step in range(9000)))
    return path


def test_a_backlog_is_read_once_whole_and_in_order_in_bounded_memory(grown):
    tracemalloc.start()
    tail, steps = EventTail(grown), []
    for events in tail.parts(size=1 << 16):
        steps += [event.step for event in events]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert steps == list(range(9000))
    assert grown.stat().st_size > 6_000_000
    assert peak < 2_000_000
    assert tail.read() == []


def test_a_line_longer_than_a_piece_and_one_without_its_end_are_read_whole(tmp_path):
    path = tmp_path / "events.jsonl"
    long, short = (json.dumps({"step": s, "total": 2, "metrics": {"x": "y" * n}}) for s, n in ((1, 5000), (2, 1)))
    path.write_text(f"{long}\nnot an event\n{short}")
    tail = EventTail(path)
    assert [event.step for part in tail.parts(size=64) for event in part] == [1]
    with path.open("a") as stream:
        stream.write("\n")
    assert [event.step for event in tail.read()] == [2]


def test_numbers_of_numpy_do_not_end_a_training(tmp_path):
    path = tmp_path / "events.jsonl"
    EventWriter(path).write(Event(1, 1, {"a": np.float32(0.5), "b": np.int64(2), "c": object}))
    [event] = EventTail(path).read()
    assert (event.metrics["a"], event.metrics["b"]) == (0.5, 2)
