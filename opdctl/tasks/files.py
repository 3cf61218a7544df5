"""A user's own rows: JSONL or parquet with a prompt and a reference answer, judged by a named verifier.

The whole file is read and checked when the task is made, so that a bad row is found before any training. Without
`eval_path`, rows are held out by a hash of their prompt (runs of blanks count as one), so that copies of a prompt
stay on one side.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any

from opdctl.errors import ConfigError, StageFailed
from opdctl.settings import AnyTask, EffortSettings, FileTask
from opdctl.tasks import Demonstration, Prompt, Split, Verdict, effort_wording, first_group, is_held_out
from opdctl.tasks.verifiers import BUILTIN, answer_problem, resolve

ROLES = ("system", "user", "assistant")
SHOWN = 10  # bad rows named in one error
IMAGE = "<image>"  # stands in a message where an image belongs
OURS = ("domain", "effort")  # columns that every row gets

Message = Mapping[str, str]


def sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def data_digest(settings: AnyTask, folder: Path, digest: Callable[[Path], str] = sha256) -> dict[str, str]:
    """sha256 of each file that the rows and their judgement depend on, but images, by its path relative to `folder`.

    `digest` may remember what it has read. A verifier of the workspace counts as data: another version of it is
    another task.
    """
    if not isinstance(settings, FileTask):
        return {}
    paths = [path for path in (settings.path, settings.eval_path) if path is not None]
    module, _, function = settings.verifier.partition(":")
    source = module.replace(".", "/") + ".py"
    if function and (folder / source).is_file():
        paths.append(source)
    digests = {}
    for path in paths:
        try:
            digests[path] = digest(folder / path)
        except OSError as error:
            raise ConfigError(
                f"{folder / path}: {error.strerror}", hint="paths of data are relative to the workspace"
            ) from error
    return digests


# ------------------------------------------------------------------------------------------------------- reading


@dataclass(frozen=True)
class Row:
    """A checked row. `number` counts lines of JSONL or rows of parquet, from 1."""

    number: int
    text: str  # the last user turn
    messages: Sequence[Message]  # () for template raw
    answer: str
    completion: str | None
    columns: Mapping[str, str]
    images: Sequence[str] = ()  # as written in the file

    @property
    def content(self) -> str:
        """What makes two prompts the same: the words of all turns."""
        turns = [f"{message['role']} {message['content']}" for message in self.messages] or [self.text]
        return " ".join(" ".join([*turns, *self.images]).split())


class _BadRow(Exception):
    """A row that cannot be used: `str()` says why, after the number of the row."""


def _read_raw(path: Path, wanted: Sequence[str], key: str) -> Iterator[tuple[int, Any]]:
    """(row number, row) of a file. A row that is no JSON comes as a `_BadRow`."""
    if path.suffix not in (".jsonl", ".parquet"):
        raise ConfigError(f"{key}: {path} is neither .jsonl nor .parquet", hint="convert it to one of the two")
    if not path.is_file():
        raise ConfigError(f"{key}: no file {path}", hint="paths of data are relative to the workspace")
    return _read_parquet(path, wanted, key) if path.suffix == ".parquet" else _read_jsonl(path)


def _read_jsonl(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            try:
                yield number, json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except UnicodeDecodeError as error:
                yield number, _BadRow(f"not UTF-8 at byte {error.start} of the line; convert the file to UTF-8")
            except json.JSONDecodeError as error:
                yield number, _BadRow(f"not JSON: {error.msg} (character {error.pos + 1}); one object a line is wanted")
            except ValueError as error:
                yield number, _BadRow(str(error))  # a number of thousands of digits
            except RecursionError:
                yield number, _BadRow("JSON nested too deep")


def _read_parquet(path: Path, wanted: Sequence[str], key: str) -> Iterator[tuple[int, Any]]:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            present = [name for name in file.schema_arrow.names if name in wanted]
            number = 0
            for batch in file.iter_batches(columns=present):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except pyarrow.ArrowException as error:
        raise ConfigError(f"{key}: {path} is not a parquet file that can be read: {error}") from error


def read_rows(path: Path, settings: FileTask, key: str) -> list[Row]:
    """All rows of a file, checked; raises ConfigError naming up to ten bad ones, each with its number."""
    wanted = [settings.prompt, settings.answer, *settings.columns]
    wanted += [column for column in (settings.completion, settings.images) if column]
    rows: list[Row] = []
    problems: list[str] = []
    for number, raw in _read_raw(path, wanted, key):
        try:
            rows.append(_check_row(number, raw, wanted, settings))
        except _BadRow as error:
            problems.append(f"{key}: {path}, row {number}: {error}")
    if len(problems) > SHOWN:
        problems[SHOWN:] = [f"{key}: {path}: {len(problems) - SHOWN} more bad rows"]
    if problems:
        raise ConfigError(problems, hint="correct or remove these rows; none is skipped silently")
    if not rows:
        raise ConfigError(f"{key}: {path} holds no rows")
    return rows


def _check_row(number: int, raw: Any, wanted: Sequence[str], settings: FileTask) -> Row:
    if isinstance(raw, _BadRow):
        raise raw
    if not isinstance(raw, dict):
        raise _BadRow(f"{type(raw).__name__} where an object is wanted")
    missing = [column for column in wanted if column not in raw]
    if missing:
        has = ", ".join(map(str, raw)) or "none"
        raise _BadRow(f"no column {', '.join(map(repr, missing))}; it has: {has}")
    messages: Sequence[Message] = ()
    if settings.template == "chat":
        messages = _messages(raw[settings.prompt], settings)
        text = messages[-1]["content"]
    else:
        text = _text(raw, settings.prompt, "text (a list of messages needs template: chat)")
    if not text.strip():
        raise _BadRow(f"column {settings.prompt!r} is empty")
    answer = _word(raw, settings.answer, (str, int, float))
    if problem := answer_problem(settings.verifier, answer):
        raise _BadRow(f"column {settings.answer!r}, {answer[:60]!r}, {problem} (verifier {settings.verifier})")
    completion = _text(raw, settings.completion, "text") if settings.completion else None
    columns = {column: _word(raw, column, (str, int)) for column in settings.columns}
    return Row(number, text, messages, answer, completion, columns, _images(raw, messages, settings))


def _images(raw: Mapping[str, Any], messages: Sequence[Message], settings: FileTask) -> Sequence[str]:
    if settings.images is None:
        return ()
    paths = raw[settings.images] or []
    if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
        raise _BadRow(f"column {settings.images!r} is {str(paths)[:60]!r}; wanted: a list of paths of image files")
    marks = sum(message["content"].count(IMAGE) for message in messages)
    if marks != len(paths):
        raise _BadRow(f"column {settings.images!r} has {len(paths)} images, and the prompt has {marks} {IMAGE}")
    return tuple(paths)


def _text(raw: Mapping[str, Any], column: str, wanted: str) -> str:
    value = raw[column]
    if not isinstance(value, str):
        raise _BadRow(f"column {column!r} is {type(value).__name__}; wanted: {wanted}")
    return _encodable(value, column)


def _encodable(value: str, column: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _BadRow(f"column {column!r} holds half a surrogate pair (\\ud800 to \\udfff), which is no text") from None
    return value


def _word(raw: Mapping[str, Any], column: str, types: tuple[type, ...]) -> str:
    value = raw[column]
    if not isinstance(value, types) or isinstance(value, bool):
        names = ", ".join(kind.__name__ for kind in types)
        raise _BadRow(f"column {column!r} is {type(value).__name__}; wanted: {names} (write anything else as text)")
    return _encodable(str(value), column)


def _messages(value: Any, settings: FileTask) -> Sequence[Message]:
    """The turns of a conversation that ends with the user's."""
    column = settings.prompt
    if isinstance(value, str):
        return ({"role": "user", "content": _encodable(value, column)},)
    if not isinstance(value, list) or not value:
        raise _BadRow(f"column {column!r} is {type(value).__name__}; wanted: text, or a list of messages")
    turns = []
    for turn in value:
        known = {k: v for k, v in turn.items() if v is not None} if isinstance(turn, dict) else {}
        if set(known) != {"role", "content"} or not all(isinstance(part, str) for part in known.values()):
            raise _BadRow(f"column {column!r}: a message is {{role: text, content: text}}, not {str(turn)[:80]}")
        if known["role"] not in ROLES:
            raise _BadRow(f"column {column!r}: role {known['role']!r} is none of {', '.join(ROLES)}")
        turns.append({"role": known["role"], "content": _encodable(known["content"], column)})
    if turns[-1]["role"] != "user":
        raise _BadRow(f"column {column!r}: the last message is {turns[-1]['role']}'s; it must be the user's")
    if settings.system and turns[0]["role"] == "system":
        raise _BadRow(f"column {column!r} begins with a system message, and `system` is set too; keep one of them")
    return tuple(turns)


