"""Names and values that MLflow takes, made from any that a stage may report."""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

LONGEST_NAME = 250  # characters, MLflow's limit for keys
LONGEST_PARAM = 5_900  # below MLflow's limit of 6,000, past which it cuts and warns
LONGEST_TAG = 4_900  # below the 5,000 of older servers
CUT = "::-"  # stands in no name that was only escaped
MARKER = "step"  # logged with every event: its last value in MLflow is the end of what is there
NOT_FINITE = "not_finite/"  # before the name of a value that MLflow would change: inf becomes 1.8e308 there
CODES = {math.inf: 1.0, -math.inf: -1.0}  # and 0 for nan
# Our own, and MLflow's: another's first letter is escaped.
RESERVED = re.compile(r"(step|run|stage|kind)$|not_finite/|(mlflow|opdctl|text|name|input|changed|gate|watch)\.")

FAN_OUT = re.compile(r"([^\[\]]+)\[([\w.-]+=[^\[\],=]*(?:,[\w.-]+=[^\[\],=]*)*)\]")  # max[domain=general,effort=low]


def safe_name(name: str) -> str:
    """A key that MLflow accepts and people can read; `unsafe_name` turns it back.

    The address `max[domain=general,effort=low]` becomes `max domain:general effort:low`; any other character that
    MLflow refuses becomes `:` and two hex digits a byte. A name that is then longer than 250 characters ends in `::-`
    and a digest instead, which no other name does: what it was has to be kept elsewhere.
    """
    safe = "/".join(_safe_part(part) for part in name.split("/"))
    return fit(f":{ord(safe[0]):02x}{safe[1:]}" if RESERVED.match(safe) else safe, name)


def fit(safe: str, name: str | None = None) -> str:
    """`safe`, or where it is longer than a key may be its start and the digest of the `name` that it stands for."""
    return safe if len(safe) <= LONGEST_NAME else _marked(safe, safe if name is None else name)


def _marked(safe: str, name: str) -> str:
    return f"{safe[: LONGEST_NAME - len(CUT) - 12]}{CUT}{hashlib.sha256(_bytes(name)).hexdigest()[:12]}"


def _safe_part(part: str) -> str:
    if (address := FAN_OUT.fullmatch(part)) is None:
        return _escape(part) or ":_"
    pairs = [pair.split("=") for pair in address[2].split(",")]
    return " ".join([_escape(address[1]), *(f"{axis}:{_escape(value)}" for axis, value in pairs)])


def _escape(text: str) -> str:
    """A leading dot counts as refused, for `..` is; the blank, because it separates axes."""
    return re.sub(r"[^\w.-]|^\.", lambda found: "".join(f":{byte:02x}" for byte in _bytes(found[0])), text)


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogatepass")  # JSON may hold half a surrogate pair


def unsafe_name(safe: str) -> str:
    """The inverse of `safe_name`, for names that were not too long."""
    return "/".join(_unsafe_part(part) for part in safe.split("/"))


def _unsafe_part(part: str) -> str:
    if part == ":_":
        return ""
    base, *axes = part.split(" ")
    pairs = [axis.split(":", 1) for axis in axes]
    shown = ",".join(f"{axis}={_unescape(value)}" for axis, value in pairs)
    return f"{_unescape(base)}[{shown}]" if axes else _unescape(base)


def _unescape(text: str) -> str:
    codes = re.compile(r"(?::[0-9a-f]{2})+")
    return codes.sub(lambda found: bytes.fromhex(found[0].replace(":", "")).decode(errors="surrogatepass"), text)


@dataclass
class Flat:
    """What a tree of metrics holds."""

    numbers: dict[str, float] = field(default_factory=dict)  # finite; safe name -> value
    texts: dict[str, str] = field(default_factory=dict)  # what is no number, or not the same as a float
    names: dict[str, str] = field(default_factory=dict)  # key that ends in a digest -> the name it stands for


def flatten_metrics(metrics: Mapping[str, Any]) -> Flat:
    """`reported` is the inverse for one number."""
    flat = Flat()
    taken: set[str] = set()
    for name, value in _leaves(metrics):
        value = value.item() if getattr(value, "size", 0) == 1 else value  # NumPy's
        if value is None:
            continue
        key = safe_name(name)
        if key in taken:  # {"a/b": 1, "a": {"b": 2}}
            key = _marked(key, f"{name} {len(taken)}")
        taken.add(key)
        if isinstance(value, int | float):  # True and False are 1 and 0
            number = _as_float(value)
            used = key if math.isfinite(number) else fit(NOT_FINITE + key, name)
            flat.numbers[used] = number if math.isfinite(number) else CODES.get(number, 0.0)
            exact = not isinstance(value, int) or number == value
        else:
            used, exact = key, False
        if not exact:
            flat.texts[key] = cut(_as_text(value), LONGEST_TAG)
        if CUT in used:
            flat.names[used] = name
    return flat


def reported(key: str, value: float) -> tuple[str, float]:
    """Name and value of a metric as it was reported, from those that MLflow has; of a cut name what is left of it."""
    if not key.startswith(NOT_FINITE):
        return unsafe_name(key), value
    number = next((inf for inf, code in CODES.items() if code == value), math.nan)
    return unsafe_name(key.removeprefix(NOT_FINITE)), number


def flatten_params(settings: Mapping[str, Any]) -> dict[str, str]:
    """One param a leaf: `config.train.optimizer.lr`. Long values are cut; the whole is in the artifact."""
    return {safe_name(name): cut(_as_text(value), LONGEST_PARAM) for name, value in _leaves(settings, ".")}


def cut(text: str, limit: int) -> str:
    """At most `limit` characters; a cut text ends with its length and digest, so unequal ones stay unequal."""
    if len(text) <= limit:
        return text
    end = f"... ({len(text)} characters, sha256 {hashlib.sha256(_bytes(text)).hexdigest()[:16]})"
    return text[: limit - len(end)] + end


def _leaves(tree: Mapping[str, Any], joint: str = "/", prefix: str = "") -> list[tuple[str, Any]]:
    leaves: list[tuple[str, Any]] = []
    for name, value in tree.items():
        if isinstance(value, Mapping):
            leaves += _leaves(value, joint, f"{prefix}{name}{joint}")
        else:
            leaves.append((f"{prefix}{name}", value))
    return leaves


def _as_text(value: Any) -> str:
    """Databases refuse halves of surrogate pairs and zero bytes."""
    text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    return text.encode(errors="backslashreplace").decode().replace("\0", "\\x00")


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # an integer beyond 1.8e308
        return math.inf
