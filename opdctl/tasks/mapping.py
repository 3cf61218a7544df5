"""From an object of a file to a checked row, by the keys of a task of kind `file`."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from opdctl.errors import ConfigError
from opdctl.references import near_miss
from opdctl.settings import FileTask
from opdctl.tasks.shards import BadRow, data_files, read_raw
from opdctl.tasks.verifiers import answer_problem

ROLES = ("system", "user", "assistant")
SHOWN = 10  # bad rows named in one error
IMAGE = "<image>"  # stands in a message where an image belongs

Message = Mapping[str, str]


@dataclass(frozen=True)
class Row:
    """A checked row. `number` counts lines of JSONL or rows of parquet, from 1, in its own file."""

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


class NoColumn(BadRow):
    def __init__(self, missing: Sequence[str], has: Sequence[str]) -> None:
        super().__init__(f"no column {', '.join(map(repr, missing))}; it has: {', '.join(has) or 'none'}")
        self.missing, self.has = tuple(missing), has


def read_rows(path: Path, settings: FileTask, key: str) -> list[Row]:
    """All rows of a path, checked; raises ConfigError naming up to ten bad ones, each with its number."""
    rows: list[Row] = []
    problems: list[str] = []
    absent: Counter[tuple[str, ...]] = Counter()
    has: dict[str, None] = {}
    for file, number, row in stream_rows(path, settings, key):
        if isinstance(row, Row):
            rows.append(row)
        else:
            problems.append(f"{key}: {file}, row {number}: {row}")
            if isinstance(row, NoColumn):
                absent[row.missing] += 1
                has |= dict.fromkeys(row.has)
    for missing, count in absent.items():
        if count == len(problems) > 1 and not rows:
            raise ConfigError(list(_never_there(missing, has, count, path, settings, key)))
    if len(problems) > SHOWN:
        problems[SHOWN:] = [f"{key}: {path}: {len(problems) - SHOWN} more bad rows"]
    if problems:
        raise ConfigError(problems, hint="correct or remove these rows; none is skipped silently")
    if not rows:
        raise ConfigError(f"{key}: {path} holds no rows")
    return rows


def _never_there(
    missing: Sequence[str], has: Iterable[str], count: int, path: Path, settings: FileTask, key: str
) -> Iterator[str]:
    """A misspelt column is no fault of the rows: it is told once, by the key that names it."""
    by_key = {name: getattr(settings, name) for name in ("prompt", "answer", "completion", "images")}
    named = [*by_key.items(), *(("columns", column) for column in settings.columns)]
    for name, column in named:
        if column in missing:
            told = f"no column {column!r} in any of {count:,} rows of {path}{near_miss(column, has, 'columns')}"
            yield f"{key.rpartition('.')[0]}.{name}: {told}"


def stream_rows(path: Path, settings: FileTask, key: str) -> Iterator[tuple[Path, int, Row | BadRow]]:
    """(file, number, row) of all rows of a path, one in memory at a time; a bad one comes as a BadRow."""
    named = [settings.prompt, settings.answer, settings.completion, settings.images, *settings.columns]
    columns = [column for column in dict.fromkeys(named) if column]
    wanted = {part for column in columns for part in (column, column.partition(".")[0])}
    for file in data_files(path, key):
        for number, raw in read_raw(file, wanted, key):
            try:
                row: Row | BadRow = _row(number, raw, columns, settings)
            except BadRow as error:
                row = error
            yield file, number, row


def _row(number: int, raw: Any, wanted: Sequence[str], settings: FileTask) -> Row:
    if isinstance(raw, BadRow):
        raise raw
    if not isinstance(raw, dict):
        raise BadRow(f"{type(raw).__name__} where an object is wanted")
    found = {column: _look_up(raw, column, settings) for column in wanted}
    if missing := [column for column in wanted if found[column] is _ABSENT]:
        raise NoColumn(missing, list(map(str, raw)))
    messages: Sequence[Message] = ()
    completion = None
    if settings.template == "chat":
        messages = _messages(found[settings.prompt], settings)
        if settings.completion == settings.prompt:
            completion, messages = messages[-1]["content"], messages[:-1]
        text = messages[-1]["content"]
    else:
        text = _text(found, settings.prompt, "text (a list of messages needs template: chat)")
    if not text.strip():
        raise BadRow(f"column {settings.prompt!r} is empty")
    if settings.completion and completion is None:
        completion = _text(found, settings.completion, "text")
    answer = _answer(found, completion, settings)
    columns = {**settings.constants, **{column: _word(found, column, (str, int)) for column in settings.columns}}
    return Row(number, text, messages, answer, completion, columns, _images(found, messages, settings))


_ABSENT = object()


def _look_up(raw: Mapping[str, Any], column: str, settings: FileTask) -> Any:
    """What a row has at a column; its text where `values` has some for the column."""
    value = raw.get(column, _ABSENT)
    if value is _ABSENT and "." in column:
        value = raw
        for part in column.split("."):
            if isinstance(value, Mapping):
                value = value.get(part, _ABSENT)
            elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
                value = value[int(part)]
            else:
                return _ABSENT
    known = settings.values.get(column)
    if known is None or value is _ABSENT:
        return value
    text = str(value) if isinstance(value, str | float) or type(value) is int else json.dumps(value, default=str)
    if text not in known:
        raise BadRow(f"column {column!r} is {text[:60]!r}, which `values` does not have: {', '.join(known)}")
    return known[text]


def _answer(found: Mapping[str, Any], completion: str | None, settings: FileTask) -> str:
    """The reference answer, cut by `answer_pattern`. Raises BadRow for one that no completion could match."""
    column = settings.answer or str(settings.completion)
    if completion is not None and column == settings.completion:
        answer = completion
    else:
        answer = _word(found, column, (str, int, float))
    if settings.answer_pattern is not None:
        matches = list(re.finditer(settings.answer_pattern, answer))
        if not matches or matches[-1][1] is None:
            raise BadRow(f"column {column!r}, ...{answer[-60:]!r}, has no match of {settings.answer_pattern!r}")
        answer = matches[-1][1].strip()
    if problem := _problem(settings.verifier, answer):
        raise BadRow(f"column {column!r}, {answer[:60]!r}, {problem} (verifier {settings.verifier})")
    return answer


_problem = lru_cache(maxsize=4096)(answer_problem)  # answers repeat


def _images(found: Mapping[str, Any], messages: Sequence[Message], settings: FileTask) -> Sequence[str]:
    if settings.images is None:
        return ()
    paths = found[settings.images] or []
    if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
        raise BadRow(f"column {settings.images!r} is {str(paths)[:60]!r}; wanted: a list of paths of image files")
    marks = sum(message["content"].count(IMAGE) for message in messages)
    if marks != len(paths):
        raise BadRow(f"column {settings.images!r} has {len(paths)} images, and the prompt has {marks} {IMAGE}")
    return tuple(paths)


def _text(found: Mapping[str, Any], column: str, wanted: str) -> str:
    value = found[column]
    if not isinstance(value, str):
        raise BadRow(f"column {column!r} is {type(value).__name__}; wanted: {wanted}")
    return _encodable(value, column)


def _encodable(value: str, column: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise BadRow(f"column {column!r} holds half a surrogate pair (\\ud800 to \\udfff), which is no text") from None
    return value


def _word(found: Mapping[str, Any], column: str, types: tuple[type, ...]) -> str:
    value = found[column]
    if not isinstance(value, types) or isinstance(value, bool):
        names = ", ".join(kind.__name__ for kind in types)
        raise BadRow(f"column {column!r} is {type(value).__name__}; wanted: {names} (write anything else as text)")
    return _encodable(str(value), column)


def _messages(value: Any, settings: FileTask) -> list[Message]:
    """The turns of a conversation that ends with the user's; with the assistant's where that is the completion."""
    column = settings.prompt
    answered = settings.completion == column
    if isinstance(value, str) and not answered:
        return [{"role": "user", "content": _encodable(value, column)}]
    if not isinstance(value, list) or not value:
        raise BadRow(f"column {column!r} is {type(value).__name__}; wanted: text, or a list of messages")
    turns: list[Message] = []
    for turn in value:
        known = {k: v for k, v in turn.items() if v is not None} if isinstance(turn, dict) else {}
        if set(known) != {"role", "content"} or not all(isinstance(part, str) for part in known.values()):
            raise BadRow(f"column {column!r}: a message is {{role: text, content: text}}, not {str(turn)[:80]}")
        if known["role"] not in ROLES:
            raise BadRow(f"column {column!r}: role {known['role']!r} is none of {', '.join(ROLES)}")
        turns.append({"role": known["role"], "content": _encodable(known["content"], column)})
    for wanted in ("assistant", "user") if answered else ("user",):
        at = -1 if wanted == "assistant" or not answered else -2
        if len(turns) < -at or turns[at]["role"] != wanted:
            have = f"is {turns[at]['role']}'s" if len(turns) >= -at else "is not there"
            place = "last message" if at == -1 else "message before the last"
            raise BadRow(f"column {column!r}: the {place} {have}; it must be the {wanted}'s")
    if settings.system and turns[0]["role"] == "system":
        raise BadRow(f"column {column!r} begins with a system message, and `system` is set too; keep one of them")
    return turns
