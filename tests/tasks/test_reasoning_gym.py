import pytest

from opdctl.errors import ConfigError
from opdctl.settings import ReasoningGymTask
from opdctl.tasks.reasoning_gym import CHECKS, REFUSED, ReasoningGym

FAST = sorted(set(CHECKS) - {"countdown", "knights_knaves", "puzzle24", "zebra_puzzles"})  # theirs are slow to generate
ATTACKS = ("", "__import__('os').system('x')", "9**9**9**9", "[", "((((", "x" * 5000, "1/0")


def make(dataset: str, **given: object) -> ReasoningGym:
    asked = {"task": "reasoning_gym", "dataset": dataset, "rows": 12, "held_out": 4} | given
    return ReasoningGym("gym", ReasoningGymTask.model_validate(asked), None)


@pytest.mark.parametrize("dataset", FAST)
def test_references_verify_and_attacks_do_not(dataset: str) -> None:
    task = make(dataset)
    for prompt in task.prompts("train", 0, 0, 12):
        assert task.verify(prompt, task.reference(prompt)).correct
        assert not any(task.verify(prompt, text).correct for text in ATTACKS)


def test_an_answer_is_found_behind_its_words() -> None:
    task = make("chain_sum")
    prompt = task.prompts("eval", 0, 0, 1)[0]
    value = prompt.answer["answer"]
    assert task.verify(prompt, f"First I add.\nThe answer is {value}.").correct
    assert task.verify(prompt, f"1 + 2 = {value}").correct
    assert not task.verify(prompt, f"{value} or 17").correct, "hedging"


def test_an_expression_must_use_the_numbers_given() -> None:
    check, row = CHECKS["puzzle24"], {"numbers": [8, 5, 10, 6], "target": 24}
    assert check("10 * (8 - 5) - 6", row)
    assert not check("(1 + 2 + 3) * 4", row), "the package's scorer takes it"
    assert not check("8 * 5 - 10 + 6", row)
    assert not check("24", row)


def test_inhabitants_may_be_named_in_any_order() -> None:
    check, row = CHECKS["knights_knaves"], {"answer": "Ada is a knight, and Ben is a knave."}
    assert check("Ben is a knave and Ada is a knight", row)
    assert not check("Ada is a knave, and Ben is a knight.", row)
    assert not check("Ada is a knight, and Ben is a knave, and Ben is a knight.", row)


def test_a_sudoku_is_judged_by_its_rules() -> None:
    row = {"puzzle": [[0] * 4] * 4}
    assert CHECKS["mini_sudoku"]("1 2 3 4\n3 4 1 2\n2 1 4 3\n4 3 2 1", row)
    assert not CHECKS["mini_sudoku"]("1 2 3 4\n3 4 1 2\n2 1 4 3\n4 3 1 2", row)
    assert not CHECKS["mini_sudoku"]("1 2 3 4\n3 4 1 2\n2 1 4 3", row)


def test_no_held_out_question_is_trained_on() -> None:
    task = make("gcd", rows=200, held_out=20, config={"min_value": 1, "max_value": 6})
    held = {prompt.text for prompt in task.prompts("eval", 0, 0, 20)}
    assert not held & {prompt.text for prompt in task.prompts("train", 0, 0, task.size("train") or 0)}


@pytest.mark.parametrize(("dataset", "why"), [("polynomial_multiplication", "evaluates"), ("no_such", "no check")])
def test_others_are_refused_by_name(dataset: str, why: str) -> None:
    with pytest.raises(ConfigError, match=rf"tasks\.gym\.dataset: {dataset} .*{why}"):
        make(dataset)
    assert not set(REFUSED) & set(CHECKS)


def test_bad_options_of_a_generator_name_the_key() -> None:
    with pytest.raises(ConfigError, match=r"tasks\.gym\.config"):
        make("gcd", config={"no_such_option": 1})
