"""Weights on disk: safetensors only, read whole and checked before a model sees them."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from opdctl.errors import OpdctlError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a Hugging Face folder. Raises OpdctlError unless all are there and whole."""
    paths = _listed_files(folder)
    for path in paths:
        try:
            with safe_open(path, framework="pt"):  # compares the header with the file's size
                pass
        except (SafetensorError, OSError, ValueError) as error:
            raise OpdctlError(
                f"{path}: not a whole safetensors file: {error}",
                hint="the file was cut short or damaged; copy it again",
            ) from error
    return paths


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors by name, on the CPU. Raises OpdctlError as `weight_files` does."""
    tensors: dict[str, Tensor] = {}
    for path in weight_files(folder):
        tensors.update(load_file(path))
    return tensors


def _listed_files(folder: Path) -> list[Path]:
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if not (folder / INDEX).is_file():
        raise _no_safetensors(folder)
    try:
        names = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError) as error:
        raise OpdctlError(f"{folder / INDEX}: not an index of safetensors files: {error!r}") from error
    missing = [name for name in names if not (folder / name).is_file()]
    if missing or any(Path(name).name != name for name in names):
        raise OpdctlError(
            f"{folder / INDEX} names files that are not in the folder: {', '.join(missing or names)}",
            hint="the download or copy was not complete; repeat it",
        )
    return [folder / name for name in names]


def check_finite(tensors: Mapping[str, Tensor], source: str | Path) -> None:
    """Raises OpdctlError naming the tensors that hold NaN or infinity."""
    bad = [name for name, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())]
    if bad:
        raise OpdctlError(
            f"{source}: weights that are NaN or infinite: {some(bad)}",
            hint="the training run that wrote them diverged; use an earlier checkpoint",
        )


def check_names(given: Mapping[str, Tensor], wanted: Mapping[str, Tensor], source: Path) -> None:
    """Raises OpdctlError unless both have the same names and shapes."""
    problems = []
    if missing := sorted(wanted.keys() - given.keys()):
        problems.append(f"missing tensors: {some(missing)}")
    if unexpected := sorted(given.keys() - wanted.keys()):
        problems.append(f"tensors that the model does not have: {some(unexpected)}")
    shapes = [
        f"{name} is {list(given[name].shape)} and should be {list(wanted[name].shape)}"
        for name in sorted(wanted.keys() & given.keys())
        if given[name].shape != wanted[name].shape
    ]
    if shapes:
        problems.append(f"wrong shapes: {some(shapes)}")
    if problems:
        raise OpdctlError(
            f"{source}: the weights do not fit config.json: {'; '.join(problems)}",
            hint="config.json and the weights must come from the same model",
        )


def _no_safetensors(folder: Path) -> OpdctlError:
    pickled = sorted(path.name for pattern in _PICKLED for path in folder.glob(pattern))
    if not pickled:
        return OpdctlError(
            f"{folder}: no weights ({SINGLE} or {INDEX})", hint="point to a folder in Hugging Face format"
        )
    command = (
        f"python -c \"from transformers import AutoModelForCausalLM as M; M.from_pretrained('{folder}')"
        f".save_pretrained('{folder}-safetensors')\""
    )
    return OpdctlError(
        f"{folder}: the weights are pickled ({some(pickled)}) and opdctl never unpickles: a pickle can run any code",
        hint=f"if you trust the file, convert it once and copy the tokenizer beside it: {command}",
    )


def some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
