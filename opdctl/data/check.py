"""What is wrong with data, before a run is spent on it: one pass over each split, in bounded memory.

In memory are four 64-bit numbers for each row, 16 bytes for each held-out word and a sample of the rows.
"""

import random
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Literal, Protocol

from opdctl.data.near import Hashes, Overlap, conflicts, repeats, words
from opdctl.data.source import CHUNK, Bad, Example, Source, verdicts
from opdctl.errors import OpdctlError
from opdctl.tasks import Prompt, Split

if TYPE_CHECKING:
    import numpy as np

SHOWN = 10  # bad rows, and pairs of rows, that are named
VALUES = 50  # values of a column that are counted one by one
SPLITS: tuple[Split, ...] = ("eval", "train")  # held-out words must be known before training texts are looked at
BINS = 12
SPOILS = 0.01  # share of rows with a wrong reference, or two right answers, from which a run is not worth its time
FLOOR = 0.5

Lengths = Callable[[Sequence[Example]], tuple[list[int], list[int]]]


@dataclass(frozen=True)
class Limit:
    """A stage's bound on tokens."""

    stage: str
    key: str
    of: Literal["prompt", "completion", "both"]
    tokens: int
    refuses: bool  # else such completions are cut, and judged as cut


@dataclass(frozen=True)
class Finding:
    spoils: bool  # a run on this data would fail, or measure something else than it says
    text: str


@dataclass(frozen=True)
class Histogram:
    """Of lengths. Bin i counts the lengths from edges[i] up to, without, edges[i + 1]."""

    mean: float
    percentiles: dict[str, int]  # "50", "90", "99", "100"
    edges: list[int]
    counts: list[int]


@dataclass
class SplitReport:
    rows: int = 0
    bad: int = 0
    columns: dict[str, dict[str, int]] = field(default_factory=dict)  # column -> value -> rows, the most frequent
    distinct: dict[str, int] = field(default_factory=dict)  # column -> values counted; `VALUES` at most
    repeated: int = 0  # prompts that an earlier one equals
    repeated_nearly: int = 0  # but for case, punctuation at the ends of words, and blanks
    conflicting: int = 0  # prompts asked more than once with different reference answers
    prompt: Histogram | None = None
    completion: Histogram | None = None
    over: dict[str, int] = field(default_factory=dict)  # "STAGE KEY: TOKENS" -> rows above


@dataclass(frozen=True)
class Judged:
    """Shares of a sample that the verifier calls right."""

    rows: int
    full: float  # the reference answers
    shuffled: float  # those of other rows, where they differ
    empty: float  # nothing at all
    constant: float  # the answer that is right most often, given to every row
    constant_answer: str
    wrong: list[str]  # rows whose own reference is judged wrong


@dataclass
class Report:
    source: str
    unit: str  # that lengths are in: tokens, words
    splits: dict[str, SplitReport] = field(default_factory=dict)
    overlap: int = 0  # held-out prompts that are training prompts too
    overlap_nearly: int = 0
    overlap_13gram: int = 0  # held-out prompts that share 13 words with a training prompt, those above left out
    judged: dict[str, Judged] = field(default_factory=dict)  # split -> its sample
    findings: list[Finding] = field(default_factory=list)

    @property
    def spoilt(self) -> bool:
        return any(finding.spoils for finding in self.findings)


class Progress(Protocol):
    def __call__(self, split: str, rows: int) -> None: ...


def check(
    source: Source,
    *,
    lengths: Lengths | None,
    limits: Sequence[Limit] = (),
    sample: int = 500,
    progress: Progress = lambda split, rows: None,
) -> Report:
    """`lengths` counts tokens; without it words are counted. `sample`: rows of a split that the verifier judges."""
    report = Report(source.title, "words" if lengths is None else "tokens")
    overlap, sides = Overlap(), {}
    for split in SPLITS:
        side = sides[split] = _Side(split, lengths or _words_of, sample)
        examples = source.examples(split)
        while chunk := list(islice(examples, CHUNK)):
            told = side.add(chunk)
            overlap.hold_out(told) if split == "eval" else overlap.train(told)
            progress(split, side.report.rows)
        if split == "eval":
            overlap.close()
        side.finish(report, limits)
    _overlaps(report, sides, overlap)
    for split, side in sides.items():
        judged = _judge(source, side.sampled)
        if judged is not None:
            report.judged[split] = judged
            report.findings += _of_verdicts(split, judged)
    if not report.splits["train"].rows:
        report.findings.append(Finding(True, "there is no row to train on"))
    report.findings.sort(key=lambda finding: not finding.spoils)
    return report


def _words_of(examples: Sequence[Example]) -> tuple[list[int], list[int]]:
    shown = [example.demonstration for example in examples]
    return (
        [len(text_of(example.prompt).split()) for example in examples],
        [len(one.completion.split()) if one is not None else 0 for one in shown],
    )


def text_of(prompt: Prompt) -> str:
    """The words that make a prompt: system prompts say the same in every row."""
    if not prompt.messages:
        return prompt.text
    return " ".join(message["content"] for message in prompt.messages if message["role"] != "system")


