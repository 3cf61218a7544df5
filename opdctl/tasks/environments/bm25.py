"""BM25, small: Robertson and Zaragoza, The Probabilistic Relevance Framework (2009), equation 3.15."""

import math
import re
from collections import Counter
from collections.abc import Sequence

K1, B = 1.2, 0.75
_WORD = re.compile(r"\w+")


def words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


class Bm25:
    """An index of texts. Ties are broken by the text's number, so that a query always has one answer."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._counts: dict[str, dict[int, int]] = {}  # word -> text -> how often
        lengths = []
        for number, text in enumerate(texts):
            counted = Counter(words(text))
            lengths.append(counted.total())
            for word, times in counted.items():
                self._counts.setdefault(word, {})[number] = times
        mean = max(1.0, sum(lengths) / max(1, len(lengths)))
        self._norms = [K1 * (1 - B + B * length / mean) for length in lengths]

    def best(self, query: str, count: int) -> list[int]:
        """Numbers of the texts that match best; fewer where fewer hold any word of the query."""
        scores: dict[int, float] = {}
        for word in dict.fromkeys(words(query)):
            found = self._counts.get(word, {})
            weight = math.log(1 + (len(self._norms) - len(found) + 0.5) / (len(found) + 0.5))
            for number, times in found.items():
                gain = weight * times * (K1 + 1) / (times + self._norms[number])
                scores[number] = scores.get(number, 0.0) + gain
        return sorted(scores, key=lambda number: (-scores[number], number))[:count]
