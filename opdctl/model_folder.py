"""Is a folder a whole model in Hugging Face format? Asked of its files, without PyTorch."""

import json
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from opdctl.errors import ConfigError, OpdctlError
from opdctl.fetch import UNWANTED, WANTED
from opdctl.records import RECORD
from opdctl.weight_files import check_computable, unreadable, weight_files

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "tiktoken.model")
READ_FIRST = ("generation_config.json", "special_tokens_map.json", "tokenizer.json", "tokenizer_config.json")
BESIDE = ("LICENSE*", "NOTICE*", "README*")  # are taken along


def check_model(folder: Path, *, computed: bool) -> None:
    """Raises as `model_files` does; where it is `computed` with, by the embedded engine, as `check_computable` too."""
    model_files(folder)
    if computed:
        check_computable(folder)


def model_files(folder: Path) -> tuple[list[Path], tuple[str, ...]]:
    """The files of a Hugging Face folder to take, and the names of those to leave.

    Raises ConfigError where there is no folder, OpdctlError unless they are a whole model: a configuration, a
    tokenizer, all tensors as safetensors.
    """
    try:
        return _model_files(folder)
    except OSError as error:
        raise unreadable(folder, error) from error


def _model_files(folder: Path) -> tuple[list[Path], tuple[str, ...]]:
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder", hint="name a folder in Hugging Face format")
    there = sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    wanted = [path for path in there if any(fnmatch(path.name, pattern) for pattern in (*WANTED, *BESIDE))]
    taken = [path for path in wanted if path.name != RECORD and not any(fnmatch(path.name, p) for p in UNWANTED)]
    names = {path.name for path in taken}
    if not isinstance(_json(folder / "config.json").get("model_type"), str):
        raise OpdctlError(f"{folder / 'config.json'} names no model_type", hint="take the folder that was saved whole")
    weights = {path.name for path in weight_files(folder)}
    if not names & set(TOKENIZERS):
        raise OpdctlError(
            f"{folder}: no tokenizer ({', '.join(TOKENIZERS)})",
            hint="copy the tokenizer's files beside the weights: they belong to the model",
        )
    for name in READ_FIRST:
        if name in names:
            _json(folder / name)
    stray = {name for name in names if name.endswith(".safetensors")} - weights  # of an adapter, or of another format
    taken = [path for path in taken if path.name not in stray]
    return taken, tuple(path.name for path in there if path not in taken)


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise OpdctlError(f"{path} cannot be read: {error}", hint="copy the folder again") from error
    if not isinstance(found, dict):
        raise OpdctlError(f"{path} holds no JSON object", hint="copy the folder again")
    return found
