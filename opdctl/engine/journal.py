"""Write-ahead log of rollout phases: a phase that was killed goes on with its unfinished completions.

Drawing them anew would favour short ones: what had ended is kept, and what had not gets another chance to end soon.

A phase (the rollouts of one step) is one append-only file of entries, each `<length u32><crc32 u32><safetensors>`. An
entry holds the digest of the call of `sampling.write` that it belongs to and what `every` steps of it drew: token ids,
log-probabilities and entropies to the bit, and who ended. The digest covers all that a call's outcome depends on (the
weights' step and model, the seed, the prompts, keys and tokens so far, how it draws), so a call that is repeated finds
its own parts and nothing else, in whatever order calls are made. Turns of an episode are such calls too: a resumed
episode asks for its finished turns, gets them from here, and plays them to its environment.

An entry is written and synced to disk before the next one is drawn. A tail torn by a kill or a power cut is cut off
when the phase is begun again. Files go when the step's recovery state is saved: `clear`.
"""

import hashlib
import json
import os
import struct
import zlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor

from opdctl.backends.contract import StageSpec
from opdctl.engine.decoding import Part
from opdctl.engine.policy import Policy
from opdctl.engine.sampling import Draft, Drawing, Generate, Rollout, Until, sample

_HEAD = struct.Struct("<II")  # bytes of the entry, their crc32


class PhaseLog:
    """The journal of one stage, in a folder of its recovery state."""

    def __init__(self, folder: Path, every: int, seed: int) -> None:
        self.folder, self.every, self.seed = folder, every, seed
        self.phase = ""
        self._begun: set[Path] = set()
        self._parts: dict[bytes, list[Part]] = defaultdict(list)  # digest of a call -> its parts

    def begin(self, phase: str, *, alone: bool = False) -> None:
        """From now on calls belong to the phase of this name; `alone`: what other phases wrote is superseded."""
        self.phase = phase
        self._begun.add(self._file)
        self._parts.clear()
        for file in self.folder.glob("*.log") if alone else ():
            if file != self._file:
                file.unlink()
        for digest, part in _read_and_mend(self._file):
            self._parts[digest].append(part)

    def clear(self) -> None:
        """What the phases begun up to here drew is saved elsewhere; later ones, of a process before this, are kept."""
        self._parts.clear()
        for file in self._begun:
            file.unlink(missing_ok=True)
        self._begun = {self._file}

    @property
    def _file(self) -> Path:
        return self.folder / f"{self.phase}.log"

    def parts(self, digest: bytes) -> list[Part]:
        return self._parts[digest]

    def append(self, digest: bytes, part: Part) -> None:
        self._parts[digest].append(part)
        payload = save(_tensors(digest, part))
        new = not self._file.exists()
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._file.open("ab") as file:
            file.write(_HEAD.pack(len(payload), zlib.crc32(payload)) + payload)
            file.flush()
            os.fsync(file.fileno())
        if new:
            _sync_folder(self.folder)


@dataclass(frozen=True)
class ModelJournal:
    """What a model writes in the phases of a log; `sampling.write` is given it."""

    of: PhaseLog
    model: str

    def log(self, drafts: Sequence[Draft], drawing: Drawing, until: Until | None) -> "CallLog":
        head = {
            "phase": self.of.phase,
            "model": self.model,
            "seed": self.of.seed,
            "every": self.of.every,
            "drawing": asdict(drawing),
            "until": asdict(until) if until else None,
            "drafts": [[draft.key, draft.sample, len(draft.prompt), len(draft.tokens)] for draft in drafts],
        }
        digest = hashlib.sha256(json.dumps(head, sort_keys=True).encode())
        for draft in drafts:
            digest.update(np.array([*draft.prompt, *draft.tokens], np.int64).tobytes())
        return CallLog(self.of, digest.digest())


@dataclass(frozen=True)
class CallLog:
    of: PhaseLog
    digest: bytes

    @property
    def every(self) -> int:
        return self.of.every

    def parts(self) -> list[Part]:
        return self.of.parts(self.digest)

    def append(self, part: Part) -> None:
        self.of.append(self.digest, part)


def open_journal(spec: StageSpec) -> PhaseLog | None:
    """The journal that a stage's `rollout.journal` asks for."""
    asked: Any = spec.config.get("rollout", {}).get("journal")
    return PhaseLog(Path(spec.state) / "journal", asked["every_tokens"], spec.seed) if asked else None


def sampler(policy: Policy, log: PhaseLog | None, model: str) -> Generate[Rollout]:
    """The policy as it samples, with a journal where there is one; `model` tells it from others of the phase."""
    return partial(sample, policy, journal=ModelJournal(log, model) if log else None)


def _tensors(digest: bytes, part: Part) -> dict[str, Tensor]:
    tokens = [token for completion in part.completions for token in completion]
    return {
        "call": torch.tensor(list(digest), dtype=torch.uint8),
        "lengths": torch.tensor([len(completion) for completion in part.completions]),
        "finished": torch.tensor(part.finished),
        "tokens": torch.tensor(tokens, dtype=torch.int64),
        "logprobs": part.logprobs_N.contiguous(),
        "entropies": part.entropy_N.contiguous(),
    }


def _part(tensors: dict[str, Tensor]) -> tuple[bytes, Part]:
    completions = [ids.tolist() for ids in tensors["tokens"].split(tensors["lengths"].tolist())]
    part = Part(completions, tensors["finished"].tolist(), tensors["logprobs"], tensors["entropies"])
    return bytes(tensors["call"].tolist()), part


def _read_and_mend(file: Path) -> list[tuple[bytes, Part]]:
    """The entries of a file, which is cut where the first one ends that is not whole."""
    if not file.exists():
        return []
    content = file.read_bytes()
    found: list[tuple[bytes, Part]] = []
    at = 0
    while at + _HEAD.size <= len(content):
        length, crc = _HEAD.unpack_from(content, at)
        payload = content[at + _HEAD.size : at + _HEAD.size + length]
        if len(payload) < length or zlib.crc32(payload) != crc:
            break
        found.append(_part(load(payload)))
        at += _HEAD.size + length
    if at < len(content):
        with file.open("r+b") as stream:
            stream.truncate(at)
            os.fsync(stream.fileno())
    return found


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
