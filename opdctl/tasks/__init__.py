"""Tasks: prompts, demonstrations and verifiers. One protocol serves SFT, RLVR, OPD and eval.

A task is a stateless stream: row `i` of a split depends on the task's settings, the seed and `i` alone, so the data
position of a stage is one integer and a resumed stage sees the same rows.
"""

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from opdctl.errors import ConfigError
from opdctl.settings import (
    AnyTask,
    CalculatorTask,
    ChainTask,
    EffortSettings,
    FactsTask,
    FileTask,
    FuseTask,
    GradeTask,
    LookupTask,
    PublicTask,
    PythonTask,
    RepairTask,
    RepositoryTask,
    SearchTask,
    UndoTask,
)

Split = Literal["train", "eval"]


@dataclass(frozen=True)
class Prompt:
    """What a model is asked. `columns` (domain, effort, ...) route it to a teacher and group it in tables."""

    text: str  # rendered for template `raw`; the user's turn for `chat`
    answer: Any  # what the task's `verify` needs
    columns: Mapping[str, str]
    messages: Sequence[Mapping[str, str]] = ()  # for template `chat`: what the tokenizer's template renders
    group: int = 0  # equal for rows that share a long prefix: they are batched side by side
    images: Sequence[str] = ()  # absolute paths, one for each <image> in the messages
    tools: Sequence[Mapping[str, Any]] = ()  # JSON schemas that the chat template shows to the model


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Turn:
    """What a model writes, and what its environment answers; the last one gets no answer."""

    text: str
    calls: Sequence[ToolCall] = ()  # written after the text, in the model's own format
    observation: str = ""


@dataclass(frozen=True)
class Demonstration:
    prompt: Prompt
    completion: str
    turns: Sequence[Turn] = ()  # of an episode; then `completion` is ""


@dataclass(frozen=True)
class Verdict:
    correct: bool
    reward: float  # 1.0 or 0.0 unless the task grades finer
    details: Mapping[str, Any] = field(default_factory=dict)


def is_held_out(content: str, share: float) -> bool:
    """Whether the problem of this content is kept for evaluation: alike in every stage, seed and machine."""
    return zlib.crc32(content.encode()) % 1_000_000 < share * 1_000_000


def first_group(task: str) -> int:
    """Where a task's group numbers begin: tasks batched together must not share them. Fits a signed 64 bit number."""
    return (zlib.crc32(task.encode()) & 0x7FFFFFFF) << 32


def in_effort(row: int, efforts: Sequence[str]) -> tuple[int, str | None]:
    """Which row of which effort's own stream comes `row`-th, where the efforts (with repeats) take turns."""
    if not efforts:
        return row, None
    turn, slot = divmod(row, len(efforts))
    return turn * efforts.count(efforts[slot]) + efforts[:slot].count(efforts[slot]), efforts[slot]


def effort_wording(task: str, efforts: EffortSettings | None, effort: str | None) -> str:
    """What asks for an effort, "" for none. Raises ConfigError for a level that the settings do not have."""
    if effort is None:
        return ""
    levels = efforts.levels if efforts else {}
    if effort not in levels:
        known = ", ".join(levels) or "none: the pipeline has no `efforts`"
        raise ConfigError(f"tasks.{task}: effort {effort!r} is asked for; known levels: {known}")
    return levels[effort]


def turns(efforts: EffortSettings | None, asked: str, text: str) -> list[dict[str, str]]:
    """A prompt's messages where efforts are asked for by system prompt; else none: it is its text."""
    if efforts is None or efforts.by != "system_prompt":
        return []
    system = [{"role": "system", "content": asked}] if asked else []
    return [*system, {"role": "user", "content": text}]


class Task(Protocol):
    def prompts(self, split: Split, seed: int, start: int, count: int, effort: str | None = None) -> list[Prompt]:
        """Rows start .. start+count-1 of the split's stream, asking for `effort`."""
        ...

    def size(self, split: Split) -> int | None:
        """Rows before the stream repeats (reshuffled); None for a generator."""
        ...

    def demonstrations(self, seed: int, start: int, count: int, efforts: Sequence[str] = ()) -> list[Demonstration]:
        """Rows of the training split with an answer to imitate; row i asks for efforts[i % len(efforts)]."""
        ...

    def verify(self, prompt: Prompt, completion: str) -> Verdict:
        """Judge a completion, its end-of-sequence token removed."""
        ...

    def reference(self, prompt: Prompt) -> str | None:
        """A completion that must verify as correct; None where the task knows none."""
        ...


@runtime_checkable
class BulkTask(Task, Protocol):
    """A task that judges many completions faster than one by one."""

    def verify_all(self, pairs: Sequence[tuple[Prompt, str]]) -> list[Verdict]: ...


def verify_all(task: Task, pairs: Sequence[tuple[Prompt, str]]) -> list[Verdict]:
    """In bulk where the task can."""
    return task.verify_all(pairs) if isinstance(task, BulkTask) else [task.verify(*pair) for pair in pairs]


def load_task(name: str, settings: AnyTask, efforts: EffortSettings | None, workspace: Path | None = None) -> Task:
    """The task called `name`; its prompts carry the column domain=`name`.

    Relative paths and the user's own verifiers start at `workspace`, the current folder where absent.
    """
    match settings:
        case ChainTask():
            from opdctl.tasks.chain import ChainStream

            return ChainStream(name, settings, efforts)
        case UndoTask():
            from opdctl.tasks.undo import UndoStream

            return UndoStream(name, settings, efforts)
        case GradeTask():
            from opdctl.tasks.grade import GradeStream

            return GradeStream(name, settings, efforts)
        case FuseTask():
            from opdctl.tasks.fuse import FuseStream

            return FuseStream(name, settings, efforts)
        case FactsTask():
            from opdctl.tasks.facts import Facts

            return Facts(name, settings, efforts)
        case FileTask():
            from opdctl.tasks.files import FileRows

            return FileRows(name, settings, efforts, workspace)
        case LookupTask():
            from opdctl.tasks.toy_agents import Lookup

            return Lookup(name, settings, efforts)
        case RepairTask():
            from opdctl.tasks.toy_agents import Repair

            return Repair(name, settings, efforts)
        case CalculatorTask() | PythonTask() | SearchTask() | RepositoryTask():
            from opdctl.tasks.environments import open_tool_task

            return open_tool_task(name, settings, efforts, workspace)
        case PublicTask():
            from opdctl.tasks.public import open_public

            return open_public(name, settings, efforts, workspace)


def load_verifier(
    name: str, settings: AnyTask, efforts: EffortSettings | None, workspace: Path
) -> Callable[[Prompt, str], Verdict]:
    """`verify` of the task called `name`; the rows of a file are not read."""
    if isinstance(settings, FileTask):
        from opdctl.tasks.files import row_verifier

        return row_verifier(name, settings, workspace)
    return load_task(name, settings, efforts, workspace).verify
