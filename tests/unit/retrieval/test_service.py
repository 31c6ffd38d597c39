"""A store behind HTTP: what is found there is what the store finds, and what goes wrong on the way is said."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest

from ragcache_core.errors import (
    ConfigError,
    EmptyStoreError,
    RAGCacheError,
    SearchError,
    SearchTimeoutError,
    StoreAuthError,
    StoreError,
    StoreUnreachableError,
    StoreVersionError,
    TooFewDocumentsError,
    UnknownDocumentError,
)
from ragcache_core.retrieval import (
    MMR,
    DocumentStore,
    PrecomputedEmbedder,
    RemoteStore,
    StoreService,
    TfidfSvdEmbedder,
)
from ragcache_core.retrieval.filters import AllOf, AnyOf, FieldCondition, Not, filter_as_mapping, parse_filter
from ragcache_core.retrieval.storage.snapshot import Snapshot
from ragcache_core.types import Document, RetrievalUpdate
from tests.support.waiting import until
from tests.unit.retrieval.conftest import make_documents

Both = tuple[DocumentStore, RemoteStore]
QUERY = "Who is the baker of Aro?"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DocumentStore]:
    with DocumentStore.create(tmp_path_factory.mktemp("served") / "store", index="flat") as made:
        made.add(make_documents(20))
        yield made


@pytest.fixture(scope="module")
def remote(store: DocumentStore) -> Iterator[RemoteStore]:
    with StoreService(store) as service, RemoteStore(service.url) as opened:
        yield opened


@pytest.fixture(scope="module", params=["flat", "ivf", "hnsw"])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    """A larger store of each index, here and served."""
    with DocumentStore.create(tmp_path_factory.mktemp("both") / "store", index=request.param) as made:
        made.add(make_documents(400))
        with StoreService(made) as service, RemoteStore(service.url) as served:
            yield made, served


async def all_of(store: DocumentStore | RemoteStore, query: str, k: int, **how: Any) -> list[RetrievalUpdate]:
    return [update async for update in store.search_staged(query, k, **how)]


class Slow:
    """An embedder that waits until it is let go."""

    name = "slow"

    def __init__(self) -> None:
        self.inner = TfidfSvdEmbedder(16).fit([d.text for d in make_documents(20)])
        self.dimension = self.inner.dimension
        self.may_go = threading.Event()
        self.may_go.set()

    def embed_documents(self, texts: Any) -> Any:
        return self.inner.embed_documents(texts)

    def embed_query(self, text: str) -> Any:
        self.may_go.wait(20)
        return self.inner.embed_query(text)


# What is found


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"where": {"town": {"$in": ["Aro", "Brin"]}, "number": {"$gte": 30}}},
        {"where": FieldCondition("town", "text_match_insensitive", "aRO")},
        {"mmr": MMR(12, 0.3)},
        {"score_threshold": 1.2},
    ],
    ids=["all", "filter", "expression", "mmr", "threshold"],
)
def test_documents_and_scores_are_bit_for_bit_those_of_the_store(both: Both, how: dict[str, Any]) -> None:
    store, remote = both
    here, there = store.search(QUERY, 5, **how), remote.search(QUERY, 5, **how)
    assert there == here
    stages = asyncio.run(all_of(remote, QUERY, 5, stages=4, **how))
    assert (stages[-1].documents, stages[-1].scores) == (here.documents, here.scores)
    assert stages == asyncio.run(all_of(store, QUERY, 5, stages=4, **how))
    vector = store.embedder.embed_query(QUERY)
    assert remote.search_vector(vector, 5, **how) == store.search_vector(vector, 5, **how)


def test_what_is_looked_up_is_what_the_store_holds(store: DocumentStore, remote: RemoteStore) -> None:
    assert len(remote) == 20
    assert remote.ids() == store.ids()
    assert remote.get(["doc-7", "doc-1", "doc-7"]) == store.get(["doc-7", "doc-1", "doc-7"])
    assert "doc-3" in remote
    assert "doc-33" not in remote
    assert remote.stats() == store.stats()
    of_both = [(s.metric, s.word_weight, s.dimension, s.index_kind, s.embedder.name) for s in (remote, store)]
    assert of_both[0] == of_both[1]
    assert np.array_equal(remote.embedder.embed_query(QUERY), store.embedder.embed_query(QUERY))
    texts = ["a baker", "a miller"]
    assert np.array_equal(remote.embedder.embed_documents(texts), store.embedder.embed_documents(texts))


def test_a_text_goes_over_the_wire_once_for_each_search(both: Both) -> None:
    asked = {"query": QUERY, "k": 5, "stages": 4}
    lines = httpx.post(f"{both[1].url}/v1/search", json=asked).text.splitlines()
    stages = [json.loads(line) for line in lines[1:]]
    assert len(stages) > 1
    texts = [new["doc_id"] for stage in stages for new in stage["new"]]
    assert sorted(texts) == sorted(set(texts)) == sorted({doc_id for stage in stages for doc_id in stage["ids"]})


def test_errors_of_a_search_are_those_of_the_store(store: DocumentStore, remote: RemoteStore, folder: Path) -> None:
    searches: list[Callable[[Any], object]] = [
        lambda s: s.search(" ", 2),
        lambda s: s.search("lone \ud800", 2),
        lambda s: s.search(QUERY, 0),
        lambda s: s.search(QUERY, 2, where={"colour": "red"}),
        lambda s: s.search(QUERY, 2, where={"number": "three"}),
        lambda s: s.search(QUERY, 2, where={"$nor": []}),
        lambda s: s.search(QUERY, 2, score_threshold="near"),
        lambda s: s.search_vector([1.0, 2.0], 2),
        lambda s: asyncio.run(all_of(s, QUERY, 2, stages=0)),
        lambda s: asyncio.run(all_of(s, QUERY, 2, stages=1001)),
        lambda s: asyncio.run(all_of(s, QUERY, 2, stages=[*np.linspace(0.0001, 1, 1001)])),
    ]
    for search in searches:
        with pytest.raises(RAGCacheError) as here:
            search(store)
        with pytest.raises(type(here.value)) as there:
            search(remote)
        assert str(there.value) == str(here.value)
    with pytest.raises(UnknownDocumentError, match="'doc-99' is not in http://"):
        remote.get(["doc-99"])
    with DocumentStore.create(folder.with_name("empty")) as empty, StoreService(empty) as service:
        with RemoteStore(service.url) as nothing:
            assert len(nothing) == 0
            with pytest.raises(EmptyStoreError):
                nothing.search(QUERY, 1)


def test_a_k_above_the_number_of_documents_returns_all_whatever_the_service_finds_at_most(remote: RemoteStore) -> None:
    assert len(remote.search(QUERY, 5000).documents) == 20


def test_a_filter_that_is_a_function_and_changes_are_refused_with_their_cures(remote: RemoteStore) -> None:
    with pytest.raises(ConfigError, match="the filter is a function, .* write it as an expression"):
        remote.search(QUERY, 2, where=lambda document: True)
    with pytest.raises(StoreError, match="is only read: change the store itself"):
        remote.put(make_documents(1))
    with pytest.raises(TooFewDocumentsError, match="21 documents were asked for, the store holds 20"):
        remote.check_k(21)


@pytest.mark.parametrize(
    "where",
    [
        FieldCondition("a", "eq", (1, "x")),
        FieldCondition("a", "is_empty"),
        FieldCondition("a", "ne", None),
        AllOf((Not(FieldCondition("a", "gt", 3)), AnyOf((FieldCondition("b", "all", ("x",)),)))),
        AllOf(()),
        Not(AnyOf((FieldCondition("a", "text_match", "x"), FieldCondition("b", "contains", True)))),
    ],
    ids=str,
)
def test_a_filter_means_the_same_when_it_was_written_and_read(where: Any) -> None:
    from ragcache_core.retrieval.filters import matches

    sent = parse_filter(json.loads(json.dumps(filter_as_mapping(where))))
    for a in ([1, "x"], 1, 4, None, "", "xy", [True]):
        for b in (["x"], "x", None, [True]):
            metadata = {"a": a, "b": b}
            assert matches(sent, metadata) == matches(where, metadata), metadata


def test_a_field_that_cannot_be_sent_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"a field that begins with \$ cannot be sent"):
        filter_as_mapping(FieldCondition("$a", "eq", 1))


def test_a_store_without_an_embedder_is_searched_by_vectors(folder: Path) -> None:
    rows = np.eye(4, dtype=np.float32)
    with DocumentStore.create(folder, embedder=PrecomputedEmbedder(), index="flat") as store:
        store.add([Document(f"{i}", f"text {i}") for i in range(4)], embeddings=rows)
        with StoreService(store) as service, RemoteStore(service.url) as remote:
            assert isinstance(remote.embedder, PrecomputedEmbedder)
            assert remote.search_vector(rows[2], 1).documents[0].doc_id == "2"
            with pytest.raises(ConfigError, match="this store has no embedder"):
                remote.search(QUERY, 1)


def test_one_store_serves_several_threads_and_loops(store: DocumentStore, remote: RemoteStore) -> None:
    expected = store.search(QUERY, 3)
    found: list[RetrievalUpdate] = []

    def ask() -> None:
        found.append(asyncio.run(all_of(remote, QUERY, 3))[-1])
        found.append(remote.search(QUERY, 3))

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [(u.documents, u.scores) for u in found] == [(expected.documents, expected.scores)] * 12


# Leaving early


def value(service: StoreService, series: str) -> float:
    text = httpx.get(f"{service.url}/metrics").text
    return float(next(line.split()[-1] for line in text.splitlines() if line.startswith(series)))


def test_closing_a_search_early_ends_it_in_the_service(folder: Path) -> None:
    embedder = Slow()
    with DocumentStore.create(folder, embedder=embedder, index="flat") as store:
        store.add(make_documents(20))
        with StoreService(store) as service, RemoteStore(service.url) as remote:
            embedder.may_go.clear()

            async def leave() -> None:
                async with aclosing(remote.search_staged(QUERY, 2)) as updates:
                    first = asyncio.ensure_future(anext(updates))
                    running = "ragcache_store_searches_running"
                    assert await asyncio.to_thread(until, lambda: value(service, running) == 1)
                    first.cancel()
                    await asyncio.gather(first, return_exceptions=True)

            asyncio.run(leave())
            assert until(lambda: value(service, 'ragcache_store_searches_total{outcome="cancelled"}') == 1)
            assert value(service, "ragcache_store_searches_running") == 0
            embedder.may_go.set()
            assert remote.search(QUERY, 2) == store.search(QUERY, 2)


def test_a_search_that_is_read_to_its_end_leaves_its_connection_to_the_next(remote: RemoteStore) -> None:
    def connections() -> set[int]:
        """Return the ports from which this process is connected to the service."""
        port = int(remote.url.rpartition(":")[2])
        return {c.laddr.port for c in psutil.Process().net_connections("tcp") if c.raddr and c.raddr.port == port}

    before = connections()
    for _ in range(3):
        remote.search(QUERY, 2)
        asyncio.run(all_of(remote, QUERY, 2))
    assert connections() == before


# The door


def test_a_wrong_key_is_refused_at_once_and_health_and_metrics_need_none(store: DocumentStore) -> None:
    with StoreService(store, api_key="right") as service:
        with pytest.raises(StoreAuthError, match="refused the API key: pass the service's api_key"):
            RemoteStore(service.url)
        with pytest.raises(StoreAuthError):
            RemoteStore(service.url, api_key="wrong")
        with RemoteStore(service.url, api_key="right") as remote:
            assert remote.search(QUERY, 2) == store.search(QUERY, 2)
        assert httpx.post(f"{service.url}/v1/search", json={"query": QUERY, "k": 2}).status_code == 401
        assert httpx.get(f"{service.url}/health").json() == {"status": "ok", "num_documents": 20, "generation": 1}
        assert value(service, 'ragcache_store_searches_total{outcome="done"}') == 1
        assert value(service, "ragcache_store_documents") == 20


def test_a_body_a_k_and_ids_beyond_the_limits_are_refused(store: DocumentStore) -> None:
    with StoreService(store, max_k=5, max_body_bytes=2000) as service, RemoteStore(service.url) as remote:
        with pytest.raises(SearchError, match="k is 6, this service finds at most 5: use a smaller k"):
            remote.search(QUERY, 6)
        with pytest.raises(SearchError, match="fetch_k is 6"):
            remote.search(QUERY, 2, mmr=MMR(6))
        with pytest.raises(SearchError, match="the request has more than 2000 bytes"):
            remote.search("x" * 3000, 2)
        ids = [f"{i}" for i in range(1001)]
        with pytest.raises(SearchError):
            remote.embedder.embed_documents(ids)  # more bytes than one request may have
        assert remote.search(QUERY, 5) == store.search(QUERY, 5)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "the request is no JSON"),
        (b"[]", "cannot be understood"),
        (b'{"query": "x"}', "k: Field required"),
        (b'{"query": "x", "k": true}', "k: Input should be a valid integer"),
        (b'{"query": "x", "k": 2, "filter": {}}', "filter: Extra inputs are not permitted"),
        (b'{"k": 2}', "neither a query nor a vector"),
        (b'{"query": "x", "k": 2, "where": {"town": {"$like": "A"}}}', "operator '\\$like'"),
        (b'{"query": "x", "k": 2, "mmr": {"lambda_mult": 3.0}}', "lambda_mult is 3.0"),
        (b'{"vector": [NaN], "k": 2}', "the query vector"),
        (b"[" * 100_000, "the request is no JSON"),
    ],
    ids=lambda given: given[:24] if isinstance(given, bytes) else "",
)
def test_a_request_that_cannot_be_understood_says_why(remote: RemoteStore, body: bytes, message: str) -> None:
    answer = httpx.post(f"{remote.url}/v1/search", content=body)
    assert answer.status_code == 400
    with pytest.raises(SearchError, match=message):
        raise SearchError(answer.json()["error"]["message"])


def test_more_searches_than_may_run_are_refused_and_asked_again(folder: Path) -> None:
    embedder = Slow()
    with DocumentStore.create(folder, embedder=embedder, index="flat") as store:
        store.add(make_documents(20))
        with StoreService(store, max_searches=1) as service, RemoteStore(service.url) as remote:
            embedder.may_go.clear()
            found: list[object] = []
            threads = [threading.Thread(target=lambda: found.append(remote.search(QUERY, 2))) for _ in range(2)]
            for thread in threads:
                thread.start()
            assert until(lambda: value(service, 'ragcache_store_searches_total{outcome="refused"}') >= 1)
            with (
                RemoteStore(service.url, timeout_s=0.3) as hasty,
                pytest.raises(StoreUnreachableError, match="ask again"),
            ):
                hasty.search(QUERY, 2)
            embedder.may_go.set()
            for thread in threads:
                thread.join()
            assert found == [store.search(QUERY, 2)] * 2


@pytest.mark.parametrize(
    ("route", "asked"), [("search", {"query": QUERY, "k": 2}), ("embed", {"texts": [QUERY]})], ids=["search", "embed"]
)
async def test_of_searches_that_come_at_once_no_more_run_than_may(
    folder: Path, route: str, asked: dict[str, Any]
) -> None:
    embedder = Slow()
    with DocumentStore.create(folder, embedder=embedder, index="flat") as store:
        store.add(make_documents(20))
        with StoreService(store, max_searches=2) as service:
            embedder.may_go.clear()
            async with httpx.AsyncClient() as client:
                url = f"{service.url}/v1/{route}"
                asking = [asyncio.create_task(client.post(url, json=asked)) for _ in range(12)]
                while sum(task.done() for task in asking) < 10:
                    await asyncio.wait(asking, timeout=1, return_when=asyncio.FIRST_COMPLETED)
                embedder.may_go.set()
                answers = await asyncio.gather(*asking)
    assert sorted(answer.status_code for answer in answers) == [200] * 2 + [503] * 10
    assert {answer.headers.get("retry-after") for answer in answers if answer.status_code == 503} == {"1"}


@pytest.mark.parametrize("before", [b"", b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"], ids=["first", "second"])
@pytest.mark.parametrize("sent", [b"G", b"GET /health HTT"])
def test_a_connection_that_sends_half_a_request_is_closed(
    remote: RemoteStore, monkeypatch: pytest.MonkeyPatch, before: bytes, sent: bytes
) -> None:
    monkeypatch.setattr("ragcache_core.runtime.connections.HEAD_S", 0.1)
    address = httpx.URL(remote.url)
    with socket.create_connection((address.host, address.port or 0), timeout=10) as half:
        half.sendall(before)
        answer = b""
        while before and b'"status":"ok"' not in answer:
            answer += half.recv(4096)
        half.sendall(sent)
        while half.recv(4096):  # until it is closed
            pass
    assert httpx.get(f"{remote.url}/health").status_code == 200


def test_a_large_filter_keeps_nobody_else_waiting_while_it_is_read(
    remote: RemoteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of a megabyte takes a second, in which the event loop would answer nobody."""
    readers: list[str] = []
    wanted = Snapshot.wanted

    def read(*args: Any) -> Any:
        readers.append(threading.current_thread().name)
        return wanted(*args)

    monkeypatch.setattr(Snapshot, "wanted", read)
    asked = {"query": QUERY, "k": 2, "where": {"$or": [{"n": i} for i in range(9)]}}
    assert httpx.post(f"{remote.url}/v1/search", json=asked).status_code in (200, 400)
    assert readers
    assert "ragcache-store-service" not in readers


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"port": -1}, "port is -1"),
        ({"host": "203.0.113.1"}, "port 0 of 203.0.113.1 cannot be used"),
        ({"max_k": 0}, "max_k is 0"),
        ({"max_searches": True}, "max_searches is True"),
        ({"search_timeout_s": 0}, "search_timeout_s is 0"),
        ({"refresh_s": float("inf")}, "refresh_s is inf"),
    ],
    ids=lambda given: next(iter(given)) if isinstance(given, dict) else "",
)
def test_a_service_that_cannot_work_is_refused(store: DocumentStore, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        StoreService(store, **settings)


def test_a_port_that_is_taken_is_said(store: DocumentStore) -> None:
    with StoreService(store) as service, pytest.raises(ConfigError, match="cannot be used .* choose another port"):
        StoreService(store, port=int(service.url.rpartition(":")[2]))


@pytest.mark.parametrize(
    ("url", "settings", "message"),
    [
        ("127.0.0.1:8100", {}, "give http://host:port"),
        ("http://", {}, "give http://host:port|no service"),
        ("http://127.0.0.1:1", {"timeout_s": 0}, "timeout_s is 0"),
        ("http://127.0.0.1:1", {"api_key": "naïve"}, "characters that HTTP cannot send"),
        ("http://127.0.0.1:1", {"api_key": b"key"}, "characters that HTTP cannot send"),
    ],
)
def test_an_address_that_cannot_work_is_refused(url: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(RAGCacheError, match=message):
        RemoteStore(url, **settings)


# Services that are gone, slow, or none


@contextmanager
def scripted(answer: Callable[[socket.socket, bytes], None]) -> Iterator[str]:
    """Serve each connection by a script that is given what came first."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            with connection, suppress(OSError):  # who asks may leave
                while request := connection.recv(65536):
                    answer(connection, request)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()


def http(body: bytes, *, length: int | None = None, status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\ncontent-length: {length or len(body)}\r\n\r\n".encode() + body


def hello(**other: Any) -> dict[str, Any]:
    stats = {"num_documents": 9, "dimension": 4, "embedder": "e", "index_kind": "flat", "index_layout": "flat"}
    stats |= {"metric": "l2", "generation": 1, "num_segments": 1, "num_bytes": 1}
    facts = {"stats": stats, "word_weight": 0.0, "embeds": True}
    return {"service": "ragcache-store", "protocol": 1, "ragcache": "9", "limits": {}, "store": facts} | other


def lines(*said: Any) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in said)


def failed(kind: str) -> dict[str, Any]:
    return {"error": {"type": kind, "message": "it failed"}}


NEW = {"doc_id": "a", "text": "A", "metadata": {}}
STAGE = {"stage": 0, "is_final": False, "ids": ["a"], "scores": [0.5], "new": [NEW]}


def after_hello(answer: bytes) -> Callable[[socket.socket, bytes], None]:
    def script(connection: socket.socket, request: bytes) -> None:
        connection.sendall(http(lines(hello())) if request.startswith(b"GET /v1/store") else answer)
        if not request.startswith(b"GET /v1/store"):
            connection.shutdown(socket.SHUT_RDWR)

    return script


def test_nothing_that_answers_is_said_after_a_moment() -> None:
    began_s = time.monotonic()
    with pytest.raises(StoreUnreachableError, match="no service of a store answers at http://127.0.0.1:1"):
        RemoteStore("http://127.0.0.1:1")
    assert 0.5 < time.monotonic() - began_s < 5


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        (
            http(b"<html>", status="404 Not Found"),
            StoreError,
            "is no service of a store .status 404.",
        ),
        (http(b"<html>"), StoreError, "says what no service"),
        (http(lines({"object": "list"})), StoreVersionError, "speaks protocol None"),
        (http(lines(hello(service="other"))), StoreError, "says what no service"),
        (
            http(lines(hello(protocol=2))),
            StoreVersionError,
            "ragcache 9. speaks protocol 2, .* the same version",
        ),
        (http(lines(hello(store={}))), StoreError, "says what no service"),
        (http(b"", status="307 Temporary Redirect"), StoreError, "is no service of a store .status 307."),
    ],
    ids=["404", "html", "other-json", "other-service", "newer", "no-facts", "redirect"],
)
def test_what_is_no_service_of_a_store_is_refused_at_the_door(answer: bytes, error: Any, message: str) -> None:
    with scripted(lambda connection, _: connection.sendall(answer)) as url, pytest.raises(error, match=message):
        RemoteStore(url)


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        (http(lines(hello(), STAGE), length=10_000), StoreUnreachableError, "is gone, the answer broke off"),
        (http(lines(hello(), STAGE)), StoreUnreachableError, "ended before its last stage"),
        (
            http(lines(hello(), STAGE, {"error": {"type": "StoreCorruptError", "message": "a file"}})),
            StoreError,
            "a file",
        ),
        (http(lines(hello(), STAGE, {"error": {"type": "SystemExit", "message": "no"}})), StoreError, "no"),
        (http(lines(hello(), STAGE, {**STAGE, "scores": []})), StoreError, "says what no service"),
        (http(lines(hello(), STAGE, {**STAGE, "ids": ["b"]})), StoreError, "says what no service"),
        (http(lines(hello(), STAGE) + b"\xff\n"), StoreError, "says what no service"),
        (http(lines(hello(), STAGE) + b"[" * 20_000 + b"\n"), StoreError, "says what no service"),
        (http(lines(hello(), STAGE, {**STAGE, "stage": float("inf")})), StoreError, "says what no service"),
        (http(lines(hello(), STAGE, {**STAGE, "scores": [10**400]})), StoreError, "says what no service"),
        (http(lines(hello(), STAGE, {**STAGE, "new": [{**NEW, "text": 5}]})), StoreError, "says what no service"),
        (http(lines(hello(), STAGE, {**STAGE, "new": [{**NEW, "metadata": [1]}]})), StoreError, "says what no service"),
    ],
    ids=[
        *("cut", "unfinished", "error", "strange-error", "scores", "unknown-id", "no-json"),
        *("deep", "infinite", "huge", "text", "metadata"),
    ],
)
def test_a_service_that_fails_amid_the_stages_fails_the_search_after_what_came(
    answer: bytes, error: Any, message: str
) -> None:
    async def search(remote: RemoteStore) -> list[RetrievalUpdate]:
        came = []
        with pytest.raises(error, match=message):
            async for update in remote.search_staged("x", 1):
                came.append(update)
        return came

    with scripted(after_hello(answer)) as url, RemoteStore(url) as remote:
        (came,) = asyncio.run(search(remote))
    assert came == RetrievalUpdate((Document("a", "A", {}),), (0.5,), 0, is_final=False)


def test_a_service_that_is_replaced_by_another_protocol_is_noticed() -> None:
    with scripted(after_hello(http(lines(hello(protocol=7), STAGE)))) as url, RemoteStore(url) as remote:
        with pytest.raises(StoreVersionError, match="speaks protocol 7"):
            remote.search("x", 1)


def test_a_service_that_says_nothing_is_given_up() -> None:
    def script(connection: socket.socket, request: bytes) -> None:
        if request.startswith(b"GET /v1/store"):
            connection.sendall(http(lines(hello())))

    with scripted(script) as url, RemoteStore(url, timeout_s=0.3) as remote:
        with pytest.raises(SearchTimeoutError, match="said nothing for 0.3 s: raise timeout_s"):
            remote.search("x", 1)


def test_a_search_that_takes_longer_than_a_service_allows_ends_there(folder: Path) -> None:
    embedder = Slow()
    with DocumentStore.create(folder, embedder=embedder, index="flat") as store:
        store.add(make_documents(20))
        with StoreService(store, search_timeout_s=0.2) as service, RemoteStore(service.url) as remote:
            embedder.may_go.clear()
            with pytest.raises(SearchTimeoutError, match="longer than the 0.2 s that this service allows"):
                remote.search(QUERY, 2)
            embedder.may_go.set()


def test_a_service_that_comes_back_is_asked_again(store: DocumentStore) -> None:
    with StoreService(store) as service:
        port, remote = int(service.url.rpartition(":")[2]), RemoteStore(service.url)
    with remote:
        again: list[StoreService] = []
        later = threading.Timer(0.3, lambda: again.append(StoreService(store, port=port)))
        later.start()
        try:
            assert remote.search(QUERY, 2) == store.search(QUERY, 2)
        finally:
            later.join()
            again[0].close()


def test_a_service_that_ends_lets_searches_end_for_a_while(folder: Path) -> None:
    embedder = Slow()
    with DocumentStore.create(folder, embedder=embedder, index="flat") as store:
        store.add(make_documents(20))
        with StoreService(store) as service, RemoteStore(service.url) as remote:
            embedder.may_go.clear()
            found: list[object] = []
            asking = threading.Thread(target=lambda: found.append(remote.search(QUERY, 2)))
            asking.start()
            assert until(lambda: value(service, "ragcache_store_searches_running") == 1)
            closing = threading.Thread(target=lambda: service.close(20))
            closing.start()
            time.sleep(0.3)  # the service drains, and a search that it cut would have failed by then
            embedder.may_go.set()
            asking.join()
            closing.join()
            assert found == [store.search(QUERY, 2)]
            with pytest.raises(StoreUnreachableError):
                remote.search(QUERY, 2)


def test_what_was_closed_and_what_was_forked_says_so(store: DocumentStore) -> None:
    with StoreService(store) as service:
        remote = RemoteStore(service.url)
        child = os.fork()
        if child == 0:
            try:
                remote.search(QUERY, 2)
            except StoreError as error:
                os._exit(0 if "connected to before a fork" in str(error) else 1)
            os._exit(2)
        assert os.waitpid(child, 0)[1] == 0
        remote.close()
        remote.close()
        with pytest.raises(StoreError, match="was closed: open it again"):
            remote.search(QUERY, 2)
        with pytest.raises(StoreError, match="was closed: open it again"):
            asyncio.run(all_of(remote, QUERY, 2))


# A store that changes


def test_what_another_writer_adds_is_found_and_a_search_keeps_its_state(folder: Path) -> None:
    with DocumentStore.create(folder, index="flat") as writer:
        writer.add(make_documents(20))
        with (
            DocumentStore.open(folder, read_only=True) as read,
            StoreService(read, refresh_s=0.05) as service,
            RemoteStore(service.url) as remote,
        ):

            async def search_over_a_change() -> list[RetrievalUpdate]:
                updates = []
                async with aclosing(remote.search_staged(QUERY, 2, stages=1)) as staged:
                    async for update in staged:
                        updates.append(update)
                        writer.delete(writer.ids()[:5])
                return updates

            before = writer.search(QUERY, 2)
            assert asyncio.run(search_over_a_change())[-1] == before
            assert until(lambda: value(service, "ragcache_store_documents") == 15)
            writer.add([Document("new", "Zebulon is the astronaut of Aro.", {"town": "Aro"})])
            assert until(lambda: remote.search("Zebulon", 1).documents[0].doc_id == "new")
            assert len(remote) == 16
            assert remote.search(QUERY, 5) == writer.search(QUERY, 5)


def test_a_store_that_takes_the_place_of_another_is_searched_then_and_a_broken_one_is_not(folder: Path) -> None:
    with DocumentStore.create(folder, index="flat") as store:
        store.add(make_documents(20))
    other = folder.with_name("other")
    with DocumentStore.create(other, index="flat") as store:
        store.add(make_documents(30, first=100))
    with (
        DocumentStore.open(folder, read_only=True) as read,
        StoreService(read, refresh_s=0.05) as service,
        RemoteStore(service.url) as remote,
    ):
        found = remote.search(QUERY, 3)
        (folder / "manifest.json").write_text("{")
        assert until(lambda: "stale_because" in httpx.get(f"{service.url}/health").json())
        assert remote.search(QUERY, 3) == found
        assert value(service, "ragcache_store_failed_refreshes_total") >= 1
        shutil.rmtree(folder)
        other.rename(folder)
        assert until(lambda: "stale_because" not in httpx.get(f"{service.url}/health").json())
        with DocumentStore.open(folder, read_only=True) as new:
            assert remote.search(QUERY, 3) == new.search(QUERY, 3)
            assert remote.ids() == new.ids()


def test_a_read_only_store_is_refreshed_and_one_to_write_has_no_news(folder: Path) -> None:
    with DocumentStore.create(folder, index="flat") as writer:
        writer.add(make_documents(20))
        with DocumentStore.open(folder, read_only=True, rebuild_index=True) as read:
            assert not read.refresh()
            writer.delete(["doc-0"])
            assert len(read) == 20
            assert read.refresh()
            assert len(read) == 19
            assert not read.refresh()
        assert not writer.refresh()


def test_a_service_takes_no_more_stages_than_it_can_hold(store: DocumentStore) -> None:
    with StoreService(store) as service:
        for stages in (10**8, 10**300, [*range(1, 5000)]):
            answer = httpx.post(
                f"{service.url}/v1/search", json={"query": QUERY, "k": 1, "stages": stages}, timeout=5.0
            )
            assert answer.status_code == 400
            assert "a search has at most 1000" in answer.text
            assert len(answer.content) < 500
