"""Puzzles and sums of reasoning-gym (arXiv 2505.24760; Apache-2.0): its generators, judged by checks of our own.

The package's scorers give partial credit for any text that contains the answer, and some of them evaluate what a
model wrote. Here the last non-empty line counts (after `Answer:` or `=` where it has one), a reward is 1 or 0, and no
text is ever evaluated: `CHECKS` lists the generators that are supported, with the check of each.

Rows are generated from seeds: `train`, `validation` and `test` by one each; a question that occurs in two of them is
removed from training.
"""

import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from opdctl.errors import ConfigError
from opdctl.settings import EffortSettings, ReasoningGymTask
from opdctl.tasks import Prompt, Verdict
from opdctl.tasks.arithmetic import compute
from opdctl.tasks.published import Part, Problem, Published

SEEDS: Mapping[Part, int] = {"train": 1_000_003, "validation": 2_000_003, "test": 3_000_017}
NUMBER = re.compile(r"-?[0-9][0-9,]{0,30}(?:\.[0-9]{1,30})?(?:/[0-9]{1,30})?")

Check = Callable[[str, Mapping[str, Any]], bool]  # (what was answered, {answer, ...}) -> right?


def _number(given: str, row: Mapping[str, Any]) -> bool:
    found = NUMBER.fullmatch(given.strip().rstrip(".").removeprefix("$"))
    try:
        return found is not None and Fraction(found[0].replace(",", "")) == Fraction(row["answer"])
    except ZeroDivisionError:
        return False


def _text(given: str, row: Mapping[str, Any]) -> bool:
    return given.strip().rstrip(".").casefold() == str(row["answer"]).strip().rstrip(".").casefold()


def _exact(given: str, row: Mapping[str, Any]) -> bool:
    return bool(given.strip() == row["answer"].strip())


def _fraction(given: str, row: Mapping[str, Any]) -> bool:
    return given.replace(" ", "") == str(row["answer"]).replace(" ", "")


def _items(given: str, row: Mapping[str, Any]) -> bool:
    whole = re.fullmatch(r"\[.*\]|[^\[\]]+", given.strip())
    return whole is not None and _listed(given) == _listed(row["answer"])


def _listed(text: str) -> list[str]:
    return [item.strip(" '\"") for item in text.strip().strip("[]").split(",")]


def _factors(given: str, row: Mapping[str, Any]) -> bool:
    parts = [part.strip() for part in re.split("[×*x]", given)]
    return sorted(parts) == sorted(row["answer"].split(" × "))


def _people(given: str, row: Mapping[str, Any]) -> bool:
    """`Ada is a knight, and Ben is a knave`, in any order."""
    return _claims(given) == _claims(row["answer"])


def _claims(text: str) -> list[tuple[str, str]]:
    return sorted(re.findall(r"(\w+) is an? (\w+)", text.casefold()))


def _expression(given: str, row: Mapping[str, Any]) -> bool:
    """The target from all of these numbers, each used once."""
    try:
        value, numbers, _ = compute(given)
    except ValueError:
        return False
    left = [Fraction(number) for number in row["numbers"]]
    for number in numbers:
        if number not in left:
            return False
        left.remove(number)
    return value == row["target"] and not left


def _sudoku(given: str, row: Mapping[str, Any]) -> bool:
    grid = [line.split() for line in given.strip().splitlines()]
    if [len(line) for line in grid] != [4] * 4:
        return False
    puzzle = row["puzzle"]
    kept = all(not puzzle[r][c] or grid[r][c] == str(puzzle[r][c]) for r in range(4) for c in range(4))
    columns = [list(column) for column in zip(*grid, strict=True)]
    boxes = [[grid[r + i][c + j] for i in (0, 1) for j in (0, 1)] for r in (0, 2) for c in (0, 2)]
    return kept and all(sorted(unit) == list("1234") for unit in [*grid, *columns, *boxes])


