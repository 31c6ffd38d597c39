"""vLLM's own server with tenants, without an engine behind it: whom it lets in, and what it reads of their requests."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.testclient import TestClient
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from ragcache_core.errors import ConfigError
from ragcache_core.runtime.tenants import cache_salt_for
from ragcache_core.vllm_plugin.server import routes
from ragcache_core.vllm_plugin.server.engine_view import Received
from ragcache_core.vllm_plugin.server.tenant_requests import check_same
from ragcache_core.vllm_plugin.settings import PluginSettings
from ragcache_core.wire import KEY, WIRE_VERSION
from tests.conftest import DEMO_MODEL

SERVER, ACME, OTHER, SECRET = "key-of-the-server", "a" * 32, "b" * 32, "s" * 32


class Reached(Exception):
    """A request has come to where vLLM would send it to its engine."""


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    path = tmp_path_factory.mktemp("door") / "tenants.toml"
    tables = [f'[[tenants]]\nname = "{name}"\nkeys = ["{key}"]\n' for name, key in (("acme", ACME), ("b", OTHER))]
    path.write_text(f'secret = "{SECRET}"\n' + "".join(tables))
    transfer = {
        "kv_connector": "DocumentConnector",
        "kv_connector_module_path": "ragcache_core.vllm_plugin.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"ragcache": {"tenants": str(path)}},
    }
    asked = ["--model", str(DEMO_MODEL), "--api-key", SERVER, "--kv-transfer-config", json.dumps(transfer)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_PLUGINS", "ragcache")
        yield build_app(make_arg_parser(FlexibleArgumentParser()).parse_args(asked), ("generate",))


@pytest.fixture(scope="module")
def server(app: Any) -> TestClient:
    return TestClient(app, raise_server_exceptions=False)


@pytest.fixture
def read(app: Any) -> list[Any]:
    """What vLLM has read of requests for completions."""
    requests: list[Any] = []

    async def serve(request: Any, _: Any) -> None:
        requests.append(request)
        raise Reached

    app.state.openai_serving_completion = SimpleNamespace(create_completion=serve)
    app.state.openai_serving_chat = SimpleNamespace(create_chat_completion=serve)
    return requests


def headers(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    ("method", "route", "by_tenant"),
    [
        ("GET", "/v1/ragcache/stats", 404),
        ("POST", "/v1/completions", 400),
        ("POST", "/tokenize", 400),
        ("POST", "/v1/responses", 403),
        ("POST", "/invocations", 403),
        ("GET", "/metrics", 403),
        ("HEAD", "/metrics", 403),
        ("OPTIONS", "/metrics", 403),
        ("OPTIONS", "/metrics/", 403),
        ("OPTIONS", "/metrics/all", 403),
    ],
)
def test_vllm_requires_the_same_key_as_the_auth_middleware(
    server: TestClient, method: str, route: str, by_tenant: int
) -> None:
    """404: there is no engine. 400: the body is empty."""
    assert server.request(method, route, json={}).status_code == 401
    assert server.request(method, route, json={}, headers=headers("wrong")).status_code == 401
    for key in (ACME, OTHER):
        assert server.request(method, route, json={}, headers=headers(key)).status_code == by_tenant
    assert server.request(method, route, json={}, headers=headers(SERVER)).status_code not in (401, 403)


def test_a_browser_that_asks_before_it_asks_needs_no_key(server: TestClient) -> None:
    asked = {"Origin": "https://a.page", "Access-Control-Request-Method": "POST"}
    answer = server.options("/v1/completions", headers=asked)
    assert "CORS" in answer.text, "vLLM answers it, by its own list of origins"


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_vllm_reads_requests_with_their_tenants_salt(server: TestClient, read: list[Any], route: str) -> None:
    body = {
        "prompt": "Who?",
        "messages": [{"role": "user", "content": "Who?"}],
        "cache_salt": "of a user",
        "kv_transfer_params": {KEY: {"version": WIRE_VERSION}, "do_remote_prefill": True},
    }
    of_another = {**body, "kv_transfer_params": {KEY: {"version": WIRE_VERSION, "tenant": "b"}}}
    assert server.post(route, json=of_another, headers=headers(ACME)).status_code == 400, "a tenant names no tenant"
    for key in (ACME, OTHER, SERVER):
        server.post(route, json=body, headers=headers(key))
    salts = [request.cache_salt for request in read]
    assert salts == [*(cache_salt_for(tenant, "of a user", secret=SECRET) for tenant in ("acme", "b")), "of a user"]
    params = [request.to_sampling_params(1, {}).extra_args["kv_transfer_params"] for request in read]
    assert [len(each) for each in params] == [1, 1, 2], "nothing that is for transfers between engines"


def test_a_request_of_another_tenants_is_as_unknown_as_one_that_never_was(
    server: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An id may be a client's own, ``X-Request-Id``: to ask for one must not tell whether another has used it."""
    figures = Received()
    figures.begin(PluginSettings())
    figures.add({"requests": {"cmpl-1-0-12345678": {"num_gpu_tokens": 7, "tenant": "b"}}}, 0)
    monkeypatch.setattr(routes, "received", figures)
    monkeypatch.setattr(routes, "_TIMEOUT_S", 0.1)

    def ask(key: str, name: str) -> tuple[int, bool]:
        began_s = time.monotonic()
        status = server.get(f"/v1/ragcache/requests/{name}", headers=headers(key)).status_code
        return status, time.monotonic() - began_s >= 0.1

    assert ask(ACME, "cmpl-1") == ask(ACME, "cmpl-2") == (404, True)
    assert ask(OTHER, "cmpl-1")[0] == ask(SERVER, "cmpl-1")[0] == 200


def test_an_engine_that_has_read_another_file_than_its_server_is_not_served(app: Any) -> None:
    tenants = app.state.ragcache_tenants
    check_same([{"tenants": {"acme": {}, "b": {}}}, None], tenants)
    check_same([{}], None)
    for known in ({"acme"}, {"acme", "b", "c"}, set()):
        with pytest.raises(ConfigError, match="has changed during the start: .*: start it again"):
            check_same([{"tenants": dict.fromkeys(known)}], tenants)
