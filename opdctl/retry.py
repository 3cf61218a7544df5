"""Which failures are tried again, and when."""

import signal
from dataclasses import dataclass

from opdctl.settings import Retry


@dataclass(frozen=True)
class Again:
    wait_s: float
    number: int  # 1 for the first further attempt
    of: int


class Retries:
    """Further attempts of the stages of one `execute`."""

    def __init__(self) -> None:
        self._made: dict[str, int] = {}

    def next(self, stage: str, settings: Retry, code: int | None) -> Again | None:
        """None where the failure will not pass by itself, or all attempts are used up. `code`: of the worker."""
        made = self._made.get(stage, 0)
        if made >= settings.attempts or not _transient(code, settings):
            return None
        self._made[stage] = made + 1
        return Again(settings.wait_s * settings.factor**made, made + 1, settings.attempts)


def _transient(code: int | None, settings: Retry) -> bool:
    """Death by a signal may pass, but not a crash of its own making; a told error is one for the user."""
    if code is None:  # the fork server was killed
        return True
    return -code not in (signal.SIGSEGV, signal.SIGILL, signal.SIGFPE) if code < 0 else code in settings.exit_codes
