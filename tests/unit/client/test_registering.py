"""What a client sends to register documents, what it makes of the answers, and what a bound store sends."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from ragcache_core.client import Engine
from ragcache_core.client.registration import DocumentRegistrations
from ragcache_core.client.server_api import ServerAPI
from ragcache_core.errors import EngineError, EngineUnreachableError, RequestRejectedError
from ragcache_core.retrieval import DocumentStore
from ragcache_core.types import Document
from tests.conftest import DEMO_MODEL
from tests.support.scripted_server import THREE_TIERS, ScriptedServer
from tests.support.waiting import until

TEXT = "A text that is long enough to be registered."


class Server:
    """A server that registers what it is sent but documents called ``bad``, and remembers the requests."""

    def __init__(self, answer: Callable[[], httpx.Response] | None = None) -> None:
        self.asked: list[list[dict[str, Any]]] = []
        self.answer = answer
        self.epoch = "first"
        self._lock = threading.Lock()
        api = ServerAPI("http://engine/v1", "key", httpx.Client(transport=httpx.MockTransport(self._answer)))
        self.registrations = DocumentRegistrations(api)

    @property
    def sent(self) -> list[dict[str, Any]]:
        with self._lock:
            return [record for records in self.asked for record in records]

    def _answer(self, request: httpx.Request) -> httpx.Response:
        if self.answer is not None:
            return self.answer()
        assert request.url.path == "/v1/ragcache/documents/register"
        records = json.loads(request.content)["documents"]
        with self._lock:
            self.asked.append(records)
        said = [
            {"id": r["id"], "registered": False, "error": "it is bad"}
            if r["id"] == "bad"
            else {"id": r["id"], "registered": True, **({"warning": "look"} if r["id"] == "odd" else {})}
            for r in records
        ]
        return httpx.Response(200, json={"documents": said, "epoch": self.epoch})


def documents(*names: str) -> list[Document]:
    return [Document(name, f"{TEXT} {name}") for name in names]


def test_documents_are_sent_in_bounded_requests_and_the_receipts_are_added() -> None:
    server, done = Server(), list[int]()
    many = documents(*(f"d{i}" for i in range(600)), "bad", "odd")
    long = [Document(f"long{i}", "x" * (1 << 20)) for i in range(3)]
    receipt = server.registrations.register([*many, *long], progress=done.append)
    assert receipt.num_registered == 604
    assert receipt.errors == {"bad": "it is bad"}
    assert receipt.warnings == {"odd": "look"}
    assert sum(done) == 605
    assert all(len(each) <= 256 and sum(len(r["text"]) for r in each) <= 2 << 20 for each in server.asked)


def test_access_groups_are_sent_and_nothing_where_there_are_none() -> None:
    server = Server()
    server.registrations.register([Document("a", TEXT, acl=["hr"]), Document("b", TEXT)])
    assert server.sent == [{"id": "a", "text": TEXT, "acl": ["hr"]}, {"id": "b", "text": TEXT}]


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (lambda: httpx.Response(404, json={"detail": "Not Found"}), RequestRejectedError),
        (lambda: httpx.Response(200, json={"documents": 3}), EngineError),
        (lambda: httpx.Response(200, text="no JSON"), EngineError),
    ],
)
def test_a_server_that_registers_nothing_is_an_error(
    answer: Callable[[], httpx.Response], error: type[Exception]
) -> None:
    with pytest.raises(error):
        Server(answer).registrations.register(documents("a"))


def test_in_the_background_each_text_is_sent_once_and_again_when_it_has_changed_or_was_forgotten() -> None:
    server = Server()
    for _ in range(3):
        server.registrations.register_in_background(documents("a", "b"))
        assert until(lambda: len(server.sent) == 2, 10)
    server.registrations.register_in_background([Document("a", f"{TEXT} changed")])
    assert until(lambda: len(server.sent) == 3, 10)
    server.registrations.forget(["b"])
    server.registrations.register_in_background(documents("b"))
    assert until(lambda: len(server.sent) == 4, 10)
    server.registrations.close()
    server.registrations.register_in_background(documents("c"))
    assert len(server.sent) == 4
    assert not any(thread.name == "ragcache-register" for thread in threading.enumerate())


def test_a_failure_in_the_background_is_logged_once_and_sent_again_when_given_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail() -> httpx.Response:
        raise httpx.ConnectError("no server")

    server = Server(fail)
    with caplog.at_level(logging.WARNING), pytest.raises(EngineUnreachableError):
        server.registrations.register(documents("a"))
    for name in ("a", "b"):
        server.registrations.register_in_background(documents(name))
    assert until(lambda: "RC-NOT-REGISTERED" in caplog.text, 10)
    server.answer = None
    server.registrations.register_in_background(documents("a"))
    assert until(lambda: [record["id"] for record in server.sent][-1:] == ["a"], 10)
    server.registrations.close()
    assert caplog.text.count("RC-NOT-REGISTERED") == 1


def test_a_bound_store_registers_what_it_holds_and_what_is_stored_later(tmp_path: Path) -> None:
    class Engine:
        def __init__(self) -> None:
            self.told: list[tuple[str, list[str]]] = []

        def forget(self, doc_ids: Any) -> None:
            self.told.append(("forget", sorted(doc_ids)))

        def warm(self, documents: Any, prompt: Any = None) -> None:
            raise AssertionError("it was not to warm")

        def register_in_background(self, documents: Any) -> None:
            self.told.append(("register", sorted(document.doc_id for document in documents)))

    with DocumentStore.create(tmp_path / "store") as store:
        store.add(documents("a", "b"))
        engine, other = Engine(), Engine()
        store.bind(engine, register=True)
        store.bind(other)
        store.add(documents("c"))
        store.put([Document("a", f"{TEXT} changed")])
        store.delete(["b"])
    changes = [("register", ["a", "b"]), ("register", ["c"]), ("forget", ["a"]), ("register", ["a"]), ("forget", ["b"])]
    assert engine.told == changes
    assert other.told == [each for each in changes if each[0] == "forget"]


def test_what_retrievers_return_is_registered_once_the_client_registers_documents() -> None:
    with ScriptedServer(api_key="secret", root=str(DEMO_MODEL), cache=dict(THREE_TIERS)) as server:
        server.cache_answers["documents/register"] = {"documents": [{"id": "a", "registered": True}]}
        with Engine.connect(server.url, api_key="secret") as engine:
            engine.remember_documents(documents("b"))
            engine.register(documents("a"))
            engine.remember_documents(documents("a", "c"))
            assert until(lambda: len(sent_to(server)) == 2, 10)
            assert sent_to(server) == [["a"], ["c"]]


def sent_to(server: ScriptedServer) -> list[list[str]]:
    """Return the ids of each registration that a server got."""
    acts = [body for action, body in server.cache_requests if action == "documents/register"]
    return [[record["id"] for record in body["documents"]] for body in acts]


def test_a_server_that_has_lost_its_registrations_gets_them_again(caplog: pytest.LogCaptureFixture) -> None:
    server = Server()
    server.registrations.register(documents("a", "b"))
    for epoch in ("first", None, "first"):
        server.registrations.saw(epoch)
        server.registrations.register_in_background(documents("a"))
    server.epoch = "second"
    server.registrations.saw("second")
    server.registrations.saw("second")
    server.registrations.register_in_background(documents("a"))
    assert until(lambda: len(server.sent) == 3)
    server.registrations.saw("first")  # of another replica, which has them
    server.registrations.register_in_background(documents("a"))
    server.registrations.close()
    assert len(server.sent) == 3
    assert [record.getMessage()[:21] for record in caplog.records] == ["RC-REGISTRATIONS-GONE"]


def test_the_statistics_of_an_answer_report_a_lost_registry() -> None:
    with ScriptedServer(cache=THREE_TIERS, root=str(DEMO_MODEL)) as server, Engine.connect(server.url) as engine:
        seen: list[str | None] = []
        engine._cache_stats._on_epoch = seen.append
        engine.generate("Who?", max_tokens=2)
        server.epoch = "another"
        engine.generate("Who?", max_tokens=2)
        assert seen == [None, "another"]
