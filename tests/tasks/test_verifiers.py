import re
import sys
import textwrap
import threading
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opdctl.errors import ConfigError
from opdctl.settings import ChainTask
from opdctl.tasks import Verdict, verifiers
from opdctl.tasks.chain import ChainStream
from opdctl.tasks.verifiers import BUILTIN, TOWER, VerifierError, answer_problem, check_references


def resolve(name, *where):
    """f(completion, answer) for one completion."""
    verifier = verifiers.resolve(name, *where)
    return lambda completion, answer: verifier([(completion, answer)])[0]


NUMERIC = [
    # completion, answer, correct
    ("The answer is 42.", "42", True),
    ("41", "42", False),
    ("42 apples and 3 pears", "42", False),  # the last number counts
    ("1,234,567", "1234567", True),
    ("1234567", "1,234,567", True),
    ("1, 2, 3", "3", True),
    ("1,23", "23", True),  # no thousands: two numbers
    ("x = -5", "-5", True),
    ("x = \N{MINUS SIGN}5", "-5", True),
    ("+5", "5", True),
    ("10-5", "5", True),  # a difference, not a sign
    ("(3)-2", "-2", False),
    ("10 - 5 = 5", "5", True),
    ("3/4", "0.75", True),
    ("0.75", "3/4", True),
    ("-3/4", "-0.75", True),
    ("1/0", "1", False),
    ("1/3", "0.333333333", True),
    ("0.3333", "1/3", False),
    ("1e3", "1000", True),
    ("2.5E-3", "0.0025", True),
    (".5", "0.5", True),
    ("5.0", "5", True),
    ("0.0", "-0", True),
    ("007", "7", True),
    ("1000000", "1000001", False),  # whole numbers are compared exactly
    ("1000000.0", "1000000.5", True),
    ("1e999", "1e999", False),  # not a finite number
    ("9" * 5000, "9" * 5000, True),
    ("9" * 5000, "9" * 4999 + "8", False),
    ("$1,234.50", "1234.5", True),
    ("half", "0.5", False),
    ("", "0", False),
    ("So 6 * 7 = 42\n#### 42", "21 + 21 = <<21+21=42>>42\n#### 42", True),
    ("#### 42 and then 7 more", "42", True),
    ("42 ####", "42", False),
    ("#### 41", "#### 42", False),
    ("#### 1,000", "1000", True),
]


@pytest.mark.parametrize(("completion", "answer", "correct"), NUMERIC)
def test_numeric(completion, answer, correct):
    verdict = resolve("numeric")(completion, answer)
    assert (verdict.correct, verdict.reward) == (correct, float(correct))
    assert bool(verdict.details["reason"]) != correct


@pytest.mark.parametrize("noise", ["1" * 200_000, "1," * 100_000, "1/" * 100_000, "-" * 200_000, "1,111" * 40_000])
def test_numeric_reads_a_long_completion_in_linear_time(noise):
    begin = time.process_time()
    resolve("numeric")(noise, "42")
    TOWER.search(noise)
    assert time.process_time() - begin < 2


@pytest.mark.parametrize(
    ("completion", "answer", "correct"),
    [(" Paris\n", "Paris", True), ("paris", "Paris", False), ("Paris!", "Paris", False), ("", "", True)],
)
def test_exact(completion, answer, correct):
    assert resolve("exact")(completion, answer).correct == correct


@pytest.mark.parametrize(
    ("completion", "answer", "correct"),
    [
        ("Paris", "Paris|paris", True),
        (" Paris \n", "Paris", True),
        ("It is Paris", "Paris", False),  # all of it must match
        ("It is\nParis, surely", "(?s).*Paris.*", True),
        ("a1b22", r"[a-z]\d[a-z]\d+", True),
    ],
)
def test_regex(completion, answer, correct):
    assert resolve("regex")(completion, answer).correct == correct


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(verifiers, "LIMITS", replace(verifiers.LIMITS, cpu_s=1.0))


def test_a_catastrophic_pattern_ends_as_not_matched(short):
    verdict = resolve("regex")("a" * 60, "(a+)+b")
    assert not verdict.correct
    assert verdict.details["reason"] == "took more than 1 s of CPU time"


def test_a_hard_comparison_ends_as_wrong_and_costs_no_other(short):
    easy, hard = ("$\\frac{1}{2}$", "0.5"), ("\\boxed{((9!)!)!}", "2")  # years
    verdicts = verifiers.resolve("math_verify")([easy, hard, easy])
    assert [verdict.correct for verdict in verdicts] == [True, False, True]
    assert verdicts[1].details["reason"] == "took more than 1 s of CPU time"


@pytest.mark.parametrize(
    ("completion", "answer", "correct"),
    [
        ("The answer is $\\frac{1}{2}$", "0.5", True),
        ("\\boxed{0.5}", "\\frac{1}{2}", True),
        ("so $(x+1)^2$", "x^2+2x+1", True),
        ("$\\frac{1}{3}$", "1/2", False),
        ("no idea", "1/2", False),
        ("", "7", False),
        ("42", "6 * 7 = 42\n#### 42", True),
    ],
)
def test_math_verify(completion, answer, correct):
    assert resolve("math_verify")(completion, answer).correct == correct