class _Side:
    """One split, as far as it has been read."""

    def __init__(self, split: Split, lengths: Lengths, sample: int) -> None:
        self.split, self.report, self.sampled = split, SplitReport(), list[Example]()
        self.exact, self.nearly, self._answers = Hashes(), Hashes(), Hashes()
        self._files: list[tuple[int, str]] = []  # row at which a file begins
        self._numbers = array("q")
        self._prompt, self._completion = array("q"), array("q")
        self._columns: dict[str, Counter[str]] = {}
        self._bad: list[Bad] = []
        self._whys: set[str] = set()  # two at most: is there more than one?
        self._lengths, self._sample, self._random = lengths, sample, random.Random(0)
        self._refused = ""

    def add(self, chunk: Sequence[Example | Bad]) -> list[list[str]]:
        """The words of the prompts that are no bad rows."""
        self._bad += [row for row in chunk if isinstance(row, Bad)][: SHOWN - len(self._bad)]
        self.report.bad += sum(isinstance(row, Bad) for row in chunk)
        for row in chunk:
            if isinstance(row, Bad) and len(self._whys) < 2:
                self._whys.add(row.why)
        examples = [row for row in chunk if isinstance(row, Example)]
        told = []
        for example in examples:
            text = text_of(example.prompt)
            told.append(words(text))
            images = " ".join(example.prompt.images)
            self.exact.add(" ".join([*text.split(), images]))
            self.nearly.add(" ".join([*told[-1], images]))
            self._answers.add(_answer(example))
            self._place(example)
            self._count(example)
            self._draw(example)
        self._measure(examples)
        return told

    def _place(self, example: Example) -> None:
        if not self._files or self._files[-1][1] != example.file:
            self._files.append((len(self._numbers), example.file))
        self._numbers.append(example.number)
        self.report.rows += 1

    def _count(self, example: Example) -> None:
        for column, value in example.prompt.columns.items():
            counts = self._columns.setdefault(column, Counter())
            if value in counts or len(counts) < VALUES:
                counts[value] += 1

    def _draw(self, example: Example) -> None:
        """A uniform sample of a stream (Vitter's algorithm R)."""
        if len(self.sampled) < self._sample:
            self.sampled.append(example)
        elif (at := self._random.randrange(self.report.rows)) < self._sample:
            self.sampled[at] = example

    def _measure(self, examples: Sequence[Example]) -> None:
        if self._refused:
            return
        try:
            prompts, completions = self._lengths(examples)
        except OpdctlError as error:
            self._refused = f"{error}" + (f" ({error.hint})" if error.hint else "")
            return
        self._prompt.extend(prompts)
        self._completion.extend(completions)

    def where(self, row: int) -> str:
        file = next(name for start, name in reversed(self._files) if start <= row)
        return f"{file}, row {self._numbers[row]}"

    def finish(self, report: Report, limits: Sequence[Limit]) -> None:
        mine = report.splits[self.split] = self.report
        find = report.findings.append
        if mine.bad > 1 and not mine.rows and len(self._whys) == 1:  # a misspelt column is no fault of the rows
            find(Finding(True, f"{self.split}: all {mine.bad:,} rows: {self._bad.pop().why}"))
        else:
            self._tell_bad(find)
        mine.columns = {name: dict(counts.most_common(VALUES)) for name, counts in sorted(self._columns.items())}
        mine.distinct = {name: len(counts) for name, counts in mine.columns.items()}
        exact, answers = self.exact.numpy(), self._answers.numpy()
        mine.repeated, mine.repeated_nearly = repeats(exact), repeats(self.nearly.numpy())
        pairs = conflicts(exact, answers)
        mine.conflicting = len(pairs)
        if pairs:
            shown = "; ".join(f"{self.where(a)} and {self.where(b)}" for a, b in pairs[:3])
            spoils = len(pairs) > SPOILS * mine.rows
            find(Finding(spoils, f"{self.split}: {len(pairs):,} prompts have more than one reference answer: {shown}"))
        if mine.repeated_nearly:
            text = f"{self.split}: {mine.repeated_nearly:,} prompts repeat another, {mine.repeated:,} word for word"
            find(Finding(False, text))
        if self._refused:
            find(Finding(True, f"{self.split}: {self._refused}"))
        elif mine.rows:
            self._bound(report, limits)

    def _tell_bad(self, find: Callable[[Finding], None]) -> None:
        for bad in self._bad:
            find(Finding(True, f"{bad.where}: {bad.why}"))
        if self.report.bad > len(self._bad):
            find(Finding(True, f"{self.split}: {self.report.bad - len(self._bad):,} more bad rows"))

    def _bound(self, report: Report, limits: Sequence[Limit]) -> None:
        import numpy as np

        prompt, completion = np.frombuffer(self._prompt, np.int64), np.frombuffer(self._completion, np.int64)
        self.report.prompt = histogram(prompt)
        self.report.completion = histogram(completion) if completion.any() else None
        measured = {"prompt": prompt, "completion": completion, "both": prompt + completion}
        for limit in limits:
            if self.split == "eval" and limit.of != "prompt":
                continue
            lengths = measured[limit.of]
            over = int((lengths > limit.tokens).sum())
            self.report.over[f"{limit.stage} {limit.key}: {limit.tokens}"] = over
            if over:
                longest = int(lengths.argmax())
                what = "rows have" if limit.of == "both" else f"{limit.of}s have"
                text = (
                    f"{self.split}: {over:,} {what} more than stages.{limit.stage}.{limit.key}: {limit.tokens} "
                    f"{report.unit}; the longest has {int(lengths[longest]):,}: {self.where(longest)}"
                )
                report.findings.append(Finding(limit.refuses, text))


