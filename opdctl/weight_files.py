"""The files that hold a model's weights, without PyTorch: which they are, what they list, whether they are whole.

A safetensors file is 8 bytes with the length of its header (little-endian), the header in JSON (name -> dtype, shape
and the range of its bytes behind the header), and the bytes, without holes.
"""

import json
import math
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from opdctl.errors import OpdctlError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
WIDTHS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # bytes of a value, of the dtypes that can be computed with
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle")
_LONGEST_HEADER = 100_000_000  # bytes; safetensors itself reads no longer one


@dataclass(frozen=True)
class StoredTensor:
    """Where one stands."""

    file: Path
    dtype: str  # F32, F16, BF16, ...
    shape: tuple[int, ...]
    start: int  # first byte in the file
    size: int  # bytes


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a Hugging Face folder; where it has both, the single one and not those of an index, as
    engines read it. Raises OpdctlError unless all are there and whole, with the tensors that the index promises."""
    return list(tensors_by_file(folder))


def tensors_by_file(folder: Path) -> dict[Path, dict[str, StoredTensor]]:
    """What each of `weight_files` lists. Raises OpdctlError as that does."""
    if (folder / SINGLE).is_file():
        return {folder / SINGLE: tensors_in(folder / SINGLE)}
    if not (folder / INDEX).is_file():
        raise _no_weights(folder)
    return _indexed(folder)


def computable_files(folder: Path) -> list[Path]:
    """Those of `weight_files`. Raises OpdctlError as that does, and for weights that are no floating-point numbers of
    `WIDTHS`: quantized ones are codes, and mean something only with scales that stand beside them. Masks and positions
    may be whole numbers."""
    files = tensors_by_file(folder)
    found = [
        f"{name} ({one.dtype})"
        for tensors in files.values()
        for name, one in tensors.items()
        if one.dtype not in WIDTHS and (name.endswith("weight") or (name.endswith("bias") and len(one.shape) == 1))
    ]
    if found:
        raise OpdctlError(
            f"{folder}: weights that nothing can be computed with: {some(found)}",
            hint=f"take the model in {', '.join(sorted(WIDTHS))}: the embedded engine reads no quantized weights, "
            "and backend: vllm does",
        )
    return list(files)


def tensors_in(file: Path) -> dict[str, StoredTensor]:
    """Name -> where it is. Raises OpdctlError unless the file is whole."""
    damaged = OpdctlError(f"{file}: not a whole safetensors file", hint="it was cut short or damaged; copy it again")
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > min(_LONGEST_HEADER, size - 8):
                raise damaged
            header: dict[str, Any] = json.loads(stream.read(length))
        _check_metadata(header.pop("__metadata__", None))
        "".join(header).encode()  # half of a character raises
        found = {name: _placed(file, 8 + length, entry) for name, entry in header.items()}
    except OSError as error:
        raise unreadable(file, error) from error
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, struct.error) as error:
        raise damaged from error
    end = 8 + length
    for tensor in sorted(found.values(), key=lambda tensor: (tensor.start, tensor.size)):
        if tensor.start != end or tensor.size < 0:
            raise damaged
        end += tensor.size
    if end != size:
        raise damaged
    return found


def _check_metadata(found: Any) -> None:
    if found is not None and not all(isinstance(text, str) for pair in found.items() for text in pair):
        raise ValueError("metadata other than texts")


def _placed(file: Path, data: int, entry: Mapping[str, Any]) -> StoredTensor:
    (start, end), shape = entry["data_offsets"], entry["shape"]
    if any(type(number) is not int or number < 0 for number in (start, end, *shape)):
        raise ValueError("not a range or shape of whole numbers")
    tensor = StoredTensor(file, str(entry["dtype"]), tuple(shape), data + start, end - start)
    if tensor.dtype in WIDTHS and tensor.size != math.prod(tensor.shape) * WIDTHS[tensor.dtype]:
        raise ValueError("shape and range do not fit")
    return tensor


def _indexed(folder: Path) -> dict[Path, dict[str, StoredTensor]]:
    try:
        listed = json.loads((folder / INDEX).read_text())["weight_map"]
        names = sorted(set(listed.values()))
        outside = [name for name in names if Path(name).name != name]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise OpdctlError(
            f"{folder / INDEX}: not an index of safetensors files: {error!r}", hint="copy the folder again"
        ) from error
    if not names:
        raise OpdctlError(f"{folder / INDEX} names no file", hint="copy the folder again")
    if outside:
        raise OpdctlError(f"{folder / INDEX} names files outside the folder: {some(outside)}")
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise OpdctlError(
            f"{folder / INDEX} names files that are not in the folder: {some(missing)}",
            hint="the download or copy was not complete; repeat it",
        )
    found = {folder / name: tensors_in(folder / name) for name in names}
    both = Counter(name for tensors in found.values() for name in tensors)
    if twice := sorted(name for name, times in both.items() if times > 1):
        raise OpdctlError(
            f"{folder}: tensors that are in more than one file: {some(twice)}",
            hint="files of another copy were mixed in; copy the folder again",
        )
    for file, tensors in found.items():
        promised = {tensor for tensor, name in listed.items() if name == file.name}
        if lost := sorted(promised - tensors.keys()):
            raise OpdctlError(f"{file} lacks tensors that {INDEX} says it holds: {some(lost)}")
    return found


def _no_weights(folder: Path) -> OpdctlError:
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    pickled = [name for name in names if any(fnmatch(name, pattern) for pattern in _PICKLED)]
    if pickled:
        command = (
            f"python -c \"from transformers import AutoModelForCausalLM as M; M.from_pretrained('{folder}')"
            f".save_pretrained('{folder}-safetensors')\""
        )
        return OpdctlError(
            f"{folder}: the weights are pickled ({some(pickled)}), and opdctl never unpickles: a pickle can run any "
            "code",
            hint="take the model's safetensors, which many repositories have as revision refs/pr/N; if you trust the "
            f"file, convert it once and copy the tokenizer beside it: {command}",
        )
    adapter = "adapter_model.safetensors" in names
    hint = "merge the adapter into its base model first" if adapter else "name a folder in Hugging Face format"
    return OpdctlError(f"{folder}: no weights ({SINGLE} or {INDEX})", hint=hint)


def unreadable(path: Path, error: OSError) -> OpdctlError:
    """A file or folder of a model that the operating system does not give."""
    return OpdctlError(
        f"{error.filename or path} cannot be read: {error.strerror}",
        hint="name a folder in Hugging Face format that you may read",
    )


def some(names: Sequence[str]) -> str:
    """The first five."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
