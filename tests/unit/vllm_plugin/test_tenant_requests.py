"""The server's door with tenants: which routes their keys open, and what becomes of what they send."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from ragcache_core.errors import ConfigError
from ragcache_core.runtime.tenants import Tenants, cache_salt_for, speculation_of
from ragcache_core.stats import merged_report
from ragcache_core.vllm_plugin.server.accepted_keys import AcceptedKeys
from ragcache_core.vllm_plugin.server.middleware import AuthMiddleware, Work
from ragcache_core.vllm_plugin.server.tenant_requests import TenantRequests, check_entry, report_for, tenants_of
from ragcache_core.wire import KEY, WIRE_VERSION, decode_kv_transfer_params

SERVER, ACME, OTHER, OPERATOR = "server-key", "a" * 32, "b" * 32, "o" * 32


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tenants") / "tenants.toml"
    path.write_text(
        f'[[tenants]]\nname = "acme"\nkeys = ["{ACME}"]\n[[tenants]]\nname = "other"\nkeys = ["{OTHER}"]\n'
        f'[operators]\nkeys = ["{OPERATOR}"]\n'
    )
    return path


@pytest.fixture(scope="module")
def server(path: Path) -> Iterator[TestClient]:
    """A server whose every route says what it got."""

    async def echo(request: Request) -> JSONResponse:
        priority = request.headers.get("x-vllm-priority")
        return JSONResponse({"path": request.url.path, "body": (await request.body()).decode(), "priority": priority})

    app = Starlette(routes=[Route("/{path:path}", echo, methods=["GET", "POST", "DELETE"])])
    app.state.ragcache_tenants = Tenants.from_toml(path)
    app.add_middleware(TenantRequests)
    app.add_middleware(AuthMiddleware, keys=AcceptedKeys([SERVER], app.state.ragcache_tenants), work=Work())
    with TestClient(app) as client:
        yield client


def headers(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def sent(server: TestClient, key: str = ACME, route: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    """Return what vLLM gets of a request."""
    answer = server.post(route, json=body, headers=headers(key))
    assert answer.status_code == 200, answer.text
    got: dict[str, Any] = json.loads(answer.json()["body"])
    return got


OURS = "/v1/ragcache"
ALLOWED = [
    *[("GET", f"{OURS}/{name}") for name in ("stats", "cached_paths", "load", "costs", "tokenizer")],
    *[("GET", f"{OURS}/requests/cmpl-1"), ("GET", f"{OURS}/speculations/s"), ("GET", "/v1/models")],
    *[("POST", f"{OURS}/speculations/s/confirm"), ("POST", f"{OURS}/prefetch"), ("POST", f"{OURS}/prompt")],
    *[("POST", "/v1/completions"), ("POST", "/v1/chat/completions"), ("POST", "/tokenize"), ("POST", "/detokenize")],
]
REFUSED = [
    *[("POST", f"{OURS}/{name}") for name in ("drain", "documents/forget", "documents/show", "cache/purge", "stats")],
    *[("GET", f"{OURS}/{name}") for name in ("cache", "tree", "requests", "requests/a/b", "requests/", "anything")],
    *[("POST", path) for path in ("/reset_prefix_cache", "/sleep", "/v1/load_lora_adapter", "/invocations", "/pause")],
    *[("POST", path) for path in ("/v1/responses", "/v1/messages", "/v1/embeddings", "/inference/v1/generate")],
    *[("GET", path) for path in ("/metrics", "/metrics/", "/load", "/v1/responses/r", "/server_info")],
    *[("DELETE", "/v1/models"), ("POST", "/v1/chat/completions/render"), ("POST", "/v1/completions/")],
]


@pytest.mark.parametrize(("method", "route"), ALLOWED)
def test_a_tenants_key_permits_requests_and_its_own_statistics(server: TestClient, method: str, route: str) -> None:
    assert server.request(method, route, headers=headers(ACME), json={}).status_code == 200
    assert server.request(method, route, json={}).status_code == 401
    assert server.request(method, route, headers=headers("c" * 32), json={}).status_code == 401


@pytest.mark.parametrize(("method", "route"), REFUSED)
def test_it_opens_nothing_else_and_an_operators_key_opens_all(server: TestClient, method: str, route: str) -> None:
    refused = server.request(method, route, headers=headers(ACME), json={})
    assert refused.status_code == 403
    assert "'acme'" in refused.json()["error"]["message"]
    assert "ask with an operator's key" in refused.json()["error"]["message"]
    assert server.request(method, route, json={}).status_code == 401
    for key in (SERVER, OPERATOR):
        assert server.request(method, route, headers=headers(key), json={}).status_code == 200


@pytest.mark.parametrize("route", ["/health", "/ready", "/version"])
def test_probes_need_no_key_as_ever(server: TestClient, route: str) -> None:
    assert server.get(route).status_code == 200


def test_a_request_has_its_tenants_salt_whatever_it_says(server: TestClient) -> None:
    lie = {"version": WIRE_VERSION, "tenant": "other", "documents": [{"id": "d", "start": 0, "end": 2}]}
    for route in ("/v1/completions", "/v1/chat/completions", "/v1/ragcache/prefetch"):
        plain = sent(server, route=route, prompt=[1, 2, 3])
        assert (plain["cache_salt"], plain["prompt"]) == (cache_salt_for("acme"), [1, 2, 3])
        said = sent(server, route=route, cache_salt=cache_salt_for("other"), kv_transfer_params={KEY: lie})
        assert said["cache_salt"] == cache_salt_for("acme", cache_salt_for("other")) != cache_salt_for("other")
        (document,) = decode_kv_transfer_params(said["kv_transfer_params"], 2).segments
        assert document.doc_id == "d"


def test_what_is_for_transfers_between_engines_is_left_out(server: TestClient) -> None:
    params = {"do_remote_prefill": True, "ragcache_adapted": True, "max_offload_tokens": 0, "prompt_token_ids": [1]}
    got = sent(server, kv_transfer_params=params, ec_transfer_params={"peer": "x"})
    assert got["kv_transfer_params"] == {"max_offload_tokens": 0, "prompt_token_ids": [1]}
    assert "ec_transfer_params" not in got


def test_a_tenant_comes_before_no_other(server: TestClient) -> None:
    assert "priority" not in sent(server, priority=-9)
    hurried = server.post("/v1/completions", json={}, headers={**headers(ACME), "X-Vllm-Priority": "-9"})
    assert hurried.json()["priority"] is None
    assert sent(server, SERVER, priority=-9)["priority"] == -9


def test_the_same_speculation_of_two_tenants_is_two(server: TestClient) -> None:
    metadata = {KEY: {"version": WIRE_VERSION, "speculation": "guess"}}
    named = [
        sent(server, key, kv_transfer_params=metadata)["kv_transfer_params"][KEY]["speculation"]
        for key in (ACME, OTHER, SERVER)
    ]
    assert named == [speculation_of("acme", "guess"), speculation_of("other", "guess"), "guess"]
    assert decode_kv_transfer_params({KEY: {"version": WIRE_VERSION, "speculation": named[0]}}, 1).speculation


def test_operators_send_what_they_want(server: TestClient) -> None:
    body = {"prompt": [1], "cache_salt": "s", "kv_transfer_params": {"do_remote_decode": True}}
    for key in (SERVER, OPERATOR):
        assert sent(server, key, **body) == body


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"[1]", "send a JSON object"),
        (b"{", "no JSON"),
        (b"[" * 10_000, "no JSON"),
        (b'{"cache_salt": ""}', "send a text of 1 to 128 characters"),
        (b'{"cache_salt": 7}', "cache_salt is 7: send a text of 1 to 128"),
        (b'{"cache_salt": "' + b"s" * 129 + b'"}', "cache_salt is 129 characters long: send a text of 1 to 128"),
        (b'{"messages": [{"content": [{"type": "image_url", "uuid": "x"}]}]}', "has the uuid 'x'"),
    ],
)
def test_a_body_that_cannot_be_made_a_tenants_own_is_refused(server: TestClient, body: bytes, said: str) -> None:
    answer = server.post("/v1/chat/completions", content=body, headers=headers(ACME))
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]


def test_a_report_for_a_tenant_holds_nothing_of_others() -> None:
    def report(num: int) -> dict[str, Any]:
        own = {
            name: {
                "num_requests": num,
                "tiers": [{"name": "gpu", "used_bytes": num, "is_enabled": True}],
                "hottest_documents": [{"doc_id": f"of {name}", "frequency": num, "num_tokens": 1, "tiers": ["gpu"]}],
            }
            for name in ("acme", "other")
        }
        whole = {"policy": "lru", "num_requests": 99, "max_overtaken": 0, "num_nodes": 99, "tiers": []}
        return {**whole, "hottest_documents": [], "tenants": own}

    for reports, num in (([report(2)], 2), ([report(2), report(3)], 5)):
        shown = report_for("acme", merged_report(reports))
        assert (shown["num_requests"], shown["policy"], shown["num_nodes"]) == (num, "lru", 0)
        assert shown["tiers"][0]["used_bytes"] == num
        assert [use["doc_id"] for use in shown["hottest_documents"]] == ["of acme"]
        assert "other" not in json.dumps(shown)
        assert "99" not in json.dumps(shown)
    assert report_for("acme", {"policy": "lru", "num_requests": 99})["num_requests"] == 0, "before the first request"


def test_a_server_knows_its_tenants_by_the_configuration_of_its_engine(path: Path) -> None:
    def args(**ragcache: object) -> Namespace:
        return Namespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config={"ragcache": ragcache}))

    assert tenants_of(Namespace(), []) is None
    assert tenants_of(args(), [ACME]) is None
    with pytest.raises(ConfigError, match="does not know the tenants of"):
        check_entry(args(tenants=str(path)).kv_transfer_config, None)
    check_entry(args().kv_transfer_config, None)
    check_entry(None, None)
    found = tenants_of(args(tenants=str(path)), [SERVER])
    assert found is not None
    assert set(found.by_name) == {"acme", "other"}
    with pytest.raises(ConfigError, match="own API key is one of tenant 'acme'"):
        tenants_of(args(tenants=str(path)), [ACME])


@pytest.mark.parametrize("strange", [None, 3, [], "x", {KEY: 5}, {KEY: {"speculation": 5}}])
def test_what_contradicts_itself_is_a_tenants_all_the_same(server: TestClient, strange: object) -> None:
    assert sent(server, kv_transfer_params=strange)["cache_salt"] == cache_salt_for("acme")


@pytest.mark.parametrize(("keys", "status"), [([], 200), ([SERVER], 401)])
def test_a_file_of_collections_alone_opens_and_closes_nothing(tmp_path: Path, keys: list[str], status: int) -> None:
    async def told(_: Request) -> JSONResponse:
        return JSONResponse({})

    path = tmp_path / "collections.toml"
    path.write_text('[[collections]]\nname = "handbook"\nids = ["handbook/*"]\n')
    app = Starlette(routes=[Route("/{path:path}", told)])
    app.add_middleware(AuthMiddleware, keys=AcceptedKeys(keys, Tenants.from_toml(path)), work=Work())
    with TestClient(app) as client:
        assert client.get("/v1/models").status_code == status
        assert client.get("/metrics").status_code == 200
