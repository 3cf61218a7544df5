"""A small repository with a bug: list, read, edit, run the tests, submit. Hidden tests decide.

A repository is a module of packaged functions (`small_functions.py`), one of which has a bug (`bugs.py`), its tests
and a README. It lives in the episode's state, as paths and texts; nothing is written to disk but in the jail, where
tests run. The hidden tests are calls of all functions of the module; their values are compared on the host, so neither
edited tests, nor what is printed, nor an object that equals everything, nor anything in the repository knows what is
wanted.

A bug, not a function, is held out: what is evaluated is unseen bugs in functions seen before.
"""

import random
import re
from collections.abc import Mapping
from typing import Any, ClassVar

from opdctl.settings import EffortSettings, RepositoryTask
from opdctl.tasks import ToolCall
from opdctl.tasks.environment import CallFormat
from opdctl.tasks.environments.bugs import EFFECTIVE, mutants, source
from opdctl.tasks.environments.programs import computed, same, tested
from opdctl.tasks.environments.small_functions import FUNCTIONS, SHOWN
from opdctl.tasks.environments.tool_task import Episode, Problem, Script, ToolError, ToolTask, tool

FILES, BYTES = 32, 65536  # of a repository at most
MODULES = ("helpers", "tools", "core", "report", "basics", "shapes")
SUBMITTED = "submitted"
_PATH = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}(?:/[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}){0,3}", re.ASCII)
_BY_NAME = {function.__name__: function for function in FUNCTIONS}


class RepositoryEpisode(Episode):
    tools = (
        tool("list_files", "The paths of all files."),
        tool("read_file", "A whole file.", path="of the file"),
        tool("write_file", "Make a file, or replace one.", path="of the file", text="all of it"),
        tool(
            "edit_file",
            "Replace a part of a file.",
            path="of the file",
            old="text that occurs once",
            new="in its place",
        ),
        tool("run_tests", "Run the functions test_* of all modules test_*."),
        tool("submit", "Say that you are done: hidden tests then decide."),
    )

    def __init__(self, problem: Problem, calls: CallFormat) -> None:
        super().__init__(problem, calls)
        self.files: dict[str, str] = dict(self.problem["files"])

    def call(self, name: str, arguments: Mapping[str, str]) -> str:
        match name:
            case "list_files":
                return "\n".join(f"{path} ({len(text)} characters)" for path, text in sorted(self.files.items()))
            case "read_file":
                return self._existing(arguments["path"])
            case "write_file":
                self._write(arguments["path"], arguments["text"])
                return f"{arguments['path']} is written."
            case "edit_file":
                return self._edit(arguments["path"], arguments["old"], arguments["new"])
            case "run_tests":
                return tested(self.files)
        self.final = SUBMITTED
        return ""

    def _existing(self, path: str) -> str:
        if path not in self.files:
            raise ToolError(f"no file {path[:80]!r}; there are: {', '.join(sorted(self.files))}")
        return self.files[path]

    def _write(self, path: str, text: str) -> None:
        if not _PATH.fullmatch(path):
            raise ToolError(f"path {path[:80]!r}: wanted: names of letters, digits and _ . - joined by /, none hidden")
        if any(path.startswith(f"{other}/") or other.startswith(f"{path}/") for other in self.files):
            raise ToolError(f"{path!r} cannot be both a file and a folder")
        after = self.files | {path: text}
        if len(after) > FILES or sum(len(content.encode(errors="replace")) for content in after.values()) > BYTES:
            raise ToolError(f"a repository has at most {FILES} files and {BYTES} bytes")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ToolError("the text holds half a surrogate pair, which is no text") from None
        self.files = after

    def _edit(self, path: str, old: str, new: str) -> str:
        text = self._existing(path)
        if not old or text.count(old) != 1:
            found = "is empty" if not old else f"occurs {text.count(old)} times"
            raise ToolError(f"old {found} in {path}; give text that occurs once")
        self._write(path, text.replace(old, new))
        return f"{path} is changed."

    def judge(self, final: str) -> str:
        names: list[str] = self.problem["functions"]
        cases = [(_BY_NAME[name], case) for name in names for case in FUNCTIONS[_BY_NAME[name]][SHOWN:]]
        calls = [f"{function.__name__}{_listed(case)}" for function, case in cases]
        outcome = computed(self.files, self.problem["module"], calls)
        if outcome.failure:
            return f"hidden tests: {outcome.failure}: {outcome.detail[:200]}"
        for call, found, (function, case) in zip(calls, outcome.value, cases, strict=True):
            if not same(found, function(*case)):
                return f"hidden test {call} fails"
        return ""

    def state(self) -> dict[str, Any]:
        return super().state() | {"files": self.files}

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        self.files = dict(state["files"])


