"""Tasks over published data and their generated stand-ins: `opdctl/tasks/` has a module for each."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from opdctl.fields import Settings


class PublicTask(Settings):
    """What tasks over published rows share (`opdctl/tasks/published.py`)."""

    FILES: ClassVar[tuple[str, ...]] = ()  # what is read from the folder `path`
    PACKAGES: ClassVar[tuple[str, ...]] = ()  # Python packages that make the rows: another version makes others

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


class Gsm8kTask(PublicTask):
    """Grade-school maths in several steps (`opdctl/tasks/final_number.py`)."""

    FILES = ("train.jsonl", "test.jsonl")

    task: Literal["gsm8k"]
    match: Literal["strict", "flexible"] = "strict"  # the number after `####`, or else the last number


class MawpsTask(PublicTask):
    """All word problems of MAWPS, answered by a number (`opdctl/tasks/final_number.py`)."""

    FILES = WordProblemTask.FILES

    task: Literal["mawps"]
    match: Literal["strict", "flexible"] = "strict"


class MathTask(PublicTask):
    """Competition mathematics (`opdctl/tasks/math.py`)."""

    FILES = ("math.jsonl", "math_500.jsonl")

    task: Literal["math"]


class MbppTask(PublicTask):
    """Short Python functions (`opdctl/tasks/code.py`)."""

    FILES = ("mbpp.jsonl",)

    task: Literal["mbpp"]


class HumanEvalTask(PublicTask):
    """Python functions by their docstring, for evaluation only (`opdctl/tasks/code.py`)."""

    FILES = ("HumanEval.jsonl.gz",)

    task: Literal["humaneval"]


NLTK = (  # all that is read of NLTK's data
    "corpora/stopwords/english",
    "tokenizers/punkt_tab/english/abbrev_types.txt",
    "tokenizers/punkt_tab/english/collocations.tab",
    "tokenizers/punkt_tab/english/ortho_context.tab",
    "tokenizers/punkt_tab/english/sent_starters.txt",
)


class IfevalTask(PublicTask):
    """Instructions that a program can check (`opdctl/tasks/ifeval.py`)."""

    FILES = ("ifeval_input_data.jsonl",)

    task: Literal["ifeval"]
    match: Literal["strict", "loose"] = "strict"  # loose: without a first or last line, or asterisks, it may hold too
    drills: Annotated[int, Field(ge=0, le=100_000)] = 0  # generated training prompts: the published ones are a test
    nltk: str | None = "data/nltk"  # folder of `opdctl data fetch nltk`: sentences and stop words

    def files(self) -> dict[str, str]:
        return super().files() | ({} if self.nltk is None else {name: f"{self.nltk}/{name}" for name in NLTK})


class ReasoningGymTask(PublicTask):
    """Generated puzzles and sums of reasoning-gym (`opdctl/tasks/reasoning_gym.py`)."""

    PACKAGES = ("reasoning_gym",)

    task: Literal["reasoning_gym"]
    path: None = None
    dataset: str  # one of the generators that `opdctl/tasks/reasoning_gym.py` lists
    config: dict[str, int | float | str | bool] = {}  # the generator's own options
    rows: Annotated[int, Field(ge=1, le=100_000)] = 2000  # of training; validation and test have `held_out` each
    held_out: Annotated[int, Field(ge=1, le=10_000)] = 200


class BfclTask(PublicTask):
    """Calls of functions, for evaluation only (`opdctl/tasks/bfcl.py`)."""

    task: Literal["bfcl"]
    category: Literal["simple_python", "multiple", "parallel", "parallel_multiple", "irrelevance"]
    template: Literal["chat"] = "chat"  # the functions are shown by the model's own chat template
    calls: Literal["tagged", "bare"] = "tagged"  # how the model writes calls (`opdctl/tasks/call_formats.py`)

    @model_validator(mode="after")
    def _several_calls(self) -> "BfclTask":
        if self.calls == "bare" and self.category.startswith("parallel"):
            raise ValueError(f"calls: bare has one call a turn, and category {self.category} asks for several")
        return self

    def files(self) -> dict[str, str]:
        names = [f"{self.category}.jsonl"]
        names += [] if self.category == "irrelevance" else [f"{self.category}_answers.jsonl"]
        return {name: f"{self.path}/{name}" for name in names}
