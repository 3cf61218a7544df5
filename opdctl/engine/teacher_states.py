"""What a loss reads of a row's teacher: last hidden states and output matrix, made when asked for or kept on disk.

`direct`: teachers stay in memory, at most `resources.resident_teachers`, and read the rows of a micro-batch when its
loss is made. `cached`, for teachers that are many, so that memory and time hardly depend on their number: each reads
all its rows of a rollout batch at once, from its checkpoint, and is dropped; their last hidden states lie on disk.
Losses make the logits of them, chunk by chunk, with that teacher's output matrix, all of it that is in memory then.
Source: DeepSeek-V4, arXiv 2606.19348, how teachers are served.

Legend: N completion tokens of the rows asked for, E hidden size of the teacher, V vocabulary.
"""

import os
import shutil
from collections import defaultdict
from collections.abc import Mapping
from collections.abc import Sequence as Items
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from opdctl.backends.contract import InputSpec, StageSpec
from opdctl.engine.batch import Sequence, micro_batches
from opdctl.engine.checkpoint import map_policy, save_new_model
from opdctl.engine.loop import DTYPES, device_of, open_frozen
from opdctl.engine.policy import Policy
from opdctl.engine.teachers import TeacherPool, distinct
from opdctl.engine.vocab import token_logprobs
from opdctl.errors import StageRefused
from opdctl.settings import NewModel
from opdctl.weight_files import weight_files

_PAGE = 4096  # bytes
Beside = Mapping[int, Items[Sequence]]
NOTHING: Beside = MappingProxyType({})


class States(Protocol):
    """Of models that score rows (teachers, a reference), by their number in the list that `open_states` was given."""

    def begin(self, sequences: Items[Sequence], wanted: Mapping[int, Items[int]], beside: Beside = NOTHING) -> None:
        """A new rollout batch. `wanted`: model -> the rows (indices into `sequences`) that it will be asked for.
        `beside`: model -> what it reads when it is asked the first time, apart from its rows."""

    def get(self, number: int, rows: Items[int], *, then: int | None = None) -> tuple[Tensor, Tensor]:
        """(hidden_NE, head_VE) of a model, without gradient. N: these rows' completions, in the order given. `then`:
        the model wanted after it."""

    def said(self) -> dict[int, Tensor]:
        """Model -> log-probabilities of the tokens that it has read beside its rows, since the batch began."""

    def policy(self, number: int) -> Policy:
        """A whole model."""

    def close(self) -> None:
        """Gives memory and disk back."""


def open_states(spec: StageSpec, models: Items[InputSpec], precision: str, student: Policy) -> States:
    """As `spec.resources` has it. Models of one checkpoint are loaded once."""
    if spec.resources["teacher_states"] == "cached":
        return CachedStates(spec, models, precision, student)
    return DirectStates(spec, models, precision)


class DirectStates:
    """Models in memory."""

    def __init__(self, spec: StageSpec, models: Items[InputSpec], precision: str) -> None:
        self._same = distinct(models)
        self._pool = TeacherPool(
            lambda number: open_frozen(spec, models[number], precision),
            resident=int(spec.resources["resident_teachers"]),
        )
        self._sequences: Items[Sequence] = ()
        self._beside: dict[int, Items[Sequence]] = {}
        self._said: dict[int, Tensor] = {}

    def begin(self, sequences: Items[Sequence], wanted: Mapping[int, Items[int]], beside: Beside = NOTHING) -> None:
        self._sequences, self._beside, self._said = sequences, dict(beside), {}

    @torch.no_grad()
    def get(self, number: int, rows: Items[int], *, then: int | None = None) -> tuple[Tensor, Tensor]:
        model = self._pool.get(self._same[number], then=None if then is None else self._same[then])
        if (fixed := self._beside.pop(number, None)) is not None:
            self._said[number] = _logprobs(model.hidden(model.batch(fixed)), model.head(), fixed)
        return model.hidden(model.batch([self._sequences[row] for row in rows])), model.head()

    def said(self) -> dict[int, Tensor]:
        return self._said

    def policy(self, number: int) -> Policy:
        return self._pool.get(self._same[number])

    def close(self) -> None:
        self._pool.close()


