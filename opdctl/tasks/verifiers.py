"""Verifiers by name, for rows with a reference answer: `resolve(name)` gives one for many completions at a time.

| name              | a completion is correct when                                                                    |
|-------------------|-------------------------------------------------------------------------------------------------|
| `exact`           | it equals the answer, blanks at the ends aside; upper and lower case differ                     |
| `numeric`         | its last number equals the answer's; where there is a `####`, the first number after it counts  |
| `regex`           | the answer, a pattern of Python's `re`, matches all of it, blanks at the ends aside;            |
|                   | write `(?s).*PATTERN.*` to look for a part                                                      |
| `math_verify`     | the Math-Verify library finds its expression equal to the answer's                              |
| `package.module:f`| your own f(completion, answer) says so, with a bool, a number (1.0 or more is correct) or a     |
|                   | Verdict; it is looked for among what is installed, then in the workspace                        |

The first two are quick on any text and work in this process; the others work in `opdctl.jail`, where a text on which
they hang, crash or fill the memory costs its own verdict only.
"""

import importlib
import logging
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol, SupportsFloat

from opdctl.errors import ConfigError
from opdctl.jail import Check, shared
from opdctl.jail.checks import FUNCTION
from opdctl.tasks import Task, Verdict

LIMITS = FUNCTION  # of `regex` and `math_verify`, for one verdict
OWN_LIMITS = replace(FUNCTION, cpu_s=60.0, wall_s=120.0)
LOSSES = 3  # of an own verifier that never gave a verdict: then it is broken, and all rewards would be 0
RELATIVE_TOLERANCE = 1e-6  # of `numeric`, where one of the two numbers is not a whole one

CUSTOM = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
FINAL = "####"  # in GSM8K's format, what follows is the answer

_DECIMAL = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|\.[0-9]+(?:[eE][+-]?[0-9]+)?"
# a sign belongs to the number unless something to subtract from comes before it: the last number of "10-3" is 3
NUMBER = re.compile(rf"((?<![\w.)\]}}])[+-])?({_DECIMAL})(?:\s*/\s*({_DECIMAL}))?")

# Powers of powers, exponents and factorials that would fill the memory before a time limit is noticed.
TOWER = re.compile(
    r"(?:\^|\*\*)[\s{(]*[0-9]+\s*(?:\^|\*\*)|(?:\^|\*\*)[\s{(]*[0-9]{5,}|(?<![0-9])[0-9]{5,}[\s)}]*!|binom\{?[0-9]{5,}"
)


OPENING, BRACKET = "({[", re.compile(r"[(){}\[\]]")
MAX_DEPTH = 100  # of brackets: Math-Verify's time grows with a power of it

logger = logging.getLogger(__name__)


class Verifier(Protocol):
    def __call__(self, pairs: Sequence[tuple[str, str]]) -> list[Verdict]:
        """Verdicts of (completion, answer). Raises VerifierError where an own verifier fails."""
        ...


class VerifierError(Exception):
    """`str()` says how the verifier failed on pair number `index`."""

    def __init__(self, index: int, message: str) -> None:
        self.index = index
        super().__init__(message)


def resolve(name: str, key: str = "verifier", workspace: Path | None = None) -> Verifier:
    """The verifier called `name`; `key` is the configuration key that errors blame.

    Your own is imported from `workspace`, the current folder where absent.
    """
    if name in QUICK:
        return _in_process(QUICK[name])
    folder = workspace or Path.cwd()
    if name not in BUILTIN:
        _function(name, key, folder)  # what cannot be found is refused now
    return _Jailed(name, folder)


def _function(name: str, key: str, workspace: Path) -> Callable[[str, str], Verdict]:
    if name in BUILTIN:
        return BUILTIN[name]
    if CUSTOM.fullmatch(name):
        return _custom(name, key, workspace)
    near = get_close_matches(name, BUILTIN, n=1)
    raise ConfigError(
        f"{key}: {name!r} is not a verifier" + (f"; did you mean {near[0]!r}?" if near else ""),
        hint=f"one of {', '.join(BUILTIN)}, or package.module:function for your own",
    )


