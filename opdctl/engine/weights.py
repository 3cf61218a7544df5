"""Weights on disk: safetensors only, read whole and checked before a model sees them."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from opdctl.errors import OpdctlError
from opdctl.weight_files import computable_files, some


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors by name, on the CPU. Raises OpdctlError as `computable_files` does."""
    tensors: dict[str, Tensor] = {}
    for path in computable_files(folder):
        tensors.update(load_file(path))
    return tensors


# what PyTorch and transformers raise for values of a config.json that make no sense
NO_NETWORK = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError)


def no_network(folder: Path, error: Exception) -> OpdctlError:
    """Of a folder whose config.json they rejected so."""
    return OpdctlError(
        f"{folder}: no causal language model can be made of its config.json: {type(error).__name__}: {error}",
        hint="correct the value, or copy config.json again; a model of another kind, or one too large for the memory "
        "of this machine, cannot be used here",
    )


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
