"""Before vLLM's routes and ours: nothing of use without the key, and no body that is larger than prompts are."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from starlette.routing import WebSocketRoute
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.tasks import GENERATION_TASKS, POOLING_TASKS
from vllm.utils.argparse_utils import FlexibleArgumentParser

from ragcache_core.client import Engine
from ragcache_core.client.launch.arguments import check_names
from ragcache_core.vllm_plugin.server import document_routes
from ragcache_core.vllm_plugin.server.middleware import OPEN_PATHS

KEY = "the key"
AUTHORIZED = {"Authorization": f"Bearer {KEY}"}


def server(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> FastAPI:
    """vLLM's server with every route it can have, and ours; there is no engine behind it."""
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    monkeypatch.setenv("VLLM_PLUGINS", "ragcache")
    monkeypatch.setenv("VLLM_API_KEY", "")
    args = make_arg_parser(FlexibleArgumentParser()).parse_args([*arguments])
    app = build_app(args, (*GENERATION_TASKS, *POOLING_TASKS))
    app.state.ragcache_max_body_bytes = 10_000
    return app


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> FastAPI:
    return server(monkeypatch, "--api-key", KEY)


@pytest.fixture
def client(app: FastAPI) -> TestClient:
    return TestClient(app, raise_server_exceptions=False)


def test_every_route_needs_the_key_but_those_on_the_list(app: FastAPI, client: TestClient) -> None:
    asked = set()
    for route in app.routes:
        path = re.sub(r"\{[^}]*\}", "x", route.path)
        if isinstance(route, WebSocketRoute):
            with pytest.raises(WebSocketDisconnect), client.websocket_connect(path):
                pass
            continue
        for method in getattr(route, "methods", None) or {"GET", "POST"}:
            if path in OPEN_PATHS:
                continue
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {KEY}"}):
                answer = client.request(method, path, headers=headers)
                assert answer.status_code == 401, (method, path)
            asked.add(path)
    expected = {
        "/invocations",
        "/tokenize",
        "/detokenize",
        "/v1/chat/completions",
        "/v1/ragcache/stats",
        "/v1/ragcache/documents/forget",
    }
    dangerous = {"/sleep", "/collective_rpc", "/reset_prefix_cache", "/server_info", "/scale_elastic_ep", "/v1/models"}
    assert asked >= expected | dangerous
    assert client.post("/invocations", headers=AUTHORIZED, json={}).status_code != 401
    assert client.post("/v1/../invocations").status_code == 401
    assert client.post("//invocations").status_code == 401


def test_every_argument_of_vllms_server_is_a_setting_of_a_launch() -> None:
    """The names are read from vLLM's source: one that is not found there would be refused as misspelt."""
    flags = make_arg_parser(FlexibleArgumentParser())._option_string_actions
    names = [flag for flag in flags if flag.startswith("--")]
    assert len(names) > 300
    check_names([], names, own=())
    check_names([name[2:].replace("-", "_") for name in names], [], own=())


def test_the_descriptions_of_the_routes_need_the_key(client: TestClient) -> None:
    for path in ("/openapi.json", "/docs", "/redoc", "/docs/oauth2-redirect"):
        assert client.get(path).status_code == 401, path
        assert client.get(path, headers=AUTHORIZED).status_code == 200, path


@pytest.fixture
def told() -> list[Any]:
    """The reports that the server takes in."""
    return []


