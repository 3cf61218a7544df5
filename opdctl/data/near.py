"""Texts that are the same, or nearly: hashes of 64 bits in place of the texts, so that millions fit into memory.

Python's own hash of text is salted for each process, so two different texts are taken for one with a probability of
2^-64 a pair, and never in the same way twice.
"""

import unicodedata
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

N = 13
BOILERPLATE = 10  # a gram in more rows than this is a common phrase
_STOPS = ".,;:?\"'"


def words(text: str) -> list[str]:
    """Lower-case words without the punctuation at their ends. Operators, brackets and `!` stay: `3 - 4` and `3 + 4`
    are two problems."""
    if not text.isascii():
        text = unicodedata.normalize("NFKC", text)
    return [word for raw in text.casefold().split() if (word := raw.strip(_STOPS))]


def gram_hashes(rows: Sequence[Sequence[str]]) -> tuple["np.ndarray", "np.ndarray"]:
    """(hash, row) of every run of N words that lies in one row. uint64 and int64 [grams]."""
    import numpy as np

    sizes = np.array([len(row) for row in rows], np.int64)
    flat = np.fromiter((hash(word) for row in rows for word in row), np.int64, int(sizes.sum())).view(np.uint64)
    starts = len(flat) - N + 1
    if starts <= 0:
        return np.empty(0, np.uint64), np.empty(0, np.int64)
    found = np.zeros(starts, np.uint64)
    for at in range(N):  # sum over i of word_i * prime^(N-1-i), modulo 2^64
        found *= np.uint64(0x9E3779B97F4A7C15)
        found += flat[at : at + starts]
    found ^= found >> np.uint64(29)
    row = np.repeat(np.arange(len(rows)), sizes)
    whole = row[:starts] == row[N - 1 :]
    return found[whole], row[:starts][whole]


class Overlap:
    """Which held-out texts share N consecutive words with a training text.

    Source: GPT-3, arXiv:2005.14165, appendix C, where N is 13 and a gram that is in more than 10 training texts counts
    as a common phrase. There all punctuation is dropped and a hit cuts the training text; here it is told.
    Memory: 16 bytes for each word of the held-out texts.
    """

    def __init__(self) -> None:
        self._hashes: list[np.ndarray] = []
        self._rows: list[np.ndarray] = []
        self._texts = 0

    def hold_out(self, texts: Sequence[Sequence[str]]) -> None:
        hashes, rows = gram_hashes(texts)
        self._hashes.append(hashes)
        self._rows.append(rows + self._texts)
        self._texts += len(texts)

    def close(self) -> None:
        """No more texts are held out."""
        import numpy as np

        every = np.concatenate([*self._hashes, np.empty(0, np.uint64)])
        self._grams, self._gram_of = np.unique(every, return_inverse=True)
        self._row_of = np.concatenate([*self._rows, np.empty(0, np.int64)])
        self._counts = np.zeros(len(self._grams), np.int64)
        self._first = np.full(len(self._grams), -1, np.int64)  # training text that has it first
        self._sieve = np.zeros(1 << 24, bool)  # most grams of training texts are in no held-out one
        self._sieve[(self._grams >> np.uint64(40)).astype(np.int64)] = True
        self._hashes, self._rows, self._seen = [], [], 0

    def train(self, texts: Sequence[Sequence[str]]) -> None:
        import numpy as np

        if len(self._grams):
            hashes, rows = gram_hashes(texts)
            maybe = self._sieve[(hashes >> np.uint64(40)).astype(np.int64)]
            hashes, rows = hashes[maybe], rows[maybe]
            at = np.minimum(np.searchsorted(self._grams, hashes), len(self._grams) - 1)
            hit = self._grams[at] == hashes
            pairs = np.unique(np.stack([at[hit], rows[hit]], axis=1), axis=0)  # a text counts once
            np.add.at(self._counts, pairs[:, 0], 1)
            new = pairs[self._first[pairs[:, 0]] < 0][::-1]
            self._first[new[:, 0]] = new[:, 1] + self._seen
        self._seen += len(texts)

    def found(self) -> list[tuple[int, int]]:
        """(held-out text, a training text that shares a gram with it), by their numbers."""
        telling = (self._counts > 0) & (self._counts <= BOILERPLATE)
        partner: dict[int, int] = {}
        for gram, row in zip(self._gram_of.tolist(), self._row_of.tolist(), strict=True) if telling.any() else ():
            if telling[gram]:
                partner.setdefault(row, int(self._first[gram]))
        return sorted(partner.items())


class Hashes:
    """One 64-bit hash a row."""

    def __init__(self) -> None:
        self._held = array("q")

    def add(self, value: str) -> None:
        self._held.append(hash(value))

    def numpy(self) -> "np.ndarray":
        import numpy as np

        return np.frombuffer(self._held, np.int64) if self._held else np.empty(0, np.int64)


def repeats(hashes: "np.ndarray") -> int:
    """Rows that an earlier row equals."""
    import numpy as np

    return int(len(hashes) - len(np.unique(hashes)))


def conflicts(prompts: "np.ndarray", answers: "np.ndarray") -> list[tuple[int, int]]:
    """Pairs of rows, by their numbers, that ask the same and want different answers: one pair for each such prompt."""
    import numpy as np

    order = np.lexsort((answers, prompts))
    prompt, answer = prompts[order], answers[order]
    differ = np.flatnonzero((prompt[1:] == prompt[:-1]) & (answer[1:] != answer[:-1]))
    _, first = np.unique(prompt[differ], return_index=True)
    return sorted(
        (int(min(a, b)), int(max(a, b))) for a, b in zip(order[differ[first]], order[differ[first] + 1], strict=True)
    )