def _in_process(function: Callable[[str, str], Verdict]) -> Verifier:
    return lambda pairs: [function(completion, answer) for completion, answer in pairs]


class _Jailed:
    """A verifier whose work on a text may take any time and memory."""

    def __init__(self, name: str, workspace: Path) -> None:
        self.name, self.workspace = name, str(workspace.absolute())
        self._limits = LIMITS if name in BUILTIN else OWN_LIMITS
        self._proven, self._lost = name in BUILTIN, 0

    def __call__(self, pairs: Sequence[tuple[str, str]]) -> list[Verdict]:
        verdicts = [_before_parsing(*pair) if self.name == "math_verify" else None for pair in pairs]
        asked = [i for i, verdict in enumerate(verdicts) if verdict is None]
        late = ["math_verify"] if self.name == "math_verify" else []
        judge = "opdctl.tasks.verifiers:judged"
        checks = [Check(judge, [self.name, self.workspace, *pairs[i]], self._limits, late) for i in asked]
        for i, outcome in zip(asked, shared().run(checks), strict=True):
            if outcome.failure == "error":
                raise VerifierError(i, outcome.detail)
            if outcome.failure:
                verdicts[i] = self._without_verdict(i, outcome.detail or outcome.failure)
            else:
                correct, reward, details = outcome.value
                verdicts[i] = Verdict(correct, reward, details)
                self._proven = True
        return [verdict for verdict in verdicts if verdict is not None]

    def _without_verdict(self, index: int, why: str) -> Verdict:
        if self.name not in BUILTIN:
            self._lost += 1
            if self._lost >= LOSSES and not self._proven:
                raise VerifierError(index, f"{why}, {self._lost} times, and never gave a verdict")
            logger.error("opdctl: verifier %s %s; a completion counts as wrong", self.name, why)
        return Verdict(False, 0.0, {"reason": why})


def judged(name: str, workspace: str, completion: str, answer: str) -> list[Any]:
    """[correct, reward, details] by a verifier: what runs in the jail."""
    os.chdir(workspace)
    verdict = _cached(name, workspace)(completion, answer)
    # of a user's Verdict, perhaps a numpy bool with details that are no JSON
    details = {
        str(name): value if isinstance(value, bool | int | float) else str(value)
        for name, value in verdict.details.items()
    }
    return [bool(verdict.correct), float(verdict.reward), details]


@lru_cache
def _cached(name: str, workspace: str) -> Callable[[str, str], Verdict]:
    return _function(name, "verifier", Path(workspace))


def answer_problem(name: str, answer: str) -> str:
    """Why no completion could ever match this reference answer under the verifier `name`; "" where one could."""
    if name == "numeric" and _number(answer) is None:
        return "holds no number"
    if name == "math_verify" and TOWER.search(answer):
        return "is too large a power, factorial or binomial to be computed"
    if name == "regex":
        try:
            re.compile(answer)
        except re.error as error:
            return f"is not a regular expression: {error}"
    return ""


def _verdict(correct: bool, reason: str) -> Verdict:
    return Verdict(correct, float(correct), {"reason": "" if correct else reason})


# ------------------------------------------------------------------------------------------------------ built in


def exact(completion: str, answer: str) -> Verdict:
    return _verdict(completion.strip() == answer.strip(), "not equal to the answer")


def numeric(completion: str, answer: str) -> Verdict:
    """Compares the last numbers: 1,234.5, -3, 2e-3, 3/4; percent signs, units and currencies are not read.

    Two whole numbers must be equal digit by digit; otherwise a relative tolerance of 1e-6 holds.
    """
    found, wanted = _number(completion), _number(answer)
    if found is None or wanted is None:
        return _verdict(False, "holds no number")
    if isinstance(found, str) and isinstance(wanted, str):
        return _verdict(found == wanted, f"{found[:40]} is not {wanted[:40]}")
    near = math.isclose(float(found), float(wanted), rel_tol=RELATIVE_TOLERANCE)
    return _verdict(near, f"{float(found)} is not {float(wanted)}")


