"""IFEval: instructions whose fulfilment a program can check, and prompts of the same kinds to train on.

Zhou et al., arXiv 2311.07911; Apache-2.0: 541 prompts with one to three of 25 kinds of instructions, evaluation only.
The checkers are those of the package if-verifiable, run in `opdctl.jail`; three kinds need NLTK's English data
(`opdctl data fetch nltk`).

    match   correct when every instruction of the prompt is fulfilled by
    strict  the answer
    loose   the answer, or what is left of it without its first line, its last line, both, or without asterisks

There are no reference answers to the published prompts. What the checkers accept is narrower than what the words ask
for, and wider: `1` is valid JSON, and `a a a ...` has many words. The floor of a constant answer is in docs/tasks.md.

Generated prompts (`drills`) ask for a few sentences on a subject under one or two instructions of the kinds in
`KINDS`. They have demonstrations, put together from plain sentences: right in form, without much to say.
"""

import itertools
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from opdctl.errors import StageFailed
from opdctl.jail import Check, shared
from opdctl.settings import EffortSettings, IfevalTask
from opdctl.tasks import Prompt, Verdict
from opdctl.tasks.published import Part, Problem, Published, read_jsonl

IMPORTS = ("if_verifiable.common", "if_verifiable.ifeval", "langdetect")
HELD_OUT = 200  # generated prompts in validation, and in test where there are no published ones


class Ifeval(Published):
    """The task. `Prompt.answer` is {prompt, instructions, arguments, solution}."""

    before_answer = "\n\n"

    def __init__(
        self, name: str, settings: IfevalTask, efforts: EffortSettings | None, folder: Path | None = None
    ) -> None:
        self.name, self._loose = name, settings.match == "loose"
        home = folder or Path.cwd()
        self._nltk = str((home / settings.nltk).absolute()) if settings.nltk else ""
        counts: dict[Part, int] = {"train": settings.drills, "validation": HELD_OUT, "test": HELD_OUT}
        parts = {part: list(itertools.islice(_generated(part), count)) for part, count in counts.items()}
        if settings.path is not None:
            file = home / settings.path / settings.FILES[0]
            parts["test"] = [_problem(row) for row in read_jsonl(file, f"tasks.{name}.path")]
        super().__init__(name, settings, efforts, parts)

    def verify(self, prompt: Prompt, completion: str) -> Verdict:
        return self.verify_all([(prompt, completion)])[0]

    def verify_all(self, pairs: Sequence[tuple[Prompt, str]]) -> list[Verdict]:
        checks = [
            Check("opdctl.tasks.ifeval:fulfilled", [completion, dict(prompt.answer), self._nltk], imports=IMPORTS)
            for prompt, completion in pairs
        ]
        verdicts = []
        for outcome in shared().run(checks):
            if outcome.failure == "error":  # the checkers judge any text: the machine lacks something
                raise StageFailed(
                    f"task {self.name}: a checker of if-verifiable failed: {outcome.detail[-300:]}",
                    hint="pip install 'opdctl[tasks]', opdctl data fetch nltk, and tasks.NAME.nltk: data/nltk",
                )
            kinds = dict(outcome.value or {})
            unmet = outcome.failure or ", ".join(kind for kind, kept in kinds.items() if not kept[self._loose])
            verdicts.append(Verdict(not unmet, float(not unmet), {"reason": unmet}))
        return verdicts

    def reference(self, prompt: Prompt) -> str | None:
        solution = prompt.answer["solution"]
        return None if solution is None else self.written(solution)


def _problem(row: Mapping[str, Any]) -> Problem:
    answer = {"prompt": row["prompt"], "instructions": row["instruction_id_list"], "arguments": row["kwargs"]}
    return Problem(row["prompt"], answer | {"solution": None}, None)


def fulfilled(completion: str, asked: Mapping[str, Any], nltk_data: str) -> dict[str, tuple[bool, bool]]:
    """Of each instruction whether it is fulfilled, strictly and loosely; runs in the jail."""
    registry = _registry(nltk_data)
    from if_verifiable.common import evaluate_instructions

    random.seed(0)  # a checker draws what its arguments leave open
    results, _ = evaluate_instructions(
        completion, list(asked["instructions"]), list(asked["arguments"]), asked["prompt"], registry
    )
    kept = {result.instruction_id: (result.strict_pass, result.loose_pass) for result in results}
    return {kind: kept.get(kind, (False, False)) for kind in asked["instructions"]}


