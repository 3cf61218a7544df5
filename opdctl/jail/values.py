"""Values of a jailed program as JSON, told apart by their plain types, and back.

`encode` runs inside a jail, where nothing it says can be trusted; `decode` makes of any JSON a value of plain types or
raises ValueError. Of an instance of a subclass of int, str, list, ... only what the base class
holds is told, so its own `__eq__`, `__iter__` or `__len__` count for nothing.
"""

import math
from dataclasses import dataclass
from typing import Any

DEPTH = 50  # of nested containers


@dataclass(frozen=True)
class Raised:
    """What came of a call that raised; it equals no value."""

    kind: str  # of the exception: "ValueError"
    message: str


def encode(value: Any, depth: int = DEPTH) -> Any:
    """JSON that `decode` understands. Raises TypeError for what is no plain data."""
    if depth == 0:
        raise TypeError(f"a value nested more than {DEPTH} deep")
    if value is None or value is True or value is False:
        return value
    for kind in _mro(type(value)):
        if kind in _ENCODERS:
            return _ENCODERS[kind](value, depth - 1)
    raise TypeError(f"a value of type {type(value).__name__} is none of plain data")


def _int(value: Any, depth: int) -> Any:
    plain = int.__add__(value, 0)
    return plain if -(2**63) <= plain < 2**63 else {"int": int.__format__(plain, "x")}


def _float(value: Any, depth: int) -> Any:
    plain = float.__add__(value, 0.0) if value else float.__float__(value)
    return plain if math.isfinite(plain) else {"float": float.__repr__(plain)}


def _complex(value: Any, depth: int) -> Any:
    return {"complex": [_float(part, depth) for part in (complex.real.__get__(value), complex.imag.__get__(value))]}


def _many(kind: Any, tag: str) -> Any:
    def encoder(value: Any, depth: int) -> Any:
        items = [encode(item, depth) for item in kind.__iter__(value)]
        return {tag: items} if tag else items

    return encoder


_mro = type.__dict__["__mro__"].__get__  # a metaclass may say otherwise
_ENCODERS: dict[Any, Any] = {
    int: _int,
    float: _float,
    complex: _complex,
    str: lambda value, depth: str.__str__(value)[:],
    bytes: lambda value, depth: {"bytes": bytes.hex(value)},
    list: _many(list, ""),
    tuple: _many(tuple, "tuple"),
    set: _many(set, "set"),
    frozenset: _many(frozenset, "frozenset"),
    dict: lambda value, depth: {"dict": [[encode(key, depth), encode(item, depth)] for key, item in dict.items(value)]},
}


def decode(given: Any) -> Any:
    """The value of what `encode` gave. Raises ValueError for anything else."""
    if given is None or isinstance(given, bool | int | float | str):
        return given
    if isinstance(given, list):
        return [decode(item) for item in given]
    if not isinstance(given, dict) or len(given) != 1:
        raise ValueError("not an encoded value")
    ((tag, content),) = given.items()
    try:
        match tag:
            case "int":
                return int(content, 16)
            case "float":
                return {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[content]
            case "complex":
                real, imaginary = content
                return complex(float(decode(real)), float(decode(imaginary)))
            case "bytes":
                return bytes.fromhex(content)
            case "tuple" | "set" | "frozenset":
                kind = {"tuple": tuple, "set": set, "frozenset": frozenset}[tag]
                return kind(decode(item) for item in _listed(content))
            case "dict":
                return {decode(key): decode(item) for key, item in _listed(content)}
            case "raised":
                name, message = content
                return Raised(str(name), str(message))
    except (TypeError, KeyError) as error:  # no text, a list as a key
        raise ValueError(f"not an encoded {tag}") from error
    raise ValueError(f"not an encoded value: {tag[:40]!r}")


def _listed(content: Any) -> list[Any]:
    if not isinstance(content, list):
        raise ValueError("not a list")
    return content
