"""Bodies that no engine can take are answered with our error; all others arrive as they were sent."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from ragcache_core.vllm_plugin.server.rank_choice import RankChoice
from ragcache_core.vllm_plugin.server.request_body import RequestBodyCheck

HUGE = "1" + "0" * 400


async def ask(*parts: bytes, method: str = "POST") -> tuple[int, bytes]:
    """What the server answers, and what arrived at its application."""
    status, body, _ = await ask_one_of_several(None, *parts, method=method)
    return status, body


async def ask_one_of_several(
    choice: RankChoice | None, *parts: bytes, method: str = "POST", headers: tuple[tuple[bytes, bytes], ...] = ()
) -> tuple[int, bytes, dict[bytes, bytes]]:
    """The same of a server with a choice among engines, and which headers arrived."""
    arrived: list[bytes] = []
    arrived_headers: dict[bytes, bytes] = {}
    sent: list[Any] = []
    waiting = [{"type": "http.request", "body": part, "more_body": i < len(parts)} for i, part in enumerate(parts, 1)]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        arrived_headers.update(scope["headers"])
        while (message := await receive())["type"] == "http.request":
            arrived.append(message["body"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"".join(arrived)})

    async def receive() -> Any:
        return waiting.pop(0) if waiting else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    state = SimpleNamespace() if choice is None else SimpleNamespace(ragcache_rank_choice=choice)
    scope = {"type": "http", "method": method, "path": "/v1/completions", "headers": [*headers]}
    await RequestBodyCheck(app)({**scope, "app": SimpleNamespace(state=state)}, receive, send)
    return sent[0]["status"], sent[1]["body"], arrived_headers


async def test_a_request_goes_to_the_engine_that_has_its_documents_unless_it_names_one() -> None:
    choice, body = RankChoice(2), b'{"kv_transfer_params": {"ragcache": {"documents": [{"id": "a"}]}}}'
    with choice.sending("b"), choice.sending("a") as rank:
        expected = {b"x-data-parallel-rank": str(rank).encode()}
    assert await ask_one_of_several(choice, body[:9], body[9:]) == (200, body, expected)
    named = (b"x-data-parallel-rank", str(1 - rank).encode())
    assert (await ask_one_of_several(choice, body, headers=(named,)))[2] == dict([named])
    assert (await ask_one_of_several(choice, b'{"prompt": "no documents"}'))[2] == {}
    assert (await ask_one_of_several(None, body))[2] == {}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ('{"prompt": "a\\ud800"}', "the request.prompt holds '\\ud800' at character 2 of 2"),
        ('{"messages": [{"role": "user", "content": [{"text": "\\udc00"}]}]}', "messages[0].content[0].text holds"),
        ('{"stop": ["\\uDFFF"]}', "the request.stop[0] holds"),
        ('{"a\\ud800": 1}', "a name in the request holds"),
        (f'{{"top_k": {HUGE}}}', "the request.top_k is 100000000000000000000000000000; a whole number must lie"),
        (f'{{"seed": -{HUGE}}}', "the request.seed is -1"),
        (f'{{"top_k": 1{"0" * 5000}}}', "a number of thousands of digits"),
        (f'{{"prompt": [1, 2, {HUGE}]}}', "the request.prompt[2] is 100000000000000000000000000000; a whole"),
        ('{"temperature": 1e999}', "the request.temperature is inf; a number must be finite"),
        ('{"logit_bias": {"1": NaN}}', "the request.logit_bias.1 is nan"),
        ('{"top_p": -Infinity}', "the request.top_p is -inf"),
        ('{"kv_transfer_params": {"ragcache": {"documents": [{"id": "\\ud800"}]}}}', "documents[0].id holds"),
        ('{"kv_transfer_params": {"theirs": "\\ud800"}}', "the request.kv_transfer_params.theirs holds"),
        (
            f'{{"kv_transfer_params": {{"a": {"[" * 700}{"]" * 700}}}}}',
            "kv_transfer_params.a is nested more than 8 deep",
        ),
        ('{"vllm_xargs": {"kv_transfer_params": "x"}}', "vllm_xargs.kv_transfer_params is 'x': send an object"),
        ('{"vllm_xargs": {"ec_transfer_params": [1]}}', "vllm_xargs.ec_transfer_params is [1]: send an object"),
        (
            '{"sampling_params": {"extra_args": {"kv_transfer_params": 7}}}',
            "sampling_params.extra_args.kv_transfer_params is 7: send an object",
        ),
        (
            f'{{"sampling_params": {{"extra_args": {{"kv_transfer_params": {{"a": {"[" * 700}{"]" * 700}}}}}}}}}',
            "sampling_params.extra_args.kv_transfer_params.a is nested more than 8 deep",
        ),
        (
            f'{{"ec_transfer_params": {{"a": {"[" * 700}{"]" * 700}}}}}',
            "ec_transfer_params.a is nested more than 8 deep",
        ),
    ],
)
async def test_what_no_engine_can_take_is_refused_with_place_value_limit_and_hint(body: str, said: str) -> None:
    status, answer = await ask(body.encode())
    error = json.loads(answer)["error"]
    assert (status, error["code"]) == (400, 400)
    assert said in error["message"]
    assert any(cure in error["message"] for cure in ("send ", "remove it"))
    assert len(error["message"]) < 400


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32"])
async def test_how_a_body_is_written_hides_nothing(encoding: str) -> None:
    deep = f'{{"kv_transfer_params": {{"a": {"[" * 700}{"]" * 700}}}}}'
    for body in (deep.replace("_", "\\u005F").encode(), deep.replace("k", "\\u006b").encode(), deep.encode(encoding)):
        status, answer = await ask(body)
        assert (status, b"nested more than 8 deep" in answer) == (400, True)
    for half in ('{"prompt": "a\\ud800"}'.encode(encoding), b'{"prompt": "a\xed\xa0\x80"}'):
        assert (await ask(half))[0] == 400
    fine = '{"prompt": "\\u0070"}'.encode(encoding)
    assert await ask(fine) == (200, fine)


@pytest.mark.parametrize(
    "body",
    [
        '{"prompt": "\\ud83d\\ude42 NaN 12345678901234567890123 1e9999"}',
        '{"seed": 9223372036854775807, "temperature": 1e-400, "top_k": 18446744073709551615}',
        '{"kv_transfer_params": {"ragcache": {"version": 1, "documents": [{"id": "a"}]}, "theirs": [[[[[[[1]]]]]]]}}',
        '{"kv_transfer_params": ["[[[[[[[[[[["]}',
        "[NaN]",
        '{"prompt": "NaN',
        "",
    ],
)
async def test_other_bodies_arrive_as_they_were_sent(body: str) -> None:
    sent = body.encode()
    assert await ask(sent) == (200, sent)
    assert await ask(sent[:7], sent[7:9], sent[9:]) == (200, sent)
    assert await ask(b'{"seed": 1e999}', method="GET") == (200, b'{"seed": 1e999}')
