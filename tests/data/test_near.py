"""Hashes in place of texts find what a slow comparison of the texts finds."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opdctl.data.near import BOILERPLATE, Hashes, N, Overlap, conflicts, gram_hashes, repeats, words

WORD = st.sampled_from("abc")
TEXT = st.lists(WORD, max_size=20)


def grams(text):
    return {tuple(text[i : i + N]) for i in range(len(text) - N + 1)}


def overlap(held, train, batch=3):
    found = Overlap()
    for start in range(0, len(held), batch):
        found.hold_out(held[start : start + batch])
    found.close()
    for start in range(0, len(train), batch):
        found.train(train[start : start + batch])
    return dict(found.found())


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("What is 3 + 4?", "what  is\n3 + 4 ?", True),
        ("What is 3 + 4?", "What is 3 - 4?", False),
        ("What is 1.5?", "What is 15?", False),
        ("What is 5!", "What is 5?", False),
        ("Ｗhat 'is' it", "what is it.", True),
    ],
)
def test_texts_are_the_same_but_for_case_blanks_and_punctuation_at_words_ends(one, other, same):
    assert (words(one) == words(other)) is same


@given(st.lists(TEXT, max_size=6))
def test_every_run_of_words_of_a_row_has_a_hash_and_none_crosses_rows(rows):
    hashes, owners = gram_hashes(rows)
    assert [sum(owners == row) for row in range(len(rows))] == [max(0, len(text) - N + 1) for text in rows]
    by_gram = {}
    for row, text in enumerate(rows):
        for i, value in enumerate(hashes[owners == row]):
            by_gram.setdefault(tuple(text[i : i + N]), set()).add(int(value))
    values = [value for found in by_gram.values() for value in found]
    assert len(values) == len(set(values)) == len(by_gram)


def test_overlap_is_that_of_a_slow_comparison():
    random.seed(3)
    text = lambda size: [random.choice("ab") for _ in range(size)]  # noqa: E731  # one line for a list
    held = [text(random.randrange(10, 16)) for _ in range(200)]
    train = [text(random.randrange(10, 22)) for _ in range(200)]
    train += [["x", *row] for row in held[:5]]
    counts = {}
    for row in train:
        for gram in grams(row):
            counts[gram] = counts.get(gram, 0) + 1
    telling = {gram for gram, count in counts.items() if count <= BOILERPLATE}
    slow = {i for i, row in enumerate(held) if grams(row) & telling}
    found = overlap(held, train)
    assert set(found) == slow
    assert slow
    assert all(grams(held[i]) & grams(train[partner]) for i, partner in found.items())


def test_a_gram_of_many_training_texts_is_a_common_phrase():
    phrase = [str(n) for n in range(N)]
    assert overlap([phrase], [[*phrase, str(i)] for i in range(BOILERPLATE)]) == {0: 0}
    assert overlap([phrase], [[*phrase, str(i)] for i in range(BOILERPLATE + 1)]) == {}


def test_repeats_and_conflicts_name_rows():
    prompts, answers = Hashes(), Hashes()
    for prompt, answer in [("a", "1"), ("b", "1"), ("a", "1"), ("b", "2"), ("c", "1"), ("b", "3")]:
        prompts.add(prompt)
        answers.add(answer)
    assert repeats(prompts.numpy()) == 3
    [(one, other)] = conflicts(prompts.numpy(), answers.numpy())
    assert {one, other} <= {1, 3, 5}
    assert conflicts(np.empty(0, np.int64), np.empty(0, np.int64)) == []
