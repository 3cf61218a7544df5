"""Every error a user can cause or act on. Anything else that escapes is a bug (exit code 3).

OpdctlError (1)
|- ConfigError (2)      the pipeline, an override or a command-line value is not valid
|- StageRefused (1)     a stage may not start: other settings under half-trained state, a bad input
|- StageFailed (1)      a worker ended without the result it owed
|  `- ProgramDied       what it had started was killed, which may pass
|- RunBusy (1)          another process works in the same run
`- Interrupted (130)    the user asked to stop; state is saved
"""

from collections.abc import Sequence


class OpdctlError(Exception):
    """`str(error)` says what is wrong, with the key or stage and the value; `hint` says what to do about it."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class ConfigError(OpdctlError):
    """The pipeline, an override or a command-line value is not valid. `problems` holds one line for each defect."""

    exit_code = 2

    def __init__(self, problems: str | Sequence[str], *, hint: str = "") -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems), hint=hint)


class StageRefused(OpdctlError):
    """A stage may not start: its inputs or the state it would resume from are not what its settings need."""


class StageFailed(OpdctlError):
    """A worker ended without the result it owed."""


class ProgramDied(StageFailed):
    """A program that a stage's worker had started was killed from outside, as the worker itself might have been."""


class RunBusy(OpdctlError):
    """Another process works in the same run directory."""


class Interrupted(OpdctlError):
    """The user asked to stop."""

    exit_code = 130