# ---------------------------------------------------------------------------------------------------------- task


@dataclass(frozen=True)
class _Naming:
    """Turns what a user's verifier raises into a failure that names the task, the verifier and the row."""

    task: str
    verifier: str
    row: Row

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if isinstance(error, Exception | SystemExit):  # sys.exit would end the worker without a word
            raise StageFailed(
                f"task {self.task}: verifier {self.verifier} failed on row {self.row.number}, answer "
                f"{self.row.answer[:60]!r}: {type(error).__name__}: {error}",
                hint="a verifier judges any text: have it return False for what it cannot read",
            ) from error


def row_verifier(name: str, settings: FileTask, workspace: Path | None = None) -> Callable[[Prompt, str], Verdict]:
    """`FileRows.verify` of a task, without reading its file."""
    verifier = resolve(settings.verifier, f"tasks.{name}.verifier", workspace or Path.cwd())

    def verify(prompt: Prompt, completion: str) -> Verdict:
        row: Row = prompt.answer
        if settings.verifier in BUILTIN:
            return verifier(completion, row.answer)
        with _Naming(name, settings.verifier, row):
            return verifier(completion, row.answer)

    return verify


class FileRows:
    """The task of one file. `Prompt.answer` is its Row. Relative paths and own verifiers start at the workspace."""

    def __init__(
        self, name: str, settings: FileTask, efforts: EffortSettings | None, workspace: Path | None = None
    ) -> None:
        self.name, self.settings, self.efforts = name, settings, efforts
        self._folder = workspace or Path.cwd()
        self._check_settings()
        self._verify = row_verifier(name, settings, workspace)
        self._rows = self._load()
        self._groups = first_group(name)
        self._order = lru_cache(maxsize=2)(self._shuffled)

    def _check_settings(self) -> None:
        key, settings = f"tasks.{self.name}", self.settings
        problems = [
            f"{key}.columns: {column!r} is set for every row already" for column in OURS if column in settings.columns
        ]
        if settings.template == "raw" and settings.system:
            problems.append(f"{key}.system: a system prompt needs template: chat")
        if settings.template == "raw" and self.efforts and self.efforts.by == "system_prompt":
            problems.append(f"{key}.template: raw has no system prompt to ask for an effort by; use template: chat")
        if settings.template == "raw" and settings.images:
            problems.append(f"{key}.images: a model reads images by its chat template; use template: chat")
        if problems:
            raise ConfigError(problems)

    def _load(self) -> dict[Split, list[Row]]:
        key, settings = f"tasks.{self.name}", self.settings
        rows = read_rows(self._folder / settings.path, settings, f"{key}.path")
        if settings.eval_path is not None:
            held = read_rows(self._folder / settings.eval_path, settings, f"{key}.eval_path")
            self._refuse_overlap(rows, held)
            return {"train": rows, "eval": held}
        kept: dict[Split, list[Row]] = {"train": [], "eval": []}
        for row in rows:
            kept["eval" if is_held_out(row.content, settings.held_out) else "train"].append(row)
        if not kept["train"]:
            raise ConfigError(
                f"{key}.held_out: {settings.held_out} keeps all {len(rows)} rows of {settings.path} for evaluation",
                hint="lower held_out, or give more rows",
            )
        return kept

    def _refuse_overlap(self, rows: Sequence[Row], held: Sequence[Row]) -> None:
        first = {row.content: row.number for row in reversed(rows)}
        shared = [(first[row.content], row.number) for row in held if row.content in first]
        if shared:
            pairs = ", ".join(f"{a} and {b}" for a, b in shared[:SHOWN])
            raise ConfigError(
                f"tasks.{self.name}.eval_path: {len(shared)} of {len(held)} prompts are in `path` too; "
                f"rows of path and eval_path: {pairs}{', ...' if len(shared) > SHOWN else ''}",
                hint="remove them from `path`, or leave eval_path out and let held_out split one file",
            )

    def size(self, split: Split) -> int | None:
        return len(self._rows[split])

    def columns(self, split: Split) -> list[Mapping[str, str]]:
        """The further columns of its rows, each combination once."""
        return list({tuple(row.columns.items()): row.columns for row in self._rows[split]}.values())

    def prompts(self, split: Split, seed: int, start: int, count: int, effort: str | None = None) -> list[Prompt]:
        return [self._prompt(row, effort, start + i) for i, row in enumerate(self._slice(split, seed, start, count))]

    def demonstrations(self, seed: int, start: int, count: int, efforts: Sequence[str] = ()) -> list[Demonstration]:
        """Rows with their completion, or their answer where the file has no completions; none depends on the effort."""
        demonstrations = []
        for i, row in enumerate(self._slice("train", seed, start, count), start):
            prompt = self._prompt(row, efforts[i % len(efforts)] if efforts else None, i)
            demonstrations.append(Demonstration(prompt, row.answer if row.completion is None else row.completion))
        return demonstrations

    def _slice(self, split: Split, seed: int, start: int, count: int) -> list[Row]:
        rows = self._rows[split]
        if split == "train":
            return [rows[self._order(seed, i // len(rows))[i % len(rows)]] for i in range(start, start + count)]
        if start + count > len(rows):
            raise ConfigError(
                f"tasks.{self.name}: {start + count} prompts are wanted for evaluation, and there are {len(rows)}",
                hint="lower rollout.prompts of the eval stage, raise held_out, or give an eval_path",
            )
        return rows[start : start + count]

    def _shuffled(self, seed: int, epoch: int) -> list[int]:
        import numpy as np

        rng = np.random.default_rng(np.random.SeedSequence([seed % 2**64, epoch]))
        return [int(index) for index in rng.permutation(len(self._rows["train"]))]

    def _prompt(self, row: Row, effort: str | None, position: int) -> Prompt:
        asked = effort_wording(self.name, self.efforts, effort)
        by_token = self.efforts is not None and self.efforts.by == "control_token"
        text = f"{row.text} {asked}" if asked and by_token else row.text
        messages: list[Message] = []
        if row.messages:
            messages = [*row.messages[:-1], {"role": "user", "content": text}]
            own = messages.pop(0)["content"] if messages[0]["role"] == "system" else self.settings.system
            system = "\n\n".join(part for part in (own, "" if by_token else asked) if part)
            messages = [{"role": "system", "content": system}, *messages] if system else messages
        columns = {**row.columns, "domain": self.name}
        if effort is not None:
            columns["effort"] = effort
        return Prompt(text, row, columns, messages, self._groups + position, self._paths(row))

    def _paths(self, row: Row) -> Sequence[str]:
        """Absolute ones. Raises ConfigError for an image that is not there."""
        paths = [(self._folder / image).absolute() for image in row.images]
        if absent := [path for path in paths if not path.is_file()]:
            raise ConfigError(
                f"tasks.{self.name}: row {row.number}: no image {absent[0]}",
                hint="paths of images are relative to the workspace",
            )
        return [str(path) for path in paths]

    def verify(self, prompt: Prompt, completion: str) -> Verdict:
        return self._verify(prompt, completion)

    def reference(self, prompt: Prompt) -> str | None:
        """The answer where the verifier compares with it, else the row's completion, if the file has one."""
        row: Row = prompt.answer
        return row.answer if self.settings.verifier in ("exact", "numeric", "math_verify") else row.completion
