"""Word problems that one operation on two of their numbers solves: MAWPS, and generated ones.

The model writes the operation (`answer: expression`) and the verifier computes it, or writes the number too (`answer:
number`). For a prompt such as `Joan had 70 shells and gave Sam 27. How many has she left?` the demonstrations are

    expression      number
    70 - 27         70 - 27 = 43
                    #### 43

Data: MAWPS (Koncel-Kedziorski et al., NAACL 2016), its subsets AddSub, MultiArith, SingleEq and SingleOp as JSONL with
the keys `input` and `target`, as in the evaluation folder of Qwen2.5-Math (that repository: MIT; the problems were
collected from several sources, whose licences vary). Rows are kept where exactly one operation on two numbers of the
text gives the target. A row's part is decided by its numbers and its target, so that rewordings of a problem, of which
the subsets have many, stay on one side: train 58 %, validation 10 %, test 32 %.

Generated problems: sentences of `word_templates`. The wordings and the pairs of numbers of `validation` and of `test`
occur in no other part.
"""

import itertools
import random
import re
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path

from opdctl.settings import EffortSettings, WordProblemTask
from opdctl.tasks import Prompt, Verdict
from opdctl.tasks.arithmetic import compute
from opdctl.tasks.published import Part, Problem, Published, place, read_jsonl
from opdctl.tasks.word_templates import ASIDES, BOXES, NAMES, PLACES, TEMPLATES, THINGS

SIGNS = {"add": "+", "sub": "-", "mul": "*", "div": "/"}
HELD_OUT = 500  # generated problems in each of validation and test
PARTS: Sequence[Part] = ("train", "validation", "test")
WORDINGS: Sequence[Part] = ("train",) * 5 + ("validation", "test")  # whose is the n-th wording, over and over
ASIDE = 0.3  # of the generated problems have a number that does not count
NUMBER = re.compile(r"\d+(?:,\d{3})+(?:\.\d+)?|\d*\.\d+|\d+")
FINAL = re.compile(r"####\s*(-?[\d,]{0,20}\.?\d{1,20})\s*$")
RESULT = re.compile(r"\s*=\s*-?[\d,.]{1,20}\s*$")
INSTRUCTION = {
    "expression": "Write only the one operation that solves the problem, like 12 + 5.",
    "number": "Write the operation and its result, then the result again after ####, like: 12 + 5 = 17\n#### 17",
}


class WordProblems(Published):
    """The task. `Prompt.answer` is {expression, value}."""

    def __init__(
        self, name: str, settings: WordProblemTask, efforts: EffortSettings | None, folder: Path | None = None
    ) -> None:
        self._mode = settings.answer
        self.instruction = INSTRUCTION[settings.answer]
        self.before_answer = "\nExpression:" if settings.answer == "expression" else "\nAnswer:"
        signs = [SIGNS[operation] for operation in settings.operations]
        parts: dict[Part, list[Problem]] = {part: [] for part in PARTS}
        drills: dict[Part, int] = {"train": settings.drills}
        if settings.path is None:
            drills |= {"validation": HELD_OUT, "test": HELD_OUT}
        else:
            for part, problem in _mawps((folder or Path.cwd()) / settings.path, name, signs, settings.answer):
                parts[part].append(problem)
        for part, count in drills.items():
            parts[part] += itertools.islice(_generated(part, settings.operations, settings.answer), count)
        super().__init__(name, settings, efforts, parts)

    def verify(self, prompt: Prompt, completion: str) -> Verdict:
        reason = (_wrong_number if self._mode == "number" else _wrong_expression)(completion, prompt.answer)
        return Verdict(not reason, float(not reason), {"reason": reason})

    def reference(self, prompt: Prompt) -> str:
        return self.written(_solution(prompt.answer["expression"], prompt.answer["value"], self._mode))


# -------------------------------------------------------------------------------------------------------- judging


def _solution(expression: str, value: str, mode: str) -> str:
    return expression if mode == "expression" else f"{expression} = {value}\n#### {value}"


def _wrong_expression(completion: str, answer: dict[str, str]) -> str:
    """Why the completion is not the reference's operation on the same two numbers, "" where it is.

    `= RESULT` may follow and is not read. Operands of + and * may be exchanged.
    """
    try:
        value, numbers, signs = compute(RESULT.sub("", completion).strip())
    except ValueError as error:
        return str(error)
    wanted, expected, _ = compute(answer["expression"])
    if len(signs) != 1 or sorted(numbers) != sorted(expected):
        return "not one operation on the two numbers that count"
    return "" if value == wanted else f"the value is {value}, not {wanted}"


