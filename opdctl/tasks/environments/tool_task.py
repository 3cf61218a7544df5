"""What tasks with tools share: a stream of problems, a scripted expert, and an episode of calls and their answers.

A problem is plain JSON, made of its number alone. The expert's turns are played in the task's own environment, so that
a demonstration's observations are those that a model would read.
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

from opdctl.errors import ConfigError
from opdctl.settings import EffortSettings
from opdctl.tasks import Demonstration, Prompt, Split, ToolCall, Turn, Verdict, effort_wording, first_group, is_held_out
from opdctl.tasks.call_formats import THOUGHT_END, Tagged
from opdctl.tasks.environment import CallFormat, Step
from opdctl.tasks.shards import BadRow, data_files, read_raw

CALLS = 4  # a turn may make
THREADS = 8  # that play the expert
ANSWER = "Answer:"  # begins the last line of a final turn

Problem = Mapping[str, Any]  # `question`, and what the task needs
Script = Sequence[tuple[str, Sequence[ToolCall]]]  # text and calls of every turn of the expert


def tool(name: str, description: str, **arguments: str) -> dict[str, Any]:
    """The JSON schema of a tool; its arguments are texts, all of them wanted, here with their descriptions."""
    properties = {key: {"type": "string", "description": said} for key, said in arguments.items()}
    parameters = {"type": "object", "properties": properties, "required": list(arguments)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def final_answer(text: str) -> str | None:
    """What follows `Answer:` in the last line; None without it."""
    line = text.rpartition(THOUGHT_END)[2].strip().rpartition("\n")[2].strip()
    return line.removeprefix(ANSWER).strip() if line.startswith(ANSWER) else None


class ToolError(ValueError):
    """What a wrong call is told."""


class Episode(ABC):
    """A turn without calls is the final one. A wrong call is told what is wrong with it and costs nothing but the turn.

    Counts: `calls`, those that could not be read included, and `valid_calls`, those that were carried out.
    """

    tools: ClassVar[Sequence[Mapping[str, Any]]]

    def __init__(self, problem: Problem, calls: CallFormat) -> None:
        self.problem = problem
        self._tools = {schema["function"]["name"]: schema["function"]["parameters"] for schema in self.tools}
        self._calls = calls
        self.final: str | None = None  # the text that ended the episode
        self._reason: str | None = None  # of the verdict, once it is known

    @abstractmethod
    def call(self, name: str, arguments: Mapping[str, str]) -> str:
        """What a tool answers. Raises ToolError for a call that cannot be carried out."""

    @abstractmethod
    def judge(self, final: str) -> str:
        """Why an episode that ended with this text is wrong, "" where it is right."""

    def step(self, action: str) -> Step:
        try:
            text, calls = self._calls.parse(action)
        except ValueError as error:
            return Step(f"Error: {error}", done=False, counts={"calls": 1.0, "valid_calls": 0.0})
        if not calls:
            self.final = text
            return Step("", done=True, reward=self.verdict().reward)
        if len(calls) > CALLS:
            told = f"Error: {len(calls)} calls in one turn; at most {CALLS}"
            return Step(told, done=False, counts={"calls": float(len(calls)), "valid_calls": 0.0})
        observations, valid = [], 0
        for call in calls:
            try:
                observations.append(self._answer(call))
                valid += 1
            except ToolError as error:
                observations.append(f"Error: {error}")
        done = self.final is not None
        counts = {"calls": float(len(calls)), "valid_calls": float(valid)}
        if done:
            return Step("", done=True, reward=self.verdict().reward, counts=counts)
        return Step("\n".join(observations), done=False, counts=counts)

    def _answer(self, call: ToolCall) -> str:
        if self.final is not None:
            raise ToolError("the episode is over")
        if call.name not in self._tools:
            raise ToolError(f"no tool {call.name[:40]!r}; there are: {', '.join(self._tools)}")
        wanted = self._tools[call.name]["required"]
        if set(call.arguments) != set(wanted) or not all(isinstance(value, str) for value in call.arguments.values()):
            signature = ", ".join(f"{key}: text" for key in wanted)
            raise ToolError(f"wanted: {call.name}({signature}); given: {', '.join(call.arguments) or 'nothing'}")
        return self.call(call.name, call.arguments)

    def verdict(self) -> Verdict:
        if self.final is None:
            return Verdict(correct=False, reward=0.0, details={"reason": "the episode has not ended"})
        if self._reason is None:
            self._reason = self.judge(self.final)
        return Verdict(not self._reason, float(not self._reason), {"reason": self._reason})

    def state(self) -> dict[str, Any]:
        return {"final": self.final}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.final, self._reason = state["final"], None

    def close(self) -> None:  # noqa: B027 (an episode that holds nothing has nothing to give back)
        """Give back what the episode holds: nothing."""


def read_problems(path: Path, key: str, problem: Callable[[Mapping[str, Any]], Problem]) -> list[Problem]:
    """The rows of a file of `question` and `answer`, in its order. Raises ConfigError, naming `key` and the first bad
    row: one that is no such object, or of which `problem` raises ValueError."""
    rows = []
    for file in data_files(path, key):
        for number, raw in read_raw(file, ("question", "answer"), key):
            try:
                if isinstance(raw, BadRow):
                    raise raw
                if not all(isinstance(raw.get(column), str) for column in ("question", "answer")):
                    raise BadRow("wanted: the columns question and answer, both text")
                rows.append(problem(raw))
            except (BadRow, ValueError) as error:
                raise ConfigError(f"{key}: {file}, row {number}: {error}") from error
    return rows


class ToolTask(ABC):
    """A stream of problems, asked by chat messages: generated ones, or `rows`. `Prompt.answer` is the Problem.

    `held_out`: share kept for evaluation, by their content. Rows of training are shuffled each epoch.
    """

    instruction: ClassVar[str]  # system prompt
    episode_class: ClassVar[type[Episode]]

    def __init__(
        self, name: str, efforts: EffortSettings | None, held_out: float, rows: Sequence[Problem] | None = None
    ) -> None:
        self.name, self.efforts, self._held_out = name, efforts, held_out
        self._rows: dict[Split, list[Problem]] | None = None
        if rows is not None:
            self._rows = {"train": [], "eval": []}
            for row in rows:
                self._rows["eval" if is_held_out(self.content(row), held_out) else "train"].append(row)
            if not self._rows["train"]:
                raise ConfigError(f"tasks.{name}.held_out: {held_out} keeps all {len(rows)} rows for evaluation")
        self._order = lru_cache(maxsize=2)(self._shuffled)

    @abstractmethod
    def generated(self, rng: random.Random) -> Problem:
        """A problem at random."""

    @abstractmethod
    def expert(self, problem: Problem) -> Script:
        """Turns that solve a problem. Raises ConfigError where it knows none."""

    def content(self, problem: Problem) -> str:
        """By which a problem is held out."""
        return str(problem["question"])

    def environment(self, prompt: Prompt, calls: CallFormat) -> Episode:
        return self.episode_class(prompt.answer, calls)

    def size(self, split: Split) -> int | None:
        return None if self._rows is None else len(self._rows[split])

    def problem(self, split: Split, seed: int, row: int) -> Problem:
        if self._rows is not None:
            rows = self._rows[split]
            if split == "train":
                return rows[self._order(seed, row // len(rows))[row % len(rows)]]
            if row >= len(rows):
                raise ConfigError(
                    f"tasks.{self.name}: prompt {row + 1} is wanted for evaluation, and there are {len(rows)}",
                    hint="lower rollout.prompts of the eval stage, or raise held_out",
                )
            return rows[row]
        rng = random.Random(f"{self.name} {split} {seed} {row}")
        while True:
            problem = self.generated(rng)
            if is_held_out(self.content(problem), self._held_out) == (split == "eval"):
                return problem

    def _shuffled(self, seed: int, epoch: int) -> list[int]:
        assert self._rows is not None
        order = list(range(len(self._rows["train"])))
        random.Random(f"{self.name} {seed} {epoch}").shuffle(order)
        return order

    def prompts(self, split: Split, seed: int, start: int, count: int, effort: str | None = None) -> list[Prompt]:
        return [self._prompt(self.problem(split, seed, row), row, effort) for row in range(start, start + count)]

    def _prompt(self, problem: Problem, row: int, effort: str | None) -> Prompt:
        wording = effort_wording(self.name, self.efforts, effort)
        by_token = self.efforts is not None and self.efforts.by == "control_token"
        text = f"{problem['question']} {wording}" if wording and by_token else problem["question"]
        system = "\n\n".join(part for part in (self.instruction, "" if by_token else wording) if part)
        columns = {"domain": self.name} if effort is None else {"domain": self.name, "effort": effort}
        messages = [{"role": "system", "content": system}, {"role": "user", "content": text}]
        return Prompt(text, problem, columns, messages, first_group(self.name) + row, tools=self.episode_class.tools)

    def demonstrations(self, seed: int, start: int, count: int, efforts: Sequence[str] = ()) -> list[Demonstration]:
        """The expert's episodes; none depends on the effort."""
        asked = [efforts[row % len(efforts)] if efforts else None for row in range(start, start + count)]
        prompts = [self.prompts("train", seed, start + i, 1, effort)[0] for i, effort in enumerate(asked)]
        with ThreadPoolExecutor(THREADS) as threads:  # programs wait for the jail
            return [
                Demonstration(prompt, "", turns)
                for prompt, turns in zip(prompts, threads.map(self._played, prompts), strict=True)
            ]

    def _played(self, prompt: Prompt) -> list[Turn]:
        written = Tagged()
        episode = self.environment(prompt, written)
        turns = [
            Turn(text, calls, episode.step(written.render(text, calls)).observation)
            for text, calls in self.expert(prompt.answer)
        ]
        verdict = episode.verdict()
        assert verdict.correct, f"{self.name}: the expert fails at {prompt.answer}: {verdict.details}"
        return turns

    def verify(self, prompt: Prompt, completion: str) -> Verdict:
        """Of an episode of one turn."""
        episode = self.environment(prompt, Tagged())
        episode.step(completion)
        return episode.verdict()

    def reference(self, prompt: Prompt) -> str | None:
        """The expert's last turn where it gives an answer; None where the episode is judged by what was done."""
        text, calls = self.expert(prompt.answer)[-1]
        return None if calls else text