CHECKS: Mapping[str, Check] = {
    "base_conversion": _exact,
    "basic_arithmetic": _number,
    "calendar_arithmetic": _text,
    "chain_sum": _number,
    "count_primes": _number,
    "countdown": _expression,
    "decimal_chain_sum": _number,
    "family_relationships": _text,
    "fraction_simplification": _fraction,
    "gcd": _number,
    "gsm_symbolic": _number,
    "knights_knaves": _people,
    "lcm": _number,
    "leg_counting": _number,
    "letter_counting": _number,
    "mini_sudoku": _sudoku,
    "number_filtering": _items,
    "number_sorting": _items,
    "prime_factorization": _factors,
    "products": _number,
    "puzzle24": _expression,
    "simple_equations": _number,
    "spell_backward": _exact,
    "syllogism": _text,
    "time_intervals": _exact,
    "word_sorting": _items,
    "zebra_puzzles": _text,
}
# why some others are not; the rest have not been looked at
_ALGEBRA = "equal expressions need an algebra system, and the package's scorer evaluates the answer"
REFUSED: Mapping[str, str] = {
    "simple_integration": _ALGEBRA,
    "intermediate_integration": _ALGEBRA,
    "polynomial_multiplication": _ALGEBRA,
    "game_of_life_halting": "every answer is the same",
    "game_of_life": "a board that hardly changes earns most of the score",
    "boxnet": "it has no reference answer",
    "graph_color": "it has no reference answer",
    "propositional_logic": "it has no reference answer",
    "rubiks_cube": "it has no reference answer",
    "rush_hour": "it has no reference answer",
}


class ReasoningGym(Published):
    """The task. `Prompt.answer` is what the check of the dataset needs."""

    instruction = "Answer with the solution alone, in the format asked for."
    before_answer = "\nAnswer:"

    def __init__(self, name: str, settings: ReasoningGymTask, efforts: EffortSettings | None) -> None:
        if settings.dataset not in CHECKS:
            why = REFUSED.get(settings.dataset, "opdctl has no check for it")
            raise ConfigError(
                f"tasks.{name}.dataset: {settings.dataset} is not supported: {why}", hint=f"one of {', '.join(CHECKS)}"
            )
        self._check_answer = CHECKS[settings.dataset]
        self._whole = settings.dataset == "mini_sudoku"
        counts = {"train": settings.rows, "validation": settings.held_out, "test": settings.held_out}
        parts: dict[Part, list[Problem]] = {
            part: _generated(name, settings, seed, counts[part]) for part, seed in SEEDS.items()
        }
        test = {row.question for row in parts["test"]}
        parts["validation"] = [row for row in parts["validation"] if row.question not in test]
        held = test | {row.question for row in parts["validation"]}
        parts["train"] = [row for row in parts["train"] if row.question not in held]
        super().__init__(name, settings, efforts, parts)

    def verify(self, prompt: Prompt, completion: str) -> Verdict:
        given = completion.strip() if self._whole else _last(completion)
        correct = self._check_answer(given, prompt.answer)
        return Verdict(correct, float(correct), {"reason": "" if correct else f"{given[:60]!r} is not right"})

    def reference(self, prompt: Prompt) -> str:
        return self.written(str(prompt.answer["answer"]))


def _last(completion: str) -> str:
    """The last line, and of that what follows `Answer:` or an equals sign."""
    lines = [line.strip() for line in completion.splitlines() if line.strip()]
    return re.split(r"(?i)answer(?: is)?:?|=", lines[-1])[-1].strip() if lines else ""


def _generated(name: str, settings: ReasoningGymTask, seed: int, count: int) -> list[Problem]:
    import reasoning_gym

    try:
        rows = reasoning_gym.create_dataset(settings.dataset, seed=seed, size=count, **settings.config)
        made = [rows[i] for i in range(count)]
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"tasks.{name}.config: {settings.dataset} refuses it: {error}") from error
    problems = []
    for row in made:
        told = row["metadata"]
        answer: dict[str, Any] = {"answer": str(row["answer"])}
        if settings.dataset in ("countdown", "puzzle24"):
            answer |= {"numbers": [int(n) for n in told["numbers"]], "target": int(told.get("target", 24))}
        elif settings.dataset == "mini_sudoku":
            answer |= {"puzzle": [[int(n) for n in line] for line in told["puzzle"]]}
        problems.append(Problem(row["question"].strip(), answer, answer["answer"]))
    return problems
