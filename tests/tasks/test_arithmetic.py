from fractions import Fraction

import pytest

from opdctl.tasks.arithmetic import compute


def test_expressions_are_computed_exactly() -> None:
    assert compute("(0.1 + 0.2) / 3") == (Fraction(1, 10), [Fraction(1, 10), Fraction(1, 5), Fraction(3)], ["+", "/"])
    assert compute(" -2 * 3 ")[0] == -6


@pytest.mark.parametrize(
    "text",
    ["", "1/0", "9**9**9", "__import__('os')", "1e9", "0x10", "1_0", "1j", "1 2", "1,2", "1 // 2", "1 < 2", "(1,)"]
    + ["9" * 12, "(" * 150, "1+" * 99, "1" * 201],
)
def test_anything_else_is_refused_and_never_run(text: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        compute(text)
