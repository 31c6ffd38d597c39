"""The tools that answers call: their names reach the engine after the response, which stays as it is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from ragcache_core.vllm_plugin.server import called_tools
from ragcache_core.vllm_plugin.server.called_tools import CalledTools
from ragcache_core.vllm_plugin.server.engine_view import Received
from ragcache_core.vllm_plugin.settings import PluginSettings

ROUTE = "/v1/chat/completions"
SEARCH = {"id": "call-1", "type": "function", "function": {"name": "search", "arguments": "{}"}}
OTHER = {"id": "call-2", "type": "function", "function": {"name": "other", "arguments": "{}"}}
TEXT = 'He wrote "tool_calls":[{ and no more'
Calls = list[tuple[str, dict[str, Any]]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Return the calls of the engine; one with the name ``dead`` fails."""
    made: Calls = []

    async def call_cache(client: object, action: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        made.append((action, body))
        if body["tool"] == "dead":
            raise RuntimeError("the engine has died")
        return [{"is_known": True}]

    monkeypatch.setattr(called_tools, "call_cache", call_cache)
    return made


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, calls: Calls) -> Iterator[TestClient]:
    """A server that answers with what a request says."""
    monkeypatch.setattr(called_tools, "received", known := Received())
    known.begin(PluginSettings())

    async def answer(request: Request) -> Response:
        said = await request.json()
        if isinstance(said, list):
            parts = [f"data: {json.dumps(each, separators=(',', ':'))}\n\n" for each in said]
            return StreamingResponse(iter([*parts, "data: [DONE]\n\n"]), media_type="text/event-stream")
        return JSONResponse(said)

    app = Starlette(routes=[Route("/{path:path}", answer, methods=["POST"])])
    app.state.ragcache_engine_client = object()
    app.add_middleware(CalledTools)
    with TestClient(app) as client:
        yield client


def answer(**message: Any) -> dict[str, Any]:
    return {"id": "chatcmpl-1", "choices": [{"message": {"role": "assistant", **message}}]}


def part(**delta: Any) -> dict[str, Any]:
    return {"id": "chatcmpl-1", "choices": [{"delta": delta}]}


@pytest.mark.parametrize(
    "said",
    [
        answer(content=TEXT, tool_calls=[SEARCH, OTHER]),
        [
            part(content=TEXT),
            part(tool_calls=[{"index": 0, **SEARCH}]),
            part(tool_calls=[{"index": 0, "function": {"arguments": "{}"}}]),
            part(tool_calls=[{"index": 1, **OTHER}]),
        ],
    ],
    ids=["whole", "stream"],
)
def test_the_engine_gets_the_first_tool_that_an_answer_calls(server: TestClient, calls: Calls, said: Any) -> None:
    got = server.post(ROUTE, json=said)
    assert calls == [("called", {"response_id": "chatcmpl-1", "tool": "search"})]
    if isinstance(said, list):
        events = [json.loads(line.removeprefix("data: ")) for line in got.text.split("\n\n")[:-2]]
        assert events == said
    else:
        assert got.json() == said


@pytest.mark.parametrize(
    ("path", "said"),
    [
        (ROUTE, answer(content=TEXT, tool_calls=[])),
        (ROUTE, [part(content=TEXT)]),
        (ROUTE, {"error": {"tool_calls": [{}]}}),
        (ROUTE, answer(tool_calls=[{"function": {"name": None}}])),
        ("/v1/completions", answer(tool_calls=[SEARCH])),
    ],
    ids=["none", "text", "an error", "no name", "no chat"],
)
def test_other_responses_say_nothing(server: TestClient, calls: Calls, path: str, said: Any) -> None:
    assert server.post(path, json=said).status_code == 200
    assert not calls


def test_a_response_is_sent_before_an_engine_fails_and_long_names_are_cut(server: TestClient, calls: Calls) -> None:
    dead = {**SEARCH, "function": {"name": "dead"}}
    assert server.post(ROUTE, json=answer(tool_calls=[dead])).json() == answer(tool_calls=[dead])
    server.post(ROUTE, json=answer(tool_calls=[{"function": {"name": "n" * 100}}]))
    assert calls[-1][1]["tool"] == "n" * 64


def test_a_server_without_ragcache_tells_nothing(
    server: TestClient, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(called_tools, "received", Received())
    server.post(ROUTE, json=answer(tool_calls=[SEARCH]))
    assert not calls
