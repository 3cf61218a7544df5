"""Tasks, and how a prompt asks for an effort."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from opdctl.fields import Count, Fraction, Name, Settings


class ChainTask(Settings):
    """Generated chains of operations with a verifiable result (`opdctl/tasks/chain.py`)."""

    task: Literal["chain"]
    domain: Literal["math", "code", "if"]
    links: Annotated[int, Field(ge=4, le=64, multiple_of=4)] = 8  # operations in a problem: the difficulty
    strides: dict[str, Count] = {"low": 4, "high": 2, "max": 1}  # write every n-th state at this effort
    held_out: Fraction = 0.1  # share of all problems kept for evaluation, by content hash
    misread: Fraction = 0.65  # demonstrations: chance that a misread operation is applied wrongly
    noise: Fraction = 0.01  # demonstrations: chance that a state is random
    obey: Fraction = 0.9  # demonstrations: chance that the answer's style is the effort asked for


class FileTask(Settings):
    """A user's own rows (`opdctl/tasks/files.py`)."""

    task: Literal["file"] = "file"
    path: str  # JSONL or parquet; relative to the workspace
    prompt: str  # column with the prompt: text, or a list of messages {role, content}
    answer: str  # column with the reference answer
    completion: str | None = None  # column to imitate in SFT; without it SFT imitates `answer`
    verifier: str  # exact, numeric, regex, math_verify or pkg.module:function
    system: str = ""  # system prompt for every row (chat template only)
    template: Literal["raw", "chat"] = "raw"  # chat: the tokenizer's chat template, which must exist
    columns: list[str] = []  # further columns that teachers may be routed by
    held_out: Fraction = 0.1  # share of the rows kept for evaluation, by content hash
    eval_path: str | None = None  # a file of its own for evaluation; then nothing is held out of `path`


def _task_tag(value: Any) -> Any:
    return value.get("task", "file") if isinstance(value, dict) else value.task


TASKS: Mapping[str, type[ChainTask] | type[FileTask]] = {"chain": ChainTask, "file": FileTask}
AnyTask = ChainTask | FileTask
TaskSettings = Annotated[
    Annotated[ChainTask, Tag("chain")] | Annotated[FileTask, Tag("file")], Discriminator(_task_tag)
]


class EffortSettings(Settings):
    """How a prompt asks for an effort level. Source: Kimi K3's low / high / max; the wording is undisclosed."""

    by: Literal["control_token", "system_prompt"]
    levels: Annotated[dict[Name, str], Field(min_length=1)]  # level -> token or system prompt, lowest effort first
