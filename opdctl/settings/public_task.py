"""Tasks over published data and their generated stand-ins: `opdctl/tasks/` has a module for each."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from opdctl.fields import Settings


class PublicTask(Settings):
    """What tasks over published rows share (`opdctl/tasks/published.py`)."""

    FILES: ClassVar[tuple[str, ...]] = ()  # what is read from the folder `path`

    path: str | None  # folder with the published files; relative to the workspace
    # what split `eval` is: settings are chosen on `validation`, which is never trained on, and `test` is for the end
    part: Literal["validation", "test"] = "test"
    template: Literal["raw", "chat"] = "raw"  # chat: the tokenizer's chat template, which must exist
    shots: Annotated[int, Field(ge=0, le=32)] = 0  # solved training rows shown before each question, always the same
    system: str | None = None  # system prompt of template chat; null: the task's own, if it has one

    def files(self) -> dict[str, str]:
        """What is read, relative to the workspace, by its name in the folder."""
        return {} if self.path is None else {name: f"{self.path}/{name}" for name in self.FILES}


class WordProblemTask(PublicTask):
    """Word problems of one operation: MAWPS and generated ones (`opdctl/tasks/word_problems.py`)."""

    FILES = ("mawps_addsub.jsonl", "mawps_multiarith.jsonl", "mawps_singleeq.jsonl", "mawps_singleop.jsonl")

    task: Literal["word_problems"]
    path: str | None = None  # folder with MAWPS's files; null: all problems are generated, those of `eval` too
    operations: Annotated[list[Literal["add", "sub", "mul", "div"]], Field(min_length=1)] = ["add", "sub", "mul", "div"]
    answer: Literal["expression", "number"] = "expression"  # `12 + 5`, or `12 + 5 = 17`, `#### 17`
    drills: Annotated[int, Field(ge=0, le=100_000)] = 0  # generated problems among the training rows

    @model_validator(mode="after")
    def _some_rows(self) -> "WordProblemTask":
        if self.path is None and not self.drills:
            raise ValueError("path is null and drills is 0: there is nothing to train on; give drills, or a path")
        return self
