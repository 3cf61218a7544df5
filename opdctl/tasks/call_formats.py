"""How a model writes calls of tools: chosen by its chat template, read strictly.

A call that is not exactly in the format is an error that names what is wrong, for the model to read; nothing is
repaired, for what is repaired while training is not there when the model is served by another parser.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from opdctl.errors import StageRefused
from opdctl.tasks import ToolCall
from opdctl.tasks.environment import CallFormat

BEGIN, END = "<tool_call>", "</tool_call>"
RAW_BEGIN, RAW_END = "<call>", "</call>"
PYTHON_TAG = "<|python_tag|>"
THOUGHT_END = "</think>"  # what stands before it is never a call

_DESCRIPTION = f"""You may call these tools. Each line is one, as a JSON schema:
%s
To call one, end your turn with exactly this, and then read the answer:
{BEGIN}
{{"name": "NAME", "arguments": {{"ARGUMENT": VALUE}}}}
{END}"""


def call_format(chat_template: str | None) -> CallFormat:
    """The format of a model with this template; None: a model without one, which writes word by word.

    Raises StageRefused for a template that shows tools in a format not known here.
    """
    if chat_template is None:
        return Words()
    if not shows_tools(chat_template):
        return Tagged()  # as `with_tools` tells the model
    if BEGIN in chat_template and "<function=" not in chat_template:
        return Tagged()
    if PYTHON_TAG in chat_template or '"parameters": ' in chat_template:
        return Bare()
    raise StageRefused(
        "the model's chat template shows tools in a format that is not known: neither <tool_call> with JSON (Hermes, "
        'Qwen) nor {"name": ..., "parameters": ...} (Llama 3)',
        hint="put a chat template with one of them into the model's folder",
    )


def shows_tools(chat_template: str | None) -> bool:
    """Whether the template itself tells the model which tools there are, when it is given them."""
    return chat_template is not None and re.search(r"\btools\b", chat_template) is not None


def with_tools(
    messages: Sequence[Mapping[str, str]], tools: Sequence[Mapping[str, Any]], chat_template: str | None
) -> list[dict[str, str]]:
    """The messages, with tools and call format in the system prompt where the template does not show them."""
    told = [dict(message) for message in messages]
    if not tools or shows_tools(chat_template):
        return told
    text = _DESCRIPTION % "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    if told and told[0]["role"] == "system":
        return [{"role": "system", "content": f"{told[0]['content']}\n\n{text}"}, *told[1:]]
    return [{"role": "system", "content": text}, *told]


@dataclass(frozen=True)
class Tagged:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number after the text. Hermes 2 Pro, Qwen 2.5
    and 3, and models told so by their system prompt."""

    def render(self, text: str, calls: Sequence[ToolCall]) -> str:
        _refuse(text.rpartition(THOUGHT_END)[2], (BEGIN, END))
        parts = [f"{BEGIN}\n{_written(call, 'arguments')}\n{END}" for call in calls]
        return "\n".join([*([text] if text or not parts else []), *parts])

    def parse(self, action: str) -> tuple[str, list[ToolCall]]:
        after = action.rfind(THOUGHT_END)
        start = action.find(BEGIN, max(after, 0))
        if start < 0:
            if END in action[max(after, 0) :]:
                raise ValueError(f"{END} without {BEGIN} before it")
            return action, []
        text, rest, calls = action[:start].removesuffix("\n"), action[start:], []
        while rest:
            if not rest.startswith(BEGIN):
                raise ValueError(f"text after {END}: {rest[:40]!r}; a turn ends with its calls")
            call, rest = _read(rest.removeprefix(BEGIN), "arguments")
            if not rest.startswith(END):
                raise ValueError(f"{rest[:40]!r} where {END} is wanted" if rest else f"{END} is missing")
            calls.append(call)
            rest = rest.removeprefix(END).lstrip()
        return text, calls


@dataclass(frozen=True)
class Bare:
    """`{"name": ..., "parameters": {...}}` as the whole turn, or after text and `<|python_tag|>`; one call a turn.
    Llama 3.1, 3.2 and 3.3."""

    def render(self, text: str, calls: Sequence[ToolCall]) -> str:
        _refuse(text, (PYTHON_TAG,))
        if not calls and text.lstrip().startswith("{"):
            raise ValueError("a text that begins with { would be read as a call")
        if len(calls) > 1:
            raise ValueError(f"{len(calls)} calls; this model's format has one a turn")
        written = [_written(call, "parameters") for call in calls]
        return PYTHON_TAG.join([*([text] if text or not written else []), *written])

    def parse(self, action: str) -> tuple[str, list[ToolCall]]:
        text, tag, rest = action.partition(PYTHON_TAG)
        if not tag:
            if not action.lstrip().startswith("{"):
                return action, []
            text, rest = "", action
        call, rest = _read(rest, "parameters")
        if rest:
            raise ValueError(f"text after the call: {rest[:40]!r}; a turn has one call and ends with it")
        return text, [call]


