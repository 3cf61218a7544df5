"""Sequences of token ids -> the tensors of one forward pass, with or without shared prefixes.

Legend: S sequences, B rows, T columns of a row, N completion tokens that the policy wrote: what an environment answered
in between is read, and is on no N axis.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import chain, compress, groupby, repeat

import numpy as np
import torch
from torch import Tensor

from opdctl.errors import OpdctlError


@dataclass(frozen=True)
class Sequence:
    """A prompt and what follows it. Adjacent sequences of equal `group` may share a prefix; group 0 shares nothing."""

    prompt: tuple[int, ...]
    completion: tuple[int, ...]
    group: int = 0
    learned: tuple[bool, ...] | None = None  # which completion tokens the policy wrote; None: all

    @property
    def targets(self) -> tuple[int, ...]:
        """The completion tokens that the policy wrote: this sequence's part of an N axis."""
        return self.completion if self.learned is None else tuple(compress(self.completion, self.learned))

    @property
    def counted(self) -> int:
        """How many they are."""
        return len(self.completion) if self.learned is None else sum(self.learned)


@dataclass(frozen=True)
class TokenBatch:
    """Input of one forward pass. The N axis is the concatenation of the sequences' `targets` in the order given."""

    ids_BT: Tensor  # int64, padded at the right
    positions_BT: Tensor  # int64, as if every sequence had a row of its own
    mask_BTT: Tensor | None  # bool [B, 1, T, T], True where a query (first T) sees a key; None: causal
    rows_N: Tensor  # int64: where the output that predicts a completion token is
    cols_N: Tensor
    targets_N: Tensor  # int64: the completion tokens
    sequence_N: Tensor  # int64: index of the token's sequence in the order given


def collate(
    sequences: Items[Sequence], *, share_prefixes: bool, pad_id: int, device: torch.device | str = "cpu"
) -> TokenBatch:
    """Lay sequences out in rows.

    With `share_prefixes`, adjacent sequences of equal non-zero group share one row: the longest common prefix of
    their prompts once (never a completion token), then one branch a sequence (rest of the prompt, completion). A tree
    mask lets a branch see the prefix and itself, so outputs are those of separate rows. The last token of a
    completion predicts nothing and is left out of the input.

    Raises OpdctlError for an empty prompt: nothing would predict the completion's first token.
    """
    if not sequences or not all(sequence.prompt for sequence in sequences):
        raise OpdctlError(
            "a batch needs at least one sequence, and every sequence a prompt of at least one token",
            hint="begin prompts with a begin-of-sequence token, or drop rows without a prompt",
        )
    runs = list(_runs(sequences)) if share_prefixes else [range(i, i + 1) for i in range(len(sequences))]
    prompt_S = np.array([len(sequence.prompt) for sequence in sequences])
    total_S = prompt_S + np.array([len(sequence.completion) for sequence in sequences])
    input_S = np.maximum(total_S - 1, prompt_S)
    row_S = np.repeat(np.arange(len(runs)), [len(run) for run in runs])
    trunk_S = np.array([_common_prefix(sequences, run) for run in runs])[row_S]
    branch_S = input_S - trunk_S
    ends_S = np.cumsum(branch_S)
    starts_S = np.array([run.start for run in runs])[row_S]  # first sequence of the same row
    shift_S = ends_S - branch_S - (ends_S - branch_S)[starts_S]  # column of a branch, less the trunk's length

    # One entry for every token of every sequence; the tokens of a trunk are written once a branch, all alike.
    sequence_A = np.repeat(np.arange(len(sequences)), total_S)
    position_A = np.arange(len(sequence_A)) - (np.cumsum(total_S) - total_S)[sequence_A]
    token_A = np.fromiter(
        chain.from_iterable(chain.from_iterable((s.prompt, s.completion) for s in sequences)), np.int64
    )
    in_trunk_A = position_A < trunk_S[sequence_A]
    column_A = position_A + np.where(in_trunk_A, 0, shift_S[sequence_A])
    fed_A = position_A < input_S[sequence_A]
    target_A = position_A >= prompt_S[sequence_A]
    if any(sequence.learned is not None for sequence in sequences):
        learned = (s.learned if s.learned is not None else repeat(True, len(s.completion)) for s in sequences)
        target_A[target_A] = np.fromiter(chain.from_iterable(learned), bool)

    rows, columns = len(runs), int((trunk_S + shift_S + branch_S).max())
    where = row_S[sequence_A[fed_A]], column_A[fed_A]
    ids_BT = np.full((rows, columns), pad_id, np.int64)
    ids_BT[where] = token_A[fed_A]
    positions_BT = np.zeros((rows, columns), np.int64)
    positions_BT[where] = position_A[fed_A]
    mask_BTT = None
    if rows < len(sequences):
        branch_BT = np.full((rows, columns), -1, np.int64)  # 0 trunk, 1 + sequence in its branch, -1 padding
        branch_BT[where] = np.where(in_trunk_A, 0, 1 + sequence_A)[fed_A]
        mask_BTT = torch.from_numpy(_tree_mask(branch_BT)).to(device)
    sequence_N = sequence_A[target_A]
    predictor_N = np.flatnonzero(target_A) - 1  # a token is predicted where its predecessor is fed
    on_device = [
        torch.from_numpy(array).to(device)
        for array in (ids_BT, positions_BT, row_S[sequence_N], column_A[predictor_N], token_A[target_A], sequence_N)
    ]
    return TokenBatch(on_device[0], on_device[1], mask_BTT, *on_device[2:])


