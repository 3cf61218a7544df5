"""Which failures are tried again, and when."""

from dataclasses import dataclass

from opdctl import processes
from opdctl.settings import Retry
from opdctl.supervisor import EXIT_DIED

LONGEST_S = 86400.0


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
        return Again(min(settings.wait_s * settings.factor**made, LONGEST_S), made + 1, settings.attempts)


def _transient(code: int | None, settings: Retry) -> bool:
    """Death by a signal may pass, of the worker or of what it had started, but not a crash of its own making.

    A told error is one for the user, whatever the settings say: they cannot name its code.
    """
    if code is None:  # the fork server was killed
        return True
    return processes.killed(code) or code == EXIT_DIED or code in settings.exit_codes
