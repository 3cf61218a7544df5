"""Plain data to settings, strictly: every problem with the key that the user wrote, and the key that was meant."""

import json
import re
import types
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from opdctl.fields import NAME, NAME_PATTERN
from opdctl.references import Problem, near_miss

MISSING = "???"
BROKEN = "\0broken\0"  # in the place of a value whose interpolation failed, which was told already
REQUIRED = "required, and not set: nothing can choose it for you; write it in the pipeline or in the scale"

_WANTED = {
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "string_type": "must be text",
    "list_type": "must be a list",
    "dict_type": "must be a mapping",
    "model_type": "must be a mapping",
    "model_attributes_type": "must be a mapping",
    "finite_number": "must be a finite number",
}
_TAGS = ("form", "rule", "method", "task", "source", "harness")  # keys that choose between settings classes
M = TypeVar("M", bound=BaseModel)


def validate(model: type[M], tree: Any) -> tuple[M | None, list[Problem]]:
    """The settings, or None and every problem with its key. A string is no number, a whole number is a number.

    A key that the settings do not have is taken away by null: so a `form` can be another than that of a preset, whose
    keys Hydra leaves beside the new ones.
    """
    missing: dict[str, str] = {}
    tree = _without_missing(tree, "", missing)
    problems = [(key, REQUIRED) for key, value in missing.items() if value == MISSING]
    text = json.dumps(tree, default=str)
    settings = None
    try:
        settings = model.model_validate_json(text, strict=True)
    except ValidationError as error:
        data = json.loads(text)
        taken = [_path(detail["loc"], data) for detail in error.errors() if _is_taken_away(detail)]
        if taken:
            for path, holder in taken:
                holder.pop(path[-1], None)
            settings, rest = validate(model, data)
            return (None if problems else settings), problems + rest
        for detail in error.errors(include_url=False):
            path, holder = _path(detail["loc"], data)
            if tag := _absent_tag(detail):
                path.append(tag)
            key = ".".join(map(str, path))
            if not any(absent == key or absent.startswith(f"{key}.") for absent in missing):
                problems.append((key, _message(detail, path, holder, model, data)))
    return (None if problems or missing else settings), list(dict.fromkeys(problems))


def _is_taken_away(detail: ErrorDetails) -> bool:
    return detail["type"] == "extra_forbidden" and detail["input"] is None


def _absent_tag(detail: ErrorDetails) -> str:
    """The key that chooses between the settings classes of a union, where it is missing or unknown."""
    if detail["type"] not in ("union_tag_not_found", "union_tag_invalid"):
        return ""
    name = str(detail.get("ctx", {}).get("discriminator", "")).strip("'")
    return {"_task_tag()": "task", "_harness_tag()": "harness"}.get(name, name)


def _without_missing(tree: Any, key: str, missing: dict[str, str]) -> Any:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    kept = {}
    for name, value in items:
        below = f"{key}.{name}" if key else str(name)
        if isinstance(value, str) and value in (MISSING, BROKEN):
            missing[below] = value
        else:
            kept[name] = _without_missing(value, below, missing)
    return kept if isinstance(tree, dict) else list(kept.values()) if isinstance(tree, list) else tree


def _path(loc: Sequence[str | int], data: Any) -> tuple[list[str | int], Any]:
    """The part of an error's location that the data have (pydantic mixes in the tags of unions), and what holds it."""
    path: list[str | int] = []
    holder = data
    for at, part in enumerate(loc):
        inside = isinstance(data, dict) and part in data or isinstance(data, list) and isinstance(part, int)
        if inside:
            holder, data = data, data[part]
            path.append(part)
        elif at == len(loc) - 1 and isinstance(data, dict):
            path.append(part)  # a key that should be there, or `[key]` of a mapping whose key is bad
            holder = data
    return path, holder


def _message(detail: ErrorDetails, path: Sequence[str | int], holder: Any, model: type[BaseModel], data: Any) -> str:
    kind, given = detail["type"], detail["input"]
    context = detail.get("ctx", {})
    if kind in ("missing", "union_tag_not_found"):
        return REQUIRED
    if kind == "extra_forbidden":
        annotation, at = _place(model, path[:-1], data)
        chosen, unknown = _chosen(annotation, at), str(path[-1])
        others = [option for option in _classes(annotation) if option is not chosen and unknown in option.model_fields]
        hint = f"; what a preset or a default gave is taken away by {unknown}: null" if others else ""
        return "unknown key" + _near_miss_key(unknown, chosen) + hint
    if kind in ("literal_error", "union_tag_invalid"):
        expected = context.get("expected") or context.get("expected_tags", "")
        word = given if kind == "literal_error" else context.get("tag")
        return f"'{word}' is not known" + near_miss(word, re.findall(r"'([^']*)'", str(expected)), "one of")
    if kind == "value_error":
        return str(context.get("error", detail["msg"])) + (f", not {_show(given)}" if _is_leaf(given) else "")
    if kind == "string_pattern_mismatch" and context.get("pattern") == NAME_PATTERN:
        return f"'{given}' is no name: use {NAME}"
    if kind in ("too_short", "too_long"):
        word = "at least" if kind == "too_short" else "at most"
        return f"must have {word} {context.get('min_length', context.get('max_length'))} items, not {len(given)}"
    wanted = _WANTED.get(kind) or detail["msg"].replace("Input should", "must")
    return f"{wanted}, not {_show(given)}"


def _is_leaf(value: Any) -> bool:
    return not isinstance(value, dict | list)


def _show(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case str():
            return f"the text '{value}'"
        case dict():
            return "a mapping"
        case list():
            return f"a list of {len(value)}"
    return str(value)


def _near_miss_key(word: str, model: type[BaseModel] | None) -> str:
    """Keys of the settings class, with those one level below under their full name."""
    if model is None:
        return ""
    below = {
        inner: f"{name}.{inner}"
        for name, field in model.model_fields.items()
        for part in _classes(field.annotation)
        for inner in part.model_fields
    }
    names = below | {name: name for name in model.model_fields}
    close = get_close_matches(word, names, n=1)
    meant = f"did you mean '{names[close[0]]}'? " if close else ""
    return f" ({meant}keys here: {', '.join(model.model_fields)})"


def _place(annotation: Any, path: Sequence[str | int], data: Any) -> tuple[Any, Any]:
    """What may stand at `path`, as an annotation, and what does."""
    for part in path:
        model = _chosen(annotation, data)
        if model is not None:
            annotation = model.model_fields[str(part)].annotation
        else:
            inner = [get_args(option)[-1] for option in _options(annotation) if get_origin(option) in (dict, list)]
            annotation = inner[0] if inner else None
        data = data[part]
    return annotation, data


def _chosen(annotation: Any, data: Any) -> type[BaseModel] | None:
    """Of a union of settings classes the one whose tag the data carry."""
    fitting = [model for model in _classes(annotation) if isinstance(data, dict) and _tag_fits(model, data)]
    return fitting[0] if fitting else None


def _tag_fits(model: type[BaseModel], data: Mapping[str, Any]) -> bool:
    tags = {name: get_args(f.annotation) for name, f in model.model_fields.items() if name in _TAGS}
    return all(data.get(name, model.model_fields[name].default) in known for name, known in tags.items())


def _classes(annotation: Any) -> list[type[BaseModel]]:
    return [option for option in _options(annotation) if isinstance(option, type) and issubclass(option, BaseModel)]


def _options(annotation: Any) -> list[Any]:
    if get_origin(annotation) is Annotated:
        return _options(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [option for part in get_args(annotation) for option in _options(part)]
    return [] if get_origin(annotation) is Literal else [annotation]
