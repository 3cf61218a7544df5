"""Tasks, and how a prompt asks for an effort."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from opdctl.fields import Count, Fraction, Name, Seed, Settings
from opdctl.settings.env_task import LookupTask, RepairTask
from opdctl.settings.public_task import (
    BfclTask,
    Gsm8kTask,
    HumanEvalTask,
    IfevalTask,
    MathTask,
    MawpsTask,
    MbppTask,
    ReasoningGymTask,
    WordProblemTask,
)
from opdctl.settings.tool_task import AnyToolTask, CalculatorTask, PythonTask, RepositoryTask, SearchTask


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


class GradeTask(Settings):
    """Is this answer to a chain right? `yes` or `no` (`opdctl/tasks/grade.py`)."""

    task: Literal["grade"]
    chain: ChainTask  # the problems, and the sloppy writer whose answers are graded
    steps: bool = True  # demonstrations write a right answer before they give the verdict


class FuseTask(Settings):
    """One answer to a chain, made of several candidates (`opdctl/tasks/fuse.py`)."""

    task: Literal["fuse"]
    chain: ChainTask  # the problems, and the sloppy writer of the candidates
    candidates: Annotated[int, Field(ge=2)] = 4


class UndoTask(Settings):
    """Generated chains of mixed length whose answer may take back what it wrote (`opdctl/tasks/undo.py`)."""

    task: Literal["undo"]
    domain: Literal["math", "code", "if"]
    links: Annotated[list[Annotated[int, Field(ge=4, le=64)]], Field(min_length=1)] = [8, 12, 16]  # a problem has one
    undos: Count = 8  # an answer with more is wrong
    held_out: Fraction = 0.1  # share of all problems kept for evaluation, by content hash
    slip: Fraction = 0.05  # demonstrations: chance that a state is wrong when first written
    notice: Fraction = 0.5  # demonstrations: chance that a slip is undone, and the state written again
    planted: bool = False  # prompts go on to the middle of an answer, right but for its last state


class FactsTask(Settings):
    """Facts to be known by heart (`opdctl/tasks/facts.py`)."""

    task: Literal["facts"]
    facts: Annotated[int, Field(ge=1, le=1000)] = 300
    seed: Seed = 0  # which facts: other than the recipe's seed, so that all of its seeds learn the same


class FileTask(Settings):
    """A user's own rows (`opdctl/tasks/files.py`).

    A column is named as the file has it, or by a path into it: `doc.question`, `answers.text.0`.
    """

    task: Literal["file"] = "file"
    # JSONL or parquet, a folder of such shards or of the `datasets` library, or a pattern: data/train-*.parquet;
    # relative to the workspace
    path: str
    prompt: str  # column with the prompt: text, or a list of messages {role, content}
    answer: str | None = None  # column with the reference answer; without it the completion is
    # column to imitate in SFT; without it SFT imitates `answer`. The column of `prompt` again: the last message, which
    # then is the assistant's
    completion: str | None = None
    verifier: str  # exact, numeric, regex, math_verify or pkg.module:function
    answer_pattern: str | None = None  # what of `answer` counts: the group of its last match, as in "#### (.*)"
    values: dict[str, dict[str, str]] = {}  # column -> value -> the text it stands for; another value is refused
    constants: dict[str, str] = {}  # further columns that are alike in all rows
    system: str = ""  # system prompt for every row (chat template only)
    template: Literal["raw", "chat"] = "raw"  # chat: the tokenizer's chat template, which must exist
    columns: list[str] = []  # further columns that teachers may be routed by
    # column with paths of images, one for each <image> in the prompt; template chat only. A stage's identity has the
    # paths, not what the images show: give changed ones other names
    images: str | None = None
    held_out: Fraction = 0.1  # share of the rows kept for evaluation, by content hash
    eval_path: str | None = None  # rows of their own for evaluation; then nothing is held out of `path`

    @model_validator(mode="after")
    def _answered(self) -> "FileTask":
        if self.answer is None and self.completion is None:
            raise ValueError("needs answer, completion or both: what is right, and what SFT imitates")
        return self

    @field_validator("answer_pattern")
    @classmethod
    def _one_group(cls, pattern: str | None) -> str | None:
        try:
            groups = re.compile(pattern or "()").groups
        except re.error as error:
            raise ValueError(f"{pattern!r} is not a regular expression: {error}") from None
        if groups != 1:
            raise ValueError(f"{pattern!r} has {groups} groups; it needs one, around the answer")
        return pattern


def _task_tag(value: Any) -> Any:
    return value.get("task", "file") if isinstance(value, dict) else value.task


AnyPublicTask = (
    WordProblemTask
    | Gsm8kTask
    | MawpsTask
    | MathTask
    | MbppTask
    | HumanEvalTask
    | IfevalTask
    | ReasoningGymTask
    | BfclTask
)
AnyEnvironmentTask = LookupTask | RepairTask | AnyToolTask
AnyTask = ChainTask | UndoTask | GradeTask | FuseTask | FactsTask | FileTask | AnyEnvironmentTask | AnyPublicTask
TASKS: Mapping[str, type[AnyTask]] = {
    "chain": ChainTask,
    "undo": UndoTask,
    "grade": GradeTask,
    "fuse": FuseTask,
    "facts": FactsTask,
    "file": FileTask,
    "lookup": LookupTask,
    "repair": RepairTask,
    "calculator": CalculatorTask,
    "python_tool": PythonTask,
    "search": SearchTask,
    "repository": RepositoryTask,
    "word_problems": WordProblemTask,
    "gsm8k": Gsm8kTask,
    "mawps": MawpsTask,
    "math": MathTask,
    "mbpp": MbppTask,
    "humaneval": HumanEvalTask,
    "ifeval": IfevalTask,
    "reasoning_gym": ReasoningGymTask,
    "bfcl": BfclTask,
}
TaskSettings = Annotated[
    Annotated[ChainTask, Tag("chain")]
    | Annotated[UndoTask, Tag("undo")]
    | Annotated[GradeTask, Tag("grade")]
    | Annotated[FuseTask, Tag("fuse")]
    | Annotated[FactsTask, Tag("facts")]
    | Annotated[FileTask, Tag("file")]
    | Annotated[LookupTask, Tag("lookup")]
    | Annotated[RepairTask, Tag("repair")]
    | Annotated[CalculatorTask, Tag("calculator")]
    | Annotated[PythonTask, Tag("python_tool")]
    | Annotated[SearchTask, Tag("search")]
    | Annotated[RepositoryTask, Tag("repository")]
    | Annotated[WordProblemTask, Tag("word_problems")]
    | Annotated[Gsm8kTask, Tag("gsm8k")]
    | Annotated[MawpsTask, Tag("mawps")]
    | Annotated[MathTask, Tag("math")]
    | Annotated[MbppTask, Tag("mbpp")]
    | Annotated[HumanEvalTask, Tag("humaneval")]
    | Annotated[IfevalTask, Tag("ifeval")]
    | Annotated[ReasoningGymTask, Tag("reasoning_gym")]
    | Annotated[BfclTask, Tag("bfcl")],
    Discriminator(_task_tag),
]


class EffortSettings(Settings):
    """How a prompt asks for an effort level. Source: Kimi K3's low / high / max; the wording is undisclosed."""

    by: Literal["control_token", "system_prompt"]
    levels: Annotated[dict[Name, str], Field(min_length=1)]  # level -> token or system prompt, lowest effort first
