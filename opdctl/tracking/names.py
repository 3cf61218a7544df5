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


FAN_OUT = re.compile(r"([^\[\]]+)\[([\w.-]+=[^\[\],=]*(?:,[\w.-]+=[^\[\],=]*)*)\]")  # max[domain=general,effort=low]


def safe_name(name: str) -> str:
    """A key that MLflow accepts and people can read; `original_name` turns it back.

    The address `max[domain=general,effort=low]` becomes `max domain:general effort:low`; any other character that
    MLflow refuses becomes `:` and two hex digits a byte. Only a name that is then longer than 250 characters cannot be
    turned back: it ends in a digest.
    """
    safe = "/".join(_safe_part(part) for part in name.split("/"))
    if len(safe) <= LONGEST_NAME:
        return safe
    digest = hashlib.sha256(name.encode()).hexdigest()[:12]
    return f"{safe[: LONGEST_NAME - 13]}-{digest}"


def _safe_part(part: str) -> str:
    if (address := FAN_OUT.fullmatch(part)) is None:
        return _escape(part) or ":_"
    pairs = [pair.split("=") for pair in address[2].split(",")]
    return " ".join([_escape(address[1]), *(f"{axis}:{_escape(value)}" for axis, value in pairs)])


def _escape(text: str) -> str:
    """A leading dot counts as refused, for `..` is; the blank, because it separates axes."""
    return re.sub(r"[^\w.-]|^\.", lambda found: "".join(f":{byte:02x}" for byte in found[0].encode()), text)


def original_name(safe: str) -> str:
    """The inverse of `safe_name`."""
    return "/".join(_original_part(part) for part in safe.split("/"))


def _original_part(part: str) -> str:
    if part == ":_":
        return ""
    base, *axes = part.split(" ")
    pairs = [axis.split(":", 1) for axis in axes]
    shown = ",".join(f"{axis}={_unescape(value)}" for axis, value in pairs)
    return f"{_unescape(base)}[{shown}]" if axes else _unescape(base)


def _unescape(text: str) -> str:
    codes = re.compile(r"(?::[0-9a-f]{2})+")
    return codes.sub(lambda found: bytes.fromhex(found[0].replace(":", "")).decode(), text)


@dataclass
class Flat:
    """What a tree of metrics holds."""

    numbers: dict[str, float] = field(default_factory=dict)  # finite; safe name -> value
    not_finite: list[str] = field(default_factory=list)  # safe names; MLflow would store inf as 1.8e308
    texts: dict[str, str] = field(default_factory=dict)  # what is no number


def flatten_metrics(metrics: Mapping[str, Any]) -> Flat:
    flat = Flat()
    for name, value in _leaves(metrics):
        key = safe_name(name)
        if isinstance(value, int | float):  # True and False are 1 and 0
            number = _as_float(value)
            if math.isfinite(number):
                flat.numbers[key] = number
            else:
                flat.not_finite.append(key)
        elif value is not None:
            flat.texts[key] = cut(_as_text(value), LONGEST_TAG)
    return flat


def flatten_params(settings: Mapping[str, Any]) -> dict[str, str]:
    """One param a leaf: `config.train.optimizer.lr`. Long values are cut; the whole is in the artifact."""
    return {safe_name(name): cut(_as_text(value), LONGEST_PARAM) for name, value in _leaves(settings, ".")}


def cut(text: str, limit: int) -> str:
    """At most `limit` characters; a cut text ends with its length and digest, so unequal ones stay unequal."""
    if len(text) <= limit:
        return text
    end = f"... ({len(text)} characters, sha256 {hashlib.sha256(text.encode()).hexdigest()[:16]})"
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
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # an integer beyond 1.8e308
        return math.inf
