"""The repository fixer, its bugs, and ways to look right without being it."""

import pytest
from tasks.environments.episodes import FORMAT, asked, call, played

from opdctl.jail import isolation
from opdctl.settings import RepositoryTask
from opdctl.tasks import Prompt, load_task
from opdctl.tasks.environments.bugs import EFFECTIVE, mutants, source
from opdctl.tasks.environments.programs import computed, same
from opdctl.tasks.environments.programs import tested as run_tests
from opdctl.tasks.environments.repository import FILES, Repository
from opdctl.tasks.environments.small_functions import FUNCTIONS, SHOWN

pytestmark = pytest.mark.skipif(isolation() != "", reason=f"this machine cannot contain programs: {isolation()}")


@pytest.fixture(scope="module")
def task() -> Repository:
    found = load_task("it", RepositoryTask(task="repository"), None)
    assert isinstance(found, Repository)
    return found


@pytest.fixture(scope="module")
def prompt(task: Repository) -> Prompt:
    return asked(task)


def module(prompt: Prompt) -> str:
    return f"{prompt.answer['module']}.py"


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_every_bug_fails_a_shown_and_a_hidden_test(function) -> None:
    cases = FUNCTIONS[function]
    wanted = [function(*case) for case in cases]
    calls = [f"{function.__name__}(*{case!r})" for case in cases]
    right = source(function)
    assert all(map(same, computed({"m.py": right}, "m", calls).value, wanted))
    for bug in EFFECTIVE[function.__name__]:
        outcome = computed({"m.py": mutants(right)[bug]}, "m", calls)
        assert not outcome.failure
        held = [same(found, value) for found, value in zip(outcome.value, wanted, strict=True)]
        assert not all(held[:SHOWN])
        assert not all(held[SHOWN:])


def test_the_shown_tests_fail_before_and_pass_after(task: Repository, prompt: Prompt) -> None:
    [shown] = task.demonstrations(0, 0, 1)
    assert ", 0 failed" not in shown.turns[0].observation
    assert shown.turns[3].observation.endswith(", 0 failed")


EVERYTHING = """
class Same(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    __hash__ = None
def anything(*given): return Same()
"""


@pytest.mark.parametrize(
    "text",
    [
        "",
        "print('6 passed, 0 failed')",
        EVERYTHING + "globals().update({name: anything for name in NAMES})",
        "import sys\nsys.exit(0)",
        "import os\nos._exit(0)",
        "import builtins\nbuiltins.type = lambda value: None",
        "raise SystemExit",
        "__all__ = []",
    ],
    ids=["nothing", "prints", "equals", "exits", "dies", "patches", "raises", "hides"],
)
def test_a_module_that_only_looks_right_earns_nothing(task: Repository, prompt: Prompt, text: str) -> None:
    given = text.replace("NAMES", repr(prompt.answer["functions"]))
    assert played(task, prompt, call("write_file", path=module(prompt), text=given), call("submit")).reward == 0.0


def test_edited_tests_earn_nothing(task: Repository, prompt: Prompt) -> None:
    edited = call("write_file", path=f"test_{module(prompt)}", text="def test_all():\n    pass\n")
    episode = task.environment(prompt, FORMAT)
    episode.step(edited)
    assert episode.step(call("run_tests")).observation == "1 passed, 0 failed"
    assert episode.step(call("submit")).done
    assert episode.verdict().reward == 0.0


def test_answers_to_the_shown_tests_alone_earn_nothing(task: Repository, prompt: Prompt) -> None:
    by_name = {function.__name__: function for function in FUNCTIONS}
    lines = []
    for name in prompt.answer["functions"]:
        known = {repr(case): by_name[name](*case) for case in FUNCTIONS[by_name[name]][:SHOWN]}
        lines.append(f"def {name}(*given):\n    return {known!r}.get(repr(given))\n")
    episode = task.environment(prompt, FORMAT)
    episode.step(call("write_file", path=module(prompt), text="\n".join(lines)))
    assert episode.step(call("run_tests")).observation == "6 passed, 0 failed"
    assert episode.step(call("submit")).done
    assert episode.verdict().reward == 0.0


@pytest.mark.parametrize(
    "path",
    [
        "../out.py",
        "/tmp/out.py",
        "a/../../out.py",
        ".hidden",
        "a//b",
        "a/",
        "",
        "a\\b",
        "a\0b",
        "x" * 65,
        "a/b/c/d/e",
        "é.py",
    ],
)
def test_a_path_cannot_leave_the_repository(task: Repository, prompt: Prompt, path: str) -> None:
    episode = task.environment(prompt, FORMAT)
    assert episode.step(call("write_file", path=path, text="x")).observation.startswith("Error: path")
    assert set(episode.state()["files"]) == set(prompt.answer["files"])


def test_a_repository_has_a_limit(task: Repository, prompt: Prompt) -> None:
    episode = task.environment(prompt, FORMAT)
    assert "at most" in episode.step(call("write_file", path="big", text="x" * 70_000)).observation
    for number in range(FILES):
        last = episode.step(call("write_file", path=f"f{number}", text="x")).observation
    assert "at most" in last
    assert "file and a folder" in episode.step(call("write_file", path="f0/x", text="x")).observation


def test_an_edit_needs_a_text_that_occurs_once(task: Repository, prompt: Prompt) -> None:
    episode = task.environment(prompt, FORMAT)
    for old, told in (("no such line", "occurs 0 times"), ("return", "occurs "), ("", "is empty")):
        step = episode.step(call("edit_file", path=module(prompt), old=old, new="x"))
        assert told in step.observation
        assert step.counts["valid_calls"] == 0.0
    assert "no file 'nothing.py'" in episode.step(call("read_file", path="nothing.py")).observation


def test_tests_that_cannot_be_run_say_why() -> None:
    assert "cannot be imported: SyntaxError" in run_tests({"test_a.py": "def ("})
    assert run_tests({}) == "0 passed, 0 failed"
