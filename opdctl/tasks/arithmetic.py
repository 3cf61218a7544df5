"""Arithmetic that a model wrote, computed exactly and without running it."""

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction

LONGEST = 200  # characters
LARGEST = 10**9  # of a number written
_ALLOWED = re.compile(r"[0-9+\-*/(). ]+")  # letters and _ would let in names, calls, 0x10, 1e9 and 1_0
_OPERATIONS: dict[type[ast.operator], tuple[str, Callable[[Fraction, Fraction], Fraction]]] = {
    ast.Add: ("+", operator.add),
    ast.Sub: ("-", operator.sub),
    ast.Mult: ("*", operator.mul),
    ast.Div: ("/", operator.truediv),
}


def compute(expression: str) -> tuple[Fraction, list[Fraction], list[str]]:
    """(value, the numbers written in order, the operations + - * /) of an expression.

    Raises ValueError, with what is wrong, for anything else, division by zero included. The text is parsed and walked:
    no name, call or power is ever evaluated.
    """
    if len(expression) > LONGEST:
        raise ValueError(f"longer than {LONGEST} characters")
    if not _ALLOWED.fullmatch(expression):
        raise ValueError("not an expression of numbers and + - * / ( )")
    numbers: list[Fraction] = []
    operations: list[str] = []
    try:
        return _walk(ast.parse(expression.strip(), mode="eval").body, numbers, operations), numbers, operations
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError("not an expression that can be read") from None
    except ZeroDivisionError:
        raise ValueError("divides by zero") from None


def _walk(node: ast.AST, numbers: list[Fraction], operations: list[str]) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool) and value < LARGEST:
            numbers.append(Fraction(repr(value)))
            return numbers[-1]
        case ast.UnaryOp(op=ast.USub()):
            return -_walk(node.operand, numbers, operations)
        case ast.BinOp() if type(node.op) in _OPERATIONS:
            sign, function = _OPERATIONS[type(node.op)]
            left = _walk(node.left, numbers, operations)
            operations.append(sign)
            return function(left, _walk(node.right, numbers, operations))
    raise ValueError("holds something else than numbers and + - * /")
