"""Buckets: sequences of like length side by side, and groups whole."""

from itertools import groupby

from opdctl.engine.batch import Sequence
from opdctl.engine.sft import bucketed


def of(length: int, group: int = 0) -> Sequence:
    return Sequence((1,) * (length - 1), (2,), group)


def lengths(sequences: list[Sequence]) -> list[int]:
    return [len(sequence.prompt) + len(sequence.completion) for sequence in sequences]


def test_sequences_without_a_group_go_from_short_to_long():
    assert lengths(bucketed([of(9), of(3), of(7), of(3)])) == [3, 3, 7, 9]


def test_a_group_stays_side_by_side_and_goes_by_its_longest():
    mixed = [of(4, 1), of(9, 1), of(5), of(2, 2), of(3, 2), of(12)]
    ordered = bucketed(mixed)
    assert [group for group, _ in groupby(sequence.group for sequence in ordered)] == [2, 0, 1, 0]
    assert lengths(ordered) == [2, 3, 5, 4, 9, 12]


def test_groups_of_equal_length_keep_their_order():
    """So that what a step adds up, and the last bit of it, does not depend on group numbers."""
    given = [of(5, 7), of(8, 7), of(8, 3), of(5, 3)]
    assert bucketed(given) == given
