"""MBPP and HumanEval: Python functions, judged by what they return.

MBPP (Austin et al., arXiv 2108.07732; CC-BY-4.0), mbpp.jsonl of 974 tasks in the published split: train 601-974,
validation 511-600, test 11-510; 1-10 are for examples and not used. Template raw is the paper's prompt: the task, its
tests, `[BEGIN]`; an answer ends at `[DONE]`.

HumanEval (Chen et al., arXiv 2107.03374; MIT), 164 functions to be completed: evaluation only, never trained on.
Template raw is the function's head, as published; an answer goes on until a line that begins a new definition or
statement. `opdctl data fetch humaneval` gets it.

Template chat asks for a block of code between ``` marks; the first one counts.

Judging. Code that a model wrote runs in `opdctl.jail`, and never in one interpreter with what is expected. It is
asked to evaluate calls, and what comes back are values of plain types, told apart on this side: neither an `__eq__`
that is always true nor a redefined test helps.

    MBPP        `assert CALL == LITERAL`: the call is evaluated there, and compared with the literal here
    HumanEval   1. `check(candidate)` runs once on the published solution, and the calls it makes are written down
                2. the model's function is called with the same arguments, nothing else of the test
                3. values equal to the published solution's are right; otherwise `check` runs in a program of its own,
                   without the model's code, on a function that gives those values back: it may allow a tolerance
"""

import ast
import re
from abc import abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from opdctl.jail import Limits, Outcome, Program, shared
from opdctl.settings import EffortSettings, HumanEvalTask, MbppTask
from opdctl.tasks import Prompt, Verdict
from opdctl.tasks.published import Part, Problem, Published, read_jsonl

FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:\n```|\Z)", re.DOTALL)
# where a completion of HumanEval has left the function, as in the paper: a new definition or statement
LEFT = re.compile(r"\n(?=class |def |#|if __name__|print\()")
# one published solution of MBPP takes three seconds; programs cannot sleep, so wall time would only judge by the load
LIMITS = Limits(cpu_s=5.0, wall_s=120.0)
SEED = "import random\nrandom.seed(0)\n"


def fenced(completion: str) -> str | None:
    """The first block of code between ``` marks, if there is one."""
    found = FENCED.search(completion)
    return found[1] if found else None


def _program(source: str, calls: Sequence[str]) -> Program:
    """By CPython: Monty keeps the order of sets, and gives `re.sub` another meaning, where published solutions rely
    on CPython's."""
    return Program(source, calls, interpreter="cpython", limits=LIMITS)


def _verdict(reason: str) -> Verdict:
    return Verdict(not reason, float(not reason), {"reason": reason})


def _failed(outcome: Outcome) -> str:
    return f"{outcome.failure}: {outcome.detail[-200:]}" if outcome.failure else ""


class _Code(Published):
    """Judged many at a time: `Prompt.answer` holds what `verify_all` needs."""

    def verify(self, prompt: Prompt, completion: str) -> Verdict:
        return self.verify_all([(prompt, completion)])[0]

    @abstractmethod
    def verify_all(self, pairs: Sequence[tuple[Prompt, str]]) -> list[Verdict]: ...


# ----------------------------------------------------------------------------------------------------------- MBPP


class Mbpp(_Code):
    """The task. `Prompt.answer` is {calls, expected (a literal each), setup, solution}."""

    instruction = "Answer with one block of Python code between ``` marks, and nothing else."
    before_question = "You are an expert Python programmer, and here is your task: "
    before_answer = "\n[BEGIN]\n"

    def __init__(
        self, name: str, settings: MbppTask, efforts: EffortSettings | None, folder: Path | None = None
    ) -> None:
        path = (folder or Path.cwd()) / str(settings.path)
        chat = settings.template == "chat"
        parts: dict[Part, list[Problem]] = {"train": [], "validation": [], "test": []}
        for row in read_jsonl(path / MbppTask.FILES[0], f"tasks.{name}.path"):
            number = row["task_id"]
            if number > 10:
                part: Part = "test" if number <= 510 else "validation" if number <= 600 else "train"
                parts[part].append(_mbpp(row, chat))
        super().__init__(name, settings, efforts, parts)

    def verify_all(self, pairs: Sequence[tuple[Prompt, str]]) -> list[Verdict]:
        programs = [
            _program(f"{self._code(completion)}\n{prompt.answer['setup']}", prompt.answer["calls"])
            for prompt, completion in pairs
        ]
        outcomes = shared().run(programs)
        return [
            _verdict(_failed(outcome) or _unequal(outcome.value, prompt.answer))
            for (prompt, _), outcome in zip(pairs, outcomes, strict=True)
        ]

    def _code(self, completion: str) -> str:
        if self._template == "chat":
            return fenced(completion) or ""
        return completion.partition("[DONE]")[0]

    def reference(self, prompt: Prompt) -> str:
        return str(prompt.answer["solution"])


