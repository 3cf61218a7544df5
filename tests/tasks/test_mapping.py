"""What a row may look like in a file, and what each key of a task of kind `file` makes of it."""

import json
import re

import pytest
from pydantic import ValidationError

from opdctl.errors import ConfigError
from opdctl.settings import FileTask
from opdctl.tasks.mapping import BadRow, Row, read_rows, stream_rows

GSM8K = {"question": "6 + 7?", "answer": "6 and 7 make <<6+7=13>>13.\n#### 0\n#### 1,013"}
TALK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}]
ANSWERED = [*TALK, {"role": "assistant", "content": "It is 2"}]


def rows_of(folder, *raws, **settings):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(raw) + "\n" for raw in raws))
    given = {"path": str(path), "prompt": "question", "verifier": "exact"} | settings
    return read_rows(path, FileTask(**given), "tasks.mine.path")


def refused(folder, raw, **settings):
    with pytest.raises(ConfigError) as caught:
        rows_of(folder, raw, **settings)
    assert "rows.jsonl, row 1: " in str(caught.value)
    return str(caught.value).partition("row 1: ")[2]


def test_a_pattern_cuts_the_reference_answer_and_leaves_the_completion(tmp_path):
    given = {"answer": "answer", "completion": "answer", "answer_pattern": "#### (.*)", "verifier": "numeric"}
    [row] = rows_of(tmp_path, GSM8K, **given)
    assert (row.answer, row.completion) == ("1,013", GSM8K["answer"])


def test_without_an_answer_column_the_completion_is_the_reference(tmp_path):
    [row] = rows_of(tmp_path, GSM8K, completion="answer", answer_pattern="#### (.*)")
    assert row.answer == "1,013"


def test_an_answer_that_the_pattern_does_not_match_is_refused(tmp_path):
    told = refused(tmp_path, {"question": "q", "answer": "13"}, answer="answer", answer_pattern="#### (.*)")
    assert told == "column 'answer', ...'13', has no match of '#### (.*)'"


def test_columns_may_lie_deeper_in_the_row(tmp_path):
    raw = {"doc": {"q": "Who?"}, "answers": {"text": ["Ann", "Eva"]}, "meta": [{"kind": "who"}]}
    given = {"prompt": "doc.q", "answer": "answers.text.1", "columns": ["meta.0.kind"]}
    [row] = rows_of(tmp_path, raw, **given)
    assert (row.text, row.answer, row.columns) == ("Who?", "Eva", {"meta.0.kind": "who"})
    told = refused(tmp_path, raw, **given | {"answer": "answers.text.2"})
    assert told == "no column 'answers.text.2'; it has: doc, answers, meta"


def test_a_column_with_a_dot_in_its_name_is_that_column(tmp_path):
    [row] = rows_of(tmp_path, {"a.b": "x", "a": {"b": "y"}, "question": "q"}, answer="a.b")
    assert row.answer == "x"


def test_values_are_given_their_text_and_others_are_refused(tmp_path):
    values = {"label": {"0": "no", "1": "yes", "true": "yes", "null": "unsure"}}
    raws = [{"question": "q", "label": label} for label in (0, "1", True, None)]
    assert [row.answer for row in rows_of(tmp_path, *raws, answer="label", values=values)] == [
        "no",
        "yes",
        "yes",
        "unsure",
    ]
    told = refused(tmp_path, {"question": "q", "label": 2}, answer="label", values=values)
    assert told == "column 'label' is '2', which `values` does not have: 0, 1, true, null"


def test_constants_are_columns_of_every_row(tmp_path):
    [row] = rows_of(tmp_path, GSM8K | {"kind": "sum"}, answer="answer", constants={"source": "gsm8k"}, columns=["kind"])
    assert row.columns == {"source": "gsm8k", "kind": "sum"}


def test_a_conversation_that_the_assistant_ends_holds_prompt_and_completion(tmp_path):
    given = {"prompt": "messages", "completion": "messages", "template": "chat"}
    [row] = rows_of(tmp_path, {"messages": ANSWERED}, **given)
    assert (list(row.messages), row.text, row.completion, row.answer) == (TALK, "1 + 1?", "It is 2", "It is 2")
    assert refused(tmp_path, {"messages": TALK}, **given).endswith(
        "the last message is user's; it must be the assistant's"
    )
    assert refused(tmp_path, {"messages": ANSWERED[-1:]}, **given).endswith(
        "the message before the last is not there; it must be the user's"
    )


def test_a_prompt_that_the_assistant_ends_is_refused_where_it_is_no_completion(tmp_path):
    told = refused(tmp_path, {"messages": ANSWERED, "a": "2"}, prompt="messages", answer="a", template="chat")
    assert told == "column 'messages': the last message is assistant's; it must be the user's"


def test_a_stream_goes_on_after_a_bad_row(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "a", "answer": 1}\n{"question": \n{"question": "b", "answer": 2}\n')
    settings = FileTask(path=str(path), prompt="question", answer="answer", verifier="exact")
    found = list(stream_rows(path, settings, "path"))
    assert [number for _, number, _ in found] == [1, 2, 3]
    assert [type(row) for _, _, row in found] == [Row, BadRow, Row]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "needs answer, completion or both"),
        ({"answer": "a", "answer_pattern": "####"}, "has 0 groups; it needs one"),
        ({"answer": "a", "answer_pattern": "(a)|(b)"}, "has 2 groups"),
        ({"answer": "a", "answer_pattern": "("}, "is not a regular expression"),
    ],
)
def test_settings_that_name_no_answer_are_refused(settings, message):
    with pytest.raises(ValidationError, match=re.escape(message)):
        FileTask(path="x.jsonl", prompt="q", verifier="exact", **settings)
