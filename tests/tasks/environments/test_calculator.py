import json
from fractions import Fraction
from pathlib import Path

import pytest
from tasks.environments.episodes import FORMAT, asked, call, played

from opdctl.errors import ConfigError
from opdctl.settings import CalculatorTask
from opdctl.tasks import load_task
from opdctl.tasks.environments.calculator import number, shown
from opdctl.tasks.environments.tool_task import ToolTask

ROW = {
    "question": "How many clips?",
    "answer": "In May 48/2 = <<48/2=24>>24. 20% is <<20%=.2>>. 48+24 = <<48+24=72>>72.\n#### 72",
}


def calculator(**settings: object) -> ToolTask:
    task = load_task("it", CalculatorTask.model_validate({"task": "calculator", **settings}), None)
    assert isinstance(task, ToolTask)
    return task


@pytest.mark.parametrize(
    ("expression", "answer"),
    [("(3 + 4) * 12.5", "87.5"), ("1/3", "1/3"), ("2 * 3", "6"), ("7 / 8", "0.875"), ("1/0", "Error: "),
     ("9 ** 9", "Error: "), ("__import__('os')", "Error: "), ("", "Error: "), ("1" * 300, "Error: ")],
)  # fmt: skip
def test_the_calculator_is_exact_and_computes_nothing_else(expression: str, answer: str) -> None:
    task = calculator()
    observation = task.environment(asked(task), FORMAT).step(call("calculate", expression=expression)).observation
    assert observation.startswith(answer) if answer == "Error: " else observation == answer


@pytest.mark.parametrize("value", [Fraction(7), Fraction(1, 3), Fraction(-5, 4), Fraction(1, 10**6), Fraction(10**14)])
def test_what_the_calculator_shows_is_read_as_the_same_number(value: Fraction) -> None:
    assert number(shown(value)) == value


@pytest.mark.parametrize("text", ["", "1/0", "12 or 13", "1e3", "twelve", "1,2", "9" * 400])
def test_what_is_not_one_number_is_no_answer(text: str) -> None:
    assert number(text) is None


def test_rows_of_a_file_are_worked_as_their_answer_shows(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROW) + "\n")
    task = calculator(path=str(tmp_path / "rows.jsonl"), held_out=0.0)
    [shown] = task.demonstrations(0, 0, 1)
    assert [turn.observation for turn in shown.turns] == ["24", "72", ""]
    assert task.size("train") == 1
    assert played(task, shown.prompt, "Answer: 72.0").correct


def test_a_row_without_a_number_is_refused_by_its_number(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROW) + "\n" + json.dumps({"question": "?", "answer": "none"}))
    with pytest.raises(ConfigError, match="row 2: no number after ####"):
        calculator(path=str(tmp_path / "rows.jsonl"))
