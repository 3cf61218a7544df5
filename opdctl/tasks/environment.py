"""Tasks of several turns: a model acts, its environment answers, until one of them ends the episode.

Environments see and give text. Which tokens that is, and which of them are trained on, is the engine's
(`engine/episodes.py`) and verl's agent loop's (`backends/verl/plugin/agent_loop.py`) to know.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from opdctl.tasks import Prompt, Task, ToolCall, Verdict


@dataclass(frozen=True)
class Step:
    """What came of an action."""

    observation: str  # what the model reads next; "" where the episode is over
    done: bool
    reward: float = 0.0  # of this action alone
    counts: Mapping[str, float] = field(default_factory=dict)  # summed over the episode: calls, valid_calls, ...


class CallFormat(Protocol):
    """How a model writes calls of tools, by its chat template."""

    def render(self, text: str, calls: Sequence[ToolCall]) -> str:
        """A turn that says the text and makes the calls."""
        ...

    def parse(self, action: str) -> tuple[str, list[ToolCall]]:
        """(text, calls) of a turn. Raises ValueError, with what is wrong, for a call that cannot be read."""
        ...


class Environment(Protocol):
    """One episode. The same actions give the same observations."""

    def step(self, action: str) -> Step:
        """What the model wrote in its turn, its end-of-turn token removed."""
        ...

    def verdict(self) -> Verdict:
        """Of the episode as it stands; `reward` is the sum of all that was earned."""
        ...

    def state(self) -> dict[str, Any]:
        """All that `restore` needs, as plain JSON."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None: ...

    def close(self) -> None:
        """Give back what the episode holds: processes, folders."""
        ...


@runtime_checkable
class EnvironmentTask(Task, Protocol):
    def environment(self, prompt: Prompt, calls: CallFormat) -> Environment:
        """A fresh episode of a prompt."""
        ...
