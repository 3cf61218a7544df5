"""Bugs planted in functions: one change of the syntax tree each, of those that its tests notice.

Which mutants fail a shown test, a hidden one, and end in time, was found out once, by running them all; `EFFECTIVE`
keeps it, so that a problem is made without running anything.
"""

import ast
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

_COMPARE: Mapping[type[ast.cmpop], ast.cmpop] = {
    ast.Lt: ast.LtE(), ast.LtE: ast.Lt(), ast.Gt: ast.GtE(), ast.GtE: ast.Gt(),
    ast.Eq: ast.NotEq(), ast.NotEq: ast.Eq(),
}  # fmt: skip
_ARITHMETIC: Mapping[type[ast.operator], ast.operator] = {
    ast.Add: ast.Sub(), ast.Sub: ast.Add(), ast.Mult: ast.Add(), ast.FloorDiv: ast.Mod(), ast.Mod: ast.FloorDiv(),
    ast.Div: ast.Mult(),
}  # fmt: skip

# function -> numbers of its mutants
EFFECTIVE: Mapping[str, Sequence[int]] = {
    "median": [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10],
    "is_prime": [1, 5, 6, 8, 9, 10],
    "run_lengths": [0, 1, 2, 3, 4, 5, 6, 7],
    "binary_search": [0, 2, 3, 5, 6],
    "merge_sorted": [0, 1, 2, 3, 5, 6, 7, 8, 9, 10],
    "caesar": [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11],
    "balanced": [0, 1, 2, 3, 4, 5, 7, 8, 9, 10, 11],
    "leap_year": [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13],
    "windows": [0, 1, 2, 3],
    "to_base": [0, 1, 3, 4, 5, 6, 7],
    "second_largest": [2],
    "title_words": [0, 1, 2, 3, 5, 6, 7],
    "change": [0, 1, 2, 3, 4, 5, 6, 7],
    "overlap": [1, 2, 3, 4, 5, 6],
    "digital_root": [2, 3],
}


@lru_cache(maxsize=64)
def source(function: Callable[..., Any]) -> str:
    """A function as `ast` writes it, so that a mutant differs from it in the bug alone."""
    return ast.unparse(ast.parse(inspect.getsource(function)))


@lru_cache(maxsize=64)
def mutants(text: str) -> list[str]:
    """All functions that differ from this one in one comparison, operation, number or truth value."""
    count = sum(1 for _ in _changes(ast.parse(text)))
    found = []
    for number in range(count):
        tree = ast.parse(text)
        for at, change in enumerate(_changes(tree)):
            if at == number:
                change()
                break
        found.append(ast.unparse(tree))
    return found


def _changes(tree: ast.AST) -> Iterator[Callable[[], None]]:
    for node in ast.walk(tree):
        match node:
            case ast.Compare(ops=[op]) if type(op) in _COMPARE:
                yield lambda node=node, op=op: setattr(node, "ops", [_COMPARE[type(op)]])  # type: ignore[misc]  # default
            case ast.BinOp(op=op) | ast.AugAssign(op=op) if type(op) in _ARITHMETIC:
                yield lambda node=node, op=op: setattr(node, "op", _ARITHMETIC[type(op)])  # type: ignore[misc]  # default
            case ast.BoolOp(op=op):
                other = ast.Or() if isinstance(op, ast.And) else ast.And()
                yield lambda node=node, other=other: setattr(node, "op", other)  # type: ignore[misc]  # default
            case ast.Constant(value=bool() as value):
                yield lambda node=node, value=value: setattr(node, "value", not value)  # type: ignore[misc]  # default
            case ast.Constant(value=int() as value):
                yield lambda node=node, value=value: setattr(node, "value", value + 1)  # type: ignore[misc]  # default