@lru_cache(maxsize=1)
def _registry(nltk_data: str) -> dict[str, Any]:
    os.environ["NLTK_DATA"] = nltk_data
    import nltk
    from if_verifiable.ifeval import INSTRUCTION_DICT
    from langdetect import DetectorFactory

    nltk.data.path.insert(0, nltk_data)
    DetectorFactory.seed = 0  # else its guess is drawn anew each time
    return dict(INSTRUCTION_DICT)


# ----------------------------------------------------------------------------------------------------- generation

FORMS = (
    "Write a few sentences about {subject}.",
    "Tell me something about {subject}.",
    "Describe {subject} to a child.",
    "What should a visitor know about {subject}?",
    "Write a short note to a friend about {subject}.",
    "Explain why people like {subject}.",
    "Give a short report on {subject}.",
)
# fmt: off
SUBJECTS = [
    "a small harbour", "the first snow", "a night train", "an old library", "the moon", "a street market", "bees",
    "a mountain lake", "tea", "a bicycle tour", "the desert", "a lighthouse", "wild horses", "a school garden",
    "volcanoes", "an orchestra", "the river", "a bakery", "penguins", "a chess club", "the aurora", "a stone bridge",
    "mushrooms", "a weather station", "sailing", "a village fair", "coral reefs", "a telescope", "autumn leaves",
    "a clock tower", "waterfalls", "an island",
]
# fmt: on
SENTENCES = (
    "There is much to say about {subject}.",
    "Many people remember {subject} for a long time.",
    "You can learn a lot when you look closely.",
    "In the morning everything is quiet and clear.",
    "Later in the day visitors come from near and far.",
    "Some of them take pictures and others just sit and watch.",
    "Every season brings a change that is worth seeing.",
    "The best way to understand it is to take your time.",
    "Old stories about {subject} are still told today.",
    "At the end of the day most people leave with a smile.",
)
# fmt: off
WORDS = [
    "light", "music", "stone", "water", "summer", "bread", "winter", "silver", "garden", "letter", "window",
    "colour", "engine", "shadow", "paper",
]
# fmt: on
_BRACKETS = ("[name]", "[address]", "[date]", "[place]")
Draw = Callable[[random.Random], dict[str, Any]]
Apply = Callable[[list[str], Mapping[str, Any]], list[str]]  # changes the lines of an answer


@dataclass(frozen=True)
class Kind:
    """An instruction: how its arguments are drawn, how it is put, and how lines of plain text come to fulfil it."""

    draw: Draw
    wordings: Sequence[str]
    apply: Apply
    form: bool  # of the answer's form: a prompt has at most one of these, and one other


def _bullets(lines: list[str], count: int) -> list[str]:
    return [f"* {line}" for line in (*lines[: count - 1], " ".join(lines[count - 1 :]))]


def _none(rng: random.Random) -> dict[str, Any]:
    return {}


