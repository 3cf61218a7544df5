import json
from pathlib import Path

import pytest

from opdctl.settings import MathTask
from opdctl.tasks import load_task
from opdctl.tasks.math import Math, boxed

pytest.importorskip("math_verify", reason="no math-verify: pip install 'opdctl[verl]'")


@pytest.fixture
def task(tmp_path: Path) -> Math:
    rows = [{"problem": f"What is {n} / 4?", "solution": f"Divide: \\boxed{{\\frac{{{n}}}{{4}}}}."} for n in range(60)]
    (tmp_path / "math.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "math_500.jsonl").write_text(json.dumps(rows[3]) + "\n")
    made = load_task("contest", MathTask(task="math", path="."), None, tmp_path)
    assert isinstance(made, Math)
    return made


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        ("\\boxed{1} then \\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{a_{b_{c}}} end", "a_{b_{c}}"),
        ("\\boxed{open", None),
        ("none", None),
    ],
)
def test_the_last_box_with_balanced_braces_counts(text: str, inside: str | None) -> None:
    assert boxed(text) == inside


def test_problems_of_the_test_are_not_trained_on(task: Math) -> None:
    size = task.size("train") or 0
    assert 40 < size < 59
    assert "What is 3 / 4?" not in "".join(prompt.text for prompt in task.prompts("train", 0, 0, size))


def test_equal_expressions_are_right_whatever_their_form(task: Math) -> None:
    prompt = task.prompts("eval", 0, 0, 1)[0]
    texts = [
        str(task.reference(prompt)),
        "so \\boxed{0.75}",
        "\\boxed{3/4}",
        "3/4",
        "\\boxed{9^{9^{9^{9}}}}",
        "\\boxed{4/3}",
    ]
    verdicts = task.verify_all([(prompt, text) for text in texts])
    assert [verdict.correct for verdict in verdicts] == [True, True, True, False, False, False]
