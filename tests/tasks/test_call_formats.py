import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opdctl.errors import StageRefused
from opdctl.tasks import ToolCall
from opdctl.tasks.call_formats import Bare, Tagged, Words, call_format, shows_tools, with_tools

QWEN3 = "{%- if tools %}...<tools></tools><tool_call>...{%- endif %}{%- for message in messages %}...{%- endfor %}"
LLAMA = "{%- set tools = custom_tools %}... {{- '<|python_tag|>' + tool_call.name }} ... '\"parameters\": '"
CHATML = "{% for message in messages %}{{ message['content'] }}{% endfor %}"

texts = st.text(st.characters(exclude_categories=["Cs"]))
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts
    | st.sampled_from(["</tool_call>", "<tool_call>", "</think>", "<|python_tag|>", '"}}', "a\nb"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
calls = st.builds(ToolCall, texts, st.dictionaries(texts, values, max_size=3))
words = st.text("abc<>/0=-", min_size=1, max_size=4).filter(lambda word: word not in ("<call>", "</call>"))
sentences = st.lists(words, min_size=1, max_size=4).map(" ".join)
word_calls = st.builds(ToolCall, words, st.dictionaries(words, sentences, max_size=3))


@settings(deadline=None, max_examples=60)
@given(texts, st.lists(calls, max_size=3), st.booleans())
def test_tagged_calls_are_read_as_they_were_written(text: str, made: list[ToolCall], thinks: bool) -> None:
    text = f"<think>\nshall I <tool_call>?\n</think>\n\n{text}" if thinks else text
    assert Tagged().parse(Tagged().render(text, made)) == (text, made)


@settings(deadline=None, max_examples=60)
@given(texts.filter(lambda text: not text.lstrip().startswith("{")), st.lists(calls, max_size=1))
def test_bare_calls_are_read_as_they_were_written(text: str, made: list[ToolCall]) -> None:
    assert Bare().parse(Bare().render(text, made)) == (text, made)


@settings(deadline=None, max_examples=60)
@given(sentences | st.just(""), st.lists(word_calls, max_size=3))
def test_calls_word_by_word_are_read_as_they_were_written(text: str, made: list[ToolCall]) -> None:
    assert Words().parse(Words().render(text, made)) == (text, made)


GOOD = '{"name": "f", "arguments": {}}'


@pytest.mark.parametrize(
    ("action", "wrong"),
    [
        ("<tool_call>{'name': 'f', 'arguments': {}}</tool_call>", "not JSON"),
        ('<tool_call>{"name": "f", "arguments": {"code": "a\nb"}}</tool_call>', "not JSON"),
        ('<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>', "no number"),
        ('<tool_call>{"name": "f", "arguments": {"x": 1, "x": 2}}</tool_call>', "twice"),
        ('<tool_call>{"name": "f", "arguments": {}, "id": 1}</tool_call>', "id"),
        ('<tool_call>{"name": "f", "parameters": {}}</tool_call>', "parameters"),
        ('<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', "object"),
        ('<tool_call>{"name": 1, "arguments": {}}</tool_call>', "text"),
        ("<tool_call>[]</tool_call>", "list"),
        ("<tool_call>" + "[" * 100_000, "nested too deep"),
        (f"<tool_call>{GOOD}", "missing"),
        (f"<tool_call>{GOOD}{GOOD}</tool_call>", "where </tool_call> is wanted"),
        (f"<tool_call>{GOOD}</tool_call> so it is", "text after"),
        (f"{GOOD}</tool_call>", "without"),
    ],
)
def test_a_call_that_is_not_exactly_in_the_format_is_told_what_is_wrong(action: str, wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        Tagged().parse(action)


@pytest.mark.parametrize(
    ("action", "wrong"),
    [
        ('{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}', "one call"),
        ('{"name": "f", "arguments": {}}', "arguments"),
        ('text <|python_tag|>print("x")', "not JSON"),
        ("{so it is", "not JSON"),
    ],
)
def test_a_bare_call_that_is_not_exactly_in_the_format_is_told_what_is_wrong(action: str, wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        Bare().parse(action)


@pytest.mark.parametrize(
    ("action", "wrong"),
    [
        ("<call> f x: 1", "missing"),
        ("<call> f 1 </call>", "KEY"),
        ("<call> f x: </call>", "no value"),
        ("<call> f x: 1 x: 2 </call>", "twice"),
        ("<call> </call>", "no call"),
        ("<call> f </call> g", "text after"),
        ("f </call>", "without"),
        ("<call> <call> f </call>", "no call"),
    ],
)
def test_a_call_word_by_word_that_is_not_in_the_format_is_told_what_is_wrong(action: str, wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        Words().parse(action)


def test_the_template_chooses_the_format() -> None:
    kinds = {template: type(call_format(template)) for template in (QWEN3, LLAMA, CHATML, None)}
    assert kinds == {QWEN3: Tagged, LLAMA: Bare, CHATML: Tagged, None: Words}


@pytest.mark.parametrize("template", ["{% if tools %}[AVAILABLE_TOOLS]", "{% if tools %}<tool_call><function="])
def test_a_template_with_an_unknown_format_is_refused(template: str) -> None:
    with pytest.raises(StageRefused, match="format that is not known"):
        call_format(template)


def test_tools_are_told_by_the_system_prompt_where_the_template_shows_none() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]
    told = with_tools(asked, [tool], CHATML)
    assert told[0]["content"].startswith("Be brief.\n\n")
    assert json.dumps(tool) in told[0]["content"]
    assert told[1:] == asked[1:]
    assert with_tools(asked[1:], [tool], CHATML)[0]["role"] == "system"
    assert with_tools(asked, [tool], QWEN3) == asked
    assert with_tools(asked, [], CHATML) == asked
    assert shows_tools(LLAMA)
    assert not shows_tools(None)
