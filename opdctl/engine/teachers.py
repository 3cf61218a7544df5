"""Models that score or stand beside a policy: do they speak its language? Many teachers: routing, few in memory."""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import zip_longest
from pathlib import Path
from typing import Generic, TypeVar

from transformers import AutoConfig

from opdctl.backends.contract import InputSpec, StageSpec
from opdctl.engine.tokenizer import Tokenizer, load_tokenizer
from opdctl.errors import StageRefused

Held = TypeVar("Held")


def check_vocabularies(
    policy: Tokenizer, width: int, others: Sequence[InputSpec], *, accepted: Sequence[str] = ()
) -> None:
    """Compares vocabularies id by id, and the number of logits. Models without a folder are the policy's own kind.

    A teacher or a reference scores the policy's token ids: where an id is another word to it, it praises what it
    never meant. One that only samples (role budget) may have other padding behind its vocabulary.
    Where the check `vocabulary` of the gate is among the `accepted`, only the number of logits counts: ids are then
    compared as numbers. Raises StageRefused naming every model that differs.
    """
    words = _words(policy)
    known: dict[bytes, str] = {}  # content of tokenizer.json -> what is wrong with it: nine teachers share one
    problems = []
    for given in (other for other in others if other.path):
        file = Path(given.path) / "tokenizer.json"
        content = file.read_bytes() if file.is_file() else str(given.path).encode()
        if content not in known:
            known[content] = _difference(words, _words(load_tokenizer(given.path)))
        logits = int(AutoConfig.from_pretrained(given.path, local_files_only=True).get_text_config().vocab_size)
        name = f"{given.role.removesuffix('s')} {given.label}"
        if known[content] and "vocabulary" not in accepted:
            problems.append(f"{name} has another vocabulary than the policy: {known[content]}")
        elif logits != width and given.role != "budget":
            problems.append(
                f"{name} has the policy's tokenizer of {len(words)} words, padded to another width: it gives {logits} "
                f"logits and the policy {width}"
            )
    if problems:
        raise StageRefused(
            "\n".join(problems),
            hint="models are compared token by token: use one tokenizer for all; if only the padding differs, "
            "save one of them again after resize_token_embeddings(N) of transformers, with the width of the other",
        )


def accepted(spec: StageSpec) -> Sequence[str]:
    """Checks of the gate whose refusals the user accepted for this stage."""
    found: Sequence[str] = spec.gate.get("accepted", ())
    return found


def _words(tokenizer: Tokenizer) -> list[str | None]:
    """The word of each id; None for ids without one."""
    vocabulary = tokenizer.get_vocab()
    words: list[str | None] = [None] * (max(vocabulary.values(), default=-1) + 1)
    for word, number in vocabulary.items():
        words[number] = word
    return words


def _difference(policy: Sequence[str | None], given: Sequence[str | None]) -> str:
    """The first id that is not the same word; empty where there is none."""
    for number, (own, other) in enumerate(zip_longest(policy, given)):
        if own != other:
            return f"id {number} is {_shown(own)} to the policy and {_shown(other)} to it"
    return ""


def _shown(word: str | None) -> str:
    return "no word" if word is None else repr(word)


class Router:
    """Which teacher scores a row: the one whose route equals the row's `route_by` columns."""

    def __init__(self, teachers: Sequence[InputSpec], route_by: Sequence[str], default: str | None) -> None:
        self.route_by = list(route_by)
        self.numbers = {tuple(teacher.route.get(c, "") for c in route_by): i for i, teacher in enumerate(teachers)}
        labels = [teacher.label for teacher in teachers]
        if default is not None and default not in labels:
            raise StageRefused(
                f"config.default_teacher: {default} is none of the teachers", hint=f"teachers: {', '.join(labels)}"
            )
        self.default = labels.index(default) if default is not None else None

    def teacher(self, columns: Mapping[str, str]) -> int:
        """Number of the row's teacher. Raises StageRefused for a row without a route."""
        key = tuple(columns.get(column, "") for column in self.route_by)
        number = self.numbers.get(key, self.default)
        if number is None:
            asked = ", ".join(f"{c}={v}" for c, v in zip(self.route_by, key, strict=True))
            raise StageRefused(
                f"no teacher for {asked}", hint="give a teacher with that route, or set config.default_teacher"
            )
        return number


def distinct(teachers: Sequence[InputSpec]) -> list[int]:
    """For each teacher the number of the first one with its checkpoint: labels and weights differ, the model is one."""
    first: dict[str, int] = {}
    return [first.setdefault(str(teacher.path), number) for number, teacher in enumerate(teachers)]


class TeacherPool(Generic[Held]):
    """Teachers, or parts of them, by number; at most `resident` in memory, the one asked for next loaded meanwhile.

    `load` is called in another thread for a prefetch; it must return the same weights whenever it is called.
    """

    def __init__(self, load: Callable[[int], Held], *, resident: int) -> None:
        self._load, self._resident = load, max(1, resident)
        self._held: OrderedDict[int, Held] = OrderedDict()
        self._coming: dict[int, Future[Held]] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="teacher")
        self.loads = 0

    def get(self, number: int, *, then: int | None = None) -> Held:
        """What `load` gives for teacher `number`; `then` is the one wanted after it."""
        if number not in self._held:
            coming = self._coming.pop(number, None)
            self._make_room(keep=number)
            self._held[number] = coming.result() if coming else self._fetch(number)
        self._held.move_to_end(number)
        # with one place the next one must wait: two would be in memory
        if then is not None and self._resident > 1 and then not in self._held and then not in self._coming:
            self._make_room(keep=number)
            self._coming[then] = self._thread.submit(self._fetch, then)
        return self._held[number]

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _fetch(self, number: int) -> Held:
        self.loads += 1
        return self._load(number)

    def _make_room(self, *, keep: int) -> None:
        """Drop the longest unused but `keep` until one more fits."""
        while len(self._held) + len(self._coming) >= self._resident and self._held.keys() - {keep}:
            del self._held[next(number for number in self._held if number != keep)]
