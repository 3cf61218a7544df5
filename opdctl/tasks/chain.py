"""Generated chains of operations with a verifiable result: three domains, three lengths of answer.

A problem is a start state and `links` operations; applying them in turn gives a chain of states. The prompt reads
`<math> +1 *2 =0 -1 +1 +1 *2 -1 <high> 3`: domain, operations, effort, start state. An answer writes every n-th
state, ending with the last: `1 6 1 1` at stride 2. A small stride is more to write and easier to get right, since
each word needs fewer operations worked out unseen; that is what an effort level buys here.

Math and code have one right answer. In `if` (instructions to be followed) some operations allow two letters, and every
letter written must be reachable from the one before. Effort and start state come last, so that prompts with the
same operations share a long prefix.

Shapes: G groups, B branches of a group (rows that share operations), T operations, S states, O kinds of operation.
"""

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np  # noqa: TID253 (this module is imported by `load_task` alone, in a worker)
import numpy.typing as npt  # noqa: TID253 (as above)

from opdctl.errors import ConfigError
from opdctl.settings import ChainTask, EffortSettings
from opdctl.tasks import Demonstration, Prompt, Split, Verdict, effort_wording, first_group, turns

Array = npt.NDArray[np.int64]
Step = Callable[[int], tuple[int, ...]]  # index of a state -> indices of the states it may become

BLOCK = 256  # problems, or groups of demonstrations, drawn at once: row i lies in block i // BLOCK
STREAMS = {"train": 0, "eval": 1, "demonstrations": 2}
SMALLEST_SHARE = 0.01  # of all problems, for a split that is drawn by throwing the others away

ORDINARY, MISREAD, OVERWRITING = 1.0, 0.4, 0.35  # relative frequencies of the kinds of operation


@dataclass(frozen=True)
class Domain:
    """The states and operations of a domain. The writer of demonstrations takes `misread[0]` for `misread[1]`."""

    states: Sequence[str]
    steps: Mapping[str, Step]
    misread: tuple[str, str]
    overwriting: frozenset[str]  # operations that forget the state: few, or the chain's start would not matter

    def frequencies(self) -> npt.NDArray[np.float64]:
        """Chance of each operation, shape [O]."""
        weights = [
            OVERWRITING if op in self.overwriting else MISREAD if op == self.misread[0] else ORDINARY
            for op in self.steps
        ]
        return np.array(weights) / sum(weights)

    def next_states(self, *, misread: bool) -> Array:
        """The two states (equal where only one is right) that follow a state under an operation, shape [S, O, 2]."""
        table = np.zeros((len(self.states), len(self.steps), 2), dtype=np.int64)
        for column, op in enumerate(self.steps):
            applied = self.misread[1] if misread and op == self.misread[0] else op
            for state in range(len(self.states)):
                after = self.steps[applied](state)
                table[state, column] = after[0], after[-1]
        return table