@pytest.mark.parametrize(
    "tower",
    [
        "9**9**9",
        "$9^{9^{9}}$",
        "$10^{10^{10}}$",
        "\\boxed{2^{100000000}}",
        "$1000000!$",
        "$(1000000)!$",
        "$\\binom{1000000}{500000}$",
    ],
)
def test_math_verify_refuses_numbers_that_cannot_be_computed_before_it_tries(tower):
    begin = time.process_time()
    verdict = resolve("math_verify")(f"I say {tower}", "2")
    assert time.process_time() - begin < 0.1
    assert "too large" in verdict.details["reason"]
    assert answer_problem("math_verify", tower)


def test_math_verify_refuses_deep_brackets_before_it_tries():
    verdict = resolve("math_verify")("$" + "{" * 2000 + "$", "2")  # minutes to find no expression
    assert verdict.details["reason"] == "brackets nested too deep"


def test_math_verify_bears_a_tower_on_the_way_to_a_boxed_answer():
    assert resolve("math_verify")("$10^{10^{10}}$ is huge, but the answer is \\boxed{4}", "4").correct


@pytest.mark.parametrize("name", ["math_verify", "regex"])
def test_a_verifier_with_a_time_limit_works_in_any_thread(name):
    found = []
    thread = threading.Thread(target=lambda: found.append(resolve(name)("1", "1")))
    thread.start()
    thread.join()
    assert found[0].correct


@given(
    st.sampled_from(["exact", "numeric", "regex"]), st.text(max_size=60), st.text("0123456789.,/eE+-#(", max_size=12)
)
def test_any_text_gets_a_verdict(name, completion, answer):
    if not answer_problem(name, answer):
        verdict = resolve(name)(completion, answer)
        assert verdict.reward == float(verdict.correct)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_numeric_reads_any_float_that_python_writes(value):
    assert resolve("numeric")(f"it is {value!r}", repr(value)).correct


# ----------------------------------------------------------------------------------------------------------- own


@pytest.fixture
def graders(workspace, monkeypatch):
    """A workspace with graders.py, importable as in a worker and forgotten afterwards."""
    (workspace / "graders.py").write_text(
        textwrap.dedent("""
        from opdctl.tasks import Verdict

        def same(completion, answer): return completion == answer
        def half(completion, answer): return 0.5
        def full(completion, answer): return Verdict(True, 0.25, {"why": completion})
        def nothing(completion, answer): return None
        def text(completion, answer): return "yes"
        def nan(completion, answer): return float("nan")
        NUMBER = 3
        """)
    )
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield workspace
    sys.modules.pop("graders", None)


def test_a_function_of_the_workspace_may_return_a_bool_a_number_or_a_verdict(graders):
    assert resolve("graders:same")("a", "a") == Verdict(True, 1.0)
    assert resolve("graders:same")("a", "b") == Verdict(False, 0.0)
    assert resolve("graders:half")("a", "b") == Verdict(False, 0.5)
    assert resolve("graders:full")("a", "b") == Verdict(True, 0.25, {"why": "a"})


@pytest.mark.parametrize("function", ["nothing", "text", "nan"])
def test_a_function_that_returns_no_judgement_is_an_error(graders, function):
    with pytest.raises(VerifierError, match=f"TypeError: graders:{function} returned"):
        resolve(f"graders:{function}")("a", "b")


def test_a_file_of_the_workspace_hides_no_installed_package(graders, monkeypatch):
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    (graders / "colorsys.py").write_text("def rgb_to_hsv(completion, answer): return True")
    with pytest.raises(VerifierError, match="TypeError"):  # the one of the standard library, which takes three numbers
        resolve("colorsys:rgb_to_hsv")("a", "b")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("numerc", "key: 'numerc' is not a verifier; did you mean 'numeric'?"),
        ("whatever", "key: 'whatever' is not a verifier"),
        ("no_such_module:f", "key: no_such_module:f: No module named 'no_such_module'"),
        ("graders:missing", "key: module graders has no function missing"),
        ("graders:NUMBER", "key: module graders has no function NUMBER"),
        ("graders:", "key: 'graders:' is not a verifier"),
    ],
)
def test_an_unknown_verifier_is_refused(graders, name, message):
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        resolve(name, "key")
    assert caught.value.hint or "has no function" in message


# ---------------------------------------------------------------------------------------------------- self-check


@pytest.mark.parametrize(
    ("name", "answer", "problem"),
    [
        ("numeric", "none", "holds no number"),
        ("numeric", "#### 3", ""),
        ("regex", "(a", "is not a regular expression"),
        ("regex", "a+", ""),
        ("math_verify", "2^{99999999}", "too large"),
        ("exact", "", ""),
    ],
)
def test_an_answer_that_nothing_can_match_is_a_problem(name, answer, problem):
    found = answer_problem(name, answer)
    assert problem in found
    assert bool(found) == bool(problem)


def test_check_references_names_what_a_broken_grader_rejects():
    class Strict(ChainStream):
        def verify(self, prompt, completion):
            return Verdict(False, 0.0, {"reason": "never"})

    settings = ChainTask(task="chain", domain="math")
    assert check_references(ChainStream("general", settings, None), 5) == []
    problems = check_references(Strict("general", settings, None), 5)
    assert len(problems) == 5
    assert "never" in problems[0]


def test_every_builtin_is_documented():
    import opdctl.tasks.verifiers as module

    assert all(f"`{name}`" in module.__doc__ for name in BUILTIN)
