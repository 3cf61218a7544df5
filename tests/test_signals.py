"""SIGINT and SIGTERM while a run is checked, and while it goes on."""

import os
import signal
import time

import pytest
import toy

from opdctl.signals import Signals
from opdctl.store import StageDir


def test_a_second_interrupt_ends_what_is_checked_before_anything_starts(tmp_path, monkeypatch):
    toy.run(toy.pipeline({"sft": toy.sft()}, folder=tmp_path))

    def pressed_twice(self, full=False):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)  # of a large checkpoint

    monkeypatch.setattr(StageDir, "verify_digests", pressed_twice)
    wanted = toy.pipeline({"sft": toy.sft(), "next": toy.sft("stage:sft")}, folder=tmp_path)
    with pytest.raises(KeyboardInterrupt):
        toy.run(wanted)
    assert toy.stage(wanted, "next").attempts() == []
    monkeypatch.undo()
    assert toy.run(wanted).done == ["sft", "next"]


def test_the_first_is_counted_and_the_second_calls_what_was_asked_for():
    called = []
    with Signals() as signals:
        signals.at_second = lambda: called.append(signals.count)
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGINT)
    assert called == [2, 3]
