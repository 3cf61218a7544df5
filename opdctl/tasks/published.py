"""What tasks over published rows share: fixed rows in three parts, and how a question becomes a prompt.

`train` is what stages learn from, reshuffled each epoch; `validation` and `test` are never learnt from, and the key
`part` says which of them split `eval` is, in a fixed order.
"""

import gzip
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from opdctl.errors import ConfigError
from opdctl.settings import EffortSettings, PublicTask
from opdctl.tasks import Demonstration, Prompt, Split, Verdict, effort_wording, first_group

Part = Literal["train", "validation", "test"]


@dataclass(frozen=True)
class Problem:
    question: str
    answer: Any  # plain JSON: what the task's `verify` needs
    solution: str | None  # a completion to imitate, as it follows template chat
    tools: Sequence[Mapping[str, Any]] = ()  # JSON schemas of functions that the prompt shows


def place(content: str) -> int:
    """0 to 99 by the content alone, alike everywhere: which part a row belongs to."""
    return int.from_bytes(hashlib.sha256(content.encode()).digest()[:8]) % 100


def read_jsonl(path: Path, key: str) -> Iterator[dict[str, Any]]:
    """The rows of a published file; raises ConfigError, blaming `key`, where there is none."""
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as stream:
            for line in stream:
                if line.strip():
                    yield json.loads(line)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{key}: {path}: {error}", hint="the folder is relative to the workspace and holds the files as published"
        ) from error


class Published(ABC):
    """A task of such rows. Each task says how a question is put, and judges: `verify`, `reference`."""

    instruction = ""  # system prompt of template chat
    before_question, before_answer, between = "", "\n", "\n\n"  # template raw; the last separates the examples

    def __init__(
        self,
        name: str,
        settings: PublicTask,
        efforts: EffortSettings | None,
        problems: Mapping[Part, Sequence[Problem]],
    ) -> None:
        self.name, self.efforts = name, efforts
        self._template, self._system = settings.template, settings.system
        self._rows: dict[Split, Sequence[Problem]] = {"train": problems["train"], "eval": problems[settings.part]}
        self._order = lru_cache(maxsize=2)(self._shuffled)
        self._check(settings)
        self._shots = self._examples(settings.shots)
        self._rows["train"] = [row for row in problems["train"] if row not in self._shots]  # their answers are shown

    def _check(self, settings: PublicTask) -> None:
        key = f"tasks.{self.name}"
        if settings.template == "raw" and settings.system:
            raise ConfigError(f"{key}.system: a system prompt needs template: chat")
        if settings.template == "raw" and self.efforts and self.efforts.by == "system_prompt":
            raise ConfigError(f"{key}.template: raw has no system prompt to ask for an effort by; use template: chat")
        if not self._rows["eval"]:
            raise ConfigError(f"{key}.part: there is no row of part {settings.part}")

    def _examples(self, count: int) -> list[Problem]:
        solved = [row for row in self._rows["train"] if row.solution is not None]
        if count > len(solved):
            raise ConfigError(f"tasks.{self.name}.shots: {count} are wanted; there are {len(solved)} solved rows")
        return sorted(solved, key=lambda row: hashlib.sha256(row.question.encode()).digest())[:count]

    def size(self, split: Split) -> int | None:
        return len(self._rows[split])

    def prompts(self, split: Split, seed: int, start: int, count: int, effort: str | None = None) -> list[Prompt]:
        return [self._prompt(row, effort, start + i) for i, row in enumerate(self._slice(split, seed, start, count))]

    def demonstrations(self, seed: int, start: int, count: int, efforts: Sequence[str] = ()) -> list[Demonstration]:
        """Training rows with their solutions, which do not depend on the effort."""
        shown = []
        for i, row in enumerate(self._slice("train", seed, start, count), start):
            if row.solution is None:
                raise ConfigError(f"tasks.{self.name}: its rows have no solution to imitate: it cannot be used by sft")
            prompt = self._prompt(row, efforts[i % len(efforts)] if efforts else None, i)
            shown.append(Demonstration(prompt, self.written(row.solution)))
        return shown

    def written(self, solution: str) -> str:
        """A solution as it stands after the prompt: in template raw, parted from it by a blank."""
        parted = self._template == "chat" or self.before_answer[-1:].isspace()
        return solution if parted else f" {solution}"

    @abstractmethod
    def verify(self, prompt: Prompt, completion: str) -> Verdict: ...

    @abstractmethod
    def reference(self, prompt: Prompt) -> str | None: ...

    def _slice(self, split: Split, seed: int, start: int, count: int) -> list[Problem]:
        rows = self._rows[split]
        if split == "train":
            if not rows:
                raise ConfigError(f"tasks.{self.name}: it has no training rows: it can only be evaluated on")
            return [rows[self._order(seed, i // len(rows))[i % len(rows)]] for i in range(start, start + count)]
        if start + count > len(rows):
            raise ConfigError(
                f"tasks.{self.name}: {start + count} prompts are wanted for evaluation, and there are {len(rows)}",
                hint="lower rollout.prompts of the eval stage, or take the other `part`",
            )
        return list(rows[start : start + count])

    def _shuffled(self, seed: int, epoch: int) -> list[int]:
        import numpy as np

        rng = np.random.default_rng(np.random.SeedSequence([seed % 2**64, epoch]))
        return [int(index) for index in rng.permutation(len(self._rows["train"]))]

    def _prompt(self, row: Problem, effort: str | None, position: int) -> Prompt:
        wording = effort_wording(self.name, self.efforts, effort)
        by_token = self.efforts is not None and self.efforts.by == "control_token"
        question = f"{row.question} {wording}" if wording and by_token else row.question
        columns = {"domain": self.name} if effort is None else {"domain": self.name, "effort": effort}
        text, messages = question, []
        if self._template == "chat":
            own = self.instruction if self._system is None else self._system
            system = "\n\n".join(part for part in (own, "" if by_token else wording) if part)
            messages = [{"role": "system", "content": system}] if system else []
            for shot in self._shots:
                messages.append({"role": "user", "content": shot.question})
                messages.append({"role": "assistant", "content": str(shot.solution)})
            messages.append({"role": "user", "content": question})
        else:
            parts = [
                f"{self.before_question}{shot.question}{self.before_answer}{self.written(str(shot.solution))}"
                for shot in self._shots
            ]
            text = self.between.join([*parts, f"{self.before_question}{question}{self.before_answer}"])
        return Prompt(text, row.answer, columns, messages, first_group(self.name) + position, (), row.tools)
