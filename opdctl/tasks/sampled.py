"""Data that a sample stage published, as demonstrations: its folder's `data.jsonl`, one JSON object a line."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from opdctl.errors import StageRefused
from opdctl.tasks import Demonstration, Prompt, Split, Task, Verdict, first_group, in_effort

DATA = "data.jsonl"


@dataclass(frozen=True)
class Sampled:
    """One kept answer: a line of the file."""

    task: str
    effort: str  # "" where the prompt asks for none
    row: int  # number of the prompt in its cell's stream
    sample: int  # which try
    prompt: str  # as the task gave it; with `messages` the user's turn
    messages: list[dict[str, str]]  # of a task with template `chat`, else empty
    completion: str  # without its end-of-sequence token
    columns: dict[str, str]
    tokens: int  # of the completion as it was drawn, EOS included
    correct: bool


class SampledTask:
    """A task whose demonstrations are sampled answers; all else is the task's own."""

    def __init__(self, name: str, task: Task, rows: Sequence[Sampled]) -> None:
        self._name, self._task, self._rows = name, task, rows
        self._by_effort: dict[str, list[Sampled]] = {}
        for row in rows:
            self._by_effort.setdefault(row.effort, []).append(row)
        # answers to one prompt share it: they are batched side by side
        prompts = {key: at for at, key in enumerate(dict.fromkeys((row.effort, row.row) for row in rows))}
        self._groups = {key: first_group(name) + at for key, at in prompts.items()}
        self._order = lru_cache(maxsize=2 * max(1, len(self._by_effort)))(self._shuffled)

    def demonstrations(self, seed: int, start: int, count: int, efforts: Sequence[str] = ()) -> list[Demonstration]:
        """Rows of the stream: row i asks for efforts[i % len(efforts)], or is any; each epoch in an order of its own.

        Raises StageRefused for an effort without rows.
        """
        return [self._demonstration(seed, i, efforts) for i in range(start, start + count)]

    def _demonstration(self, seed: int, at: int, efforts: Sequence[str]) -> Demonstration:
        at, effort = in_effort(at, efforts)
        pool = self._rows if effort is None else self._by_effort.get(effort, [])
        if not pool:
            what = f"task {self._name}" + (f" at effort {effort}" if effort else "")
            raise StageRefused(
                f"the sampled data has no row for {what}", hint="sample it too, or leave it out of config.data"
            )
        epoch, place = divmod(at, len(pool))
        row = pool[self._order(seed, effort or "", epoch, len(pool))[place]]
        prompt = Prompt(row.prompt, None, row.columns, row.messages, self._groups[row.effort, row.row])
        return Demonstration(prompt, row.completion)

    def _shuffled(self, seed: int, effort: str, epoch: int, size: int) -> list[int]:
        import numpy as np

        words = [seed % 2**64, epoch, *effort.encode()]
        return [int(at) for at in np.random.default_rng(np.random.SeedSequence(words)).permutation(size)]

    def prompts(self, split: Split, seed: int, start: int, count: int, effort: str | None = None) -> list[Prompt]:
        return self._task.prompts(split, seed, start, count, effort)

    def size(self, split: Split) -> int | None:
        return self._task.size(split)

    def verify(self, prompt: Prompt, completion: str) -> Verdict:
        return self._task.verify(prompt, completion)

    def reference(self, prompt: Prompt) -> str | None:
        return self._task.reference(prompt)


def read_sampled(folders: Sequence[str], tasks: Mapping[str, Task]) -> dict[str, Task]:
    """Each task with the answers to its prompts in these folders as demonstrations.

    Raises StageRefused for a file that cannot be read, and for a task without rows.
    """
    rows: dict[str, list[Sampled]] = {name: [] for name in tasks}
    for folder in folders:
        for row in _read(Path(folder) / DATA):
            if row.task in rows:
                rows[row.task].append(row)
    if bare := [name for name, found in rows.items() if not found]:
        raise StageRefused(
            f"the sampled data has no row for task {bare[0]}", hint="sample it too, or leave it out of config.data"
        )
    return {name: SampledTask(name, task, rows[name]) for name, task in tasks.items()}


def _read(path: Path) -> list[Sampled]:
    try:
        with path.open(encoding="utf-8") as stream:
            lines: list[dict[str, Any]] = [json.loads(line) for line in stream]
            return [Sampled(**line) for line in lines]
    except (OSError, ValueError, TypeError) as error:
        raise StageRefused(
            f"{path}: sampled data that cannot be read: {type(error).__name__}: {error}",
            hint="put it back as it was, or sample it anew: --rerun with the name of the stage that did",
        ) from error