def _mbpp(row: dict[str, Any], chat: bool) -> Problem:
    tests = [ast.parse(test).body[0] for test in row["test_list"]]
    calls, expected = [], []
    for test in tests:
        assert isinstance(test, ast.Assert)
        assert isinstance(test.test, ast.Compare)  # `CALL == LITERAL`, all 2,922 of them
        calls.append(ast.unparse(test.test.left))
        expected.append(ast.unparse(test.test.comparators[0]))
    code = row["code"].replace("\r\n", "\n")
    solution = f"```python\n{code}\n```" if chat else f"{code}\n[DONE]"
    question = f"{row['text']} Your code should pass these tests:\n\n" + "\n".join(row["test_list"])
    answer = {"calls": calls, "expected": expected, "setup": row["test_setup_code"], "solution": solution}
    return Problem(question, answer, solution)


def _unequal(values: Sequence[Any], answer: dict[str, Any]) -> str:
    for call, value, expected in zip(answer["calls"], values, answer["expected"], strict=True):
        if value != _literal(expected):
            return f"{call} is {value!r:.100}, not {expected:.100}"
    return ""


@lru_cache(maxsize=4096)
def _literal(expected: str) -> Any:
    try:
        return ast.literal_eval(expected)
    except ValueError:  # one task expects `sys.getsizeof(...)`
        return shared().run([Program("import sys", [expected])])[0].value[0]


# ------------------------------------------------------------------------------------------------------ HumanEval


class HumanEval(_Code):
    """The task. `Prompt.answer` is {prompt, entry, test, solution}."""

    instruction = "Complete the function. Answer with all of it in one block of Python code between ``` marks."
    before_answer = ""

    def __init__(
        self, name: str, settings: HumanEvalTask, efforts: EffortSettings | None, folder: Path | None = None
    ) -> None:
        path = (folder or Path.cwd()) / str(settings.path)
        problems = [
            Problem(row["prompt"], {key: row[field] for key, field in _FIELDS.items()}, None)
            for row in read_jsonl(path / HumanEvalTask.FILES[0], f"tasks.{name}.path")
        ]
        super().__init__(name, settings, efforts, {"train": [], "validation": [], "test": problems})

    def verify_all(self, pairs: Sequence[tuple[Prompt, str]]) -> list[Verdict]:
        recorded = self._recorded([prompt for prompt, _ in pairs])
        programs = []
        for (prompt, completion), record in zip(pairs, recorded, strict=True):
            calls = [f"{prompt.answer['entry']}(*{arguments!r})" for arguments, _ in record]
            programs.append(_program(self._code(prompt, completion), calls))
        outcomes = shared().run(programs)
        reasons = [_failed(outcome) for outcome in outcomes]
        open_ = [
            i
            for i, (outcome, record) in enumerate(zip(outcomes, recorded, strict=True))
            if not reasons[i] and outcome.value != [value for _, value in record]
        ]
        replays = shared().run([_replay(pairs[i][0].answer, outcomes[i].value) for i in open_])
        for i, outcome in zip(open_, replays, strict=True):
            reasons[i] = _failed(outcome)
        return [_verdict(reason) for reason in reasons]

    def _recorded(self, prompts: Sequence[Prompt]) -> list[list[tuple[Any, Any]]]:
        """The (arguments, value) of all calls that each test makes of the published solution."""
        known = self.__dict__.setdefault("_known", {})
        fresh = {prompt.answer["prompt"]: prompt.answer for prompt in prompts if prompt.answer["prompt"] not in known}
        outcomes = shared().run([_record(answer) for answer in fresh.values()])
        known |= {head: outcome.value[0] for head, outcome in zip(fresh, outcomes, strict=True)}
        return [known[prompt.answer["prompt"]] for prompt in prompts]

    def _code(self, prompt: Prompt, completion: str) -> str:
        head = str(prompt.answer["prompt"])
        if self._template == "chat":
            return f"{head}    pass\n{fenced(completion) or ''}"  # its imports and helpers, then all of the function
        return head + LEFT.split(completion)[0] + "\n"

    def reference(self, prompt: Prompt) -> str:
        answer = prompt.answer
        whole = f"```python\n{answer['prompt']}{answer['solution']}```"
        return whole if self._template == "chat" else str(answer["solution"])


_FIELDS = {"prompt": "prompt", "entry": "entry_point", "test": "test", "solution": "canonical_solution"}


def _record(answer: dict[str, str]) -> Program:
    body = f"""
from copy import deepcopy as _copy
_calls = []
def _asked(*arguments):
    _calls.append((_copy(arguments), None))
    _calls[-1] = (_calls[-1][0], {answer["entry"]}(*arguments))
    return _calls[-1][1]
check(_asked)
"""
    source = f"{SEED}{answer['prompt']}{answer['solution']}\n{answer['test']}{body}"
    return _program(source, ["_calls"])


def _replay(answer: dict[str, str], values: Sequence[Any]) -> Program:
    body = f"_values = iter({list(values)!r})\ncheck(lambda *arguments: next(_values))\n"
    source = f"{SEED}{answer['prompt']}{answer['solution']}\n{answer['test']}\n{body}"
    return _program(source, ["None"])
