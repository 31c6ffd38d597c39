"""The page at ``/ragcache`` in a real browser, over the demo model, and over a server that is gone for a while."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from starlette.testclient import TestClient

from ragcache_core.client import Engine
from ragcache_core.client.launch.process import free_port
from ragcache_core.vllm_plugin.server import document_routes, routes
from ragcache_core.vllm_plugin.server.page import files
from ragcache_core.vllm_plugin.server.page import routes as page_routes
from tests.engine.vllm_plugin.test_door import KEY, server
from tests.support.browser import DESK, browser, darken, resize, why_no_browser
from tests.support.waiting import until

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

needs_browser = pytest.mark.skipif(why_no_browser() is not None, reason=str(why_no_browser()))
TENANTS_KEY = "t" * 32
EVIL = "<img src=x onerror=\"document.title='read as HTML'\">"
REPORT: dict[str, Any] = {
    "policy": "pgdsf",
    "num_nodes": 1,
    "num_requests": 1,
    **dict.fromkeys(("num_reordered_requests", "num_speculative_requests", "num_confirmed_speculations"), 0),
    **dict.fromkeys(("num_speculative_tokens", "num_wasted_tokens"), 0),
    "tiers": [],
    "hottest_documents": [],
}


@pytest.fixture(scope="module")
def window() -> Iterator[Chrome]:
    with browser() as opened:
        yield opened


@pytest.fixture
def page(window: Chrome, engine: Engine) -> Chrome:
    """The page of the shared engine, in a tab that has no key."""
    visit(window, engine.base_url.removesuffix("/v1"))
    return window


def visit(window: Chrome, url: str) -> None:
    resize(window, DESK)
    darken(window, is_dark=False)
    window.get(f"{url}/ragcache")
    window.execute_script("sessionStorage.clear()")
    window.get(f"{url}/ragcache")


def text(window: Chrome, element_id: str) -> str:
    """Return what an element shows; nothing of what is hidden."""
    said: str = window.execute_script(
        "const it = document.getElementById(arguments[0]); return it?.checkVisibility() ? it.innerText : ''", element_id
    )
    return said


def type_key(window: Chrome, key: str) -> None:
    assert until(lambda: window.find_element("id", "key").is_displayed(), 10)
    window.find_element("id", "key").send_keys(f"{key}\n")


def sees(window: Chrome, words: str, where: str) -> bool:
    return until(lambda: words in text(window, where), 15)


def sees_node(window: Chrome, label: str) -> bool:
    """Return whether the tree's picture comes to have a node, perhaps too small for its name."""
    labels = "return [...document.querySelectorAll('#tree > div')].map((cell) => cell.ariaLabel)"
    return until(lambda: any(said.startswith(label) for said in window.execute_script(labels)), 15)


def ask_about(engine: Engine, *doc_ids: str, first: int, times: int = 40) -> None:
    """Send a prompt of documents of two blocks each, so often that they are hot; no other test has those tokens."""
    prompt = [first + i % 50 for i in range(64 * len(doc_ids) + 5)]
    spans = [{"id": name, "start": 64 * i, "end": 64 * (i + 1)} for i, name in enumerate(doc_ids)]
    params = {"ragcache": {"version": 1, "documents": spans}}
    body = {"model": engine.model, "prompt": prompt, "max_tokens": 2, "kv_transfer_params": params}
    authorized = {"Authorization": f"Bearer {engine.api_key}"}
    with httpx.Client(headers=authorized, timeout=60) as client:
        for _ in range(times):
            client.post(f"{engine.base_url}/completions", json=body).raise_for_status()


@needs_browser
def test_the_page_asks_for_the_key_refuses_a_wrong_one_and_keeps_the_right_one_in_the_tab(
    page: Chrome, engine: Engine
) -> None:
    type_key(page, "wrong")
    assert sees(page, "rejects this key", "why")
    assert text(page, "main") == ""
    type_key(page, "schlüssel")
    assert sees(page, "ASCII letters", "why")
    type_key(page, str(engine.api_key))
    assert sees(page, "live", "state")
    page.refresh()
    assert sees(page, "live", "state")
    assert engine.api_key not in page.current_url
    assert page.execute_script("return [localStorage.length, document.cookie]") == [0, ""]
    page.find_element("id", "leave").click()
    assert page.find_element("id", "key").is_displayed()
    assert page.execute_script("return sessionStorage.length") == 0


