"""The table of failure cases is whole, and names tests that exist and run."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
CASES = range(1, 42)
ROWS = re.findall(r"^\| (\d+) \| (.+?) \| (.+?) \| (.+) \|$", (ROOT / "runbooks/failure-cases.md").read_text(), re.M)
NAMED = [(path, name) for *_, tests in ROWS for path, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", tests)]


def functions(path: str) -> dict[str, ast.FunctionDef]:
    tree = ast.parse((ROOT / path).read_text())
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def marks(node: ast.FunctionDef | ast.Module) -> list[str]:
    """As written: decorators of a test, `pytestmark` of a file."""
    if isinstance(node, ast.FunctionDef):
        return [ast.unparse(mark) for mark in node.decorator_list]
    assigned = [one for one in node.body if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == "pytestmark"]
    return [ast.unparse(one.value) for one in assigned]


def never_runs(node: ast.FunctionDef | ast.Module) -> bool:
    first = ast.unparse(node.body[1 if ast.get_docstring(node) else 0])
    given_up = first.startswith(("pytest.skip(", "pytest.xfail(", "pass", "..."))
    return given_up or any(re.search(r"mark\.(skip\b|xfail|skipif\((True|1)\b)", mark) for mark in marks(node))


def test_every_case_has_its_row_and_every_row_a_test():
    assert [int(number) for number, *_ in ROWS] == list(CASES)
    assert [number for number, *_, tests in ROWS if "::test_" not in tests] == []


def test_every_test_that_the_table_names_exists_and_runs():
    files = {path: functions(path) for path in {path for path, _ in NAMED}}
    assert [f"{path}::{name}" for path, name in NAMED if name not in files[path]] == []
    assert [f"{path}::{name}" for path, name in NAMED if never_runs(files[path][name])] == []
    assert [path for path in files if never_runs(ast.parse((ROOT / path).read_text()))] == []