def _pairs(change: Callable[[int, int], tuple[int, int]]) -> Step:
    """An operation on two registers modulo 3, as one on the index 3x + y."""

    def step(state: int) -> tuple[int, ...]:
        x, y = change(state // 3, state % 3)
        return (3 * (x % 3) + y % 3,)

    return step


DOMAINS: Mapping[str, Domain] = {
    "math": Domain(
        states=[str(n) for n in range(7)],
        steps={
            "+1": lambda s: ((s + 1) % 7,),
            "-1": lambda s: ((s - 1) % 7,),
            "*2": lambda s: (2 * s % 7,),
            "=0": lambda s: (0,),
            "=3": lambda s: (3,),
        },
        misread=("*2", "+1"),
        overwriting=frozenset({"=0", "=3"}),
    ),
    "code": Domain(  # two registers, written as one word xy
        states=[f"{x}{y}" for x in range(3) for y in range(3)],
        steps={
            "swap": _pairs(lambda x, y: (y, x)),
            "x+1": _pairs(lambda x, y: (x + 1, y)),
            "y+1": _pairs(lambda x, y: (x, y + 1)),
            "x=y": _pairs(lambda x, y: (y, y)),
            "x=0": _pairs(lambda x, y: (0, y)),
            "ret": _pairs(lambda x, y: (2, 1)),
        },
        misread=("swap", "x+1"),
        overwriting=frozenset({"x=y", "x=0", "ret"}),
    ),
    "if": Domain(  # next, previous, mirrored, a neighbour, a vowel, fixed
        states=list("abcdefg"),
        steps={
            "nx": lambda s: ((s + 1) % 7,),
            "pv": lambda s: ((s - 1) % 7,),
            "mir": lambda s: (6 - s,),
            "nb": lambda s: ((s + 1) % 7, (s - 1) % 7),
            "vw": lambda s: (0, 4),
            "fx": lambda s: (3,),
        },
        misread=("mir", "nx"),
        overwriting=frozenset({"vw", "fx"}),
    ),
}


def named_rng(name: str, split: Split, seed: int, block: int) -> np.random.Generator:
    """Random numbers of a block for a task that is built on a chain, its own whatever the chain draws."""
    return np.random.default_rng(
        np.random.SeedSequence([seed % 2**64, STREAMS[split], zlib.crc32(name.encode()), block])
    )


class ChainStream:
    """The task of one domain. `Prompt.answer` is (start state, operations)."""

    def __init__(self, name: str, settings: ChainTask, efforts: EffortSettings | None) -> None:
        self.name, self.settings, self.efforts = name, settings, efforts
        self.domain = DOMAINS[settings.domain]
        self.ops = list(self.domain.steps)
        self.strides = list(settings.strides.values())
        self._check()
        self.counts = {settings.links // stride for stride in self.strides}  # words that an answer may have
        self._groups = first_group(name)
        self._op_bytes = [f" {op}".encode() for op in self.ops]
        self._start_crc = [zlib.crc32(f"{settings.domain} {state}".encode()) for state in self.domain.states]
        self._threshold = settings.held_out * 1_000_000
        self._frequencies = self.domain.frequencies()
        self._right = self.domain.next_states(misread=False)
        self._sloppy = self.domain.next_states(misread=True)
        self._problem_block = lru_cache(maxsize=8)(self._draw_problems)
        self._demonstration_block = lru_cache(maxsize=8)(self._draw_demonstrations)

    def _check(self) -> None:
        key, settings = f"tasks.{self.name}.strides", self.settings
        problems = [
            f"{key}.{level}: {stride} does not divide links = {settings.links}"
            for level, stride in settings.strides.items()
            if settings.links % stride
        ]
        levels = self.efforts.levels if self.efforts else {}
        problems += [f"{key}: no stride for effort {level!r}" for level in levels if level not in settings.strides]
        if not settings.strides:
            problems.append(f"{key}: empty; an answer needs at least one level to be written at")
        if problems:
            raise ConfigError(problems, hint="a stride n writes every n-th state, e.g. {low: 4, high: 2, max: 1}")

    def size(self, split: Split) -> int | None:
        return None

    # ------------------------------------------------------------------------------------------------ prompts

    def prompts(self, split: Split, seed: int, start: int, count: int, effort: str | None = None) -> list[Prompt]:
        rows = range(start, start + count)
        return [self._prompt(*self._problem_block(split, seed, i // BLOCK)[i % BLOCK], effort, i) for i in rows]

    def _prompt(self, first: str, ops: tuple[str, ...], effort: str | None, group: int) -> Prompt:
        asked = effort_wording(self.name, self.efforts, effort)
        text = f"<{self.settings.domain}> {' '.join(ops)} {first}"
        messages = turns(self.efforts, asked, text)
        if asked and not messages:
            text = f"<{self.settings.domain}> {' '.join(ops)} {asked} {first}"
        columns = {"domain": self.name} if effort is None else {"domain": self.name, "effort": effort}
        return Prompt(text, (first, ops), columns, messages, self._groups + group)

    def _draw_problems(self, split: Split, seed: int, block: int) -> list[tuple[str, tuple[str, ...]]]:
        rng = self._rng(split, seed, block)
        ops_GT, first_GB = self._draw(rng, split, branches=1)
        return [(self.domain.states[first], self._words(ops)) for ops, (first,) in zip(ops_GT, first_GB, strict=True)]

    def _rng(self, stream: str, seed: int, block: int) -> np.random.Generator:
        domain = list(DOMAINS).index(self.settings.domain)
        return np.random.default_rng(np.random.SeedSequence([seed % 2**64, STREAMS[stream], domain, block]))

    def _draw(self, rng: np.random.Generator, split: Split, branches: int) -> tuple[list[list[int]], list[list[int]]]:
        """BLOCK groups all of whose problems lie in the split: operations [G, T] and start states [G, B]."""
        held_out = self.settings.held_out
        share = (held_out if split == "eval" else 1 - held_out) ** branches
        if share < SMALLEST_SHARE:
            raise ConfigError(
                f"tasks.{self.name}.held_out: {held_out} leaves hardly a problem for {split}", hint="0.1 is usual"
            )
        ops: list[list[int]] = []
        first: list[list[int]] = []
        while len(ops) < BLOCK:
            draws = math.ceil((BLOCK - len(ops)) / share * 1.1) + 8
            ops_GT = rng.choice(len(self.ops), (draws, self.settings.links), p=self._frequencies).tolist()
            first_GB = rng.integers(len(self.domain.states), size=(draws, branches)).tolist()
            for ops_T, first_B in zip(ops_GT, first_GB, strict=True):
                if self._inside(split, ops_T, first_B):
                    ops.append(ops_T)
                    first.append(first_B)
        return ops[:BLOCK], first[:BLOCK]

    def _inside(self, split: Split, ops_T: list[int], first_B: list[int]) -> bool:
        """`is_held_out("math 3 +1 *2 ...")` for the branches of a group at once: half the time of drawing goes here."""
        ops = b"".join([self._op_bytes[op] for op in ops_T])
        held = [zlib.crc32(ops, self._start_crc[first]) % 1_000_000 < self._threshold for first in first_B]
        return all(held) if split == "eval" else not any(held)

    def _words(self, ops_T: Sequence[int]) -> tuple[str, ...]:
        return tuple([self.ops[op] for op in ops_T])

    # ----------------------------------------------------------------------------------------- demonstrations

    def demonstrations(self, seed: int, start: int, count: int, efforts: Sequence[str] = ()) -> list[Demonstration]:
        """Rows by a sloppy writer: it misreads one operation, slips at random and does not always obey the effort.

        len(efforts) rows in turn share their operations and their group. Without efforts every row is a group of
        its own, written as at the last level of `strides`.
        """
        for effort in efforts:
            effort_wording(self.name, self.efforts, effort)
        size = BLOCK * max(1, len(efforts))
        rows = range(start, start + count)
        return [self._demonstration_block(seed, i // size, tuple(efforts))[i % size] for i in rows]

    def _draw_demonstrations(self, seed: int, block: int, efforts: tuple[str, ...]) -> list[Demonstration]:
        asked: tuple[str | None, ...] = efforts or (None,)
        rng = self._rng("demonstrations", seed, block)
        ops, first = self._draw(rng, "train", branches=len(asked))
        states_GBT = self._write(rng, np.array(ops), np.array(first)).tolist()
        strides_GB = self._styles(rng, efforts).tolist()
        words = self.domain.states
        rows = []
        for group, (ops_T, first_B) in enumerate(zip(ops, first, strict=True)):
            ops_words = self._words(ops_T)
            for branch, effort in enumerate(asked):
                prompt = self._prompt(words[first_B[branch]], ops_words, effort, block * BLOCK + group)
                stride = strides_GB[group][branch]
                written = states_GBT[group][branch][stride - 1 :: stride]
                rows.append(Demonstration(prompt, " ".join([words[state] for state in written])))
        return rows

    def attempts(
        self, rng: np.random.Generator, prompts: Sequence[Prompt], count: int, effort: str | None
    ) -> list[list[str]]:
        """`count` answers of the sloppy writer to each of these prompts, every one as long as `effort` asks for."""
        ops_GT = np.array([[self.ops.index(op) for op in ops] for _, ops in (prompt.answer for prompt in prompts)])
        first_G = np.array([self.domain.states.index(prompt.answer[0]) for prompt in prompts])
        states_GBT = self._write(rng, ops_GT, np.repeat(first_G[:, None], count, axis=1))
        stride = self.strides[-1] if effort is None else self.settings.strides[effort]
        words = self.domain.states
        return [
            [" ".join([words[state] for state in states_T]) for states_T in states_BT]
            for states_BT in states_GBT[:, :, stride - 1 :: stride].tolist()
        ]

    def _styles(self, rng: np.random.Generator, efforts: tuple[str, ...]) -> Array:
        """The stride at which each row is written, shape [G, B]."""
        if not efforts:
            return np.full((BLOCK, 1), self.strides[-1])
        asked_B = np.array([self.settings.strides[effort] for effort in efforts])
        shape = (BLOCK, len(efforts))
        return np.where(rng.random(shape) < self.settings.obey, asked_B, rng.choice(self.strides, shape))

    def _write(self, rng: np.random.Generator, ops_GT: Array, first_GB: Array) -> Array:
        """The states that the sloppy writer passes through, shape [G, B, T]."""
        state, states, shape = first_GB, [], first_GB.shape
        for t in range(self.settings.links):
            op = ops_GT[:, t, None]
            choice = rng.integers(2, size=shape)
            misread = rng.random(shape) < self.settings.misread
            state = np.where(misread, self._sloppy[state, op, choice], self._right[state, op, choice])
            slip = rng.random(shape) < self.settings.noise
            state = np.where(slip, rng.integers(len(self.domain.states), size=shape), state)
            states.append(state)
        return np.stack(states, axis=-1)

    # ----------------------------------------------------------------------------------------------- verifier

    def verify(self, prompt: Prompt, completion: str) -> Verdict:
        """Right when the answer has a length that some stride gives and, for `if`, no letter is out of reach.

        For math and code only the last state is judged: the others are the model's own notes.
        """
        first, ops = prompt.answer
        written = completion.split()
        if len(written) not in self.counts:
            return Verdict(False, 0.0, {"reason": f"{len(written)} words, not one of {sorted(self.counts)}"})
        if self.settings.domain == "if":
            stride = len(ops) // len(written)
            for j, (before, after) in enumerate(pairwise([first, *written])):
                if after not in self._reachable(before, ops[j * stride : (j + 1) * stride]):
                    return Verdict(False, 0.0, {"reason": f"word {j + 1}, {after!r}, cannot follow {before!r}"})
        elif written[-1] not in self._reachable(first, ops):
            return Verdict(False, 0.0, {"reason": f"ends in {written[-1]!r}"})
        return Verdict(True, 1.0, {"reason": ""})

    def nearest(self, prompt: Prompt, written: Sequence[str]) -> list[str]:
        """A right answer of the same length that keeps every word which follows from the one that it has before."""
        state, ops = prompt.answer
        stride, right = len(ops) // len(written), []
        for j, word in enumerate(written):
            reachable = self._reachable(state, ops[j * stride : (j + 1) * stride])
            state = word if word in reachable else min(reachable)
            right.append(state)
        return right

    def _reachable(self, state: str, ops: Sequence[str]) -> set[str]:
        states = self.domain.states
        reached = {states.index(state)}
        for op in ops:
            reached = {after for before in reached for after in self.domain.steps[op](before)}
        return {states[index] for index in reached}

    def reference(self, prompt: Prompt) -> str:
        """A right answer that writes every state."""
        first, ops = prompt.answer
        state, written = self.domain.states.index(first), []
        for op in ops:
            state = self.domain.steps[op](state)[0]
            written.append(self.domain.states[state])
        stride = min(self.strides)
        return " ".join(written[stride - 1 :: stride])
