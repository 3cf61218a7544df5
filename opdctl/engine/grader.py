"""Generative rewards: a language model grades completions, one by one (rubric) or in pairs within a group (pairwise).

rubric:   R(y_i) = s(v_i), v_i the verdict on y_i and s the settings' `verdicts`.
pairwise: R(y_i) = 1 / (2 (G - 1)) * sum over j != i of [w(i, j) + 1 - w(j, i)], w(i, j) in [0, 1] what the first wins
          when y_i is shown first: every pair is shown both ways round, so that a judge who prefers a place favours no
          completion. The reward is the share of its comparisons that a completion won.
A text that ends with no verdict earns the lowest score (in a pair, neither wins) and is counted as unparsed.

Sources: the tournament inside a group, Kimi K3 (arXiv 2607.24653; its rule that over-long answers lose has constants
that are undisclosed, and is left out); the actor as its own generative reward model, DeepSeek-V4 (arXiv 2606.19348).
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import permutations

from opdctl.backends.contract import StageSpec
from opdctl.engine.endpoint import Client
from opdctl.engine.loop import open_policy, role
from opdctl.engine.rows import Renderer, Row, stream_seed
from opdctl.engine.sampling import Completions, Generate, sample
from opdctl.engine.tokenizer import Tokenizer, closed_vocabulary
from opdctl.errors import StageRefused
from opdctl.settings import Grader
from opdctl.tasks import Prompt, Task

ANY_LENGTH = 1 << 62  # the judge's own positions are the only limit
_GROUP = 1 << 12  # completions of a prompt, at most: keys of random numbers are counted out in squares of it
_FIELD = re.compile(r"\{\w+\}")  # of a template

Judge = Callable[[Sequence[Prompt], Sequence[int]], list[str]]  # prompts, and keys of random numbers -> what it writes


@dataclass(frozen=True)
class Verdict:
    """What the judge said of completion `first`, or of it beside `second`."""

    first: int
    second: int | None
    score: float | None  # None: unparsed
    accepted: bool  # rubric: a score in the upper half; pairwise: the first was preferred


@dataclass(frozen=True)
class Agreement:
    """A judge beside the rule: counts of verdicts.

    Pairwise, those on a right and a wrong completion count, and `right` means that the right one was shown first; the
    rule cannot tell the others apart.
    """

    right: int  # the rule accepts
    wrong: int
    false_rejects: int  # of `right`
    false_accepts: int  # of `wrong`
    verdicts: int  # all of them
    unparsed: int
    score: float  # mean reward

    @property
    def told(self) -> int:
        """Verdicts that the rule has one of its own beside."""
        return self.right + self.wrong

    @property
    def agree(self) -> int:
        return self.told - self.false_rejects - self.false_accepts


@dataclass(frozen=True)
class Graded:
    rewards: Mapping[int, float]  # by the number of the completion; those of other tasks are absent
    verdicts: Sequence[Verdict]

    def agreement(self, correct: Sequence[bool]) -> Agreement:
        """With `correct[i]` as the rule's verdict on completion i."""
        judged = self.verdicts
        # of a pair, the rule prefers the first where that alone is right
        told = [v for v in judged if v.second is None or correct[v.first] != correct[v.second]]
        right = [v.accepted for v in told if correct[v.first]]
        wrong = [v.accepted for v in told if not correct[v.first]]
        unparsed = sum(v.score is None for v in judged)
        score = sum(self.rewards.values()) / max(1, len(self.rewards))
        return Agreement(len(right), len(wrong), right.count(False), wrong.count(True), len(judged), unparsed, score)

    def metrics(self, correct: Sequence[bool]) -> dict[str, float]:
        """grader_score and unparsed are means over what was graded, 0 where nothing was; agreement is with the rule."""
        counts = self.agreement(correct)
        return {
            "grader_score": counts.score,
            "unparsed": counts.unparsed / max(1, counts.verdicts),
            "agreement": counts.agree / max(1, counts.told),
        }


