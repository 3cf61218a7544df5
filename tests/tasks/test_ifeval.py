from pathlib import Path

import pytest
from public_data import published

from opdctl.settings import IfevalTask
from opdctl.tasks import Prompt, load_task
from opdctl.tasks.ifeval import KINDS, Ifeval

pytest.importorskip("if_verifiable", reason="no if-verifiable: pip install 'opdctl[tasks]'")
UNAIDED = sorted(set(KINDS) - {"length_constraints:number_sentences"})  # sentences are found with NLTK's data


def make(folder: Path | None = None, **given: object) -> Ifeval:
    settings = IfevalTask.model_validate({"task": "ifeval", "path": None, "drills": 60, "nltk": None} | given)
    task = load_task("rules", settings, None, folder)
    assert isinstance(task, Ifeval)
    return task


def test_generated_answers_fulfil_their_instructions() -> None:
    task = make()
    prompts = [
        prompt for prompt in task.prompts("train", 0, 0, 60) if set(prompt.answer["instructions"]) <= set(UNAIDED)
    ]
    assert len({kind for prompt in prompts for kind in prompt.answer["instructions"]}) == len(UNAIDED)
    verdicts = task.verify_all([(prompt, task.reference(prompt) or "") for prompt in prompts])
    assert [verdict.details["reason"] for verdict in verdicts if not verdict.correct] == []
    empty = task.verify_all([(prompt, "") for prompt in prompts])
    assert not any(verdict.correct for verdict in empty)


def test_subjects_in_their_form_belong_to_one_part() -> None:
    openings = {}
    for part in ("validation", "test"):
        openings[part] = {_opening(prompt.text) for prompt in make(part=part).prompts("eval", 0, 0, 200)}
    openings["train"] = {_opening(prompt.text) for prompt in make(drills=500).prompts("train", 0, 0, 500)}
    assert not openings["train"] & (openings["validation"] | openings["test"])
    assert not openings["validation"] & openings["test"]


def _opening(text: str) -> str:
    return text[: min(text.find(end) for end in (".", "?") if end in text)]


def test_loose_forgives_a_first_line_and_strict_does_not() -> None:
    asked = {"prompt": "Hi", "instructions": ["startend:quotation"], "arguments": [{}], "solution": None}
    prompt = Prompt("Hi", asked, {})
    assert make(match="loose").verify(prompt, 'Sure!\n"All of it."').correct
    assert not make().verify(prompt, 'Sure!\n"All of it."').correct


def test_every_instruction_must_be_fulfilled() -> None:
    task = make(drills=200)
    prompt = next(p for p in task.prompts("train", 0, 0, 200) if "punctuation:no_comma" in p.answer["instructions"])
    assert task.verify(prompt, task.reference(prompt) or "").correct
    assert not task.verify(prompt, f"Well, {task.reference(prompt)}").correct


def test_published_prompts_are_a_test_and_have_no_answers() -> None:
    task = make(published("ifeval/ifeval_input_data.jsonl"), path="ifeval")
    prompts = task.prompts("eval", 0, 0, 541)
    assert task.size("eval") == 541
    assert {task.reference(prompt) for prompt in prompts} == {None}
    assert len({kind for prompt in prompts for kind in prompt.answer["instructions"]}) == 25
