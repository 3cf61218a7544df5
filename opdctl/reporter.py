"""Who is told what happens while a plan is carried out, and what came of it."""

from dataclasses import dataclass, field
from typing import Protocol

from opdctl.backends.contract import Event
from opdctl.store import Record


class Reporter(Protocol):
    """Is told what happens, from one thread."""

    def started(self, stage: str, attempt: int) -> None: ...

    def progress(self, stage: str, event: Event) -> None: ...

    def finished(self, stage: str, record: Record) -> None: ...

    def failed(self, stage: str, message: str, log_tail: str) -> None: ...

    def reused(self, stage: str, reason: str) -> None: ...

    def paused(self, stage: str, message: str) -> None: ...

    def warned(self, stage: str, text: str) -> None: ...

    def message(self, text: str) -> None: ...


class Silent:
    """A reporter for programs."""

    def started(self, stage: str, attempt: int) -> None:
        return None

    def progress(self, stage: str, event: Event) -> None:
        return None

    def finished(self, stage: str, record: Record) -> None:
        return None

    def failed(self, stage: str, message: str, log_tail: str) -> None:
        return None

    def reused(self, stage: str, reason: str) -> None:
        return None

    def paused(self, stage: str, message: str) -> None:
        self.message(f"{stage}: {message}")

    def warned(self, stage: str, text: str) -> None:
        self.message(f"{stage}: {text}")

    def message(self, text: str) -> None:
        return None


@dataclass(frozen=True)
class Outcome:
    """`done`: stages that are finished now, reused ones included; one whose gate stopped the run is in `failed` too."""

    done: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)  # stage -> why
    not_run: dict[str, str] = field(default_factory=dict)  # stage -> why: a stage it reads failed, a gate, interrupted
    interrupted: bool = False

    def summary(self) -> str:
        """One line."""
        parts = [f"{len(self.done)} done", *(f"{name} failed" for name in self.failed)]
        return "; ".join([*parts, *(f"{name} not run: {why}" for name, why in self.not_run.items())])
