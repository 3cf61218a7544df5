"""Programs of a model in the jail, and what it is shown of them."""

from collections.abc import Mapping, Sequence
from typing import Any

from opdctl.jail import Outcome, Program, shared

SHOWN = 2000  # characters of what a program prints

_TESTS = """
import importlib
passed = failed = 0
for name in {modules!r}:
    try:
        module = importlib.import_module(name)
    except BaseException as error:
        failed += 1
        print(f"{{name}}: cannot be imported: {{type(error).__name__}}: {{error}}")
        continue
    for test, function in list(vars(module).items()):
        if test.startswith("test_"):
            try:
                function()
                passed += 1
            except BaseException as error:
                failed += 1
                print(f"{{name}}.{{test}}: {{type(error).__name__}}: {{error}}")
print(f"{{passed}} passed, {{failed}} failed")
"""


def printed(source: str, files: Mapping[str, str] | None = None) -> str:
    """What a program prints, and how it failed if it did."""
    [outcome] = shared().run([Program(source, files=files or {})])
    text = outcome.printed if len(outcome.printed) <= SHOWN else f"{outcome.printed[:SHOWN]} ... (cut)"
    told = {"": "", "error": outcome.detail.strip()}.get(outcome.failure, f"{outcome.failure}: {outcome.detail}")
    return "\n".join(part for part in (text.rstrip("\n"), told) if part) or "It printed nothing."


def tested(files: Mapping[str, str]) -> str:
    """What the functions test_* of the modules test_* say."""
    modules = sorted(path[:-3] for path in files if path.startswith("test_") and path.endswith(".py"))
    return printed(_TESTS.format(modules=modules), files)


def computed(files: Mapping[str, str], module: str, calls: Sequence[str]) -> Outcome:
    """The values of the calls of a module's functions."""
    [outcome] = shared().run([Program(f"from {module} import *", calls, files)])
    return outcome


def same(found: Any, wanted: Any) -> bool:
    """Whether two plain values are equal, True and 1 told apart at the top."""
    return type(found) is type(wanted) and bool(found == wanted)
