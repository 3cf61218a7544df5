import json
from fractions import Fraction
from pathlib import Path

import pytest
from public_data import published

from opdctl.errors import ConfigError
from opdctl.settings import Gsm8kTask, MawpsTask
from opdctl.tasks import load_task
from opdctl.tasks.final_number import FinalNumber, final_number


def gsm8k(folder: Path, **given: object) -> FinalNumber:
    made = load_task("sums", Gsm8kTask.model_validate({"task": "gsm8k", "path": "gsm8k"} | given), None, folder)
    assert isinstance(made, FinalNumber)
    return made


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Two hundred training rows and five test rows in the published format."""
    (tmp_path / "gsm8k").mkdir()
    for name, count in (("train", 200), ("test", 5)):
        lines = [
            {
                "question": f"{name}: what is {n} + 1000?",
                "answer": f"{n} + 1000 = <<{n}+1000={n + 1000}>>\n#### {n + 1000:,}",
            }
            for n in range(count)
        ]
        (tmp_path / "gsm8k" / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        ("#### 18", 18, 18),
        ("so 7\n#### $1,234.50 in all", Fraction(2469, 2), Fraction(2469, 2)),
        ("#### 18\nQ: more\n#### 3", 18, 18),
        ("#### -4.", -4, -4),
        ("it costs $5, so $12.", None, 12),
        ("#### none", None, None),
        ("#### .,.", None, None),
        ("#### " + "9" * 5000, None, None),
        ("", None, None),
    ],
)
def test_the_number_that_counts(text: str, strict: object, flexible: object) -> None:
    assert final_number(text, flexible=False) == strict
    assert final_number(text, flexible=True) == flexible


def test_parts_are_the_published_ones_and_a_tenth_of_training(rows: Path) -> None:
    made = gsm8k(rows)
    held = gsm8k(rows, part="validation")
    assert made.size("eval") == 5
    assert made.size("train") == held.size("train")
    assert (held.size("eval") or 0) + (held.size("train") or 0) == 200
    trained = {prompt.text for prompt in held.prompts("train", 0, 0, held.size("train") or 0)}
    assert not trained & {prompt.text for prompt in held.prompts("eval", 0, 0, held.size("eval") or 0)}


def test_prompts_and_shots_have_the_harness_wording(rows: Path) -> None:
    text = gsm8k(rows, shots=1).prompts("eval", 0, 0, 1)[0].text
    shot, asked = text.split("\n\n")
    assert shot.startswith("Question: train: what is ")
    assert "\nAnswer: " in shot
    assert asked == "Question: test: what is 0 + 1000?\nAnswer:"


def test_what_a_base_model_goes_on_to_ask_does_not_count(rows: Path) -> None:
    made = gsm8k(rows, match="flexible")
    prompt = made.prompts("eval", 0, 0, 1)[0]
    assert made.verify(prompt, " It is 1000.\n\nQuestion: and 7?\nAnswer: #### 7").correct
    assert not made.verify(prompt, " It is 7.\n\nQuestion: and 1000?\nAnswer: #### 1000").correct


def test_demonstrations_verify_and_end_as_published(rows: Path) -> None:
    made = gsm8k(rows)
    for shown in made.demonstrations(0, 0, 20):
        assert made.verify(shown.prompt, shown.completion).correct
        assert "#### " in shown.completion


def test_missing_data_names_the_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tasks\.sums\.path: .*train\.jsonl"):
        gsm8k(tmp_path)


def test_all_published_solutions_are_right() -> None:
    folder = published("gsm8k/test.jsonl", "math/mawps_addsub.jsonl")
    sums = gsm8k(folder)
    assert (sums.size("train"), sums.size("eval")) == (6778, 1319)
    assert all(sums.verify(shown.prompt, shown.completion).correct for shown in sums.demonstrations(0, 0, 6778))
    stories = load_task("stories", MawpsTask(task="mawps", path="math"), None, folder)
    prompts = stories.prompts("eval", 0, 0, stories.size("eval") or 0)
    assert all(stories.verify(prompt, stories.reference(prompt) or "").correct for prompt in prompts)
