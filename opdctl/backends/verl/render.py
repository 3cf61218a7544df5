"""From a stage to the command line that makes verl carry it out. Pure: nothing is read or written."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from opdctl.backends.contract import StageSpec


@dataclass(frozen=True)
class Command:
    environment: Mapping[str, str]  # to be added to the caller's
    argv: Sequence[str]  # the interpreter first

    def shell(self) -> str:
        """For a shell, one argument a line."""
        words = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        words += [shlex.quote(word) for word in self.argv]
        return " \\\n  ".join(words)


def command(spec: StageSpec) -> Command:
    """The trainer's command line."""
    raise NotImplementedError
