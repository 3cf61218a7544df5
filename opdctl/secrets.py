"""Secrets: a pipeline holds references to them, never themselves; what is written or shown is redacted.

`${secret:NAME}` stands for the environment variable NAME in settings, on disk, in MLflow and in `plan`. Three sources:

- `${secret:NAME}` in a pipeline, and `${oc.env:NAME}` where the name ends in TOKEN, KEY, PASSWORD, ... or the value has
  the shape of a secret;
- by shape, anywhere: user and password of an address, `token=` in its query, the prefixes of well-known tokens;
- by key: `api_key: ...`, the path of `notify.webhook`, what follows `--token` in `notify.command`.

What was written out in a pipeline or an override is put into this process's environment as OPDCTL_SECRET_<KEY>, where
workers find it. Those who hand a value to the outside call `reveal`; those who write free text call `redact`.
"""

import json
import os
import re
import sys
from collections.abc import Iterable
from functools import lru_cache
from typing import Any
from urllib.parse import quote, quote_plus, unquote

from opdctl.errors import ConfigError

REFERENCE = re.compile(r"\$\{secret:([A-Za-z_]\w*)\}")
MASK = "***"
MADE = "OPDCTL_SECRET_"  # how variables begin that hold what was written out

_LEAST = 8  # letters of a variable's value that is looked for although no pipeline refers to it
_WORD = 3  # of one that is looked for as a word; from `_LEAST` on within words too

# PWD itself is a folder
_VARIABLE = re.compile(r"(?:^|_)(?:TOKEN|SECRET|PASSWORD|PASSWD|PASS|API_?KEY|KEY|CREDENTIALS?)$|_PWD$|^" + MADE, re.I)
# of `eos_token` and its like nothing is secret
_NOUN = r"(?:(?:api|access|auth|hf|refresh|session)_?token|secret|passw(?:or)?d|(?:api|access|private|secret)_?key)"
_KEY = re.compile(rf"(?:^|[._-])(?:{_NOUN}|credentials?|authorization)$|(?:^|\.)token$", re.I)
_FLAG = re.compile(rf"--?[\w-]*?(?:{_NOUN.replace('_?', '[_-]?')}|token)", re.I)
_NAMES_NO_SECRET = ("labels", "route")  # mappings whose keys are words of the user's

_SHAPES = (
    re.compile(r"://(?P<secret>[^\s/?#'\"]+)@"),  # of an address
    re.compile(r"[?&][\w-]*(?:token|key|secret|sig|signature|passw(?:or)?d|pwd)=(?P<secret>[^&\s#'\"]+)", re.I),
    re.compile(r"hooks\.slack\.com/(?P<secret>[\w/-]{12,})"),
    re.compile(r"\bBearer (?P<secret>[\w.~+/=-]{16,})", re.I),
    re.compile(r"(?P<secret>-----BEGIN [A-Z ]*PRIVATE KEY-----.*?-----END [A-Z ]*PRIVATE KEY-----)", re.S),
    re.compile(
        r"(?<![A-Za-z0-9])(?P<secret>hf_[A-Za-z0-9]{16,}|sk-[\w-]{16,}|gh[opsru]_[A-Za-z0-9]{16,}|github_pat_\w{16,}"
        r"|glpat-[\w-]{16,}|xox[a-z]-[\w-]{10,}|A[KS]IA[0-9A-Z]{16}|AIza[\w-]{30,}|nvapi-[\w-]{16,}|dapi[0-9a-f]{32}"
        r"|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)"
    ),
)

_referred: set[str] = set()  # variables that a reference was made to, or followed


# ------------------------------------------------------------------------------------------------ into a pipeline


def from_environment(name: str) -> str | None:
    """The reference that `${oc.env:NAME}` becomes; None where the variable is no secret."""
    value = os.environ.get(name, "")
    if not value or not (_VARIABLE.search(name) or _has_shape(value)):
        return None
    return reference(name)


def reference(name: str) -> str:
    """Raises ConfigError where there is no such variable."""
    if not os.environ.get(name):
        raise ConfigError(f"the environment variable {name} is not set", hint=_EXPORT)
    _referred.add(name)
    return f"${{secret:{name}}}"


def conceal(tree: Any, key: str = "") -> Any:
    """A copy of a tree of plain data at `key` of a pipeline, with references in the place of secrets written out."""
    match tree:
        case dict():
            return {name: conceal(value, f"{key}.{name}" if key else str(name)) for name, value in tree.items()}
        case list() if key == "notify.command":
            return [_argument(tree, at, f"{key}.{at}") for at in range(len(tree))]
        case list():
            return [conceal(value, f"{key}.{at}") for at, value in enumerate(tree)]
        case str():
            return _concealed(tree, key)
    return tree