@dataclass(frozen=True)
class Words:
    """`TEXT <call> NAME KEY: WORD ... </call>`, all separated by blanks: for models of a few hundred words, which have
    no JSON. A value is text of one word or more, none of which ends with a colon."""

    def render(self, text: str, calls: Sequence[ToolCall]) -> str:
        _refuse(text, (RAW_BEGIN, RAW_END))
        return " ".join([*text.split(), *(word for call in calls for word in self._words(call))])

    def _words(self, call: ToolCall) -> Iterable[str]:
        if call.name.split() != [call.name] or call.name in (RAW_BEGIN, RAW_END) or call.name.endswith(":"):
            raise ValueError(f"{call.name!r} is not one word")
        yield from (RAW_BEGIN, call.name)
        for key, value in call.arguments.items():
            words = value.split() if isinstance(value, str) else []
            if (
                not words
                or " ".join(words) != value
                or any(w.endswith(":") or w in (RAW_BEGIN, RAW_END) for w in words)
            ):
                raise ValueError(f"{key}: {value!r} cannot be written word by word; a chat template can write any JSON")
            if f"{key}:".split() != [f"{key}:"]:
                raise ValueError(f"argument {key!r} is not one word")
            yield from (f"{key}:", *words)
        yield RAW_END

    def parse(self, action: str) -> tuple[str, list[ToolCall]]:
        words = action.split()
        start = words.index(RAW_BEGIN) if RAW_BEGIN in words else len(words)
        if RAW_END in words[:start]:
            raise ValueError(f"{RAW_END} without {RAW_BEGIN} before it")
        calls, rest = [], words[start:]
        while rest:
            if rest[0] != RAW_BEGIN:
                raise ValueError(f"text after {RAW_END}: {rest[0]!r}; a turn ends with its calls")
            if RAW_END not in rest:
                raise ValueError(f"{RAW_END} is missing")
            end = rest.index(RAW_END)
            calls.append(self._call(rest[1:end]))
            rest = rest[end + 1 :]
        return " ".join(words[:start]), calls

    def _call(self, words: Sequence[str]) -> ToolCall:
        if not words or words[0].endswith(":") or RAW_BEGIN in words:
            raise ValueError(f"{' '.join(words)[:40]!r} is no call; wanted: NAME KEY: VALUE")
        arguments: dict[str, list[str]] = {}
        key = None
        for word in words[1:]:
            if word.endswith(":"):
                key = word[:-1]
                if key in arguments:
                    raise ValueError(f"argument {key!r} twice")
                arguments[key] = []
            elif key is None:
                raise ValueError(f"{word!r} where KEY: is wanted")
            else:
                arguments[key].append(word)
        if empty := [key for key, value in arguments.items() if not value]:
            raise ValueError(f"argument {empty[0]!r} has no value")
        return ToolCall(words[0], {key: " ".join(value) for key, value in arguments.items()})


def _refuse(text: str, marks: Sequence[str]) -> None:
    for mark in marks:
        if mark in text:
            raise ValueError(f"{mark} in the text would be read as part of a call")


def _written(call: ToolCall, arguments: str) -> str:
    """As transformers' templates write it: `tojson` with everything but ASCII as it is."""
    text = json.dumps({"name": call.name, arguments: call.arguments}, ensure_ascii=False, allow_nan=False)
    return text.replace(THOUGHT_END, "\\u003c/think>").replace(PYTHON_TAG, "\\u003c|python_tag|>")


def _read(text: str, arguments: str) -> tuple[ToolCall, str]:
    """The call that the text begins with, and what comes after it."""
    text = text.lstrip()
    try:
        value, end = _DECODER.raw_decode(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"the call is not JSON: {error.msg} (character {error.pos + 1})") from None
    except RecursionError:
        raise ValueError("the call is not JSON: nested too deep") from None
    if not isinstance(value, dict) or set(value) != {"name", arguments}:
        has = ", ".join(map(str, value)) if isinstance(value, dict) else type(value).__name__
        raise ValueError(f'a call is {{"name": ..., "{arguments}": ...}}, not {has or "empty"}')
    if not isinstance(value["name"], str):
        raise ValueError("the name of a call is text")
    if not isinstance(value[arguments], dict):
        raise ValueError(f'"{arguments}" of a call is an object, not {type(value[arguments]).__name__}')
    return ToolCall(value["name"], value[arguments]), text[end:].lstrip()


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("the call is not JSON: an object has a key twice")
    return found


def _no_number(name: str) -> Any:
    raise ValueError(f"the call is not JSON: {name} is no number")


_DECODER = json.JSONDecoder(object_pairs_hook=_once, parse_constant=_no_number)
