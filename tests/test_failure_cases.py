"""The table of failure cases names tests that exist."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_every_test_that_the_table_names_exists():
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "runbooks/failure-cases.md").read_text())
    assert len(named) > 30
    functions = {
        path: {
            node.name for node in ast.walk(ast.parse((ROOT / path).read_text())) if isinstance(node, ast.FunctionDef)
        }
        for path in {path for path, _ in named}
    }
    assert [f"{path}::{name}" for path, name in named if name not in functions[path]] == []
