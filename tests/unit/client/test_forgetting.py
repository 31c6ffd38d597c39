"""What a client asks of a server to forget documents, and what it makes of the answers."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from ragcache_core.client.cache import DocumentRoutes
from ragcache_core.client.server_api import ServerAPI
from ragcache_core.errors import ConfigError, EngineError, EngineUnreachableError, RequestRejectedError
from ragcache_core.stats import ForgetReceipt
from ragcache_core.wire import MAX_DOC_ID_CHARS, MAX_DOCUMENTS

RECEIPT = ForgetReceipt(
    forgotten=("a",),
    unknown=("b",),
    num_paths=2,
    num_variants=1,
    num_blocks={"gpu": 3, "disk": 4},
    num_bytes={"gpu": 300, "disk": 400},
    num_requests=1,
    num_pending=2,
    problems=("the disk tier is out of service",),
    duration_s=0.5,
)


class Server:
    """A server's answers, and what it was asked."""

    def __init__(self, status: int = 200, body: Any = None, error: Exception | None = None) -> None:
        self.asked: list[tuple[str, dict[str, Any], str]] = []
        self._status, self._body, self._error = status, RECEIPT.to_dict() if body is None else body, error
        transport = httpx.MockTransport(self._answer)
        http, http_async = httpx.Client(transport=transport), httpx.AsyncClient(transport=transport)
        self.routes = DocumentRoutes(ServerAPI("http://engine/v1", "key", http, http_async))

    def _answer(self, request: httpx.Request) -> httpx.Response:
        if self._error is not None:
            raise self._error
        self.asked.append((request.url.path, json.loads(request.content), request.headers["authorization"]))
        return httpx.Response(self._status, json=self._body)


def test_ids_are_sent_once_each_and_the_receipt_is_read() -> None:
    for is_async in (False, True):
        server = Server()
        asked = ["a", "b", "a"]
        receipt = asyncio.run(server.routes.aforget(asked, 5)) if is_async else server.routes.forget(asked, 5)
        assert receipt == RECEIPT
        assert not receipt.is_complete
        assert server.asked == [("/v1/ragcache/documents/forget", {"ids": ["a", "b"], "wait_s": 5}, "Bearer key")]


def test_more_ids_than_the_limit_are_sent_in_several_requests_with_added_receipts() -> None:
    server = Server()
    receipt = server.routes.forget([str(i) for i in range(MAX_DOCUMENTS + 1)], 0)
    assert [len(body["ids"]) for _, body, _ in server.asked] == [MAX_DOCUMENTS, 1]
    assert receipt.num_blocks == {"gpu": 6, "disk": 8}
    assert (receipt.num_paths, receipt.num_variants, receipt.duration_s) == (4, 2, 1.0)
    assert (receipt.num_requests, receipt.num_pending) == (1, 2), "of what is left now"


@pytest.mark.parametrize("ids", ["a", [""], ["x" * (MAX_DOC_ID_CHARS + 1)], ["half \ud800"], [1], [None]])
def test_what_is_no_id_is_refused_before_anything_is_sent(ids: Any) -> None:
    server = Server()
    with pytest.raises(ConfigError, match="ids"):
        server.routes.forget(ids, 1)
    assert server.asked == []


@pytest.mark.parametrize(
    ("server", "error", "said"),
    [
        (Server(404, {"detail": "Not Found"}), RequestRejectedError, "without RAGCache"),
        (Server(409, {"error": {"message": "this model's groups"}}), RequestRejectedError, "this model's groups"),
        (Server(401, {"error": "Unauthorized"}), EngineError, "401"),
        (Server(500, {}), EngineError, "500"),
        (Server(200, {"num_paths": "many"}), EngineError, "same version"),
        (Server(200, ["no receipt"]), EngineError, "same version"),
        (Server(error=httpx.ConnectError("refused")), EngineUnreachableError, "no engine answers"),
    ],
)
def test_what_goes_wrong_is_reported(server: Server, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        server.routes.forget(["a"], 1)
    with pytest.raises(error, match=said):
        asyncio.run(server.routes.aforget(["a"], 1))


class Answers:
    """A cache of answers that notes what it dropped."""

    def __init__(self) -> None:
        self.dropped: list[str] = []

    def forget(self, doc_ids: list[str]) -> None:
        self.dropped += doc_ids


def test_caches_of_answers_forget_as_well_whatever_the_engine_says() -> None:
    answers = Answers()
    for server in (Server(), Server(error=httpx.ConnectError("gone"))):
        server.routes.answer_caches.add(answers)
    Server().routes.forget(["other"], 5)
    with pytest.raises(EngineUnreachableError):
        server.routes.forget(["a", "b", "a"], 5)
    with pytest.raises(EngineUnreachableError):
        asyncio.run(server.routes.aforget(["c"], 5))
    assert answers.dropped == ["a", "b", "c"]


def test_a_cache_of_answers_that_is_gone_is_not_kept() -> None:
    routes, answers = Server().routes, Answers()
    routes.answer_caches.add(answers)
    del answers
    assert not routes.answer_caches
