"""A server behind a proxy: it says who answered, and at once that another replica has a request's figures."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from ragcache_core.vllm_plugin.server.request_defaults import DefaultsHeader, replica_name
from ragcache_core.vllm_plugin.server.routes import received, router
from ragcache_core.wire import REPLICA_HEADER

OWN, OTHER = replica_name("engine-1"), replica_name("engine-2")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    app = FastAPI()
    app.include_router(router)
    app.post("/v1/completions")(lambda: {"id": "cmpl-1"})
    app.add_middleware(DefaultsHeader)
    app.state.ragcache_defaults, app.state.ragcache_replica, app.state.ragcache_tenants = "{}", OWN, None
    monkeypatch.setattr(received, "engine", lambda: {"policy": "pgdsf"})
    found = {"cmpl-1": {"num_host_tokens": 32}}
    monkeypatch.setattr(received, "request", lambda response_id, *_, **__: found.get(response_id))
    with TestClient(app) as client:
        yield client


def test_answers_name_the_replica_and_names_differ(server: TestClient) -> None:
    assert server.post("/v1/completions").headers[REPLICA_HEADER] == OWN == replica_name("engine-1")
    assert OWN != OTHER


def test_figures_of_another_replica_are_refused_at_once_and_unknown_ones_of_its_own_are_waited_for(
    server: TestClient,
) -> None:
    assert server.get("/v1/ragcache/requests/cmpl-1", headers={REPLICA_HEADER: OWN}).status_code == 200
    assert server.get("/v1/ragcache/requests/cmpl-1").status_code == 200
    began_s = time.monotonic()
    refused = server.get("/v1/ragcache/requests/cmpl-2", headers={REPLICA_HEADER: OTHER})
    assert time.monotonic() - began_s < 0.25
    assert refused.status_code == 404
    assert OTHER in refused.json()["detail"]
    began_s = time.monotonic()
    assert server.get("/v1/ragcache/requests/cmpl-2", headers={REPLICA_HEADER: OWN}).status_code == 404
    assert time.monotonic() - began_s > 0.4