class CachedStates:
    """Hidden states on disk, one output matrix in memory and the next one on its way.

    The folder `teacher-states` beside the recovery state holds one rollout batch and nothing that a resumed stage
    needs: it draws and reads the batch again.
    """

    def __init__(self, spec: StageSpec, models: Items[InputSpec], precision: str, student: Policy) -> None:
        self._spec, self._models, self._precision, self._student = spec, models, precision, student
        self._same = distinct(models)
        self._folder = Path(spec.state) / "teacher-states"
        self._checkpoints = {number: self._checkpoint(number) for number in set(self._same)}
        self._heads = TeacherPool(
            lambda number: self._checkpoints[number].head(), resident=min(2, int(spec.resources["resident_teachers"]))
        )
        self._places: dict[tuple[int, int], tuple[Path, slice]] = {}  # (model, row) -> its tokens in a file
        self._beside: dict[int, tuple[Items[Sequence], Tensor]] = {}  # model -> what it has read, hidden_NE
        self._said: dict[int, Tensor] = {}

    def _checkpoint(self, number: int) -> "_Checkpoint":
        path = self._models[number].path
        if not path:
            path = str(Path(self._spec.state) / "new-model")
            save_new_model(NewModel.model_validate(self._spec.new_model), self._spec.seed, Path(path))
        return _Checkpoint(Path(path), self._student, device_of(self._spec), DTYPES[self._precision])

    def begin(self, sequences: Items[Sequence], wanted: Mapping[int, Items[int]], beside: Beside = NOTHING) -> None:
        self._clear()
        self._folder.mkdir(parents=True)
        rows: dict[int, set[int]] = defaultdict(set)
        for number, asked in wanted.items():
            rows[self._same[number]].update(asked)
        numbers = sorted(number for number in rows if rows[number])
        for number, then in zip(numbers, [*numbers[1:], None], strict=True):
            if then is not None:
                self._checkpoints[then].announce()
            self._read(number, sequences, sorted(rows[number]), beside)

    @torch.no_grad()
    def _read(self, number: int, sequences: Items[Sequence], rows: Items[int], beside: Beside) -> None:
        """One model reads its rows and is gone."""
        body = self._checkpoints[number].body()
        for asked, fixed in beside.items():
            if self._same[asked] == number:
                self._beside[asked] = fixed, body.hidden(body.batch(fixed))
        own = [sequences[row] for row in rows]
        for part in micro_batches(own, int(self._spec.resources["micro_batch_tokens"])):
            file = self._folder / f"{number}-{part.start}.safetensors"
            hidden_NE = body.hidden(body.batch([own[i] for i in part]))
            save_file({"hidden": hidden_NE.cpu().contiguous()}, file)
            at = 0
            for i in part:
                end = at + own[i].counted
                self._places[number, rows[i]] = file, slice(at, end)
                at = end

    def get(self, number: int, rows: Items[int], *, then: int | None = None) -> tuple[Tensor, Tensor]:
        asked, number, then = number, self._same[number], None if then is None else self._same[then]
        places = [self._places[number, row] for row in rows]
        head_VE = self._heads.get(number, then=then)
        if asked in self._beside:
            fixed, hidden_NE = self._beside.pop(asked)
            self._said[asked] = _logprobs(hidden_NE, head_VE, fixed)
        stored = {file: _mapped(file, "hidden") for file in dict.fromkeys(file for file, _ in places)}
        return torch.cat([stored[file][tokens] for file, tokens in places]).to(head_VE.device), head_VE

    def said(self) -> dict[int, Tensor]:
        return self._said

    def policy(self, number: int) -> Policy:
        return open_frozen(self._spec, self._models[number], self._precision)

    def close(self) -> None:
        self._heads.close()
        self._clear()

    def _clear(self) -> None:
        self._places.clear()
        self._beside, self._said = {}, {}
        shutil.rmtree(self._folder, ignore_errors=True)


class _Checkpoint:
    """A teacher on disk. Its weights are the file's pages, mapped: nothing is copied, and all is given back at once."""

    def __init__(self, folder: Path, student: Policy, device: torch.device, dtype: torch.dtype) -> None:
        self._folder, self._student, self._device, self._dtype = folder, student, device, dtype
        self._head: tuple[Path, str] | None = None  # file and tensor, known once the body was read

    def body(self) -> Policy:
        """The whole model, without gradients. Only the first reading looks for what is missing or not finite."""
        policy = map_policy(self._folder, like=self._student, dtype=self._dtype, check=self._head is None)
        if self._head is None:
            self._head = self._find(policy.head())
        return policy.to(self._device).requires_grad_(False).eval()

    def head(self) -> Tensor:
        """The output matrix [V, E] alone, its pages in memory."""
        assert self._head is not None, "a head is asked for after its body"
        head_VE = _mapped(*self._head)
        head_VE.view(-1)[:: _PAGE // head_VE.element_size()].sum()  # reads every page
        return head_VE.to(self._device, self._dtype)

    def announce(self) -> None:
        """Has the operating system read the files, which costs this process neither time nor memory."""
        if not hasattr(os, "posix_fadvise"):
            return
        for path in weight_files(self._folder):
            file = os.open(path, os.O_RDONLY)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_WILLNEED)
            os.close(file)

    def _find(self, head_VE: Tensor) -> tuple[Path, str]:
        """The stored tensor that the output matrix is, under whatever name the architecture gives it."""
        for path in weight_files(self._folder):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  # no dict
                    same_shape = tuple(file.get_slice(name).get_shape()) == tuple(head_VE.shape)
                    if same_shape and torch.equal(file.get_tensor(name).to(head_VE.dtype), head_VE):
                        return path, name
        raise StageRefused(
            f"{self._folder}: no stored tensor is the model's output matrix, and resources.teacher_states: cached "
            "reads it from the file alone",
            hint="set resources.teacher_states: direct",
        )


def _mapped(file: Path, name: str) -> Tensor:
    with safe_open(file, framework="pt") as stored:
        tensor: Tensor = stored.get_tensor(name)
        return tensor


@torch.no_grad()
def _logprobs(hidden_NE: Tensor, head_VE: Tensor, sequences: Items[Sequence]) -> Tensor:
    targets_N = torch.tensor([token for sequence in sequences for token in sequence.targets], device=hidden_NE.device)
    return token_logprobs(hidden_NE, head_VE, targets_N)[0].float().cpu()
