"""``POST /v1/ragcache/documents/register`` behind the server's middleware: bad bodies, bad records, tenants, bounds."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from ragcache_core.runtime.tenants import Tenants
from ragcache_core.vllm_plugin.server.accepted_keys import AcceptedKeys
from ragcache_core.vllm_plugin.server.middleware import AuthMiddleware, Work
from ragcache_core.vllm_plugin.server.recognition.routes import router
from ragcache_core.vllm_plugin.server.request_body import RequestBodyCheck
from ragcache_core.wire import MAX_DOCUMENTS

from .recognition_scene import ACME, OTHER, SUIT, SUN, Server, document

KEY = "server-key"
LIMIT = 32 << 20


@pytest.fixture
def server() -> Server:
    return asyncio.run(Server(limit=50).begin())


@pytest.fixture
def client(server: Server, tmp_path: Path) -> Iterator[TestClient]:
    path = tmp_path / "tenants.toml"
    path.write_text(f'[[tenants]]\nname = "acme"\nkeys = ["{ACME}"]\n[[tenants]]\nname = "other"\nkeys = ["{OTHER}"]\n')
    path.chmod(0o600)
    app = FastAPI()
    app.include_router(router)
    app.state.ragcache_recognition = server.services[0]
    app.state.ragcache_max_body_bytes = LIMIT
    app.add_middleware(RequestBodyCheck)
    app.add_middleware(AuthMiddleware, keys=AcceptedKeys([KEY], Tenants.from_toml(path)), work=Work())
    with TestClient(app) as running:
        yield running


def post(client: TestClient, body: bytes | dict[str, Any], key: str = KEY) -> tuple[int, dict[str, Any]]:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    answer = client.post("/v1/ragcache/documents/register", content=content, headers=headers)
    return answer.status_code, answer.json()


def test_good_records_are_registered_and_bad_ones_say_why(client: TestClient) -> None:
    records = [document("sun", SUN), document("half \ud800", SUN), document("big", "words " * 2_000_000), {"id": "x"}]
    status, said = post(client, {"documents": [*records, document("nul", f"{SUIT} \0")]})
    assert status == 200
    assert (said["num_registered"], said["num_failed"]) == (2, 3)
    assert [each["registered"] for each in said["documents"]] == [True, False, False, False, True]
    assert "12000000 characters, the limit is 1048576" in said["documents"][2]["error"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{",
        b'{"documents": 3}',
        b'{"documents": []}',
        b'{"documents": [{}], "more": 1}',
        b"\xff\xfe",
        b'{"documents": ' + b"[" * 10_000,
        json.dumps({"documents": [{}] * (MAX_DOCUMENTS + 1)}).encode(),
    ],
)
def test_a_body_that_is_no_list_of_documents_is_refused_with_an_example(client: TestClient, body: bytes) -> None:
    status, said = post(client, body)
    assert status == 400
    assert '{"documents": [' in said["detail"]


def test_a_tenant_registers_for_itself_alone(client: TestClient, server: Server) -> None:
    assert post(client, {"documents": [document("mine", SUN)]}, ACME)[1]["num_registered"] == 1
    assert post(client, {"documents": [document("mine", SUN)]}, OTHER)[1]["num_registered"] == 1, "no word of another's"
    assert post(client, {"documents": [document("mine", SUN)]}, "no-key-at-all")[0] == 401
    service = server.services[0]
    tokens = server.tokenizer.encode(SUN, add_special_tokens=False)
    assert service.recognise(None, tokens).documents == ()
    assert [each.doc_id for each in service.recognise("acme", tokens).documents] == ["mine"]


def test_any_number_of_registrations_is_bounded_and_a_tenants_leave_others_alone(
    client: TestClient, server: Server
) -> None:
    post(client, {"documents": [document("kept", SUN)]})
    for start in range(0, 400, 100):
        records = [document(f"d{i}", f"{SUIT} This is number {i} of {i} .") for i in range(start, start + 100)]
        said = post(client, {"documents": records}, ACME)[1]
        assert all(each["registered"] or "max_documents" in each["error"] for each in said["documents"])
    assert server.services[0].figures()["num_documents"] == 51
    tokens = server.tokenizer.encode(SUN, add_special_tokens=False)
    assert [each.doc_id for each in server.services[0].recognise(None, tokens).documents] == ["kept"]


def test_a_server_without_recognition_reports_it(client: TestClient) -> None:
    client.app.state.ragcache_recognition = None  # type: ignore[attr-defined]
    status, said = post(client, {"documents": [document("sun", SUN)]})
    assert status == 404
    assert "RC-RECOGNITION-OFF" in said["detail"]
