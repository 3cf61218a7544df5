"""Tasks whose problems are solved with tools: `opdctl/tasks/environments/` has a module for each."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from opdctl.fields import Count, Fraction, Seed
from opdctl.settings.env_task import EnvironmentTaskSettings


class ToolTaskSettings(EnvironmentTaskSettings):
    FILES: ClassVar[tuple[str, ...]] = ()  # keys that name a file or folder, relative to the workspace

    def files(self) -> dict[str, str]:
        """What is read, by its key."""
        return {key: path for key in self.FILES if (path := getattr(self, key)) is not None}


class CalculatorTask(ToolTaskSettings):
    """Arithmetic with a calculator (`opdctl/tasks/environments/calculator.py`)."""

    FILES = ("path",)

    task: Literal["calculator"]
    path: str | None = None  # rows with question and answer, as GSM8K's; relative to the workspace; null: generated
    held_out: Fraction = 0.1  # share of all problems kept for evaluation, by the question


class PythonTask(ToolTaskSettings):
    """Problems to be solved by writing programs (`opdctl/tasks/environments/python_tool.py`)."""

    FILES = ("path",)

    task: Literal["python_tool"]
    path: str | None = None  # as CalculatorTask's
    held_out: Fraction = 0.1  # share of all problems kept for evaluation, by the question


class SearchTask(ToolTaskSettings):
    """Questions over a corpus that is searched (`opdctl/tasks/environments/search.py`)."""

    FILES = ("corpus", "questions")

    task: Literal["search"]
    # folder of .txt and .md files, or rows with id and text; relative to the workspace; null: a made-up world
    corpus: str | None = None
    questions: str | None = None  # rows with question and answer, over `corpus`
    people: Annotated[int, Field(ge=20, le=1000)] = 300  # of the made-up world
    seed: Seed = 0  # of the made-up world: other than the recipe's seed, so that all of its seeds search the same
    hops: Annotated[list[Literal[1, 2, 3]], Field(min_length=1)] = [1, 2, 3]  # links that a question goes over
    results: Count = 5  # texts that a search shows
    held_out: Fraction = 0.1  # share of all problems kept for evaluation, by the question

    @model_validator(mode="after")
    def _both(self) -> "SearchTask":
        if (self.corpus is None) != (self.questions is None):
            raise ValueError("corpus and questions belong together: give both, or neither for the made-up world")
        return self


class RepositoryTask(ToolTaskSettings):
    """Repositories with a bug to be corrected (`opdctl/tasks/environments/repository.py`)."""

    task: Literal["repository"]
    functions: Annotated[int, Field(ge=1, le=4)] = 2  # in the module that has the bug
    held_out: Fraction = 0.1  # share of all problems kept for evaluation, by their files


AnyToolTask = CalculatorTask | PythonTask | SearchTask | RepositoryTask