def _concealed(text: str, key: str) -> str:
    above, _, last = key.rpartition(".")
    by_key = _KEY.search(last) and above.rpartition(".")[2] not in _NAMES_NO_SECRET
    if by_key and text and not REFERENCE.search(text):
        return _made(text, key)
    if key == "notify.webhook" and (found := re.fullmatch(r"(\w+://[^/\s]+/)([^\s$]+)", text)):
        return _by_shape(found[1], key) + _made(found[2], f"{key}.path")
    return _by_shape(text, key)


def _argument(command: list[Any], at: int, key: str) -> Any:
    text, before = command[at], command[at - 1] if at else ""
    if not isinstance(text, str):
        return text
    flag, equals, value = text.partition("=")
    if equals and _FLAG.fullmatch(flag if flag.startswith("-") else f"-{flag}") and not REFERENCE.search(value):
        return f"{flag}={_made(value, key)}"
    if isinstance(before, str) and _FLAG.fullmatch(before) and not REFERENCE.search(text):
        return _made(text, key)
    return _by_shape(text, key)


def _by_shape(text: str, key: str) -> str:
    for number, shape in enumerate(_SHAPES):
        for at, found in reversed(list(enumerate(shape.finditer(text)))):
            start, end = found.span("secret")
            if not REFERENCE.search(found["secret"]):
                text = text[:start] + _made(found["secret"], f"{key}.{number}.{at}") + text[end:]
    return text


def _made(value: str, key: str) -> str:
    name = MADE + re.sub(r"\W+", "_", key, flags=re.A).strip("_").upper()
    os.environ[name] = value
    return reference(name)


def _has_shape(text: str) -> bool:
    return any(shape.search(text) for shape in _SHAPES)


# ------------------------------------------------------------------------------------------------ out of it

_EXPORT = "export it in the shell that starts opdctl: opdctl writes no secret to disk, so it cannot find it elsewhere"


def reveal(value: Any) -> Any:
    """A copy of plain data with the secrets that it refers to. Raises ConfigError for a variable that is not set."""
    match value:
        case dict():
            return {name: reveal(item) for name, item in value.items()}
        case list():
            return [reveal(item) for item in value]
        case str():
            return REFERENCE.sub(lambda found: _value(found[1]), value)
    return value


def _value(name: str) -> str:
    value = os.environ.get(name)
    if value is None:
        told = "was written out in the pipeline" if name.startswith(MADE) else "is a secret of the pipeline"
        raise ConfigError(f"the environment variable {name} is not set, and {told}", hint=_EXPORT)
    _referred.add(name)
    return value


def redact(text: str) -> str:
    """The text with every secret that is known, or looks like one, masked."""
    if (known := _known(tuple(sorted(_values())))) is not None:
        text = known.sub(MASK, text)
    for shape in _SHAPES:
        text = shape.sub(_mask, text)
    return text


def shown(text: str) -> str:
    """A setting to be shown: references as the user wrote them, what was written out masked."""
    return redact(REFERENCE.sub(lambda found: MASK if found[1].startswith(MADE) else found[0], text))


def _mask(found: re.Match[str]) -> str:
    start, end = (at - found.start() for at in found.span("secret"))
    whole, secret = found[0], found["secret"]
    return whole if secret == MASK or REFERENCE.search(secret) else whole[:start] + MASK + whole[end:]


def command_line(arguments: Iterable[str] | None = None) -> list[str]:
    """`sys.argv`, or other arguments, to be written down or shown."""
    return [_argument_shown(argument) for argument in (sys.argv if arguments is None else arguments)]


def _argument_shown(text: str) -> str:
    key, equals, value = text.partition("=")
    if equals and value and _KEY.search(key) and "${" not in value:
        return f"{key}={MASK}"
    return redact(text)


def _values() -> Iterable[str]:
    for name, value in os.environ.items():
        if name in _referred or name.startswith(MADE) or (_VARIABLE.search(name) and len(value) >= _LEAST):
            yield value
            yield from _parts(value)


def _parts(value: str) -> Iterable[str]:
    """What stands for a secret elsewhere: the password of an address, and spellings of it."""
    for user in re.findall(r"://([^\s/?#]+)@", value) or [value]:
        password = user.partition(":")[2]
        yield from (password, unquote(password))
    yield from (quote(value, safe=""), quote_plus(value), json.dumps(value)[1:-1])


@lru_cache(maxsize=4)
def _known(values: tuple[str, ...]) -> re.Pattern[str] | None:
    """The longest first, for one may be part of another. Short ones are words: `abc` does not mask `abcd`."""
    ordered = sorted({value for value in values if len(value) >= _WORD}, key=len, reverse=True)
    parts = [
        re.escape(value) if len(value) >= _LEAST else rf"(?<![^\W_]){re.escape(value)}(?![^\W_])" for value in ordered
    ]
    return re.compile("|".join(parts)) if parts else None