@needs_browser
def test_documents_of_a_request_appear_while_one_looks_and_are_text_whatever_they_are_called(
    page: Chrome, engine: Engine
) -> None:
    type_key(page, str(engine.api_key))
    assert sees(page, "live", "state")
    page.find_element("id", "size").send_keys("uses")
    ask_about(engine, "page-a.md", EVIL, first=200)
    for name in ("page-a.md", EVIL):
        assert sees(page, name, "hottest")
        assert sees(page, name, "requests")
        assert sees_node(page, name)
    assert page.title == "RAGCache"
    assert page.execute_script("return document.images.length") == 0
    assert re.search(r"GPU\s.* of 1.0 GiB", text(page, "tiers"))
    assert "from the cache" in text(page, "sources")
    assert re.search(r"GPU\s+\d", text(page, "ttft"))
    assert re.search(r"running\s+\d", text(page, "queue"))
    page.find_element("css selector", "#requests summary").click()
    assert re.search(r"first token after\s+\d", text(page, "requests"))
    wrong = [line for line in page.get_log("browser") if "401" not in line["message"]]
    assert wrong == [], "nothing breaks the page's own rules, or is missing"


def test_the_data_of_the_page_needs_the_key_and_has_a_limit(engine: Engine) -> None:
    ask_about(engine, "page-e.md", first=400, times=3)
    authorized = {"Authorization": f"Bearer {engine.api_key}"}
    for what in ("tree", "requests"):
        url = f"{engine.base_url}/ragcache/{what}"
        assert httpx.get(url).status_code == 401
        assert httpx.get(f"{url}?limit=100000", headers=authorized).status_code == 400
        assert httpx.get(f"{url}?limit=0", headers=authorized).status_code == 400
    (tree,) = httpx.get(f"{engine.base_url}/ragcache/tree?limit=1000", headers=authorized).json()["engines"]
    (node,) = (node for node in tree["nodes"] if node["doc_id"] == "page-e.md")
    assert (node["num_tokens"], node["num_uses"]) == (64, 3)
    assert node["num_bytes"]["gpu"] > 0
    latest = httpx.get(f"{engine.base_url}/ragcache/requests?limit=1", headers=authorized).json()
    assert (latest["num_queued"], latest["num_running"]) == (0, 0)
    (request,) = latest["requests"]
    assert (request["doc_ids"], request["num_prompt_tokens"], request["engine"]) == (["page-e.md"], 69, 0)
    assert 0 <= request["queue_s"] < request["ttft_s"] <= request["total_s"] <= request["age_s"]


# Without an engine


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> FastAPI:
    """The server, behind which an engine has one node in its tree."""
    made = server(monkeypatch, "--api-key", KEY)
    reports_of_one_engine(made, monkeypatch, "before.md")
    return made