def _wrong_number(completion: str, answer: dict[str, str]) -> str:
    found = FINAL.search(completion)
    if found is None:
        return "does not end with #### and a number"
    value = Fraction(found[1].replace(",", ""))
    return "" if value == Fraction(answer["value"]) else f"{value} is not {answer['value']}"


# ----------------------------------------------------------------------------------------------------------- rows


def _references(numbers: Sequence[Fraction], target: Fraction) -> set[tuple[Fraction, str, Fraction]]:
    """All (a, sign, b) of two of the numbers whose value is the target; + and * in the order of the text."""
    found = {(a, "+", b) for a, b in itertools.combinations(numbers, 2) if a + b == target}
    found |= {(a, "*", b) for a, b in itertools.combinations(numbers, 2) if a * b == target}
    found |= {(a, "-", b) for a, b in itertools.permutations(numbers, 2) if a - b == target}
    return found | {(a, "/", b) for a, b in itertools.permutations(numbers, 2) if b and a / b == target}


def _numbers(text: str) -> list[Fraction]:
    return [Fraction(number.replace(",", "")) for number in NUMBER.findall(text)]


def _part(numbers: Sequence[Fraction], target: Fraction) -> Part:
    at = place(f"{sorted(map(str, numbers))} {target}")
    return "train" if at < 58 else "validation" if at < 68 else "test"


def _plain(number: Fraction) -> str:
    return str(number.numerator) if number.denominator == 1 else repr(float(number))


def mawps_rows(folder: Path, key: str) -> list[tuple[str, Fraction]]:
    """(question, target) of all subsets, those of equal words once, in an order that mixes the subsets."""
    rows: dict[str, tuple[str, Fraction]] = {}
    for file in WordProblemTask.FILES:
        for raw in read_jsonl(folder / file, key):
            question = re.sub(r" ([.,?!])", r"\1", " ".join(raw["input"].split()))
            rows.setdefault(
                " ".join(re.findall(r"[a-z]+|[\d.]*\d", question.lower())), (question, Fraction(str(raw["target"])))
            )
    return [rows[words] for words in sorted(rows, key=place)]


def mawps_part(question: str, target: Fraction) -> Part:
    """Decided by the numbers: rewordings of a problem stay together."""
    return _part(_numbers(question), target)


def _mawps(folder: Path, name: str, signs: Sequence[str], mode: str) -> Iterator[tuple[Part, Problem]]:
    for question, target in mawps_rows(folder, f"tasks.{name}.path"):
        numbers = _numbers(question)
        references = _references(numbers, target)
        if len(references) == 1 and (reference := references.pop())[1] in signs:
            yield _part(numbers, target), _problem(question, reference, target, mode)


def _problem(question: str, reference: tuple[Fraction, str, Fraction], target: Fraction, mode: str) -> Problem:
    a, sign, b = reference
    answer = {"expression": f"{_plain(a)} {sign} {_plain(b)}", "value": _plain(target)}
    return Problem(question, answer, _solution(answer["expression"], answer["value"], mode))


# ------------------------------------------------------------------------------------------------------ generation


def _generated(part: Part, operations: Sequence[str], mode: str) -> Iterator[Problem]:
    """An endless stream of different problems, the operations in turn."""
    rng = random.Random(f"word problems {part}")
    seen: set[str] = set()
    for operation in itertools.cycle(operations):
        problem = None
        while problem is None or problem.question in seen:
            problem = _draw(operation, part, mode, rng)
        seen.add(problem.question)
        yield problem


def _draw(operation: str, part: Part, mode: str, rng: random.Random) -> Problem | None:
    """A problem; None where its numbers belong to another part, or have another way to the same value."""
    small, large = rng.randint(2, 12), rng.randint(2, 99)
    match operation:
        case "add":
            a, b = large, rng.randint(2, 99)
        case "sub":
            a, b = large + rng.randint(1, 99), large
        case "mul":
            a, b = small, rng.randint(2, 20)
        case _:
            a, b = small * rng.randint(2, 20), small
    x, y = Fraction(a), Fraction(b)
    value = {"add": x + y, "sub": x - y, "mul": x * y, "div": x / y}[operation]
    c = rng.randint(3, 60)
    aside = rng.choice(ASIDES) + " " if rng.random() < ASIDE else ""
    wording = rng.choice([text for at, text in enumerate(TEMPLATES[operation]) if WORDINGS[at % len(WORDINGS)] == part])
    name, other = rng.sample(NAMES, 2)
    thing, place_, box = rng.choice(THINGS), rng.choice(PLACES), rng.choice(BOXES)
    question = (aside + wording).format(a=a, b=b, c=c, name=name, other=other, thing=thing, place=place_, box=box)
    numbers = _numbers(question)
    if _part([x, y], value) != part or len(_references(numbers, value)) != 1:
        return None
    return _problem(question, (x, SIGNS[operation], y), value, mode)