def _answer(example: Example) -> str:
    """What tells two answers apart. Tasks keep in `Prompt.answer` what their verifier needs."""
    answer = example.prompt.answer
    return str(getattr(answer, "answer", answer))


def histogram(lengths: "np.ndarray") -> Histogram:
    import numpy as np

    at = np.percentile(lengths, [50, 90, 99, 100], method="higher")
    width = max(1, -(-(int(at[-1]) + 1) // BINS))
    step = 10 ** (len(str(width)) - 1)
    width = -(-width // step) * step  # one digit and noughts: edges that can be read
    first = int(lengths.min()) // width
    counts = np.bincount(lengths // width)[first:]
    edges = [width * (first + i) for i in range(len(counts) + 1)]
    percentiles = {str(p): int(value) for p, value in zip((50, 90, 99, 100), at, strict=True)}
    return Histogram(float(lengths.mean()), percentiles, edges, [int(count) for count in counts])


def _overlaps(report: Report, sides: "dict[Split, _Side]", overlap: Overlap) -> None:
    import numpy as np

    held, train = sides["eval"], sides["train"]
    exact = np.isin(held.exact.numpy(), train.exact.numpy())
    nearly = np.isin(held.nearly.numpy(), train.nearly.numpy())
    shared = [(row, partner) for row, partner in overlap.found() if not nearly[row]]
    report.overlap, report.overlap_nearly, report.overlap_13gram = int(exact.sum()), int(nearly.sum()), len(shared)
    if nearly.any():
        first = [held.where(int(row)) for row in np.flatnonzero(nearly)[:3]]
        report.findings.append(
            Finding(
                True,
                f"{report.overlap_nearly:,} of {held.report.rows:,} held-out prompts are trained on too, "
                f"{report.overlap:,} word for word: {'; '.join(first)}",
            )
        )
    if shared:
        row, partner = shared[0]
        text = f"{len(shared):,} of {held.report.rows:,} held-out prompts share 13 words with a training prompt"
        report.findings.append(Finding(False, f"{text}: {held.where(row)} with {train.where(partner)}"))


# -------------------------------------------------------------------------------------------------------- verdicts


def _judge(source: Source, sampled: Sequence[Example]) -> Judged | None:
    """None where the task has no reference answers."""
    known = [(example, text) for example in sampled if (text := source.judging.reference(example.prompt)) is not None]
    if not known:
        return None
    prompts, texts = [example.prompt for example, _ in known], [text for _, text in known]

    def right(answers: Sequence[str]) -> list[bool]:
        return [verdict.correct for verdict in verdicts(source.judging, list(zip(prompts, answers, strict=True)))]

    full = right(texts)
    others = texts[1:] + texts[:1]
    shuffled = [ok for ok, own, other in zip(right(others), texts, others, strict=True) if own != other]
    best = [(sum(right([text] * len(texts))), text) for text, _ in Counter(texts).most_common(3)]
    constant, answer = max(best)
    wrong = [f"{example.where}: {text[:60]!r}" for (example, text), ok in zip(known, full, strict=True) if not ok]
    count = len(known)
    return Judged(
        count,
        sum(full) / count,
        sum(shuffled) / max(1, len(shuffled)),
        sum(right([""] * count)) / count,
        constant / count,
        answer,
        wrong[:SHOWN],
    )


def _of_verdicts(split: Split, judged: Judged) -> Iterator[Finding]:
    if judged.wrong:
        text = f"{split}: the verifier calls {1 - judged.full:.1%} of {judged.rows:,} reference answers wrong"
        yield Finding(1 - judged.full > SPOILS, f"{text}: {'; '.join(judged.wrong[:3])}")
    if judged.empty > SPOILS:
        yield Finding(True, f"{split}: the verifier calls an empty completion right in {judged.empty:.1%} of the rows")
    if judged.constant > FLOOR:
        told = f"always answering {judged.constant_answer[:40]!r} is right in {judged.constant:.1%} of the rows"
        yield Finding(False, f"{split}: {told}: compare accuracies with that, not with 0")
    elif judged.shuffled > FLOOR:
        text = f"{split}: the answer of another row is called right in {judged.shuffled:.1%} of the rows"
        yield Finding(False, f"{text}: the verifier tells answers hardly apart")
