"""Arithmetic that is tedious without a calculator: generated expressions and stories, or rows of a file.

The tool `calculate` works with exact fractions. The final turn ends with `Answer: NUMBER`, which must have exactly the
right value: a number, or a fraction such as 7/3.

A file holds `question` and `answer`, the result after the last `####` of the answer; what the answer computes in
`<<48/2=24>>` is what the expert has the calculator do. GSM8K is so written: Cobbe et al., arXiv:2110.14168, MIT.
"""

import random
import re
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar

from opdctl.settings import CalculatorTask, EffortSettings
from opdctl.tasks import ToolCall
from opdctl.tasks.arithmetic import compute
from opdctl.tasks.environments.tool_task import (
    ANSWER,
    Episode,
    Problem,
    Script,
    ToolError,
    ToolTask,
    final_answer,
    read_problems,
    tool,
)

_NUMBER = re.compile(r"-?(?:\d{1,15}|\d{1,3}(?:,\d{3}){1,4})(?:\.\d{1,15}|/\d{1,15})?")
_STEP = re.compile(r"<<([^=<>]+)=[^<>]*>>")
_STORIES = (
    ("A warehouse has {a} shelves with {b} boxes each. {c} boxes are sent away, and the others are packed onto {d} "
     "lorries, the same number onto each. How many boxes does a lorry carry?", "({a} * {b} - {c}) / {d}"),
    ("A print shop sells {a} posters at {b} coins and {c} cards at {d} coins. How many coins does it take?",
     "{a} * {b} + {c} * {d}"),
    ("A train of {a} carriages has {b} seats in each. {c} seats are taken at the start, and {d} more at the first "
     "stop. How many seats are free then?", "{a} * {b} - {c} - {d}"),
    ("{a} people share the cost of a feast: {b} coins for food, {c} coins for music and {d} coins for the hall. How "
     "many coins does each one pay?", "({b} + {c} + {d}) / {a}"),
)  # fmt: skip
_EXPRESSIONS = ("{a} * {b} - {c}", "({a} + {b}) * {c} - {d}", "({a} * {b} + {c}) / {d}", "{a} * ({b} - {c}) + {d}")


def shown(value: Fraction) -> str:
    """A value as a number, or as a fraction where it has no short decimal form."""
    if value.denominator == 1:
        return str(value.numerator)
    if (value * 10**6).denominator == 1:
        return f"{float(value):.6f}".rstrip("0")
    return f"{value.numerator}/{value.denominator}"


def number(text: str) -> Fraction | None:
    """What an answer says; None for anything but one number."""
    if not _NUMBER.fullmatch(text):
        return None
    try:
        return Fraction(text.replace(",", ""))
    except ZeroDivisionError:
        return None


def worked(raw: Mapping[str, Any]) -> Problem:
    """A row of a file. Raises ValueError without a result."""
    value = number(raw["answer"].rpartition("####")[2].strip())
    if value is None:
        raise ValueError(f"no number after #### in the answer {raw['answer'][-60:]!r}")
    steps = []
    for expression in _STEP.findall(raw["answer"]):
        try:
            compute(expression)
        except ValueError:
            continue  # 20%: the calculator has no such thing
        steps.append(expression)
    return {"question": raw["question"], "steps": steps, "value": str(value)}


class CalculatorEpisode(Episode):
    tools = (tool("calculate", "The exact value of an expression of numbers and + - * / ( ).",
                  expression="such as (3 + 4) * 12.5"),)  # fmt: skip

    def call(self, name: str, arguments: Mapping[str, str]) -> str:
        try:
            return shown(compute(arguments["expression"])[0])
        except ValueError as error:
            raise ToolError(f"expression: {error}") from None

    def judge(self, final: str) -> str:
        return wrong_number(final, self.problem["value"])


def wrong_number(final: str, value: str) -> str:
    """Why the final answer is not this value, "" where it is."""
    answer = final_answer(final)
    if answer is None:
        return f"the last line does not begin with {ANSWER}"
    found = number(answer)
    if found is None:
        return f"{answer[:40]!r} is not a number"
    return "" if found == Fraction(value) else f"it is {value}"


class Calculator(ToolTask):
    instruction: ClassVar[str] = (
        "Solve the problem with the calculator. When you know the result, end with a line like: Answer: 42"
    )
    episode_class = CalculatorEpisode

    def __init__(
        self, name: str, settings: CalculatorTask, efforts: EffortSettings | None, folder: Path | None = None
    ) -> None:
        path = settings.path
        rows = None if path is None else read_problems((folder or Path.cwd()) / path, f"tasks.{name}.path", worked)
        super().__init__(name, efforts, settings.held_out, rows)

    def generated(self, rng: random.Random) -> Problem:
        told = rng.random() < 0.5
        text, expression = rng.choice(_STORIES) if told else ("", rng.choice(_EXPRESSIONS))
        while True:
            slots = {"a": rng.randint(12, 99), "b": rng.randint(12, 999), "c": rng.randint(12, 999)}
            slots["d"] = rng.randint(3, 40)
            written = expression.format_map(slots)
            value = compute(written)[0]
            if value > 0 and value.denominator in (1, 2, 4, 5):
                break
        question = text.format_map(slots) if told else f"What is {written}?"
        return {"question": question, "steps": [written], "value": str(value)}

    def expert(self, problem: Problem) -> Script:
        steps = [("", [ToolCall("calculate", {"expression": step})]) for step in problem["steps"]]
        return [*steps, (f"{ANSWER} {shown(Fraction(problem['value']))}", [])]
