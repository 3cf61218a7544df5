"""Tells a command or a webhook that a stage failed, a run stopped or finished, or the gate refused."""

from collections.abc import Mapping
from typing import Any

from opdctl.settings import Notify, NotifyOn


class Notifier:
    """Sends from a thread of its own: nothing waits for it, and nothing fails for its sake."""

    def __init__(self, settings: Notify, context: Mapping[str, Any]) -> None:
        self._settings, self._context = settings, context

    def tell(self, what: NotifyOn, stage: str, message: str) -> None:
        """`stage` is empty for the whole run."""

    def close(self) -> list[str]:
        """Waits, at most `timeout_s`, until all is sent; what could not be sent, a line each."""
        return []
