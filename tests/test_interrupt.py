"""Ctrl-C on a real terminal, which signals every process in it: orchestrator, fork server, a worker just forked."""

import os
import pty
import subprocess
import sys
import time

import pytest

import opdctl

SMALL = ["scale=smoke", "axes.domain=[general]", "axes.loss=[full_vocab]", "tracking.enabled=false"]
CTRL_C = b"\x03"


class Terminal:
    """`opdctl run` in the foreground of a terminal of its own."""

    def __init__(self, workspace):
        self.workspace = workspace
        command = [sys.executable, "-m", "opdctl", "run", "kimi_k3", *SMALL, "--run", "r"]
        self.ours, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", LEAD, *command], stdin=theirs, stdout=theirs, stderr=theirs, cwd=workspace
        )
        os.close(theirs)
        self.shown = b""

    def until(self, condition, seconds=60):
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, self.shown.decode()
            assert self.process.poll() is None, self.shown.decode()
            self._read(0.01)

    def press(self, key):
        os.write(self.ours, key)

    def exit_code(self, seconds=60):
        deadline = time.monotonic() + seconds
        while self.process.poll() is None and time.monotonic() < deadline:
            self._read(0.05)
        if self.process.poll() is None:
            self.process.kill()
        self._read(0.05)
        return self.process.wait()

    def _read(self, seconds):
        import select

        while select.select([self.ours], [], [], seconds)[0]:
            try:
                self.shown += os.read(self.ours, 1 << 16)
            except OSError:  # the other end is closed
                return


LEAD = """
import fcntl, os, sys, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


@pytest.fixture
def terminal(workspace):
    opened = Terminal(workspace)
    yield opened
    opened.process.kill()
    opened.process.wait()
    os.close(opened.ours)


def starting(workspace):
    """The first stage has an attempt whose worker does not run yet: the fork server imports."""
    [*attempts] = workspace.glob("runs/r/stages/sft/attempts/1")
    return bool(attempts) and not (attempts[0] / "worker.json").exists()


def test_an_interrupt_before_the_first_worker_started_is_an_interrupt(terminal, workspace):
    terminal.until(lambda: starting(workspace))
    terminal.press(CTRL_C)
    assert terminal.exit_code() == 130, terminal.shown.decode()
    assert b"failed" not in terminal.shown
    assert b"to go on from here: opdctl run kimi_k3" in terminal.shown


def test_two_interrupts_before_the_first_worker_started_stop_at_once(terminal, workspace):
    terminal.until(lambda: starting(workspace))
    terminal.press(CTRL_C)
    time.sleep(0.3)
    began = time.monotonic()
    terminal.press(CTRL_C)
    assert terminal.exit_code() == 130, terminal.shown.decode()
    assert time.monotonic() - began < 3
    assert b"failed" not in terminal.shown


def test_an_interrupt_while_a_stage_trains_saves_and_a_second_one_stops_at_once(terminal, workspace):
    events = workspace / "runs/r/stages/sft/attempts/1/events.jsonl"
    terminal.until(lambda: events.exists() and events.stat().st_size)
    terminal.press(CTRL_C)
    time.sleep(0.05)
    terminal.press(CTRL_C)
    assert terminal.exit_code(20) == 130, terminal.shown.decode()
    assert b"failed" not in terminal.shown
    assert not opdctl.Workspace(workspace).run("r").busy()
