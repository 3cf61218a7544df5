"""Answers that try to pass the verifiers of text, or to hold them up. None of them is right."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Answer:
    name: str
    verifier: str
    completion: str
    answer: str
    slow: bool = False  # ends by its time limit, and a worker is started anew: tests try few of them


def _math(name: str, completion: str, slow: bool = False) -> Answer:
    return Answer(name, "math_verify", completion, "42", slow)


BOMB = "__import__('os').system('touch CANARY')"

ANSWERS = [
    _math("tower", "\\boxed{9^{9^{9^9}}}"),
    _math("tower in Python's way", "\\boxed{9**9**9**9}"),
    _math("tower of fractions", "\\boxed{\\frac{1}{2}^{\\frac{9^{9}}{2}^{9}}}", slow=True),
    _math("tower by letters", "\\boxed{(9^9)^{(9^9)^{(9^9)}}}"),
    _math("tower of brackets", "\\boxed{\\left(9\\right)^{\\left(99999\\right)^{\\left(99999\\right)}}}", slow=True),
    _math("exponential of exponentials", "\\boxed{e^{e^{e^{e^{10}}}}}", slow=True),
    _math("factorial", "\\boxed{10000000!}"),
    _math("factorial of a factorial", "\\boxed{((9!)!)!}", slow=True),
    _math("factorial of a product", "\\boxed{(9999 \\cdot 9999)!}", slow=True),
    _math("binomial", "\\boxed{\\binom{1000000}{500000}}"),
    _math("long sum", "\\boxed{" + "+".join(["1/7"] * 3000) + "}", slow=True),
    _math("long product", "\\boxed{" + "\\cdot".join(["x+1"] * 2000) + "}", slow=True),
    _math("sum without end", "\\boxed{\\sum_{n=1}^{10^9} \\frac{1}{n^n}}"),
    _math("integral", "\\boxed{\\int_0^1 e^{e^{x^x}} dx}", slow=True),
    _math("digits", "\\boxed{" + "9" * 200_000 + "}", slow=True),
    _math("braces", "$" + "{" * 2000 + "$"),
    _math("brackets", "\\boxed{" + "(" * 3000 + "1" + ")" * 3000 + "}"),
    _math("fractions in fractions", "\\boxed{" + "\\frac{1}{" * 300 + "2" + "}" * 300 + "}", slow=True),
    _math("roots in roots", "\\boxed{" + "\\sqrt{" * 500 + "2" + "}" * 500 + "}", slow=True),
    _math("flood of boxes", "\\boxed{41}" * 20_000, slow=True),
    _math("flood of formulas", "$x=1$ " * 20_000, slow=True),
    _math("two boxes", "\\boxed{42} or \\boxed{43}"),
    _math("all boxes", " ".join(f"\\boxed{{{i}}}" for i in range(100))),
    _math("list of answers", "\\boxed{41, 42, 43}"),
    _math("set of answers", "\\boxed{\\{41, 42, 43\\}}"),
    _math("interval round the answer", "\\boxed{[41, 43]}"),
    _math("answer or another", "\\boxed{42 \\text{ or } 43}"),
    _math("inequality", "\\boxed{x < 43}"),
    _math("free symbol", "\\boxed{x}"),
    _math("nothing by nothing", "\\boxed{\\frac{0}{0}}"),
    _math("infinity", "\\boxed{\\infty}"),
    _math("empty box", "\\boxed{}"),
    _math("nothing", ""),
    _math("matrix", "\\boxed{\\begin{pmatrix}" + "&".join(["1"] * 2000) + "\\end{pmatrix}}", slow=True),
    _math("code", f"\\boxed{{{BOMB}}}"),
    _math("code as text", f"\\boxed{{\\text{{{BOMB}}}}}"),
    _math("code alone", BOMB),
    _math("digits of another script", "\\boxed{\u0664\u0663}"),
    _math("null bytes", "\\boxed{4\x002\x00\x01}"),
    Answer("pattern of years", "regex", "a" * 60, "(a+)+b"),
    Answer("pattern of years, longer", "regex", "a" * 100_000, "(a|a)*b", slow=True),
    Answer("pattern as an answer", "regex", "(a+)+b|.*", "[0-9]{7}"),
    Answer("lines round the answer", "regex", "1\n42\n3", "42"),
    Answer("all numbers", "numeric", " ".join(map(str, range(10_000))), "42"),
    Answer("many marks", "numeric", "#### 42 #### 43", "42"),
    Answer("number that is none", "numeric", "nan", "42"),
    Answer("infinite number", "numeric", "1e999", "42"),
    Answer("flood of digits", "numeric", "4" * 1_000_000, "42"),
    Answer("blanks within", "exact", "4 2", "42"),
]
