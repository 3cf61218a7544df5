"""Berkeley Function Calling Leaderboard, version 4, the Python categories of one turn: evaluation only.

Patil et al., ICML 2025; Apache-2.0; `opdctl data fetch bfcl` gets it. The model's own chat template shows the
functions (their types in JSON Schema's words, dots of names as `_`), and its calls are read strictly by
`call_formats`.

Correct, as the leaderboard's AST checker judges:

    simple_python, multiple       the one call that is expected
    parallel, parallel_multiple   the expected calls in any order, and no other
    irrelevance                   no call

A call is as expected when its name is, it has all that is required, no argument that is unknown, and each argument is
one of the accepted values; one that may be absent has "" among them. Text is compared without case, blanks and the
signs ,./-_*^ ; a whole number may stand for a decimal one.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from opdctl.settings import BfclTask, EffortSettings
from opdctl.tasks import Prompt, ToolCall, Verdict
from opdctl.tasks.call_formats import Bare, Tagged
from opdctl.tasks.published import Problem, Published, read_jsonl

TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}


class Bfcl(Published):
    """The task. `Prompt.answer` is {expected: a list of {name: {argument: accepted values}}}."""

    def __init__(
        self, name: str, settings: BfclTask, efforts: EffortSettings | None, folder: Path | None = None
    ) -> None:
        self._format = Bare() if settings.calls == "bare" else Tagged()
        source, key = (folder or Path.cwd()) / str(settings.path), f"tasks.{name}.path"
        asked, *answers = settings.files()
        expected = {row["id"]: row["ground_truth"] for file in answers for row in read_jsonl(source / file, key)}
        problems = [
            Problem(
                row["question"][0][-1]["content"],
                {"expected": expected.get(row["id"], [])},
                None,
                tuple(_tool(function) for function in row["function"]),
            )
            for row in read_jsonl(source / asked, key)
        ]
        super().__init__(name, settings, efforts, {"train": [], "validation": [], "test": problems})

    def verify(self, prompt: Prompt, completion: str) -> Verdict:
        try:
            _, calls = self._format.parse(completion)
            reason = _mismatch(calls, prompt.answer["expected"])
        except (ValueError, RecursionError) as error:
            reason = f"no call that can be read: {error}"
        return Verdict(not reason, float(not reason), {"reason": reason})

    def reference(self, prompt: Prompt) -> str:
        calls = [
            ToolCall(_name(name), {key: _first(values) for key, values in arguments.items() if values[0] != ""})
            for call in prompt.answer["expected"]
            for name, arguments in call.items()
        ]
        return self._format.render("" if calls else "None of the functions does that.", calls)


def _name(name: str) -> str:
    return name.replace(".", "_")


def _tool(function: Mapping[str, Any]) -> dict[str, Any]:
    told = {"description": function["description"], "parameters": _schema(function["parameters"])}
    return {"type": "function", "function": {"name": _name(function["name"]), **told}}


def _schema(given: Any) -> Any:
    if isinstance(given, list):
        return [_schema(item) for item in given]
    if not isinstance(given, dict):
        return given
    return {
        key: TYPES.get(value, value) if key == "type" and isinstance(value, str) else _schema(value)
        for key, value in given.items()
    }


def _first(values: Sequence[Any]) -> Any:
    """The first accepted value; an object's are a list each."""
    value = values[0]
    if isinstance(value, dict):
        return {key: _first(inner) for key, inner in value.items() if inner[0] != ""}
    if isinstance(value, list):
        return [_first([item]) if isinstance(item, dict) else item for item in value]
    return value


# -------------------------------------------------------------------------------------------------------- judging


def _mismatch(calls: Sequence[ToolCall], expected: Sequence[Mapping[str, Any]]) -> str:
    if len(calls) != len(expected):
        return f"{len(calls)} calls, {len(expected)} expected"
    left = list(calls)
    for wanted in expected:
        ((name, arguments),) = wanted.items()
        found = next((call for call in left if _same(call, name, arguments)), None)
        if found is None:
            return f"no call is {name}({json.dumps(arguments)[:200]})"
        left.remove(found)
    return ""


def _same(call: ToolCall, name: str, accepted: Mapping[str, Sequence[Any]]) -> bool:
    return _name(call.name) == _name(name) and _members(call.arguments, accepted)


def _members(given: Mapping[str, Any], accepted: Mapping[str, Sequence[Any]]) -> bool:
    return all(key in accepted and _among(value, accepted[key]) for key, value in given.items()) and all(
        key in given or "" in values for key, values in accepted.items()
    )


def _among(value: Any, accepted: Sequence[Any]) -> bool:
    return any(_equal(value, one) for one in accepted)


def _equal(value: Any, accepted: Any) -> bool:
    if isinstance(accepted, str) and isinstance(value, str):
        return _standard(value) == _standard(accepted)
    if isinstance(accepted, bool) or isinstance(value, bool):
        return value is accepted
    if isinstance(accepted, dict) and isinstance(value, dict):
        return _members(value, accepted)
    if isinstance(accepted, list) and isinstance(value, list):
        return len(value) == len(accepted) and all(map(_equal, value, accepted))
    return bool(value == accepted)  # int, float, None; different types are unequal


def _standard(text: str) -> str:
    return re.sub(r"[ ,./\-_*^]", "", text).lower().replace("'", '"')
