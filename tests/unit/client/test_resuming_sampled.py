"""A sampled stream that is cut continues from the tokens that the client has; what cannot continue does not try."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from ragcache_core.client.http.resume import ResumableStream
from ragcache_core.errors import EngineDiedError
from tests.support.greedy_server import PROMPT, GreedyServer
from tests.support.resumed import events_of, request_of, rest_after, stream_of, text_of

FIRST_ID = 100  # of an answer: the id of a token is its place


def body_of(is_chat: bool = False, **more: Any) -> dict[str, Any]:
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": "?"}]} if is_chat else {"prompt": PROMPT}
    return {"model": "m", **prompt, "stream": True, "temperature": 0.7, **more}


def server_of(tokens: tuple[str, ...], interval: int = 1) -> GreedyServer:
    """A server whose random state says ``tokens``; one without text is a part of the next one's first character."""
    return GreedyServer(tokens, interval, parts=frozenset(i for i, token in enumerate(tokens) if not token))


def decoder_of(tokens: Sequence[str]) -> Callable[[Sequence[int]], str]:
    """Decode as tokenizers do: the bytes of an unfinished character are a replacement character."""
    return lambda ids: "".join(tokens[i - FIRST_ID] or "\ufffd" for i in ids)


def until(data: bytes, share: float) -> bytes:
    """Return the whole events within a share of what a server sends before the end of its answer."""
    end = data.rfind(b"\n\n", 0, data.find(b'"finish_reason": "')) + 2
    return data[: data.rfind(b"\n\n", 0, int(share * end) + 2) + 2] if share else b""


def cut(stream: ResumableStream, tokens: tuple[str, ...], end: str) -> bytes:
    """Have ``stream`` read an answer of one token an event up to the text ``end``; return what the client gets."""
    data = server_of(tokens).answer(json.loads(stream.request().content))
    return stream.read(data[: data.find(end.encode())])


def rest_of(stream: ResumableStream) -> dict[str, Any]:
    rest = rest_after(stream)
    assert rest is not None
    body: dict[str, Any] = json.loads(rest.content)
    return body


TOKENS = (
    st.lists(st.text("ab\n é", min_size=0, max_size=9), max_size=30)
    .map(tuple)
    .filter(lambda tokens: all(any(tokens[i : i + 4]) for i in range(len(tokens) - 3)))
)
"""A character has four bytes at most: at most three tokens without text stand before the one that has it."""
STOPS = st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=2)


@given(TOKENS, st.lists(st.tuples(st.floats(0, 1), TOKENS), max_size=3), st.integers(1, 4), STOPS, *[st.booleans()] * 2)
@example(("a", "b", "a", "b", "\n"), [(0.9, ("\n", "a"))], 1, ["b\n"], False, True)
@example(("one", "", "é", "twelve characters", "", "é", "x"), [(0.8, ("", "é", "y"))], 2, [], False, True)
@example(("a", "", "é"), [(1.0, ("é", "y"))], 2, [], False, False)
def test_wherever_it_is_cut_the_client_gets_the_text_of_the_tokens_that_the_last_engine_knows(
    tokens: tuple[str, ...],
    cuts: list[tuple[float, tuple[str, ...]]],
    interval: int,
    stops: list[str],
    keeps: bool,
    is_chat: bool,
) -> None:
    """After each cut the random state is another one, and so are the tokens."""
    body = body_of(is_chat, **({"stop": stops} if stops else {}), include_stop_str_in_output=keeps, max_tokens=25)
    known = list(tokens)
    stream = stream_of(body)
    asked, got = stream.request(), b""
    for share, tail in cuts:
        got += stream.read(until(server_of(tuple(known), interval).answer(json.loads(asked.content)), share))
        rest = rest_after(stream, decoder_of(known))
        assert rest is not None
        asked = rest
        sent = json.loads(asked.content)
        ids = sent["prompt"] if not is_chat else sent.get("kv_transfer_params", {}).get("prompt_token_ids", PROMPT)
        known = [*known[: len(ids) - len(PROMPT)], *tail]
    assume(len(known) < 25)
    server = server_of(tuple(known), interval)
    got += stream.read(server.answer(json.loads(asked.content)))
    assert stream.is_finished
    whole = server.answer(body)
    assert text_of(got) == text_of(whole)
    (*_, last, usage), (*_, expected, counted) = events_of(got), events_of(whole)
    assert last["choices"][0]["finish_reason"] == expected["choices"][0]["finish_reason"]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert usage["usage"][name] == counted["usage"][name]
    assert len({event["id"] for event in events_of(got)}) == 1
    assert str(FIRST_ID).encode() not in got, "token ids that the client did not ask for"


