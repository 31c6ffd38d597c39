"""Statistics in a response: only where the header asks for them, and in a form that other clients read over."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from ragcache_core.vllm_plugin.server import response_stats
from ragcache_core.vllm_plugin.server.engine_view import Received
from ragcache_core.vllm_plugin.server.response_stats import ResponseStatsMiddleware
from ragcache_core.vllm_plugin.settings import PluginSettings

FIGURES = {"num_gpu_tokens": 96, "num_disk_tokens": 32}
ASKED = {"x-ragcache-stats": "1"}
PARTS = [
    {"id": "chatcmpl-1", "object": "chat.completion.chunk", "choices": [{"delta": {"content": part}}]} for part in "ab"
]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    """A server that has answered one request; its route returns what a test asks for."""
    monkeypatch.setattr(response_stats, "received", known := Received())
    monkeypatch.setattr(response_stats, "_TIMEOUT_S", 0.05)
    known.begin(PluginSettings())
    known.add({"requests": {"chatcmpl-1-00000000": FIGURES}}, 0)

    async def answer(request: Request) -> Response:
        match (await request.json()).get("kind"):
            case "stream":
                events = [f"data: {json.dumps(part)}\n\n" for part in PARTS]
                return StreamingResponse(iter([*events, "data: [DONE]\n\n"]), media_type="text/event-stream")
            case "marks":
                event = {**PARTS[0], "choices": [{"text": "\ndata: [DONE]\n\n data: [DONE]"}]}
                events = [f"data: {json.dumps(event)}\n\n"]
                return StreamingResponse(iter([*events, "data: [DONE]\n\n"]), media_type="text/event-stream")
            case "response":
                made = {"id": "chatcmpl-1"}
                said = [{"type": f"response.{end}", "response": made} for end in ("created", "completed")]
                said.insert(1, {"type": "response.output_text.delta", "delta": "a"})
                events = [f"event: {each['type']}\ndata: {json.dumps(each)}\n\n" for each in said]
                return StreamingResponse(iter(events), media_type="text/event-stream")
            case "error":
                return JSONResponse({"id": "chatcmpl-1", "error": "no"}, 400)
            case "text":
                return Response("plain", media_type="text/plain")
            case "unknown":
                return JSONResponse({"id": "chatcmpl-2", "answer": "ü"})
        return JSONResponse({"id": "chatcmpl-1", "answer": "ü"})

    app = Starlette(routes=[Route("/{path:path}", answer, methods=["POST"])])
    app.add_middleware(ResponseStatsMiddleware)
    with TestClient(app) as client:
        yield client


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_a_response_has_the_statistics_of_its_request_where_they_are_requested(server: TestClient, path: str) -> None:
    asked = server.post(path, json={}, headers=ASKED)
    assert asked.json() == {"id": "chatcmpl-1", "answer": "ü", "ragcache": FIGURES}
    assert int(asked.headers["content-length"]) == len(asked.content)
    for headers in ({}, {"x-ragcache-stats": "0"}):
        assert server.post(path, json={}, headers=headers).json() == {"id": "chatcmpl-1", "answer": "ü"}


def test_a_stream_has_them_in_an_event_of_its_own_before_the_last(server: TestClient) -> None:
    lines = server.post("/v1/chat/completions", json={"kind": "stream"}, headers=ASKED).text.split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    assert lines[-2:] == ["data: [DONE]", ""]
    assert events[:-1] == PARTS
    assert events[-1] == {"id": "chatcmpl-1", "object": "chat.completion.chunk", "choices": [], "ragcache": FIGURES}
    plain = server.post("/v1/chat/completions", json={"kind": "stream"}).text
    assert "ragcache" not in plain


def test_an_answer_with_the_words_of_a_streams_end_stays_whole(server: TestClient) -> None:
    lines = server.post("/v1/completions", json={"kind": "marks"}, headers=ASKED).text.split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    assert events[0]["choices"][0]["text"].count("[DONE]") == 2
    assert ["ragcache" in event for event in events] == [False, True]


def test_a_stream_of_the_responses_api_has_an_event_of_ours_before_its_last(server: TestClient) -> None:
    plain = server.post("/v1/responses", json={"kind": "response"}).text.split("\n\n")
    asked = server.post("/v1/responses", json={"kind": "response"}, headers=ASKED).text.split("\n\n")
    name, data = asked.pop(2).split("\n")
    assert asked == plain
    assert name == "event: response.ragcache"
    assert json.loads(data.removeprefix("data: "))["ragcache"] == FIGURES