def reports_of_one_engine(app: FastAPI, monkeypatch: pytest.MonkeyPatch, *doc_ids: str) -> None:
    """Have each of as many engines as ``doc_ids`` tell of one document."""

    async def call_cache(_: object, action: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        node = {"node": 1, "parent": None, "num_tokens": 32, "num_uses": 1, "num_bytes": {"gpu": 9}}
        return [{"num_nodes": 1, "num_left_out": 0, "nodes": [{**node, "doc_id": doc_id}]} for doc_id in doc_ids]

    async def call_requests(_: object, limit: int) -> list[dict[str, Any]]:
        return [{"num_queued": 0, "num_running": 0, "requests": []} for _ in doc_ids]

    async def call_report(_: object) -> list[dict[str, Any]]:
        raise RuntimeError("no engine")

    app.state.ragcache_engine_client = None
    monkeypatch.setattr(routes, "call_report", call_report)
    monkeypatch.setattr(document_routes, "call_cache", call_cache)
    monkeypatch.setattr(page_routes, "call_recent_requests", call_requests)
    report = {**REPORT, "num_requests": len(doc_ids[0])}
    monkeypatch.setattr(page_routes.received, "engine", lambda: report)
    load = {"num_pending_prefills": 0, "pending_prefill_s": 0.0, "is_speculative": False, "has_room": False}
    monkeypatch.setattr(page_routes.received, "load", lambda: load)


@contextmanager
def serving(app: FastAPI, port: int) -> Iterator[None]:
    running = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error", lifespan="off"))
    thread = threading.Thread(target=running.run)
    thread.start()
    try:
        assert until(lambda: running.started, 10)
        yield
    finally:
        running.should_exit = running.force_exit = True
        thread.join()


def test_the_page_is_open_says_nothing_of_the_cache_and_takes_nothing_from_elsewhere(app: FastAPI) -> None:
    client = TestClient(app)
    for path, name in files.FILES.items():
        answer = client.get(path)
        assert answer.status_code == 200, path
        assert "before.md" not in answer.text
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|innerHTML|\beval\b|style=", answer.text), name
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
    html = client.get("/ragcache").text
    assert not re.search(r"\son\w+=|<script>|<style", html)
    assert client.get("/ragcache/", follow_redirects=False).headers["location"].endswith("/ragcache")
    assert client.get("/ragcache/other.js").status_code == 401
    on_disk = {path.name for path in Path(files.__file__).parent.iterdir() if path.suffix in (".html", ".css", ".js")}
    assert on_disk == set(files.FILES.values())


@needs_browser
def test_the_page_says_that_the_server_is_gone_and_goes_on_with_the_next_one(
    app: FastAPI, window: Chrome, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port("127.0.0.1")
    with serving(app, port):
        visit(window, f"http://127.0.0.1:{port}")
        type_key(window, KEY)
        assert sees(window, "before.md", "tree")
    assert sees(window, "trying again", "state")
    assert "before.md" in text(window, "tree"), "what is known stays"
    reports_of_one_engine(app, monkeypatch, "after.md")
    with serving(app, port):
        assert sees(window, "after.md", "tree")
        assert sees(window, "live", "state")
        assert "before.md" not in text(window, "main")


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FastAPI:
    """The server of an engine that tenants share."""
    tenants = tmp_path / "tenants.toml"
    tenants.write_text(f'[[tenants]]\nname = "acme"\nkeys = ["{TENANTS_KEY}"]\n')
    transfer = {
        "kv_connector": "RAGCacheConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"ragcache": {"tenants": str(tenants)}},
    }
    made = server(monkeypatch, "--api-key", KEY, "--kv-transfer-config", json.dumps(transfer))
    reports_of_one_engine(made, monkeypatch, "theirs.md")
    tier = {"name": "gpu", "capacity_bytes": 9 << 20, "used_bytes": 3 << 20, "num_blocks": 3, "num_evicted_blocks": 0}
    use = {"doc_id": "own.md", "frequency": 2, "num_tokens": 32, "tiers": ["gpu"]}
    own = {"tiers": [{**tier, "num_hit_tokens": 7, "is_enabled": True}], "hottest_documents": [use]}
    monkeypatch.setattr(page_routes.received, "engine", lambda: {**REPORT, "tenants": {"acme": own}})
    return made


def test_a_tenants_key_opens_what_the_page_shows_a_tenant_and_nothing_else(shared: FastAPI) -> None:
    client = TestClient(shared, headers={"Authorization": f"Bearer {TENANTS_KEY}"})
    answers = {what: client.get(f"/v1/ragcache/{what}") for what in ("stats", "load", "tree", "requests")}
    statuses = {what: answer.status_code for what, answer in answers.items()}
    assert statuses == {"stats": 200, "load": 200, "tree": 403, "requests": 403}
    assert [use["doc_id"] for use in answers["stats"].json()["hottest_documents"]] == ["own.md"]


@needs_browser
def test_with_a_tenants_key_the_page_shows_what_is_the_tenants_own_and_reports_what_is_not(
    shared: FastAPI, window: Chrome
) -> None:
    port = free_port("127.0.0.1")
    with serving(shared, port):
        visit(window, f"http://127.0.0.1:{port}")
        type_key(window, TENANTS_KEY)
        assert sees(window, "live", "state")
        assert sees(window, "own.md", "hottest")
        assert "3.0 MiB of 9.0 MiB" in text(window, "tiers")
        assert "need an operator's key" in text(window, "tenant")
        assert (text(window, "tree"), text(window, "requests"), text(window, "sources")) == ("", "", "")
        window.find_element("id", "leave").click()
        type_key(window, KEY)
        assert sees(window, "theirs.md", "tree")
        assert text(window, "tenant") == ""
