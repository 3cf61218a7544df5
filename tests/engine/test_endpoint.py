"""The client of OpenAI-compatible servers, against servers of `completions_server`."""

import json
import time

import pytest
from engine.completions_server import completion, serving

from opdctl.engine import endpoint
from opdctl.engine.endpoint import Client
from opdctl.errors import StageFailed, StageRefused
from opdctl.settings import Endpoint

KEY = "sk-very-secret"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(endpoint, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("A_KEY", KEY)


def client(url, **more):
    return Client(Endpoint(url=url, model="judge", **{"attempts": 3, "concurrent": 1, **more}))


def ask(url, prompts=("good?",), **more):
    seeds = list(range(len(prompts)))
    return client(url, **more).complete(list(prompts), max_tokens=3, temperature=0.5, seeds=seeds)


def in_turn(*answers):
    return lambda path, payload, number: answers[min(number, len(answers)) - 1]


def test_text_goes_to_completions_and_messages_to_chat():
    with serving(in_turn(completion("yes"))) as (url, asked):
        assert ask(url, ["good?", [{"role": "user", "content": "good?"}]]) == ["yes", "yes"]
    (first, text, _), (second, chat, _) = asked
    assert first == "/v1/completions"
    assert text == {"model": "judge", "max_tokens": 3, "temperature": 0.5, "seed": 0, "prompt": "good?"}
    assert second == "/v1/chat/completions"
    assert chat["messages"] == [{"role": "user", "content": "good?"}]


def test_answers_come_in_the_order_asked_whichever_is_ready_first():
    def slow_first(path, payload, number):
        time.sleep(0.2 if payload["prompt"] == "0" else 0)
        return completion(payload["prompt"])

    with serving(slow_first) as (url, _):
        assert ask(url, [str(n) for n in range(6)], concurrent=4) == [str(n) for n in range(6)]


@pytest.mark.parametrize("status", [500, 503, 429])
def test_a_busy_or_failing_server_is_asked_again(status):
    with serving(in_turn((status, b"later"), completion("yes"))) as (url, asked):
        assert ask(url) == ["yes"]
    assert len(asked) == 2


def test_a_silent_server_is_asked_again():
    def first_silent(path, payload, number):
        time.sleep(0.6 if number == 1 else 0)
        return completion("yes")

    with serving(first_silent) as (url, asked):
        assert ask(url, timeout_s=0.2) == ["yes"]
    assert len(asked) == 2


def test_a_server_that_stays_down_fails_the_stage_after_all_attempts():
    with serving(in_turn((502, b""))) as (url, asked), pytest.raises(StageFailed, match="after 3 attempts: 502"):
        ask(url)
    assert len(asked) == 3


def test_no_server_at_all_fails_the_stage():
    with serving(in_turn(completion("yes"))) as (url, _):
        pass
    with pytest.raises(StageFailed, match="after 3 attempts"):
        ask(url)


def test_pauses_grow(monkeypatch):
    pauses = []
    monkeypatch.setattr(endpoint.time, "sleep", pauses.append)
    with serving(in_turn((500, b""))) as (url, _), pytest.raises(StageFailed):
        ask(url, attempts=9)
    assert pauses[:3] == [0.01, 0.02, 0.04]
    monkeypatch.setattr(endpoint, "FIRST_PAUSE_S", 20.0)
    with serving(in_turn((500, b""))) as (url, _), pytest.raises(StageFailed):
        ask(url, attempts=4)
    assert pauses[-3:] == [20.0, 30.0, 30.0]


def test_a_refusal_is_told_by_name_and_not_tried_again():
    told = f"Incorrect API key provided: {KEY}"
    with (
        serving(in_turn((401, told.encode()))) as (url, asked),
        pytest.raises(StageRefused, match="refused: 401 Unauthorized: Incorrect API key") as caught,
    ):
        ask(url, key_variable="A_KEY")
    assert len(asked) == 1
    assert KEY not in str(caught.value)


@pytest.mark.parametrize("body", [b"{", b"{}", b'{"choices": []}', b'{"choices": [{"text": null}]}', b"\xff", b"[1]"])
def test_what_is_no_completion_is_refused(body):
    with serving(in_turn((200, body))) as (url, asked), pytest.raises(StageRefused, match="what is no completion"):
        ask(url)
    assert len(asked) == 1


def test_the_key_travels_in_a_header_alone():
    with serving(in_turn(completion("yes"))) as (url, asked):
        ask(url, key_variable="A_KEY")
        ask(url)
    (_, payload, headers), (_, _, without) = asked
    assert headers["Authorization"] == f"Bearer {KEY}"
    assert KEY not in json.dumps(payload)
    assert "Authorization" not in without


def test_a_key_that_is_not_set_is_refused_before_anything_is_asked(monkeypatch):
    monkeypatch.delenv("A_KEY")
    with pytest.raises(StageRefused, match="A_KEY is not set"):
        client("http://127.0.0.1:1/v1", key_variable="A_KEY")


def test_a_redirect_is_not_followed_for_it_would_carry_the_key_away():
    with serving(in_turn(completion("yes"))) as (elsewhere, taken):
        moved = (307, b"", ("Location", f"{elsewhere}/completions"))
        with serving(in_turn(moved)) as (url, _), pytest.raises(StageRefused, match="refused: 307"):
            ask(url, key_variable="A_KEY")
    assert taken == []
