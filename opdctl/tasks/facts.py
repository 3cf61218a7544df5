"""Facts to be known by heart: key -> value, drawn by a seed, as in documents that a model is trained on.

A prompt reads `<facts> k4 k0 k7`, and the one right completion is the two words that go with this key, `v3 v9`.
Nothing about a value can be worked out from its key. So there is no held-out split: a fact is learnt by reading it,
and evaluation asks for the facts that training showed, each once; accuracy is recall (by chance: 1 in 100).
An effort asked for stands behind the key and changes nothing.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np  # noqa: TID253 (this module is imported by `load_task` alone, in a worker)

from opdctl.settings import EffortSettings, FactsTask
from opdctl.tasks import Demonstration, Prompt, Split, Verdict, effort_wording, first_group, in_effort, turns

TOKEN = "<facts>"
KEY_WORDS, VALUE_WORDS = 3, 2
KEYS, VALUES = [f"k{n}" for n in range(10)], [f"v{n}" for n in range(10)]


class Facts:
    """The task. `Prompt.answer` is the value."""

    def __init__(self, name: str, settings: FactsTask, efforts: EffortSettings | None) -> None:
        self.name, self.efforts = name, efforts
        rng = np.random.default_rng(np.random.SeedSequence([settings.seed % 2**64]))
        keys = rng.permutation(len(KEYS) ** KEY_WORDS)[: settings.facts].tolist()
        values = rng.integers(len(VALUES) ** VALUE_WORDS, size=settings.facts).tolist()
        self._facts = [
            (f"{TOKEN} {_spelled(key, KEYS, KEY_WORDS)}", _spelled(value, VALUES, VALUE_WORDS))
            for key, value in zip(keys, values, strict=True)
        ]
        self._order = lru_cache(maxsize=16)(self._shuffled)

    def size(self, split: Split) -> int | None:
        return len(self._facts)

    def prompts(self, split: Split, seed: int, start: int, count: int, effort: str | None = None) -> list[Prompt]:
        """Every fact once an epoch, in an order of the epoch's own."""
        asked = effort_wording(self.name, self.efforts, effort)
        columns = {"domain": self.name} if effort is None else {"domain": self.name, "effort": effort}
        prompts = []
        for epoch, at in (divmod(i, len(self._facts)) for i in range(start, start + count)):
            number = self._order(split, seed, epoch)[at]
            text, value = self._facts[number]
            messages = turns(self.efforts, asked, text)
            if asked and not messages:
                text = f"{text} {asked}"
            prompts.append(Prompt(text, value, columns, messages, first_group(self.name) + number))
        return prompts

    def demonstrations(self, seed: int, start: int, count: int, efforts: Sequence[str] = ()) -> list[Demonstration]:
        places = (in_effort(i, efforts) for i in range(start, start + count))
        shown = [self.prompts("train", seed, at, 1, effort)[0] for at, effort in places]
        return [Demonstration(prompt, prompt.answer) for prompt in shown]

    def verify(self, prompt: Prompt, completion: str) -> Verdict:
        correct = completion.strip() == prompt.answer
        return Verdict(correct, float(correct), {"reason": "" if correct else f"it is {prompt.answer!r}"})

    def reference(self, prompt: Prompt) -> str:
        return str(prompt.answer)

    def _shuffled(self, split: Split, seed: int, epoch: int) -> list[int]:
        words = [seed % 2**64, split == "train", epoch]
        return [int(at) for at in np.random.default_rng(np.random.SeedSequence(words)).permutation(len(self._facts))]


def _spelled(number: int, words: Sequence[str], length: int) -> str:
    """A number as `length` digits, each a word."""
    return " ".join([words[number // len(words) ** place % len(words)] for place in reversed(range(length))])
