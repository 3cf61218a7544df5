"""Weights on disk that are never in memory as a whole: parts of tensors in, parts of tensors out.

In the format of safetensors (opdctl/weight_files.py). Memory-mapped files would count as the process's own memory, so
parts are read by `pread`.
"""

import json
import math
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from opdctl.errors import OpdctlError
from opdctl.weight_files import INDEX, SINGLE, StoredTensor, tensors_by_file

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
SHARD_BYTES = 5_000_000_000  # of one file, as transformers has it
_ALIGNMENT = 8  # bytes that a header is padded to


@dataclass(frozen=True)
class OpenTensor:
    """Where the values of a tensor lie."""

    file: int  # descriptor
    offset: int  # bytes
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    def read(self, start: int, count: int) -> Tensor:
        """Values start .. start+count-1 in storage order."""
        width = self.dtype.itemsize
        buffer = memoryview(bytearray(count * width))
        done, offset = 0, self.offset + start * width
        while done < len(buffer):
            got = os.preadv(self.file, [buffer[done:]], offset + done)
            if got == 0:
                raise OpdctlError("a weight file became shorter while it was read", hint="run the stage again")
            done += got
        return torch.frombuffer(buffer, dtype=self.dtype) if count else torch.empty(0, dtype=self.dtype)


@contextmanager
def stored_tensors(folder: Path) -> Iterator[dict[str, OpenTensor]]:
    """All tensors of a Hugging Face folder by name, to be read as long as the block lasts.

    Raises OpdctlError as `weight_files` does, and for tensors that are not of floating point numbers.
    """
    files: list[int] = []
    try:
        found: dict[str, OpenTensor] = {}
        for path, tensors in tensors_by_file(folder).items():
            files.append(os.open(path, os.O_RDONLY))
            found |= _opened(path, tensors, files[-1])
        yield found
    finally:
        for file in files:
            os.close(file)


def _opened(path: Path, found: Mapping[str, StoredTensor], file: int) -> dict[str, OpenTensor]:
    if odd := [name for name, tensor in found.items() if tensor.dtype not in DTYPES]:
        raise OpdctlError(
            f"{path}: {odd[0]} is of type {found[odd[0]].dtype}, and only {', '.join(DTYPES)} can be computed with",
            hint="merge models before they are quantised",
        )
    return {name: OpenTensor(file, one.start, one.shape, DTYPES[one.dtype]) for name, one in found.items()}


class TensorWriter:
    """Writes the weights of a Hugging Face folder part by part. Every file's header is written before its first value,
    so the shapes must be known from the start. Equal values give equal bytes.
    """

    def __init__(
        self,
        folder: Path,
        shapes: Mapping[str, Sequence[int]],
        dtype: torch.dtype,
        *,
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        self._folder, self._shapes, self._dtype = folder, shapes, dtype
        self._sizes = {name: math.prod(shape) * dtype.itemsize for name, shape in shapes.items()}
        self._files = self._laid_out(shard_bytes)

    def _laid_out(self, shard_bytes: int) -> dict[str, list[str]]:
        """File name -> tensors, in the given order; a tensor is never split."""
        shards: list[list[str]] = [[]]
        filled = 0
        for name, size in self._sizes.items():
            if shards[-1] and filled + size > shard_bytes:
                shards.append([])
                filled = 0
            shards[-1].append(name)
            filled += size
        if len(shards) == 1:
            return {SINGLE: shards[0]}
        return {f"model-{n:05}-of-{len(shards):05}.safetensors": names for n, names in enumerate(shards, 1)}

    def write(self, tensors: Iterator[tuple[str, Iterator[Tensor]]]) -> None:
        """Takes in each tensor's parts, flat and in order; the tensors in the order of `shapes`."""
        for file, names in self._files.items():
            with (self._folder / file).open("wb") as stream:
                stream.write(self._header(names))
                for name in names:
                    given, parts = next(tensors)
                    assert given == name, f"{given} was given where {name} is to be written"
                    self._append(stream, name, parts)
        if len(self._files) > 1:
            index = {
                "metadata": {"total_size": sum(self._sizes.values())},
                "weight_map": {name: file for file, names in self._files.items() for name in names},
            }
            (self._folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")

    def _append(self, stream: BinaryIO, name: str, parts: Iterator[Tensor]) -> None:
        written = 0
        for part in parts:
            values = part.to(self._dtype).contiguous()
            if not bool(torch.isfinite(values).all()):
                raise OpdctlError(
                    f"{name}: the result holds NaN or infinity in {str(self._dtype).removeprefix('torch.')}",
                    hint="lower the scale of the merge",
                )
            written += stream.write(values.view(torch.uint8).numpy().data) if len(values) else 0
        assert written == self._sizes[name], f"{name}: {written} bytes instead of {self._sizes[name]}"

    def _header(self, names: Sequence[str]) -> bytes:
        kind = next(name for name, dtype in DTYPES.items() if dtype == self._dtype)
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at = 0
        for name in names:
            header[name] = {
                "dtype": kind,
                "shape": list(self._shapes[name]),
                "data_offsets": [at, at + self._sizes[name]],
            }
            at += self._sizes[name]
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        return struct.pack("<Q", len(text)) + text