def micro_batches(sequences: Items[Sequence], max_tokens: int) -> list[range]:
    """Contiguous index ranges of at most `max_tokens` tokens each, counted padded and unshared (the upper bound).

    A group is cut only where it does not fit a range of its own; a single sequence that is longer stands alone.
    """
    lengths = [len(sequence.prompt) + len(sequence.completion) for sequence in sequences]
    ranges: list[range] = []
    start, longest = 0, 0

    def fits(unit: range) -> bool:
        return max(longest, *lengths[unit.start : unit.stop]) * (unit.stop - start) <= max_tokens

    for run in _runs(sequences):
        whole = max(lengths[run.start : run.stop]) * len(run) <= max_tokens
        for unit in [run] if whole else [range(i, i + 1) for i in run]:
            if unit.start > start and not fits(unit):
                ranges.append(range(start, unit.start))
                start, longest = unit.start, 0
            longest = max(longest, *lengths[unit.start : unit.stop])
    if len(sequences) > start:
        ranges.append(range(start, len(sequences)))
    return ranges


def _runs(sequences: Items[Sequence]) -> Iterator[range]:
    """Index ranges of adjacent sequences of equal non-zero group; one for each sequence of group 0."""
    start = 0
    for group, members in groupby(sequences, key=lambda sequence: sequence.group):
        count = sum(1 for _ in members)
        step = count if group else 1
        yield from (range(i, i + step) for i in range(start, start + count, step))
        start += count


def _common_prefix(sequences: Items[Sequence], run: range) -> int:
    """Length of the longest common prefix of the run's prompts; 0 for a run of one, which needs no trunk."""
    if len(run) == 1:
        return 0
    prompts = [sequences[i].prompt for i in run]
    first, last = min(prompts), max(prompts)  # in lexicographic order these two differ the earliest
    return next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))


def _tree_mask(branch_BT: np.ndarray) -> np.ndarray:
    """bool [B, 1, T, T]: a query sees earlier keys of the trunk and of its own branch."""
    seen_BTT = (branch_BT[:, None, :] == 0) | (branch_BT[:, None, :] == branch_BT[:, :, None])
    mask_BTT: np.ndarray = (seen_BTT & np.tri(branch_BT.shape[1], dtype=bool))[:, None]
    return mask_BTT
