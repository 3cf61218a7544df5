"""Fusing: one answer to a chain, made of several candidates.

A prompt reads `<fuse> <math> +1 *2 ... <max> 3 : 4 1 ... : 4 6 ... : 5 1 ...`: a chain's own prompt, and candidate
answers by its sloppy writer, who stands in for the weaker models whose answers a fusing model is given. The fused
answer is judged as any answer to the chain. Source: Hunyuan-MT's Chimera-7B, trained by RL to fuse six candidate
translations (arXiv 2509.05209).

A demonstration is one more answer by the writer: SFT teaches the form, and no better an answer than a candidate's.
"""

from collections.abc import Sequence
from functools import lru_cache

from opdctl.settings import EffortSettings, FuseTask
from opdctl.tasks import Demonstration, Prompt, Split, Verdict, first_group, in_effort
from opdctl.tasks.chain import BLOCK, ChainStream, named_rng
from opdctl.tasks.grade import COLON, in_the_place

TOKEN = "<fuse>"


class FuseStream:
    """The task of one chain. `Prompt.answer` is the chain's."""

    def __init__(self, name: str, settings: FuseTask, efforts: EffortSettings | None) -> None:
        self.name, self.candidates = name, settings.candidates
        self.chain = ChainStream(name, settings.chain, efforts)
        self._groups = first_group(name)
        self._block = lru_cache(maxsize=16)(self._draw)

    def size(self, split: Split) -> int | None:
        return None

    def prompts(self, split: Split, seed: int, start: int, count: int, effort: str | None = None) -> list[Prompt]:
        return [self._row(split, seed, i, effort).prompt for i in range(start, start + count)]

    def demonstrations(self, seed: int, start: int, count: int, efforts: Sequence[str] = ()) -> list[Demonstration]:
        places = (in_effort(i, efforts) for i in range(start, start + count))
        return [self._row("train", seed, at, effort) for at, effort in places]

    def verify(self, prompt: Prompt, completion: str) -> Verdict:
        return self.chain.verify(prompt, completion)

    def reference(self, prompt: Prompt) -> str:
        return self.chain.reference(prompt)

    def shown(self, prompt: Prompt) -> list[str]:
        """The candidates of a prompt."""
        return [part.strip() for part in prompt.text.split(f" {COLON} ")[1:]]

    def _row(self, split: Split, seed: int, row: int, effort: str | None) -> Demonstration:
        return self._block(split, seed, row // BLOCK, effort)[row % BLOCK]

    def _draw(self, split: Split, seed: int, block: int, effort: str | None) -> list[Demonstration]:
        rng = named_rng(self.name, split, seed, block)
        problems = self.chain.prompts(split, seed, block * BLOCK, BLOCK, effort)
        attempts = self.chain.attempts(rng, problems, self.candidates + 1, effort)
        rows = []
        for at, (problem, (answer, *candidates)) in enumerate(zip(problems, attempts, strict=True)):
            text = f" {COLON} ".join([f"{TOKEN} {problem.text}", *candidates])
            messages = in_the_place(problem, text)
            prompt = Prompt(text, problem.answer, problem.columns, messages, self._groups + block * BLOCK + at)
            rows.append(Demonstration(prompt, answer))
        return rows