@pytest.fixture
def engines(app: FastAPI, told: list[Any], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Two data-parallel engines behind the server, which have something left at first; what they are asked."""
    asked: list[Any] = []
    left = [{"num_requests": 1, "num_blocks": 0, "problems": []}] * 2
    nothing = [{"num_requests": 0, "num_blocks": 0, "problems": ["a disk"]}, {**left[0], "num_requests": 0}]

    async def forget(_: object, doc_ids: list[str]) -> list[Any]:
        asked.append(doc_ids)
        gone = {
            "forgotten": ["a"],
            "num_paths": 1,
            "num_variants": 0,
            "num_blocks": {"gpu": 2},
            "num_bytes": {"gpu": 9},
        }
        return [gone, {**gone, "forgotten": ["b"], "num_blocks": {"disk": 1}, "num_bytes": {"disk": 7}}]

    async def call_left(_: object) -> list[Any]:
        asked.append("left")
        return left if asked.count("left") < 3 else nothing

    async def call_report(_: object) -> list[Any]:
        return [{"hottest_documents": []}]

    app.state.ragcache_engine_client = None
    monkeypatch.setattr(document_routes, "call_report", call_report)
    monkeypatch.setattr(document_routes.received, "update", lambda reports: told.extend(reports))
    monkeypatch.setattr(document_routes, "call_forget", forget)
    monkeypatch.setattr(document_routes, "call_left", call_left)
    monkeypatch.setattr(document_routes.received, "engine", dict)
    return asked


def test_documents_are_forgotten_by_all_engines_and_the_answer_waits_for_what_is_left(
    client: TestClient, engines: list[Any]
) -> None:
    body = {"ids": ["a", "c", "b", "a"]}
    answer = client.post("/v1/ragcache/documents/forget", headers=AUTHORIZED, json=body)
    assert answer.status_code == 200
    receipt = answer.json()
    assert receipt.pop("duration_s") > 0
    assert receipt == {
        "forgotten": ["a", "b"],
        "unknown": ["c"],
        "num_paths": 2,
        "num_variants": 0,
        "num_blocks": {"gpu": 2, "disk": 1},
        "num_bytes": {"gpu": 9, "disk": 7},
        "num_requests": 0,
        "num_pending": 0,
        "problems": ["a disk"],
        "unsearched": [],
        "is_complete": False,
    }
    assert engines == [["a", "c", "b"], "left", "left", "left"]
    answer = client.post("/v1/ragcache/documents/forget", headers=AUTHORIZED, json={**body, "wait_s": 0})
    assert engines[-2:] == [["a", "c", "b"], "left"], "it does not wait"


def test_what_is_forgotten_is_in_no_statistics_though_the_engine_takes_no_step(
    client: TestClient, engines: list[Any], told: list[Any]
) -> None:
    client.post("/v1/ragcache/documents/forget", headers=AUTHORIZED, json={"ids": ["a"]})
    assert told == [{"hottest_documents": []}]


@pytest.mark.parametrize("action", ["show", "pin", "unpin", "prefetch"])
def test_an_id_is_unknown_where_no_engine_knows_it(
    client: TestClient, engines: list[Any], monkeypatch: pytest.MonkeyPatch, action: str
) -> None:
    contents = {
        "paths": 1,
        "tokens": 1,
        "variants": 0,
        "bytes": {},
        "uses": 1,
        "saved_s": 0,
        "age_s": 1,
        "pinned": False,
    }

    async def call_cache(_: object, asked: str, body: dict[str, Any]) -> list[Any]:
        answers = []
        for known in ("a", "b"):
            unknown = [doc_id for doc_id in body["ids"] if doc_id != known]
            found = {"documents": [{**contents, "id": known}], "total": 1, "changed": [known], "unknown": unknown}
            numbers = ("num_pinned", "num_bytes", "limit_bytes", "num_read_tokens", "num_paths", "num_left_out")
            answers.append({**found, **dict.fromkeys(numbers, 1)})
        return answers

    monkeypatch.setattr(document_routes, "call_cache", call_cache)
    answer = client.post(f"/v1/ragcache/documents/{action}", headers=AUTHORIZED, json={"ids": ["a", "c", "b"]})
    assert answer.status_code == 200
    assert answer.json()["unknown"] == ["c"]


@pytest.mark.parametrize(
    "body",
    [
        *("", "no json", "[]", '"a"', "{}", '{"ids": "a"}', '{"ids": []}', '{"ids": [1]}', '{"ids": [""]}'),
        *('{"ids": ["a"], "wait_s": -1}', '{"ids": ["a"], "wait_s": "1"}', '{"ids": ["a"], "wait_s": 601}'),
        *('{"ids": ["a"], "wait_s": true}', '{"ids": ["a"], "more": 1}', '{"ids": ["\\ud800"]}', '{"ids": [NaN]}'),
        json.dumps({"ids": ["x" * 1025]}),
        json.dumps({"ids": ["x"] * 4097}),
        *("[" * depth + "]" * depth for depth in (900, 20_000)),
        *('{"ids": ["a"], "wait_s": ' + "[" * depth + "]" * depth + "}" for depth in (900, 20_000)),
        '{"ids": [' + "[" * 900 + "]" * 900 + "]}",
    ],
)
def test_what_names_no_documents_is_refused_and_nothing_is_forgotten(
    client: TestClient, app: FastAPI, engines: list[Any], body: str
) -> None:
    app.state.ragcache_max_body_bytes = 100_000
    headers = {**AUTHORIZED, "content-type": "application/json"}
    answer = client.post("/v1/ragcache/documents/forget", headers=headers, content=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"]
    assert engines == []


def test_an_engine_that_cannot_forget_and_a_server_without_ragcache_say_so(
    client: TestClient, engines: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: object) -> list[Any]:
        return [{"refused": "its groups are in no tree"}]

    monkeypatch.setattr(document_routes, "call_forget", refuse)
    answer = client.post("/v1/ragcache/documents/forget", headers=AUTHORIZED, json={"ids": ["a"]})
    assert answer.status_code == 409
    assert "its groups are in no tree" in answer.text
    monkeypatch.setattr(document_routes.received, "engine", lambda: None)
    answer = client.post("/v1/ragcache/documents/forget", headers=AUTHORIZED, json={"ids": ["a"]})
    assert answer.status_code == 404
    assert "without RAGCache" in answer.text


def test_the_routes_on_the_list_answer_without_the_key(client: TestClient) -> None:
    for path in OPEN_PATHS:
        assert client.get(path).status_code != 401, path


def test_a_server_behind_a_prefix_asks_for_the_key_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    client = TestClient(server(monkeypatch, "--api-key", KEY, "--root-path", "/llm"), raise_server_exceptions=False)
    for prefix in ("", "/llm"):
        assert client.post(f"{prefix}/invocations").status_code == 401
        assert client.post(f"{prefix}/v1/completions").status_code == 401
        assert client.get(f"{prefix}/version").status_code != 401


def test_any_of_several_keys_opens_and_a_server_without_one_asks_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    client = TestClient(server(monkeypatch, "--api-key", "a", "b"), raise_server_exceptions=False)
    for key, is_let_in in (("a", True), ("b", True), ("c", False), ("", False), ("a b", False)):
        answer = client.post("/invocations", headers={"Authorization": f"bearer {key}"}, json={})
        assert (answer.status_code != 401) is is_let_in
    client = TestClient(server(monkeypatch), raise_server_exceptions=False)
    assert client.post("/invocations", json={}).status_code != 401


def test_a_body_beyond_the_limit_is_refused_before_anything_reads_it(client: TestClient) -> None:
    body = b" " * 10_001
    answer = client.post("/v1/completions", content=body, headers={**AUTHORIZED, "content-type": "application/json"})
    assert answer.status_code == 413
    assert answer.json()["error"] == {
        "message": "the request's body has 10001 bytes, this server takes 10000, which its context window sets: send "
        "fewer documents or prompts at once, or raise --max-model-len",
        "type": "Request Entity Too Large",
        "param": None,
        "code": 413,
    }
    assert client.post("/v1/completions", content=body[1:], headers=AUTHORIZED).status_code != 413
    assert client.post("/invocations", content=body).status_code == 401, "who has no key learns nothing"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/invocations", "/tokenize"])
async def test_a_body_that_does_not_say_how_long_it_is_is_counted(app: FastAPI, path: str) -> None:
    num_sent = 0

    async def chunks() -> AsyncIterator[bytes]:
        nonlocal num_sent
        yield b'{"prompt": "'
        while num_sent < 1000:
            num_sent += 1
            yield b"a" * 1000

    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        headers = {**AUTHORIZED, "content-type": "application/json"}
        answer = await client.post(path, content=chunks(), headers=headers)
    assert answer.status_code == 413
    assert "has more than 10000 bytes, this server takes 10000" in answer.json()["error"]["message"]
    assert num_sent < 20


# Before it ends


def answer_later(app: FastAPI, begun: asyncio.Event, released: asyncio.Event) -> None:
    """Add a route that streams half of an answer, and the rest when it may."""

    async def halves() -> AsyncIterator[bytes]:
        yield b"the first half, "
        begun.set()
        await released.wait()
        yield b"the second half"

    @app.post("/slow")
    async def slow() -> StreamingResponse:
        return StreamingResponse(halves())


async def test_a_server_that_drains_ends_its_answers_and_refuses_further_requests(app: FastAPI) -> None:
    begun, released = asyncio.Event(), asyncio.Event()
    answer_later(app, begun, released)
    app.state.ragcache_engine_client = SimpleNamespace(errored=False)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        assert (await client.get("/ready")).status_code == 200
        running = asyncio.create_task(client.post("/slow", headers=AUTHORIZED))
        await begun.wait()
        assert (await client.post("/v1/ragcache/drain")).status_code == 401
        drained = await client.post("/v1/ragcache/drain", headers=AUTHORIZED)
        assert drained.json() == {"num_running": 1}
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/slow"):
            refused = await client.post(path, headers=AUTHORIZED, json={})
            assert (refused.status_code, refused.headers["Retry-After"]) == (503, "2")
            assert "send them to another, or again" in refused.json()["error"]["message"]
            assert (await client.post(path)).status_code == 401, "who has no key learns nothing"
        unready = await client.get("/ready")
        assert (unready.status_code, unready.headers["Retry-After"]) == (503, "2")
        assert (await client.get("/metrics")).status_code == 200
        released.set()
        assert (await running).text == "the first half, the second half"
        drained = await client.post("/v1/ragcache/drain", headers=AUTHORIZED)
        assert drained.json() == {"num_running": 0}


def test_a_server_whose_engine_died_is_not_ready(app: FastAPI, client: TestClient) -> None:
    app.state.ragcache_engine_client = SimpleNamespace(errored=True)
    assert client.get("/ready").status_code == 503


# On a real engine


def ask(engine: Engine, route: str, more: dict[str, object], headers: dict[str, str] | None = None) -> httpx.Response:
    prompt = {"messages": [{"role": "user", "content": "hello"}]} if "chat" in route else {"prompt": "hello"}
    body = json.dumps(
        {"model": engine.model, "max_tokens": 1, "temperature": 0, **prompt, **more}
    )  # HTTPX sends no halves of pairs
    authorized = {"Authorization": f"Bearer {engine.api_key}"} if headers is None else headers
    headers = {"Content-Type": "application/json", **authorized}
    return httpx.post(engine.base_url.removesuffix("/v1") + route, content=body, headers=headers, timeout=60)


def spans(num_documents: int) -> dict[str, object]:
    documents = [{"id": str(i), "start": i, "end": i + 1} for i in range(num_documents)]
    return {"kv_transfer_params": {"ragcache": {"version": 1, "documents": documents}}}


def test_the_hosting_platforms_route_needs_the_key_on_a_running_server(engine: Engine) -> None:
    assert ask(engine, "/invocations", {}, {}).status_code == 401
    assert ask(engine, "/invocations", {}).json()["choices"][0]["text"]


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_more_documents_than_the_engine_reads_are_refused_and_a_million_before_they_are_parsed(
    engine: Engine, route: str
) -> None:
    assert ask(engine, route, spans(4096)).status_code == 200
    answer = ask(engine, route, spans(4097))
    assert answer.status_code == 413
    assert "lists 4097 documents in kv_transfer_params, the engine reads 4096" in answer.json()["error"]["message"]
    answer = ask(engine, route, spans(1_000_000))
    assert answer.status_code == 413
    assert "this server takes 16908288, which its context window sets" in answer.json()["error"]["message"]
