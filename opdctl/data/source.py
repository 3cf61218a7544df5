"""Where the rows that are looked at come from: a user's files, as a stream, or any other task."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from opdctl.errors import ConfigError, OpdctlError
from opdctl.settings import AnyTask, EffortSettings, FileTask
from opdctl.tasks import BulkTask, Demonstration, Prompt, Split, Task, Verdict, load_task
from opdctl.tasks.files import FilePrompts, split_of
from opdctl.tasks.mapping import Row, stream_rows
from opdctl.tasks.shards import data_files, read_raw

CHUNK = 1024  # rows that a task is asked for at once


@dataclass(frozen=True)
class Example:
    """A row as a stage meets it."""

    file: str  # or the task
    number: int  # in the file, or in the task's stream
    prompt: Prompt
    demonstration: Demonstration | None  # None: nothing to imitate

    @property
    def where(self) -> str:
        return f"{self.file}, row {self.number}"


@dataclass(frozen=True)
class Bad:
    """A row that no stage would read."""

    where: str
    why: str


class Judging(Protocol):
    def verify(self, prompt: Prompt, completion: str) -> Verdict: ...

    def reference(self, prompt: Prompt) -> str | None: ...


class Source(Protocol):
    name: str
    title: str
    note: str  # what cannot be shown of it, and why

    @property
    def judging(self) -> Judging: ...

    def examples(self, split: Split) -> Iterator[Example | Bad]:
        """All rows of a split, or as many as were asked for, few in memory at a time."""
        ...


class FileSource:
    """Rows of a task of kind `file`, in the order of its files. Bad ones are told, not raised."""

    note = ""

    def __init__(self, name: str, settings: FileTask, efforts: EffortSettings | None, workspace: Path) -> None:
        self.name, self.title, self._settings, self._workspace = name, settings.path, settings, workspace
        self.judging = FilePrompts(name, settings, efforts, workspace)

    def examples(self, split: Split) -> Iterator[Example | Bad]:
        apart = self._settings.eval_path if split == "eval" else None
        path, key = (self._settings.path, "path") if apart is None else (apart, "eval_path")
        position = 0
        for file, number, row in stream_rows(self._workspace / path, self._settings, f"tasks.{self.name}.{key}"):
            if not isinstance(row, Row):
                if split == "train" or apart is not None:  # once, though `path` is read for both sides
                    yield Bad(f"{file}, row {number}", str(row))
                continue
            if apart is None and split_of(row, self._settings) != split:
                continue
            try:
                shown = self.judging.demonstration(row, None, position)
            except ConfigError as error:  # an image that is not there
                yield Bad(f"{file}, row {number}", str(error))
                continue
            yield Example(str(file), number, shown.prompt, shown)
            position += 1


class TaskSource:
    """The first `limit` rows of each split of a task that is no file's; all that there are where it has fewer."""

    def __init__(self, name: str, task: Task, seed: int, limit: int) -> None:
        self.name, self.title, self.note = name, f"task {name}", ""
        self.judging, self._seed, self._limit = task, seed, limit

    def examples(self, split: Split) -> Iterator[Example | Bad]:
        size = self.judging.size(split)
        total = self._limit if size is None else min(size, self._limit)
        for start in range(0, total, CHUNK):
            count = min(CHUNK, total - start)
            for i, (prompt, shown) in enumerate(self._rows(split, start, count), start + 1):
                yield Example(f"task {self.name}, {split}", i, prompt, shown)

    def _rows(self, split: Split, start: int, count: int) -> list[tuple[Prompt, Demonstration | None]]:
        if split == "train" and not self.note:
            try:
                return [(shown.prompt, shown) for shown in self.judging.demonstrations(self._seed, start, count)]
            except OpdctlError as error:
                self.note = f"no demonstrations: {error}"
        return [(prompt, None) for prompt in self.judging.prompts(split, self._seed, start, count)]


def open_source(
    name: str, settings: AnyTask, efforts: EffortSettings | None, workspace: Path, *, seed: int, limit: int
) -> Source:
    """`limit` holds for tasks that are no file's. Raises ConfigError for settings or files that cannot be used."""
    if isinstance(settings, FileTask):
        for key in ("path", "eval_path"):
            if (path := getattr(settings, key)) is not None:
                data_files(workspace / path, f"tasks.{name}.{key}")
        return FileSource(name, settings, efforts, workspace)
    return TaskSource(name, load_task(name, settings, efforts, workspace), seed, limit)


def verdicts(judging: Judging, pairs: list[tuple[Prompt, str]]) -> list[Verdict]:
    if isinstance(judging, BulkTask):
        return list(judging.verify_all(pairs))
    return [judging.verify(prompt, text) for prompt, text in pairs]


def raw_columns(path: Path) -> Mapping[str, Any]:
    """Columns of the first row that can be read, for somebody who has yet to say what they mean."""
    for file in data_files(path):
        for _, raw in read_raw(file, None, "path"):
            if isinstance(raw, dict):
                return raw
    return {}
