import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from opdctl.settings import BfclTask
from opdctl.tasks import load_task
from opdctl.tasks.bfcl import Bfcl

FUNCTION = {
    "name": "shop.buy",
    "description": "Buy things.",
    "parameters": {
        "type": "dict",
        "properties": {"what": {"type": "string"}, "weight": {"type": "float"}, "to": {"type": "dict"}},
        "required": ["what"],
    },
}
WANTED = {
    "shop.buy": {"what": ["red apple", "apple"], "weight": [2.0, ""], "to": [{"city": ["Rome"], "zip": ["", 7]}, ""]}
}


@pytest.fixture
def make(tmp_path: Path):
    def write(name: str, row: dict) -> None:
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")

    question = {"id": "one", "question": [[{"role": "user", "content": "Get apples."}]], "function": [FUNCTION]}
    for category, expected in (("simple_python", [WANTED]), ("parallel", [WANTED, {"shop.buy": {"what": ["tea"]}}])):
        write(category, question)
        write(f"{category}_answers", {"id": "one", "ground_truth": expected})
    write("irrelevance", question)

    def made(category: str, **given: object) -> Bfcl:
        settings = BfclTask.model_validate({"task": "bfcl", "path": ".", "category": category} | given)
        task = load_task("calls", settings, None, tmp_path)
        assert isinstance(task, Bfcl)
        return task

    return made


def call(**arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'shop_buy', 'arguments': arguments})}\n</tool_call>"


@pytest.mark.parametrize(
    ("text", "right"),
    [
        (call(what="red apple"), True),
        (call(what="Red-Apple", weight=2), True),
        (call(what="apple", to={"city": "rome"}), True),
        (call(what="apple", to={"city": "Rome", "zip": 7}), True),
        (call(what="pear"), False),
        (call(weight=2.0), False),
        (call(what="apple", weight="2"), False),
        (call(what="apple", weight=True), False),
        (call(what="apple", colour="red"), False),
        (call(what="apple", to={"zip": 7}), False),
        (call(what="apple") + call(what="apple"), False),
        ("shop_buy(what='apple')", False),
        ("<tool_call>{", False),
        ("", False),
    ],
)
def test_the_one_call_that_is_expected(make, text: str, right: bool) -> None:
    task = make("simple_python")
    assert task.verify(task.prompts("eval", 0, 0, 1)[0], text).correct is right


def test_parallel_calls_come_in_any_order_and_all(make) -> None:
    task = make("parallel")
    prompt = task.prompts("eval", 0, 0, 1)[0]
    assert task.verify(prompt, call(what="tea") + "\n" + call(what="apple")).correct
    assert not task.verify(prompt, call(what="tea")).correct
    assert not task.verify(prompt, call(what="tea") + call(what="tea")).correct


def test_where_no_function_helps_any_call_is_wrong(make) -> None:
    task = make("irrelevance")
    prompt = task.prompts("eval", 0, 0, 1)[0]
    assert task.verify(prompt, "I cannot do that.").correct
    assert not task.verify(prompt, call(what="apple")).correct


def test_functions_are_shown_as_json_schemas(make) -> None:
    (tool,) = make("simple_python").prompts("eval", 0, 0, 1)[0].tools
    assert tool["function"]["name"] == "shop_buy"
    assert tool["function"]["parameters"]["type"] == "object"
    assert tool["function"]["parameters"]["properties"]["weight"] == {"type": "number"}


def test_references_verify(make) -> None:
    for category in ("simple_python", "parallel", "irrelevance"):
        task = make(category)
        prompt = task.prompts("eval", 0, 0, 1)[0]
        assert task.verify(prompt, task.reference(prompt)).correct


def test_a_format_of_one_call_a_turn_cannot_do_several() -> None:
    with pytest.raises(ValidationError, match="one call a turn"):
        BfclTask(task="bfcl", path="x", category="parallel", calls="bare")
