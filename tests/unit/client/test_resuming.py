"""A greedy stream that is cut goes on with exactly what was missing, wherever it was cut; what cannot, does not try."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ragcache_core.client.http.resume import ResumableStream
from ragcache_core.errors import EngineDiedError
from tests.support.greedy_server import PROMPT, GreedyServer
from tests.support.resumed import events_of, request_of, rest_after, stream_of, text_of

DEAD = b'data: {"error": {"message": "EngineCore encountered an issue. See stack trace", "code": 500}}\n\n'


def body_of(is_chat: bool, **more: Any) -> dict[str, Any]:
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": "?"}]} if is_chat else {"prompt": PROMPT}
    return {"model": "m", **prompt, "stream": True, "temperature": 0.0} | more


def read_through(
    server: GreedyServer, body: dict[str, Any], cuts: list[float], part_bytes: int = 7, defaults: str = "{}"
) -> bytes:
    """Return what a client gets of an answer that is cut at these shares of what each server sends."""
    stream = stream_of(body, defaults)
    asked: httpx.Request | None = stream.request()
    got = b""
    ends: list[float | None] = [*cuts, None]
    while ends:
        assert asked is not None
        cut = ends.pop(0)
        data = server.answer(json.loads(asked.content))
        finish = data.find(b'"finish_reason": "')
        data = data if cut is None else data[: int(cut * data.rfind(b"\n\n", 0, finish) + 2)]
        try:
            for i in range(0, len(data), part_bytes):
                got += stream.read(data[i : i + part_bytes])
        except httpx.RemoteProtocolError:
            ends = ends or [None]
        if ends:
            asked = rest_after(stream)
    assert stream.is_finished
    return got


TOKENS = st.lists(st.text("ab\n é", min_size=0, max_size=9), max_size=40).map(tuple)
STOPS = st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=2)
CUTS = st.lists(st.floats(0, 1), max_size=3)


@given(TOKENS, st.integers(1, 4), STOPS, st.booleans(), st.none() | st.integers(1, 40), st.booleans(), CUTS)
@example(("a", "b", "a", "b", "\n"), 1, ["b\n"], False, None, True, [0.9])
@example(("aaa", "aaa", "b"), 2, ["ab"], True, None, False, [0.7, 0.7])
@example(("", "a", "", "", "aa", "aa", "aaa", "aaaa", "aaaaa"), 3, [], False, None, False, [1.0, 1.0])
@example(("one", "", "é", "twelve characters", "", "é", "twelve characters", "x"), 2, [], False, None, True, [0.9])
def test_wherever_an_answer_is_cut_the_client_gets_what_it_would_have_got(
    tokens: tuple[str, ...],
    interval: int,
    stops: list[str],
    keeps: bool,
    limit: int | None,
    is_chat: bool,
    cuts: list[float],
) -> None:
    settings: dict[str, Any] = {"stop": stops} if stops else {}
    settings |= {} if limit is None else {"max_tokens": limit}
    body = body_of(is_chat, **settings, include_stop_str_in_output=keeps)
    server = GreedyServer(tokens, interval, parts=frozenset(i for i, token in enumerate(tokens) if not token))
    whole, got = read_through(server, body, []), read_through(server, body, cuts)
    assert text_of(got) == text_of(whole) == text_of(server.answer(body))
    (*_, last, usage), (*_, expected, counted) = events_of(got), events_of(whole)
    assert last["choices"][0]["finish_reason"] == expected["choices"][0]["finish_reason"]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert usage["usage"][name] == counted["usage"][name]
    assert usage["usage"]["prompt_tokens_details"]["cached_tokens"] <= len(PROMPT)
    assert {(event["id"], event["created"]) for event in events_of(got)} == {(usage["id"], len(PROMPT))}
    assert got.endswith(b"data: [DONE]\n\n")
    assert b"100" not in got, "token ids that the client did not ask for"


@given(TOKENS, st.none() | st.integers(1, 12), st.none() | st.integers(1, 12), st.booleans(), st.booleans(), CUTS)
def test_an_answer_that_goes_on_is_as_long_as_the_server_lets_one_be(
    tokens: tuple[str, ...], asked: int | None, limit: int | None, is_strict: bool, is_chat: bool, cuts: list[float]
) -> None:
    body = body_of(is_chat, **({} if asked is None else {"max_tokens": asked}))
    server = GreedyServer(tokens, 1, limit, is_strict)
    defaults = {} if limit is None else {"max_tokens": limit, **({"most_tokens": limit} if is_strict else {})}
    got = read_through(server, body, cuts, defaults=json.dumps(defaults))
    assert text_of(got) == text_of(server.answer(body))


@pytest.mark.parametrize("tokens", [("a",) * 30, ("a",) * 7])
def test_a_completion_that_says_no_limit_has_the_protocols(tokens: tuple[str, ...]) -> None:
    got = read_through(GreedyServer(tokens), body_of(False), [0.5])
    assert text_of(got) == "a" * min(len(tokens), 16)


@pytest.mark.parametrize(
    ("defaults", "goes_on"),
    [
        ("{}", True),
        ('{"presence_penalty": 0.0}', True),
        ('{"presence_penalty": 1.5}', False),
        ('{"is_parsed": true}', False),
        ("no JSON", False),
        ("[]", False),
        (None, False),
    ],
)
def test_it_goes_on_only_where_the_server_reports_what_it_adds_and_that_does_no_harm(
    defaults: str | None, goes_on: bool
) -> None:
    stream = stream_of(body_of(True), defaults)
    data = GreedyServer(("one", " two", " three")).answer(json.loads(stream.request().content))
    got = stream.read(data[: data.find(b" two")])
    assert b"100" not in got, "token ids that the client did not ask for"
    assert (rest_after(stream) is not None) == goes_on


def test_a_successor_that_answers_another_prompt_than_was_asked_is_an_error() -> None:
    body = body_of(True, kv_transfer_params={"prompt_token_ids": PROMPT})
    stream, server = stream_of(body), GreedyServer(("one", " and a second word", " three"))
    data = server.answer(json.loads(stream.request().content))
    stream.read(data[: data.find(b" three")])
    assert rest_after(stream) is not None
    with pytest.raises(EngineDiedError, match="another prompt"):
        stream.read(server.answer(body))  # it takes the messages, and begins again


def test_little_is_generated_twice() -> None:
    words = ("a beginning", " of some length", ", and a rest that is", " longer", " still", " and", " lost")
    stream = stream_of(body_of(False, max_tokens=9))
    data = GreedyServer(words).answer(json.loads(stream.request().content))
    stream.read(data[: data.find(b" lost")])
    rest = rest_after(stream)
    assert rest is not None
    asked = json.loads(rest.content)
    assert (asked["prompt"], asked["max_tokens"]) == ([*PROMPT, 100, 101, 102], 6)


def test_an_answer_that_differs_from_the_middle_on_is_replayed_from_its_beginning() -> None:
    """As after a part of a character, and by a parser of answers that has no second beginning."""
    words = ("a beginning", " of some length", ", and a rest that is", " longer", " still", " and", " lost")
    stream = stream_of(body_of(False))
    server = GreedyServer(words, parts=frozenset(range(7)))
    whole = server.answer(json.loads(stream.request().content))
    got = stream.read(whole[: whole.find(b" lost")])
    for expected in (3, 0):
        rest = rest_after(stream)
        assert rest is not None
        asked = json.loads(rest.content)
        assert len(asked["prompt"]) == len(PROMPT) + expected
        answer = server.answer(asked)
        if expected:
            with pytest.raises(httpx.RemoteProtocolError):
                stream.read(answer)
        else:
            got += stream.read(answer)
    assert text_of(got) == "".join(words)


def test_a_chat_goes_on_with_its_documents_and_its_own_settings() -> None:
    params = {"ragcache": {"version": 1, "documents": []}, "prompt_token_ids": PROMPT}
    body = body_of(True, kv_transfer_params=params, max_completion_tokens=5, min_tokens=2, top_p=0.5)
    stream = stream_of(body)
    data = GreedyServer(("one", " and a second word", " three")).answer(json.loads(stream.request().content))
    stream.read(data[: data.find(b" three")])
    rest = rest_after(stream)
    assert rest is not None
    asked = json.loads(rest.content)
    assert asked["kv_transfer_params"] == {**params, "prompt_token_ids": [*PROMPT, 100]}
    assert asked["messages"] == body["messages"]
    assert (asked["max_completion_tokens"], asked["min_tokens"], asked["top_p"]) == (4, 1, 0.5)


def test_a_crash_of_the_engine_cuts_a_stream_without_a_message() -> None:
    stream = stream_of(body_of(False))
    data = GreedyServer(("one", " two")).answer(json.loads(stream.request().content))
    got = stream.read(data[: data.find(b'" two"')])
    with pytest.raises(httpx.RemoteProtocolError, match="died"):
        stream.read(DEAD)
    assert b"error" not in got
    assert rest_after(stream) is not None


@pytest.mark.parametrize(("words", "settings"), [(("one", " TWO", " SIX"), {"stop": ["xx"]}), (("one", " two"), {})])
def test_a_successor_that_says_something_else_or_less_is_an_error_and_no_wrong_answer(
    words: tuple[str, ...], settings: dict[str, Any]
) -> None:
    stream = stream_of(body_of(False, **settings))
    data = GreedyServer(("one", " two", " six")).answer(json.loads(stream.request().content))
    stream.read(data[: data.find(b'"finish_reason": "')])
    rest = rest_after(stream)
    assert rest is not None
    with pytest.raises(EngineDiedError, match="generated another text"):
        stream.read(GreedyServer(words).answer(json.loads(rest.content)))


@pytest.mark.parametrize(
    "more",
    [
        {"n": 2},
        {"logprobs": True},
        {"logprobs": 0},
        {"presence_penalty": 0.5},
        {"tools": [{"type": "function"}]},
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"regex": "a+"}},
        {"return_token_ids": True},
        {"a_setting_of_another_release": 1},
        {"stream_options": {"continuous_usage_stats": True}},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
        {"stream": False},
    ],
)
def test_what_depends_on_where_an_answer_was_cut_does_not_go_on(more: dict[str, Any]) -> None:
    for temperature in (0.0, 0.7):
        assert ResumableStream.of(request_of(body_of(True, **{"temperature": temperature} | more))) is None


@pytest.mark.parametrize("delta", [{"reasoning": "hm"}, {"tool_calls": [{"index": 0}]}])
def test_an_answer_with_more_in_it_than_text_does_not_go_on(delta: dict[str, Any]) -> None:
    stream = stream_of(body_of(True))
    event = {"id": "chatcmpl-1", "created": 1, "prompt_token_ids": PROMPT}
    choice = {"index": 0, "delta": delta, "finish_reason": None, "token_ids": [100]}
    got = stream.read(f"data: {json.dumps({**event, 'choices': [choice]})}\n\n".encode())
    assert events_of(got)[0]["choices"][0]["delta"] == delta
    assert rest_after(stream) is None


def test_a_server_that_names_no_tokens_is_not_asked_for_the_rest() -> None:
    stream = stream_of(body_of(False))
    stream.read(b'data: {"id": "cmpl-1", "choices": [{"index": 0, "text": "one", "finish_reason": null}]}\n\n')
    assert rest_after(stream) is None