KINDS: Mapping[str, Kind] = {
    "punctuation:no_comma": Kind(
        _none, ("Do not use any commas.", "Avoid commas altogether."), lambda lines, _: lines, False
    ),
    "keywords:existence": Kind(
        lambda rng: {"keywords": rng.sample(WORDS, rng.randint(1, 3))},
        ("Include the keywords {keywords}.", "Your answer must contain these words: {keywords}."),
        lambda lines, given: [*lines, f"It has to do with {' and '.join(given['keywords'])}."],
        False,
    ),
    "keywords:forbidden_words": Kind(
        lambda rng: {"forbidden_words": rng.sample(WORDS, rng.randint(1, 3))},
        ("Do not use any of these words: {forbidden_words}.", "Leave out the keywords {forbidden_words}."),
        lambda lines, _: lines,
        False,
    ),
    "length_constraints:number_words": Kind(
        lambda rng: {"num_words": 10 * rng.randint(9, 15), "relation": "less than"},
        ("Answer with less than {num_words} words.",),
        lambda lines, _: lines,
        False,
    ),
    "length_constraints:number_sentences": Kind(
        lambda rng: {"num_sentences": rng.randint(2, 4), "relation": "at least"},
        ("Your response should contain at least {num_sentences} sentences.",),
        lambda lines, _: lines,
        False,
    ),
    "detectable_content:number_placeholders": Kind(
        lambda rng: {"num_placeholders": rng.randint(1, 4)},
        ("Include at least {num_placeholders} placeholders in square brackets, such as [address].",),
        lambda lines, given: [*lines, f"Write to {' or '.join(_BRACKETS[: given['num_placeholders']])}."],
        False,
    ),
    "detectable_format:number_bullet_lists": Kind(
        lambda rng: {"num_bullets": rng.randint(2, 4)},
        ("Your answer must contain exactly {num_bullets} bullet points, each beginning with an asterisk: * a point.",),
        lambda lines, given: _bullets(lines, given["num_bullets"]),
        True,
    ),
    "detectable_format:number_highlighted_sections": Kind(
        lambda rng: {"num_highlights": rng.randint(1, 3)},
        ("Highlight at least {num_highlights} parts of your answer with asterisks, i.e. *a highlighted part*.",),
        lambda lines, given: [f"*{line}*" if at < given["num_highlights"] else line for at, line in enumerate(lines)],
        True,
    ),
    "detectable_format:title": Kind(
        _none,
        ("Give your answer a title in double angular brackets, such as <<a title>>.",),
        lambda lines, _: ["<<What to know>>", *lines],
        True,
    ),
    "detectable_content:postscript": Kind(
        lambda rng: {"postscript_marker": rng.choice(["P.S.", "P.P.S"])},
        ("At the end of your answer, add a postscript that starts with {postscript_marker}",),
        lambda lines, given: [*lines, f"{given['postscript_marker']} Come and see for yourself."],
        True,
    ),
    "startend:end_checker": Kind(
        lambda rng: {"end_phrase": rng.choice(["That is all.", "What do you think?", "See you soon!"])},
        ("Finish with exactly these words: {end_phrase} Nothing may follow them.",),
        lambda lines, given: [*lines, given["end_phrase"]],
        True,
    ),
    "startend:quotation": Kind(
        _none,
        ("Wrap your whole answer in double quotation marks.",),
        lambda lines, _: [f'"{lines[0]}', *lines[1:-1], f'{lines[-1]}"'],
        True,
    ),
    "change_case:english_lowercase": Kind(
        _none,
        ("Write everything in lowercase English letters.", "No capital letters are allowed."),
        lambda lines, _: [line.lower() for line in lines],
        True,
    ),
    "change_case:english_capital": Kind(
        _none,
        ("Write everything in capital English letters.", "Your entire answer should be in uppercase."),
        lambda lines, _: [line.upper() for line in lines],
        True,
    ),
}


def _generated(part: Part) -> Iterator[Problem]:
    """An endless stream of different prompts; a combination of subject and form belongs to one part."""
    rng = random.Random(f"ifeval {part}")
    pairs = list(itertools.product(SUBJECTS, FORMS))
    random.Random("ifeval").shuffle(pairs)
    share = {"train": pairs[: len(pairs) * 8 // 10], "validation": pairs[len(pairs) * 8 // 10 : len(pairs) * 9 // 10]}
    mine = share.get(part, pairs[len(pairs) * 9 // 10 :])
    seen: set[str] = set()
    while True:
        problem = _draw(rng, *rng.choice(mine))
        if problem.question not in seen:
            seen.add(problem.question)
            yield problem


def _draw(rng: random.Random, subject: str, form: str) -> Problem:
    names = [rng.choice([name for name, kind in KINDS.items() if kind.form is wanted]) for wanted in (False, True)]
    if rng.random() < 0.4:
        names = [rng.choice(names)]
    question, lines = form.format(subject=subject), []
    lines = [text.format(subject=subject) for text in rng.sample(SENTENCES, 4)]
    arguments = []
    for name in names:
        kind = KINDS[name]
        given = kind.draw(rng)
        shown = {key: ", ".join(value) if isinstance(value, list) else value for key, value in given.items()}
        question += " " + rng.choice(kind.wordings).format(**shown)
        lines = kind.apply(lines, given)
        arguments.append(given)
    solution = "\n".join(lines)
    answer = {"prompt": question, "instructions": names, "arguments": arguments, "solution": solution}
    return Problem(question, answer, solution)