def _number(text: str) -> str | float | None:
    """The number that counts: a whole one as digits (too many for an int, perhaps), any other as a float."""
    _, marked, text = text.replace("\N{MINUS SIGN}", "-").rpartition(FINAL)
    numbers = list(NUMBER.finditer(text))
    if not numbers:
        return None
    found = numbers[0 if marked else -1]
    sign, top, bottom = found[1] or "", found[2].replace(",", ""), (found[3] or "").replace(",", "")
    if not bottom and top.isdigit():
        digits = top.lstrip("0") or "0"
        return f"-{digits}" if sign == "-" and digits != "0" else digits
    over = float(bottom) if bottom else 1.0
    value = float(sign + top) / over if over else math.inf
    return value if math.isfinite(value) else None


def regex(completion: str, answer: str) -> Verdict:
    """In a jail: a pattern such as `(a+)+b` may take years."""
    return _verdict(re.fullmatch(answer, completion.strip()) is not None, "the pattern does not match")


def math_verify(completion: str, answer: str) -> Verdict:
    """Symbolic comparison by Math-Verify. In a jail: many expressions take hours."""
    known = _before_parsing(completion, answer)
    if known is not None:
        return known
    from math_verify import parse, verify

    # The library's own limits are of wall time, a verdict that depends on the load; it warns when they are off.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    answer = answer.rpartition(FINAL)[2].strip()
    marked = answer if any(mark in answer for mark in ("$", "\\boxed", "\\(", "\\[")) else f"${answer}$"
    wanted, found = parse(marked, parsing_timeout=None), parse(completion, parsing_timeout=None)
    return _verdict(bool(verify(wanted, found, timeout_seconds=None)), "not equal to the answer")


def _before_parsing(completion: str, answer: str) -> Verdict | None:
    """What needs no symbolic algebra: the same text, and what algebra could not compute."""
    if completion.strip() == answer.strip():
        return _verdict(True, "")
    boxed = completion.rfind("\\boxed")  # what Math-Verify looks at first
    if TOWER.search(completion if boxed < 0 else completion[boxed:]):
        return _verdict(False, "too large a power, factorial or binomial to be computed")
    depths = accumulate(1 if mark in OPENING else -1 for mark in BRACKET.findall(completion))
    if max(depths, default=0) > MAX_DEPTH:
        return _verdict(False, "brackets nested too deep")
    return None


QUICK: dict[str, Callable[[str, str], Verdict]] = {"exact": exact, "numeric": numeric}
BUILTIN = QUICK | {"regex": regex, "math_verify": math_verify}


# ----------------------------------------------------------------------------------------------------------- own


def _custom(name: str, key: str, workspace: Path) -> Callable[[str, str], Verdict]:
    module, _, function = name.partition(":")
    here = str(workspace.absolute())
    if here not in sys.path:
        sys.path.append(here)  # last: a file of the workspace must not hide an installed package
    try:
        found = getattr(importlib.import_module(module), function, None)
    except ImportError as error:
        raise ConfigError(
            f"{key}: {name}: {error}", hint=f"install it, or put {module.replace('.', '/')}.py into the workspace"
        ) from error
    if not callable(found):
        raise ConfigError(f"{key}: module {module} has no function {function}")

    def verify(completion: str, answer: str) -> Verdict:
        result = found(completion, answer)
        if isinstance(result, Verdict):
            return result
        reward = float(result) if isinstance(result, SupportsFloat) else math.nan
        if not math.isfinite(reward):
            raise TypeError(f"{name} returned {result!r}; a bool, a finite number or a Verdict is wanted")
        return Verdict(reward >= 1, reward)

    return verify


# ---------------------------------------------------------------------------------------------------- self-check


def check_references(task: Task, count: int) -> list[str]:
    """A line for each of the first `count` training prompts whose own reference is judged wrong: a broken grader."""
    problems = []
    for prompt in task.prompts("train", seed=0, start=0, count=count):
        reference = task.reference(prompt)
        if reference is None:
            continue
        verdict = task.verify(prompt, reference)
        if not verdict.correct:
            problems.append(f"{prompt.text[:60]!r}: {reference[:60]!r} is judged wrong: {verdict.details}")
    return problems
