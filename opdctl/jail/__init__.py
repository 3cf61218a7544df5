"""Where verifiers work: processes with limits on time, memory, files and output, and no network.

`Check` calls a function that is trusted on text that is not; `Program` is Python that a model wrote, of which nothing
may be trusted but the values it computes. `docs/jail.md` says what is contained and what is not.
"""

from opdctl.jail.checks import Check, Limits, Outcome, Program
from opdctl.jail.pool import REMEDY, Jail, isolation, require_isolation, run_python, shared
from opdctl.jail.values import Raised

__all__ = [
    "REMEDY",
    "Check",
    "Jail",
    "Limits",
    "Outcome",
    "Program",
    "Raised",
    "isolation",
    "require_isolation",
    "run_python",
    "shared",
]