def test_nothing_is_generated_twice() -> None:
    stream = stream_of(body_of(max_tokens=9, min_tokens=3, seed=7))
    assert text_of(cut(stream, ("one", " two", " three"), " three")) == "one two"
    asked = rest_of(stream)
    assert (asked["prompt"], asked["max_tokens"], asked["min_tokens"]) == ([*PROMPT, 100, 101], 7, 1)
    assert asked["seed"] not in (7, None), "the random numbers of the beginning would come again"
    assert (stream.num_resumes, stream.is_sampled) == (1, True)


def test_an_answer_without_text_is_not_continued_but_begun_again() -> None:
    stream = stream_of(body_of(is_chat=True, seed=7))
    data = server_of(("one",)).answer(json.loads(stream.request().content))
    stream.read(data[: data.find(b"\n\n") + 2])
    assert rest_of(stream)["seed"] == 7
    assert stream.num_resumes == 0


def test_text_is_passed_on_as_it_arrives_unless_a_stop_string_may_have_begun() -> None:
    words = ("one", " and a second word", "\n", "and more", "\nthe", " rest")
    stream = stream_of(body_of(stop=["\nthe end"], include_stop_str_in_output=True))
    data = server_of(words).answer(json.loads(stream.request().content))
    texts = [text_of(stream.read(event + b"\n\n")) for event in data.split(b"\n\n")[: len(words)]]
    assert texts == ["one", " and a second word", "", "\nand more", "", "\nthe rest"]


@pytest.mark.parametrize(("decode", "continues"), [(None, False), (decoder_of(("a", "", "é", "b")), True)])
def test_an_event_may_end_within_a_character_that_only_a_tokenizer_knows(
    decode: Callable[[Sequence[int]], str] | None, continues: bool
) -> None:
    stream = stream_of(body_of())
    data = server_of(("a", "", "é", "b"), interval=2).answer(json.loads(stream.request().content))
    assert text_of(stream.read(data[: data.find(b"\n\n") + 2])) == "a"
    rest = rest_after(stream, decode)
    assert (rest is not None) == continues
    if rest is not None:
        assert json.loads(rest.content)["prompt"] == [*PROMPT, 100]


def test_an_engine_that_continues_with_something_else_than_text_is_an_error() -> None:
    stream = stream_of(body_of(is_chat=True))
    cut(stream, ("one", " two"), " two")
    rest_of(stream)
    choice = {"index": 0, "delta": {"reasoning": "hm"}, "finish_reason": None, "token_ids": [101]}
    with pytest.raises(EngineDiedError, match="continued with reasoning"):
        stream.read(f"data: {json.dumps({'id': 'chatcmpl-1', 'created': 1, 'choices': [choice]})}\n\n".encode())


def test_a_caller_chooses_which_answers_continue() -> None:
    sampled, greedy = (request_of(body_of(temperature=value)) for value in (None, 0))
    assert [ResumableStream.of(sampled, which) is None for which in ("all", "greedy", "off")] == [False, True, True]
    assert [ResumableStream.of(greedy, which) is None for which in ("all", "greedy", "off")] == [False, False, True]
