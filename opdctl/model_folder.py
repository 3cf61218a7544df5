"""Is a folder a whole model in Hugging Face format? Asked of its files, without PyTorch.

What the gate, estimates and engines read in the JSON files is checked here once, so that they need not doubt it.
"""

from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from opdctl.errors import ConfigError, OpdctlError
from opdctl.fetch import UNWANTED, WANTED
from opdctl.records import RECORD
from opdctl.weight_files import computable_files, unreadable, weight_files

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "tiktoken.model")
BESIDE = ("LICENSE*", "NOTICE*", "README*")  # are taken along
Ids = int | list[int] | None
Id = Annotated[int, Field(ge=0, lt=10_000_000)]


class _Form(BaseModel):
    """What is read of a file that has more in it; a number in quotes is none."""

    model_config = ConfigDict(extra="ignore", strict=True)


class _Rope(_Form):
    rope_type: str | None = None
    type: str | None = None
    factor: float | None = None
    original_max_position_embeddings: float | None = None


class _Generation(_Form):
    eos_token_id: Ids = None
    bos_token_id: Ids = None
    pad_token_id: int | None = None


class _Text(_Generation):
    vocab_size: Id | None = None
    max_position_embeddings: float | None = None
    n_positions: float | None = None
    rope_parameters: _Rope | None = None
    rope_scaling: _Rope | None = None


class _Config(_Text):
    model_type: str
    text_config: _Text | None = None


class _Token(_Form):
    content: str


class _Named(_Form):
    bos_token: str | _Token | None = None
    eos_token: str | _Token | None = None
    pad_token: str | _Token | None = None
    unk_token: str | _Token | None = None


class _Template(_Form):
    name: str
    template: str


class _TokenizerConfig(_Named):
    chat_template: str | list[_Template] | None = None
    added_tokens_decoder: dict[str, _Token] | None = None
    model_max_length: float | None = None


class _Words(_Form):
    vocab: dict[str, Id] | list[tuple[str, float]] | None = None
    merges: list[str | tuple[str, str]] | None = None


class _Added(_Token):
    id: Id
    special: bool = False


class _Tokenizer(_Form):
    model: _Words | None = None
    added_tokens: list[_Added] | None = None


FORMS: Mapping[str, type[_Form]] = {
    "config.json": _Config,
    "generation_config.json": _Generation,
    "special_tokens_map.json": _Named,
    "tokenizer.json": _Tokenizer,
    "tokenizer_config.json": _TokenizerConfig,
}


def model_files(folder: Path, *, computed: bool = False) -> tuple[list[Path], tuple[str, ...]]:
    """The files of a Hugging Face folder to take, and the names of those to leave.

    Raises ConfigError where there is no folder, OpdctlError unless they are a whole model: a configuration, a
    tokenizer, all tensors as safetensors, which `computed` wants as `computable_files` does.
    """
    try:
        return _model_files(folder, computed)
    except OSError as error:
        raise unreadable(folder, error) from error


def _model_files(folder: Path, computed: bool) -> tuple[list[Path], tuple[str, ...]]:
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder", hint="name a folder in Hugging Face format")
    listed = sorted(folder.iterdir())
    if odd := [path for path in listed if _wanted(path.name) and not path.is_file()]:
        raise OpdctlError(
            f"{odd[0]} is no file: a link to nothing, a folder, a pipe", hint="remove it, or put the model's file there"
        )
    if not (folder / "config.json").is_file():
        raise OpdctlError(f"{folder}: no config.json", hint="name a folder in Hugging Face format")
    there = [path for path in listed if path.is_file() and not path.name.startswith(".")]
    taken = [path for path in there if _wanted(path.name) or any(fnmatch(path.name, pattern) for pattern in BESIDE)]
    names = {path.name for path in taken}
    for name in FORMS.keys() & names:
        _check(folder / name, FORMS[name])
    if "chat_template.jinja" in names:
        _read_text(folder / "chat_template.jinja")
    weights = {path.name for path in (computable_files if computed else weight_files)(folder)}
    if not names & set(TOKENIZERS):
        raise OpdctlError(
            f"{folder}: no tokenizer ({', '.join(TOKENIZERS)})",
            hint="copy the tokenizer's files beside the weights: they belong to the model",
        )
    stray = {name for name in names if name.endswith(".safetensors")} - weights  # of an adapter, or of another format
    taken = [path for path in taken if path.name not in stray]
    return taken, tuple(path.name for path in there if path not in taken)


def _wanted(name: str) -> bool:
    own = name != RECORD and not any(fnmatch(name, pattern) for pattern in UNWANTED)
    return own and any(fnmatch(name, pattern) for pattern in WANTED)


def _read_text(path: Path) -> None:
    try:
        path.read_text()
    except ValueError as error:
        raise OpdctlError(f"{path} cannot be read: {error}", hint="copy the file again") from error


def _check(path: Path, form: type[_Form]) -> None:
    try:
        form.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise _defect(path, error.errors(include_url=False)[0]) from None


def _defect(path: Path, found: Mapping[str, Any]) -> OpdctlError:
    hint = "correct the value, or copy the file again"
    if found["type"] == "json_invalid":
        return OpdctlError(f"{path} cannot be read: {found['ctx']['error']}", hint="copy the file again")
    if not found["loc"]:
        return OpdctlError(f"{path} holds no JSON object", hint="copy the file again")
    if found["type"] == "missing":
        return OpdctlError(f"{path} names no {'.'.join(map(str, found['loc']))}", hint=hint)
    where, value = ".".join(map(str, found["loc"])), repr(found["input"])
    return OpdctlError(f"{path}: {where}: {found['msg']}, and it is {value[:60]}", hint=hint)
