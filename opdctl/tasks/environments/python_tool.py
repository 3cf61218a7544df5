"""Problems that are tedious by hand and a few lines of Python: generated ones, or rows of a file.

The tool `run_python` runs one program in the jail and shows what it printed; nothing is kept from one program to the
next. The final turn ends with `Answer: NUMBER`, judged as the calculator's. Rows are as there too.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from opdctl.settings import EffortSettings, PythonTask
from opdctl.tasks import ToolCall
from opdctl.tasks.environments.calculator import worked, wrong_number
from opdctl.tasks.environments.programs import printed
from opdctl.tasks.environments.tool_task import ANSWER, Episode, Problem, Script, ToolTask, read_problems, tool


@dataclass(frozen=True)
class Kind:
    """Problems of a kind: a question and a program with the same slots, and the value that the program prints."""

    question: str
    program: str
    value: Callable[[Mapping[str, int]], int]
    slots: Mapping[str, tuple[int, int]]


def _primes(slots: Mapping[str, int]) -> int:
    last = slots["a"] + slots["w"]
    composite = {multiple for n in range(2, last) for multiple in range(2 * n, last + 1, n)}
    return sum(n not in composite for n in range(max(2, slots["a"]), last + 1))


def _collatz(slots: Mapping[str, int]) -> int:
    number, steps = slots["a"], 0
    while number != 1:
        number, steps = number // 2 if number % 2 == 0 else 3 * number + 1, steps + 1
    return steps


def _recurrence(slots: Mapping[str, int]) -> int:
    number = slots["a"]
    for _ in range(slots["n"] - 1):
        number = (number * slots["k"] + slots["c"]) % slots["m"]
    return number


def _most_divisors(slots: Mapping[str, int]) -> int:
    numbers = range(slots["a"], slots["a"] + slots["w"] + 1)
    return max(numbers, key=lambda number: (sum(number % d == 0 for d in range(1, number + 1)), -number))


KINDS: Sequence[Kind] = (
    Kind(
        "How many prime numbers are there from {a} to {b}, both included?",
        "print(sum(n > 1 and all(n % d for d in range(2, int(n ** 0.5) + 1)) for n in range({a}, {b} + 1)))",
        _primes,
        {"a": (10, 900), "w": (40, 400)},
    ),
    Kind(
        "How many whole numbers from {a} to {b} have digits that add up to {s}?",
        "print(sum(sum(int(d) for d in str(n)) == {s} for n in range({a}, {b} + 1)))",
        lambda x: sum(sum(map(int, str(n))) == x["s"] for n in range(x["a"], x["a"] + x["w"] + 1)),
        {"a": (10, 900), "w": (100, 900), "s": (5, 20)},
    ),
    Kind(
        "A sequence begins with {a}. Every further number is the one before times {k} plus {c}, modulo {m}. What is "
        "its number {n}, where {a} is number 1?",
        "x = {a}\nfor _ in range({n} - 1):\n    x = (x * {k} + {c}) % {m}\nprint(x)",
        _recurrence,
        {"a": (1, 50), "k": (2, 30), "c": (1, 99), "m": (101, 999), "n": (15, 60)},
    ),
    Kind(
        "Begin with {a}. Halve an even number; multiply an odd one by 3 and add 1. After how many steps is 1 reached?",
        "n, steps = {a}, 0\nwhile n != 1:\n    n = n // 2 if n % 2 == 0 else 3 * n + 1\n    steps += 1\nprint(steps)",
        _collatz,
        {"a": (7, 2000)},
    ),
    Kind(
        "Which whole number from {a} to {b} has the most divisors? If several have as many, give the smallest.",
        "def divisors(n):\n    return sum(n % d == 0 for d in range(1, n + 1))\n\n"
        "print(max(range({a}, {b} + 1), key=lambda n: (divisors(n), -n)))",
        _most_divisors,
        {"a": (20, 400), "w": (10, 90)},
    ),
)


class PythonEpisode(Episode):
    tools = (
        tool(
            "run_python",
            "Run a program and show what it prints. Each program starts anew; it has the standard library, no files "
            "and no network.",
            code="the whole program",
        ),
    )

    def call(self, name: str, arguments: Mapping[str, str]) -> str:
        return printed(arguments["code"])

    def judge(self, final: str) -> str:
        return wrong_number(final, self.problem["value"])


class PythonTool(ToolTask):
    instruction: ClassVar[str] = (
        "Solve the problem by running Python programs. When you know the result, end with a line like: Answer: 42"
    )
    episode_class = PythonEpisode

    def __init__(
        self, name: str, settings: PythonTask, efforts: EffortSettings | None, folder: Path | None = None
    ) -> None:
        path = settings.path
        rows = None if path is None else read_problems((folder or Path.cwd()) / path, f"tasks.{name}.path", worked)
        super().__init__(name, efforts, settings.held_out, rows)

    def generated(self, rng: random.Random) -> Problem:
        kind = rng.choice(KINDS)
        slots = {name: rng.randint(*bounds) for name, bounds in kind.slots.items()}
        value = kind.value(slots)
        if "w" in slots:
            slots["b"] = slots["a"] + slots["w"]
        question, program = kind.question.format_map(slots), kind.program.format_map(slots)
        return {"question": question, "program": program, "value": str(value)}

    def expert(self, problem: Problem) -> Script:
        program = problem.get("program") or "\n".join(f"print({step})" for step in problem["steps"])
        return [("", [ToolCall("run_python", {"code": program})]), (f"{ANSWER} {problem['value']}", [])]
