"""Plain data to settings, strictly: every problem with the key that the user wrote, and the key that was meant."""

import json
import re
import types
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from opdctl.references import Problem, near_miss

MISSING = "???"
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
M = TypeVar("M", bound=BaseModel)


def validate(model: type[M], tree: Any) -> tuple[M | None, list[Problem]]:
    """The settings, or None and every problem with its key. A string is no number, a whole number is a number."""
    missing: list[str] = []
    tree = _without_missing(tree, "", missing)
    problems = [(key, REQUIRED) for key in missing]
    text = json.dumps(tree, default=str)
    settings = None
    try:
        settings = model.model_validate_json(text, strict=True)
    except ValidationError as error:
        data = json.loads(text)
        for detail in error.errors(include_url=False):
            path, holder = _path(detail["loc"], data)
            key = ".".join(map(str, path))
            if key not in missing:
                problems.append((key, _message(detail, path, holder, model, data)))
    return (None if problems else settings), list(dict.fromkeys(problems))


def _without_missing(tree: Any, key: str, missing: list[str]) -> Any:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    kept = {}
    for name, value in items:
        below = f"{key}.{name}" if key else str(name)
        if isinstance(value, str) and value == MISSING:
            missing.append(below)
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
    if kind == "missing":
        return REQUIRED
    if kind == "extra_forbidden":
        return "unknown key" + near_miss_key(str(path[-1]), _class_at(model, path[:-1], data))
    if kind in ("literal_error", "union_tag_invalid"):
        expected = context.get("expected") or context.get("expected_tags", "")
        word = given if kind == "literal_error" else context.get("tag")
        return f"'{word}' is not known" + near_miss(word, re.findall(r"'([^']*)'", str(expected)), "one of")
    if kind == "union_tag_not_found":
        return f"{str(context.get('discriminator', '')).strip(chr(39))}: {REQUIRED}"
    if kind == "value_error":
        return str(context.get("error", detail["msg"])) + (f", not {_show(given)}" if _is_leaf(given) else "")
    if kind == "string_pattern_mismatch":
        return f"{_show(given)} is no name: use letters, digits and _ . -, starting with a letter or digit"
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


def near_miss_key(word: str, model: type[BaseModel] | None) -> str:
    """Keys of the settings class, with those one level below under their full name."""
    if model is None:
        return ""
    below = {
        inner: f"{name}.{inner}"
        for name, field in model.model_fields.items()
        for part in _classes(field.annotation)
        for inner in part.model_fields
    }
    if word in below and word not in model.model_fields:
        return f" (did you mean '{below[word]}'? keys here: {', '.join(model.model_fields)})"
    return near_miss(word, model.model_fields, "keys here")


def _class_at(annotation: Any, path: Sequence[str | int], data: Any) -> type[BaseModel] | None:
    """The settings class that holds the keys at `path`."""
    for part in path:
        model = _chosen(annotation, data)
        if model is not None:
            annotation = model.model_fields[str(part)].annotation
        else:
            inner = [get_args(option)[-1] for option in _options(annotation) if get_origin(option) in (dict, list)]
            annotation = inner[0] if inner else None
        data = data[part]
    return _chosen(annotation, data)


def _chosen(annotation: Any, data: Any) -> type[BaseModel] | None:
    """Of a union of settings classes the one whose tag the data carry."""
    fitting = [model for model in _classes(annotation) if isinstance(data, dict) and _tag_fits(model, data)]
    return fitting[0] if fitting else None


def _tag_fits(model: type[BaseModel], data: Mapping[str, Any]) -> bool:
    tags = {
        name: get_args(f.annotation) for name, f in model.model_fields.items() if name in ("form", "task", "source")
    }
    return all(data.get(name, model.model_fields[name].default) in known for name, known in tags.items())


def _classes(annotation: Any) -> list[type[BaseModel]]:
    return [option for option in _options(annotation) if isinstance(option, type) and issubclass(option, BaseModel)]


def _options(annotation: Any) -> list[Any]:
    if get_origin(annotation) is Annotated:
        return _options(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [option for part in get_args(annotation) for option in _options(part)]
    return [] if get_origin(annotation) is Literal else [annotation]