class Repository(ToolTask):
    instruction: ClassVar[str] = "You are a programmer who works with tools."
    episode_class = RepositoryEpisode

    def __init__(self, name: str, settings: RepositoryTask, efforts: EffortSettings | None) -> None:
        super().__init__(name, efforts, settings.held_out)
        self._functions = settings.functions

    def generated(self, rng: random.Random) -> Problem:
        names = rng.sample(sorted(EFFECTIVE), self._functions)
        broken, module = names[0], rng.choice(MODULES)
        bug = rng.choice(EFFECTIVE[broken])
        rng.shuffle(names)
        right = {name: source(_BY_NAME[name]) for name in names}
        shown = right | {broken: mutants(right[broken])[bug]}
        files = {
            "README.md": f"# {module}\n\nFunctions: {', '.join(names)}. `test_{module}.py` tests them.\n",
            f"{module}.py": "\n\n\n".join(shown.values()) + "\n",
            f"test_{module}.py": _tests(module, names),
        }
        return {
            "question": f"The tests of this repository fail: {module}.py has a bug. Find it, correct it, and submit.",
            "module": module,
            "functions": names,
            "files": files,
            "bug": [broken, bug],
        }

    def content(self, problem: Problem) -> str:
        return str(problem["bug"])

    def expert(self, problem: Problem) -> Script:
        path = f"{problem['module']}.py"
        broken, bug = problem["bug"]
        right = source(_BY_NAME[broken])
        old, new = _difference(mutants(right)[bug], right, problem["files"][path])
        calls = [
            ToolCall("run_tests", {}),
            ToolCall("read_file", {"path": path}),
            ToolCall("edit_file", {"path": path, "old": old, "new": new}),
            ToolCall("run_tests", {}),
            ToolCall("submit", {}),
        ]
        return [("", [call]) for call in calls]


def _listed(arguments: tuple[Any, ...]) -> str:
    return f"({', '.join(map(repr, arguments))})"


def _tests(module: str, names: list[str]) -> str:
    lines = [f"from {module} import {', '.join(names)}"]
    for name in names:
        function = _BY_NAME[name]
        for number, case in enumerate(FUNCTIONS[function][:SHOWN], 1):
            call = f"{name}{_listed(case)}"
            lines += ["", "", f"def test_{name}_{number}():", f"    found = {call}"]
            lines += [f"    assert found == {function(*case)!r}, f{f'{call} gave {{found!r}}'!r}"]
    return "\n".join(lines) + "\n"


def _difference(wrong: str, right: str, text: str) -> tuple[str, str]:
    """The lines to be replaced, as many as make them occur once in the text, and those that replace them."""
    before, after = wrong.split("\n"), right.split("\n")
    start = next(at for at, (a, b) in enumerate(zip(before, after, strict=False)) if a != b)
    tail = next(at for at, (a, b) in enumerate(zip(reversed(before), reversed(after), strict=False)) if a != b)
    while text.count(old := "\n".join(before[start : len(before) - tail])) != 1:
        start -= 1
    return old, "\n".join(after[start : len(after) - tail])
