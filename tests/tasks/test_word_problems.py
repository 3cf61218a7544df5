import json
import re
from pathlib import Path

import pytest
from public_data import published
from pydantic import ValidationError

from opdctl.settings import WordProblemTask
from opdctl.tasks import Prompt, load_task
from opdctl.tasks.word_problems import WordProblems
from opdctl.tasks.word_templates import TEMPLATES


def task(folder: Path | None = None, **given: object) -> WordProblems:
    settings = WordProblemTask.model_validate({"task": "word_problems", "drills": 64} | given)
    made = load_task("words", settings, None, folder)
    assert isinstance(made, WordProblems)
    return made


def mawps(folder: Path) -> Path:
    """Two problems of each operation with several numbers, in the published format; the subsets repeat each other."""
    rows = [
        {"input": f"Joan has {a} shells . Sam brings {b} . How many are there ?", "target": float(a + b)}
        for a in range(20, 40)
        for b in (3, 4)
    ]
    rows += [
        {"input": f"Each of {a} boxes holds {b} pens. How many pens?", "target": a * b}
        for a in range(20, 40)
        for b in (6, 7)
    ]
    for name in WordProblemTask.FILES:
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_a_row_does_not_depend_on_how_the_stream_is_cut() -> None:
    made = task()
    for split in ("train", "eval"):
        whole = made.prompts(split, 7, 0, 150)  # type: ignore[arg-type]  # a literal in a loop
        assert whole == [*made.prompts(split, 7, 0, 70), *made.prompts(split, 7, 70, 80)]  # type: ignore[arg-type]


def test_references_verify_and_may_be_exchanged_where_the_operation_allows_it() -> None:
    made = task()
    for prompt in made.prompts("train", 0, 0, 64):
        a, sign, b = prompt.answer["expression"].split()
        assert made.verify(prompt, made.reference(prompt)).correct
        assert made.verify(prompt, f"{b} {sign} {a}").correct == (sign in "+*" or a == b)
        assert made.verify(prompt, f"{a}{sign}{b} = 1").correct, "the verifier computes; a result is not read"
        assert not made.verify(prompt, prompt.answer["value"]).correct, "the bare number is no expression"


@pytest.mark.parametrize(
    "text",
    ["", "12", "12 +", "12 + 5 + 0", "17 + 0", "5 ** 2", "0x0c + 5", "1_2 + 5", "12 + 5\n12 - 5", "12 + 5 (sum)"],
)
def test_anything_but_the_operation_is_wrong(text: str) -> None:
    made = task()
    prompt = made.prompts("train", 0, 0, 1)[0]
    prompt.answer.update(expression="12 + 5", value="17")
    assert made.verify(prompt, "12 + 5").correct
    assert not made.verify(prompt, text).correct


def test_a_number_counts_only_at_the_end_behind_its_mark() -> None:
    made = task(answer="number")
    for prompt in made.prompts("train", 0, 0, 8):
        value = prompt.answer["value"]
        assert made.reference(prompt).endswith(f"= {value}\n#### {value}")
        assert made.verify(prompt, made.reference(prompt)).correct
        assert not made.verify(prompt, value).correct
        assert not made.verify(prompt, f"#### {value}\n#### {int(value) + 1}").correct


def test_wordings_and_numbers_of_evaluation_are_in_no_training_row() -> None:
    made = task(drills=2000)
    parts = [made.prompts("train", 0, 0, 2000), made.prompts("eval", 0, 0, 500)]
    parts.append(task(part="validation").prompts("eval", 0, 0, 500))
    problems = [{prompt.answer["expression"] for prompt in part} for part in parts]
    wordings = [used(part) for part in parts]
    assert len(wordings[0]) == 80
    for found in (problems, wordings):
        assert not found[0] & found[1]
        assert not found[0] & found[2]
        assert not found[1] & found[2]


def used(prompts: list[Prompt]) -> set[str]:
    text = "\n".join(prompt.text for prompt in prompts)
    every = [wording for some in TEMPLATES.values() for wording in some]
    return {each for each in every if re.search(re.sub(r"\\\{\w+\\\}", r"\\w+", re.escape(each)), text)}


def test_operations_make_domains_of_one_set_of_files(tmp_path: Path) -> None:
    mawps(tmp_path)
    sizes = {}
    for operations in (["add", "sub"], ["mul"], ["add", "mul"]):
        made = task(tmp_path, path=".", operations=operations, drills=0)
        signs = {
            prompt.answer["expression"].split()[1] for prompt in made.prompts("train", 0, 0, made.size("train") or 0)
        }
        assert signs == {"add": "+", "mul": "*"}[operations[0]] or len(signs) == len(operations) - ("sub" in operations)
        sizes["".join(operations)] = made.size("train") or 0
    assert sizes["addmul"] == sizes["addsub"] + sizes["mul"]


def test_copies_are_removed_and_rewordings_stay_in_one_part(tmp_path: Path) -> None:
    mawps(tmp_path)
    again = (tmp_path / WordProblemTask.FILES[0]).read_text().replace("Joan", "Olga")
    (tmp_path / WordProblemTask.FILES[3]).write_text(again)
    parts = {}
    for part in ("validation", "test"):
        made = task(tmp_path, path=".", part=part, drills=0)
        parts[part] = made.prompts("eval", 0, 0, made.size("eval") or 0)
    parts["train"] = made.prompts("train", 0, 0, made.size("train") or 0)
    texts = [prompt.text for rows in parts.values() for prompt in rows]
    assert len(texts) == len(set(texts)) == 120
    expressions = {part: {prompt.answer["expression"] for prompt in rows} for part, rows in parts.items()}
    assert not expressions["train"] & (expressions["test"] | expressions["validation"])


def test_shots_are_solved_training_rows_that_are_not_asked_again(tmp_path: Path) -> None:
    made = task(shots=3)
    prompt = made.prompts("train", 0, 0, 1)[0]
    assert prompt.text.count("Expression: ") == 3
    assert prompt.text.endswith("\nExpression:")
    assert made.size("train") == 61
    chat = task(shots=1, template="chat").prompts("train", 0, 0, 1)[0].messages
    assert [message["role"] for message in chat] == ["system", "user", "assistant", "user"]


def test_a_task_without_any_row_is_refused() -> None:
    with pytest.raises(ValidationError, match="nothing to train on"):
        WordProblemTask(task="word_problems")


def test_the_published_rows_all_verify() -> None:
    folder = published("math/mawps_addsub.jsonl")
    made = task(folder, path="math", drills=0)
    for split in ("train", "eval"):
        prompts = made.prompts(split, 0, 0, made.size(split) or 0)  # type: ignore[arg-type]  # a literal in a loop
        assert len(prompts) > 300
        assert all(made.verify(prompt, made.reference(prompt)).correct for prompt in prompts)
