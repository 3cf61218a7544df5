"""Generated chains of mixed length whose answer may take back what it wrote: errors that can be noticed and undone.

A problem is a start state and some operations of a domain of `opdctl.tasks.chain`. The prompt reads
`<math> +1 *2 -1 . 3`: domain, operations, start state; dots fill the list up to the longest length, so that a state
and its operation lie equally far apart in every problem. The answer writes the state after every operation, `4 1 0`.
`<undo>` takes back the last state that stands, and its operation may then be applied again: `4 5 <undo> 1 0`. All
states that stand at the end must be right: an error that goes unnoticed is fatal, however lucky the rest.

So an answer's states are not all alike: those after an error of the writer's own ask for skills (noticing, undoing,
going on from the right place) that the answers of a writer without errors hardly show. That is where learning on
the teacher's states and learning on one's own can differ.

Length, and with it the tokens that an answer needs, is a problem's own: a budget b0(x) differs from prompt to prompt.
An effort is a word of the prompt here and changes nothing in what is right; budgets give it its meaning.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np  # noqa: TID253 (this module is imported by `load_task` alone, in a worker)

from opdctl.errors import ConfigError
from opdctl.settings import EffortSettings, UndoTask
from opdctl.tasks import Demonstration, Prompt, Split, Verdict, effort_wording, first_group, is_held_out, turns
from opdctl.tasks.chain import BLOCK, DOMAINS, SMALLEST_SHARE, STREAMS

UNDO, FILL = "<undo>", "."


class Problem(NamedTuple):
    """What the verifier needs; plain data, so that it can travel as JSON."""

    first: str
    ops: Sequence[str]
    planted: Sequence[str]  # words of the answer that the prompt holds already, the last of them wrong; mostly none


class UndoStream:
    """The task of one domain and its lengths. `Prompt.answer` is a `Problem`."""

    def __init__(self, name: str, settings: UndoTask, efforts: EffortSettings | None) -> None:
        self.name, self.settings, self.efforts = name, settings, efforts
        self.domain = DOMAINS[settings.domain]
        self._ops = list(self.domain.steps)
        self._frequencies = self.domain.frequencies()
        self._groups = first_group(name)
        self._problem_block = lru_cache(maxsize=8)(self._draw_problems)
        self._demonstration_block = lru_cache(maxsize=8)(self._draw_demonstrations)

    def size(self, split: Split) -> int | None:
        return None

    # ------------------------------------------------------------------------------------------------ prompts

    def prompts(self, split: Split, seed: int, start: int, count: int, effort: str | None = None) -> list[Prompt]:
        rows = range(start, start + count)
        return [self._prompt(self._problem_block(split, seed, i // BLOCK)[i % BLOCK], effort, i) for i in rows]

    def _prompt(self, problem: Problem, effort: str | None, group: int) -> Prompt:
        asked = effort_wording(self.name, self.efforts, effort)
        fill = [FILL] * (max(self.settings.links) - len(problem.ops))
        token = [asked] if asked and self.efforts and self.efforts.by == "control_token" else []
        text = " ".join([f"<{self.settings.domain}>", *problem.ops, *fill, *token, problem.first, *problem.planted])
        columns = {"domain": self.name} if effort is None else {"domain": self.name, "effort": effort}
        return Prompt(text, problem, columns, turns(self.efforts, asked, text), self._groups + group)

    def _draw_problems(self, split: Split, seed: int, block: int) -> list[Problem]:
        rng = self._rng(split, seed, block)
        problems = self._draw(rng, split)
        return [self._plant(rng, problem) for problem in problems] if self.settings.planted else problems

    def _rng(self, stream: str, seed: int, block: int) -> np.random.Generator:
        domain = list(DOMAINS).index(self.settings.domain)
        return np.random.default_rng(np.random.SeedSequence([seed % 2**64, STREAMS[stream], domain, block, 1]))

    def _draw(self, rng: np.random.Generator, split: Split) -> list[Problem]:
        """BLOCK problems of the split: the others are thrown away."""
        held_out = self.settings.held_out
        if (held_out if split == "eval" else 1 - held_out) < SMALLEST_SHARE:
            raise ConfigError(
                f"tasks.{self.name}.held_out: {held_out} leaves hardly a problem for {split}", hint="0.1 is usual"
            )
        states, problems = self.domain.states, list[Problem]()
        while len(problems) < BLOCK:
            lengths = rng.choice(self.settings.links, BLOCK).tolist()
            ops = rng.choice(len(self._ops), (BLOCK, max(self.settings.links)), p=self._frequencies).tolist()
            firsts = rng.integers(len(states), size=BLOCK).tolist()
            for length, row, first in zip(lengths, ops, firsts, strict=True):
                problem = Problem(states[first], tuple([self._ops[op] for op in row[:length]]), ())
                content = " ".join([self.settings.domain, problem.first, *problem.ops])
                if is_held_out(content, held_out) == (split == "eval"):
                    problems.append(problem)
        return problems[:BLOCK]

    def _plant(self, rng: np.random.Generator, problem: Problem) -> Problem:
        """The problem with the beginning of an answer, right but for its last state."""
        at = int(rng.integers(len(problem.ops)))
        state, planted = problem.first, list[str]()
        for j, op in enumerate(problem.ops[: at + 1]):
            right = self._after(state, op)
            state = right[0] if j < at else str(rng.choice([s for s in self.domain.states if s not in right]))
            planted.append(state)
        return problem._replace(planted=tuple(planted))

    def _after(self, state: str, op: str) -> list[str]:
        """The states that may follow a state."""
        states = self.domain.states
        return [states[after] for after in self.domain.steps[op](states.index(state))]

    # ----------------------------------------------------------------------------------------- demonstrations

    def demonstrations(self, seed: int, start: int, count: int, efforts: Sequence[str] = ()) -> list[Demonstration]:
        """Rows by a writer who slips and notices as often as the settings say."""
        rows = []
        for i in range(start, start + count):
            problem, answer = self._demonstration_block(seed, i // BLOCK)[i % BLOCK]
            rows.append(Demonstration(self._prompt(problem, efforts[i % len(efforts)] if efforts else None, i), answer))
        return rows

    def _draw_demonstrations(self, seed: int, block: int) -> list[tuple[Problem, str]]:
        rng = self._rng("demonstrations", seed, block)
        return [(problem, " ".join(self._write(rng, problem))) for problem in self._draw(rng, "train")]

    def _write(self, rng: np.random.Generator, problem: Problem) -> Iterator[str]:
        """A slip writes another state than the right ones; once noticed it is taken back at once, else built upon."""
        state, undone = problem.first, 0
        for op in problem.ops:
            right = self._after(state, op)
            while True:
                slip, noticed = rng.random(2) < (self.settings.slip, self.settings.notice)
                wrong = [s for s in self.domain.states if s not in right]
                written = str(rng.choice(wrong)) if slip else str(rng.choice(right))
                yield written
                if not (slip and noticed and undone < self.settings.undos):
                    break
                undone += 1
                yield UNDO
            state = written

    # ----------------------------------------------------------------------------------------------- verifier

    def verify(self, prompt: Prompt, completion: str) -> Verdict:
        """Right when, replayed with its undos, the answer gives every link a state that the one before allows."""
        first, ops, planted = prompt.answer
        stood, undone = [first], 0
        for word in [*planted, *completion.split()]:
            if word != UNDO:
                stood.append(word)
            elif len(stood) == 1:
                return _wrong("nothing is left to undo", undone)
            else:
                stood.pop()
                undone += 1
        if undone > self.settings.undos:
            return _wrong(f"{undone} undos, not {self.settings.undos} at most", undone)
        if len(stood) != 1 + len(ops):
            return _wrong(f"{len(stood) - 1} states stand, not {len(ops)}", undone)
        for number, (op, before, after) in enumerate(zip(ops, stood, stood[1:], strict=False), 1):
            if after not in self._after(before, op):
                return _wrong(f"state {number}, {after!r}, does not follow {before!r}", undone)
        return Verdict(True, 1.0, {"reason": "", "undone": undone})

    def reference(self, prompt: Prompt) -> str:
        """A right answer; of a planted prompt its rest."""
        problem: Problem = prompt.answer
        first, ops, planted = problem
        state, words = first, list[str]()
        for op in ops:
            state = self._after(state, op)[0]
            words.append(state)
        return " ".join([UNDO, *words[len(planted) - 1 :]] if planted else words)


def _wrong(reason: str, undone: int) -> Verdict:
    return Verdict(False, 0.0, {"reason": reason, "undone": undone})