class GenerativeReward:
    """Grades completions of the settings' tasks by asking `judge`."""

    def __init__(self, settings: Grader, tasks: Mapping[str, Task], judge: Judge) -> None:
        self.settings, self.tasks, self.judge = settings, tasks, judge
        scores = settings.verdicts.values()
        self._lowest, self._middle = min(scores), (min(scores) + max(scores)) / 2
        # the longest first: `not good` ends with `good`
        words = "|".join(re.escape(verdict) for verdict in sorted(settings.verdicts, key=len, reverse=True))
        self._verdict = re.compile(rf"(?<![\w.])({words})\W*\Z")

    def grade(self, rows: Sequence[Row], texts: Sequence[str], group_size: int) -> Graded:
        """Completions are prompt-major, `group_size` a row. Raises StageRefused for an {answer} that no task knows."""
        asked = [
            (row, group)
            for number, row in enumerate(rows)
            if row.task in self.settings.tasks
            for group in self._groups(range(number * group_size, (number + 1) * group_size))
        ]
        written = self.judge(
            [self._prompt(row, [texts[i] for i in group]) for row, group in asked],
            [self._key(row, [i % group_size for i in group]) for row, group in asked],
        )
        verdicts = [self._judged(group, text) for (_, group), text in zip(asked, written, strict=True)]
        rewards = self._tournament(verdicts, group_size) if self.settings.mode == "pairwise" else self._alone(verdicts)
        return Graded(rewards, verdicts)

    def _groups(self, members: range) -> list[tuple[int, ...]]:
        """What is judged together: each completion alone, or all ordered pairs."""
        if self.settings.mode == "rubric":
            return [(i,) for i in members]
        return list(permutations(members, 2))

    @staticmethod
    def _key(row: Row, members: Sequence[int]) -> int:
        first, *rest = members
        return (row.key * _GROUP + first) * _GROUP + (rest[0] if rest else first)

    def _prompt(self, row: Row, shown: Sequence[str]) -> Prompt:
        """The template filled in; a user's turn where the task's prompts are messages."""
        names = ("completion",) if len(shown) == 1 else ("first", "second")
        fields = {"prompt": row.prompt.text, **dict(zip(names, shown, strict=True))}
        if "{answer" in self.settings.template:
            answer = self.tasks[row.task].reference(row.prompt)
            if answer is None:
                raise StageRefused(
                    f"grader.template has {{answer}}, and task {row.task} knows no answer to {row.prompt.text[:60]!r}",
                    hint="leave {answer} out of the template, or take the task out of grader.tasks",
                )
            fields["answer"] = answer
        text = self.settings.template.format(**fields)
        messages = [{"role": "user", "content": text}] if row.prompt.messages else []
        return Prompt(text, None, row.prompt.columns, messages)

    def _judged(self, group: tuple[int, ...], text: str) -> Verdict:
        found = self._verdict.search(text)
        score = self.settings.verdicts[found[1]] if found else None
        pair = len(group) == 2
        accepted = score is not None and (score > 0.5 if pair else score > self._middle)
        return Verdict(group[0], group[1] if pair else None, score, accepted)

    def _alone(self, verdicts: Sequence[Verdict]) -> dict[int, float]:
        return {v.first: self._lowest if v.score is None else v.score for v in verdicts}

    @staticmethod
    def _tournament(verdicts: Sequence[Verdict], group_size: int) -> dict[int, float]:
        """The share of its 2 (G - 1) comparisons that each completion won."""
        won: dict[int, float] = {}
        for v in verdicts:
            assert v.second is not None
            for member, gain in ((v.first, v.score), (v.second, None if v.score is None else 1 - v.score)):
                won[member] = won.get(member, 0.0) + (gain or 0.0)
        return {member: total / (2 * (group_size - 1)) for member, total in won.items()}


# ------------------------------------------------------------------------------------------------- judges


def _check_words(settings: Grader, tokenizer: Tokenizer) -> None:
    """Refuse what a judge of few words can never read or write: all would silently get the lowest score."""
    words = closed_vocabulary(tokenizer)
    if words is None:
        return
    text = _FIELD.sub("\0", settings.template).replace("{{", "{").replace("}}", "}")
    unread = [word for word in text.split() if "\0" not in word and word not in words]
    ends = {verdict: re.compile(rf"(?<![\w.]){re.escape(verdict.split()[-1])}\W*\Z") for verdict in settings.verdicts}
    unwritten = [verdict for verdict, end in ends.items() if not any(end.search(word) for word in words)]
    for key, missing in (("template", unread), ("verdicts", unwritten)):
        if missing:
            raise StageRefused(
                f"config.grader.{key}: {missing[0]!r} is not in the vocabulary of the judge",
                hint="use words that its tokenizer knows, or another judge (config.grader.by)",
            )


def open_grader(
    spec: StageSpec,
    settings: Grader,
    tasks: Mapping[str, Task],
    actor: Generate[Completions],
    renderer: Renderer,
) -> GenerativeReward:
    """With the judge that the settings name: the actor, the input role `grader`, or a server."""
    if settings.endpoint is not None:
        return GenerativeReward(settings, tasks, _endpoint_judge(settings, Client(settings.endpoint), spec.seed))
    if settings.by == "model":
        policy, tokenizer = open_policy(spec, role(spec, "grader")[0])
        policy.requires_grad_(False)
        actor, renderer = partial(sample, policy), Renderer(tokenizer, policy.eos_ids)
    _check_words(settings, renderer.tokenizer)
    return GenerativeReward(settings, tasks, _model_judge(spec, settings, actor, renderer))


def _model_judge(spec: StageSpec, settings: Grader, generate: Generate[Completions], renderer: Renderer) -> Judge:
    """A model of this process as it is when asked, in calls of at most `resources.micro_batch_tokens` tokens."""
    budget, seed = int(spec.resources["micro_batch_tokens"]), stream_seed(spec.seed, "grader")

    def judge(prompts: Sequence[Prompt], keys: Sequence[int]) -> list[str]:
        ids = renderer.prompts(prompts, ANY_LENGTH)
        step = max(1, budget // (max(map(len, ids), default=0) + settings.max_tokens))
        written: list[str] = []
        for at in range(0, len(ids), step):
            drawn = generate(
                ids[at : at + step],
                group_size=1,
                max_completion_tokens=settings.max_tokens,
                temperature=settings.temperature or 1.0,
                top_p=1.0,
                top_k=0 if settings.temperature else 1,  # greedy: the likeliest token alone
                seed=seed,
                keys=keys[at : at + step],
            )
            written += renderer.texts(drawn.completions)
        return written

    return judge


def _endpoint_judge(settings: Grader, client: Client, seed: int) -> Judge:
    def judge(prompts: Sequence[Prompt], keys: Sequence[int]) -> list[str]:
        return client.complete(
            [list(prompt.messages) or prompt.text for prompt in prompts],
            max_tokens=settings.max_tokens,
            temperature=settings.temperature,
            seeds=[stream_seed(seed, "grader", key) & 0x7FFFFFFF for key in keys],
        )

    return judge
