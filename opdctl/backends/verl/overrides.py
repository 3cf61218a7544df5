"""Overrides of verl's configuration: who owns a key, and how a value is written so that Hydra reads it back."""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from opdctl.errors import ConfigError

_BARE = re.compile(r"[A-Za-z_/][A-Za-z0-9_./:@-]*")  # a string that needs no quotes
_WORDS = frozenset({"null", "true", "false", "nan", "inf"})  # that Hydra reads as something else than a string
_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*([./][A-Za-z0-9_]+)*")


class Overrides:
    """verl's keys with their values, in order. A key that is not in verl's YAML, but in the dataclass behind it, is
    written with a `+`, as on verl's command line.
    """

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._plus: dict[str, str] = {}
        self._owner: dict[str, str] = {}

    def own(self, source: str, values: Mapping[str, Any]) -> None:
        """Keys that follow from the user's key `source`, or that opdctl relies on, for the reason that `source` gives:
        raw overrides of them are refused.
        """
        for key in self._add(values):
            self._owner[key] = source

    def choose(self, values: Mapping[str, Any]) -> None:
        """Keys that no setting of opdctl decides: stated, because verl's defaults differ from place to place, and
        open to raw overrides.
        """
        self._add(values)

    def _add(self, values: Mapping[str, Any]) -> list[str]:
        keys = []
        for written, value in values.items():
            key = written.lstrip("+")
            assert key not in self._values, f"{key} is set twice"
            self._values[key], self._plus[key] = value, written[: len(written) - len(key)]
            keys.append(key)
        return keys

    def add_raw(self, raw: Mapping[str, Any]) -> None:
        """The user's own overrides, last; nested mappings are dotted keys. Raises ConfigError for keys that opdctl
        owns and for what is no key.
        """
        problems, seen = [], set()
        for written, value in _flat(raw):
            key = written.lstrip("+")
            if not _KEY.fullmatch(key):
                problems.append(f"verl.{written}: not a key of verl; write it with dots, as a.b.c")
            elif owned := next((own for own in self._owner if _same_place(key, own)), None):
                source = self._owner[owned]
                where = f"itself: {source}" if " " in source else f"from {source}; change it there"
                problems.append(f"verl.{key}: opdctl sets {owned} {where}")
            elif key in seen:
                problems.append(f"verl.{key}: given twice, with and without a +")
            else:
                seen.add(key)
                self._values.pop(key, None)
                # `++` takes the key whether the YAML has it or only the dataclass; the check against verl's schema
                # finds those that neither has
                self._values[key], self._plus[key] = value, "++"
        if problems:
            raise ConfigError(problems)

    def arguments(self) -> list[str]:
        """`key=value`, as arguments of verl's command line."""
        return [f"{self._plus[key]}{key}={written(value)}" for key, value in self._values.items()]

    def __getitem__(self, key: str) -> Any:
        return self._values[key]


def _flat(raw: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in raw.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def _same_place(key: str, owned: str) -> bool:
    return key == owned or key.startswith(f"{owned}.") or owned.startswith(f"{key}.")


def written(value: Any) -> str:
    """A value in Hydra's override grammar. Raises ConfigError for one that the grammar cannot hold."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case int():
            return str(value)
        case float() if math.isfinite(value):
            return repr(value)
        case str():
            return _text(value)
        case list() | tuple():
            return f"[{','.join(map(written, value))}]"
        case Mapping():
            if bad := [key for key in value if not _BARE.fullmatch(str(key))]:
                raise ConfigError(f"Hydra cannot write the key {bad[0]!r}")
            return f"{{{','.join(f'{key}:{written(item)}' for key, item in value.items())}}}"
    raise ConfigError(f"Hydra cannot write the value {value!r}")


def _text(text: str) -> str:
    if _BARE.fullmatch(text) and text.lower() not in _WORDS:
        return text
    # OmegaConf reads `${` as an interpolation unless a backslash precedes it; backslashes of the text are doubled there
    plain = re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + r"\${", text)
    # Hydra's quotes: a backslash escapes quotes, and itself where quotes follow
    quoted = re.sub(r"(\\*)('|\Z)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), plain)
    return f"'{quoted}'"
