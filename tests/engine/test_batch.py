import itertools
import random
from dataclasses import replace

import pytest
import torch

from opdctl.engine.batch import Sequence, collate, micro_batches
from opdctl.errors import OpdctlError


def random_sequences(seed: int) -> list[Sequence]:
    """Groups of 1 to 5 whose prompts share 0 to 6 tokens; completions of 0 to 5 tokens that may be equal."""
    rng = random.Random(seed)
    sequences = []
    for group in range(1, 7):
        trunk = [rng.randrange(3, 9) for _ in range(rng.randrange(7))]
        for _ in range(rng.randint(1, 5)):
            rest = [rng.randrange(3, 9) for _ in range(rng.randrange(0 if trunk else 1, 3))]
            completion = [rng.randrange(3, 5) for _ in range(rng.randrange(6))]
            sequences.append(Sequence((*trunk, *rest), tuple(completion), group if rng.random() < 0.8 else 0))
    return sequences


def some_learned(seed: int) -> list[Sequence]:
    """The same, most of them with tokens that an environment wrote."""
    rng = random.Random(seed)
    masks = [tuple(rng.random() < 0.5 for _ in one.completion) for one in random_sequences(seed)]
    return [
        replace(one, learned=mask) if rng.random() < 0.8 else one
        for one, mask in zip(random_sequences(seed), masks, strict=True)
    ]


def visible(batch, row: int, column: int) -> list[tuple[int, int]]:
    """(position, token) of all that a column sees, in column order."""
    columns = batch.ids_BT.shape[1]
    mask = torch.ones(columns, columns).tril().bool() if batch.mask_BTT is None else batch.mask_BTT[row, 0]
    seen = mask[column].nonzero()[:, 0].tolist()
    return [(int(batch.positions_BT[row, i]), int(batch.ids_BT[row, i])) for i in seen]


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("given", [random_sequences, some_learned])
def test_every_token_that_the_policy_wrote_is_predicted_from_its_own_past_alone(given, seed, share):
    sequences = given(seed)
    batch = collate(sequences, share_prefixes=share, pad_id=0)
    wanted = [
        (i, j)
        for i, sequence in enumerate(sequences)
        for j in range(len(sequence.completion))
        if sequence.learned is None or sequence.learned[j]
    ]
    assert len(wanted) == len(batch.rows_N) == sum(one.counted for one in sequences)
    assert batch.targets_N.tolist() == [token for one in sequences for token in one.targets]
    for n, (i, j) in enumerate(wanted):
        past = (*sequences[i].prompt, *sequences[i].completion[:j])
        assert visible(batch, int(batch.rows_N[n]), int(batch.cols_N[n])) == list(enumerate(past))
        assert int(batch.targets_N[n]) == sequences[i].completion[j]
        assert int(batch.sequence_N[n]) == i


def test_a_shared_prefix_is_stored_once():
    group = [Sequence((5, 6, 7), (8, 8), 1), Sequence((5, 6, 7), (9,), 1), Sequence((5, 6, 4), (9, 9), 1)]
    batch = collate(group, share_prefixes=True, pad_id=0)
    assert batch.ids_BT.tolist() == [[5, 6, 7, 8, 7, 4, 9]]
    assert batch.positions_BT.tolist() == [[0, 1, 2, 3, 2, 2, 3]]
    assert batch.cols_N.tolist() == [2, 3, 4, 5, 6]


def test_equal_prompts_are_predicted_from_one_place():
    group = [Sequence((5, 6), (7, 8), 1), Sequence((5, 6), (7, 9), 1)]
    batch = collate(group, share_prefixes=True, pad_id=0)
    assert batch.ids_BT.tolist() == [[5, 6, 7, 7]]  # the prefix ends with the prompts, however alike the completions
    assert batch.cols_N.tolist() == [1, 2, 1, 3]


def test_only_adjacent_sequences_of_one_non_zero_group_share():
    given = [((1, 2), (3,), group) for group in (0, 0, 4, 4, 5, 4)]
    batch = collate(list(itertools.starmap(Sequence, given)), share_prefixes=True, pad_id=0)
    assert batch.rows_N.tolist() == [0, 1, 2, 2, 3, 4]


def test_an_empty_prompt_is_refused():
    with pytest.raises(OpdctlError, match="every sequence a prompt"):
        collate([Sequence((), (1,))], share_prefixes=False, pad_id=0)


@pytest.mark.parametrize("seed", range(8))
def test_micro_batches_cover_everything_once_and_stay_within_the_limit(seed):
    sequences = random_sequences(seed)
    limit = 24
    ranges = micro_batches(sequences, limit)
    assert [i for part in ranges for i in part] == list(range(len(sequences)))
    for part in ranges:
        longest = max(len(sequences[i].prompt) + len(sequences[i].completion) for i in part)
        assert len(part) == 1 or longest * len(part) <= limit


def test_micro_batches_keep_a_group_together_where_it_fits():
    sequences = [Sequence((1, 2), (3, 4), group) for group in (1, 1, 2, 2, 2, 3, 3)]
    assert micro_batches(sequences, 16) == [range(2), range(2, 5), range(5, 7)]
    assert micro_batches(sequences, 20) == [range(5), range(5, 7)]
    assert micro_batches(sequences, 8) == [range(2), range(2, 4), range(4, 5), range(5, 7)]
    assert micro_batches(sequences, 1) == [range(i, i + 1) for i in range(7)]
