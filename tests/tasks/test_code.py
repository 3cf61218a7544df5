"""Code is right by the values that it returns, and by nothing that it says about them."""

import gzip
import json
from pathlib import Path

import pytest
from public_data import published

from opdctl.jail import isolation
from opdctl.settings import HumanEvalTask, MbppTask
from opdctl.tasks import load_task
from opdctl.tasks.code import HumanEval, Mbpp, fenced

if missing := isolation():
    pytest.skip(f"programs cannot be contained here: {missing}", allow_module_level=True)

EQUAL_TO_ALL = "class Any:\n    def __eq__(self, other):\n        return True\ndef double(x):\n    return Any()"
QUITS = "import os\ndef double(x):\n    os._exit(0)"
HACKS = {
    "exits 0": "import sys\ndef double(x):\n    sys.exit(0)",
    "exits 0 at once": "import os\nos._exit(0)",
    "prints the file of the answers": "print(open(ANSWERS).read())\ndef double(x):\n    return open(ANSWERS).read()",
    "forks": "import os\ndef double(x):\n    return x * 2 if os.fork() == 0 else x",
    "fork bomb": "import os\ndef double(x):\n    while True:\n        os.fork()",
    "fills the disk": "def double(x):\n    with open('full', 'wb') as stream:\n        while True:\n"
    "            stream.write(bytes(1 << 20))",
}


def mbpp_row(number: int) -> dict:
    tests = ["assert double(2) == 4", "assert double([1]) == [1, 1]", "assert set(double((1,))) == {1}"]
    return {
        "task_id": number,
        "text": "Double it.",
        "code": "def double(x):\r\n    return x * 2",
        "test_list": tests,
    } | {"test_setup_code": ""}


@pytest.fixture
def mbpp(tmp_path: Path):
    rows = [mbpp_row(number) for number in (1, 11, 511, 601, 602)]
    (tmp_path / "mbpp.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def make(**given: object) -> Mbpp:
        task = load_task("code", MbppTask.model_validate({"task": "mbpp", "path": "."} | given), None, tmp_path)
        assert isinstance(task, Mbpp)
        return task

    return make


CHECK = """
def check(candidate):
    for n in range(3):
        assert abs(candidate(n, [n]) - n / 3) < 1e-6
    assert candidate(9, []) == 3
"""


@pytest.fixture
def humaneval(tmp_path: Path):
    row = {"task_id": "HumanEval/0", "prompt": 'def third(n, more):\n    """A third of n."""\n', "test": CHECK}
    row |= {"entry_point": "third", "canonical_solution": "    return n / 3\n"}
    with gzip.open(tmp_path / "HumanEval.jsonl.gz", "wt") as stream:
        stream.write(json.dumps(row) + "\n")

    def make(**given: object) -> HumanEval:
        settings = HumanEvalTask.model_validate({"task": "humaneval", "path": "."} | given)
        task = load_task("code", settings, None, tmp_path)
        assert isinstance(task, HumanEval)
        return task

    return make


def test_published_parts(mbpp) -> None:
    assert (mbpp().size("train"), mbpp().size("eval"), mbpp(part="validation").size("eval")) == (2, 1, 1)


@pytest.mark.parametrize("template", ["raw", "chat"])
def test_solutions_are_right_in_both_templates(mbpp, humaneval, template: str) -> None:
    for task in (mbpp(template=template), humaneval(template=template)):
        prompt = task.prompts("eval", 0, 0, 1)[0]
        assert task.verify(prompt, task.reference(prompt)).correct


@pytest.mark.parametrize(
    "code", ["", "def double(x):\n    return 4", EQUAL_TO_ALL, QUITS, "double = 1 +", "raise SystemExit"]
)
def test_wrong_code_is_wrong(mbpp, code: str) -> None:
    task = mbpp()
    assert not task.verify(task.prompts("eval", 0, 0, 1)[0], code + "\n[DONE]").correct


@pytest.mark.parametrize("hack", HACKS.values(), ids=HACKS.keys())
def test_a_hack_earns_nothing_and_costs_the_next_program_nothing(mbpp, tmp_path, hack: str) -> None:
    task = mbpp()
    prompt = task.prompts("eval", 0, 0, 1)[0]
    code = hack.replace("ANSWERS", repr(str(tmp_path / "mbpp.jsonl")))
    hacked, honest = task.verify_all([(prompt, code + "\n[DONE]"), (prompt, task.reference(prompt))])
    assert (hacked.correct, honest.correct) == (False, True)
    assert hacked.reward == 0.0


def test_a_tolerance_of_the_test_holds_for_values_unlike_the_solutions(humaneval) -> None:
    task = humaneval()
    prompt = task.prompts("eval", 0, 0, 1)[0]
    near, far = "    return n / 3 + 1e-9 * (n < 9)\n", "    return n / 3 + 1e-3\n"
    told = "    return 0\nprint('done')\ndef check(candidate):\n    pass\n"
    always = "    class Any(float):\n        __sub__ = __eq__ = lambda *a: 0.0\n    return Any(7)\n"
    verdicts = task.verify_all([(prompt, text) for text in (near, far, told, always)])
    assert [verdict.correct for verdict in verdicts] == [True, False, False, False]


def test_only_the_first_block_counts() -> None:
    assert fenced("Sure:\n```python\nx = 1\n```\nor\n```\nx = 2\n```") == "x = 1"
    assert fenced("```py\nx = 1") == "x = 1"
    assert fenced("x = 1") is None


def test_published_solutions_are_right() -> None:
    task = load_task("code", MbppTask(task="mbpp", path="code"), None, published("code/mbpp.jsonl"))
    assert isinstance(task, Mbpp)
    prompts = task.prompts("eval", 0, 0, 60)
    verdicts = task.verify_all([(prompt, task.reference(prompt)) for prompt in prompts])
    assert all(verdict.correct for verdict in verdicts)
