"""SIGINT and SIGTERM of the orchestrator."""

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


def _interrupt() -> None:
    raise KeyboardInterrupt


class Signals:
    """Counts SIGINT and SIGTERM instead of dying of them. Only the main thread can; elsewhere nothing changes.

    `at_second` is called at once, in the midst of whatever is going on. Before there is something to be put in order
    first, it interrupts: models are fetched and checkpoints read then, which takes long.
    """

    def __init__(self) -> None:
        self.count = 0
        self.at_second: Callable[[], None] = _interrupt
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Signals":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.count > 1:
            self.at_second()
