"""A door that knows what the engine has cached, over real HTTP: it follows, loses and finds the server again."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from ragcache_core.client import Engine
from ragcache_core.client.ordering.cached_prefixes import CachedPrefixes
from ragcache_core.client.ordering.document_order import OrderingClient, RememberedOrders
from ragcache_core.errors import EngineForkedError
from ragcache_core.ordering import PathChange, static_prefix_digest
from ragcache_core.prompt import PromptLayout
from ragcache_core.routing.index import PathIndex
from ragcache_core.types import Document
from tests.support import waiting
from tests.support.cached_orders import all_cached
from tests.support.forks import in_a_fork
from tests.support.scripted_server import THREE_TIERS, ScriptedServer

P = b"p" * 16
A, B, C = (Document(name, f"The text of {name} is short, but it is there.") for name in "abc")


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ragcache_core.client.ordering.cached_prefixes._POLL_INTERVAL_S", 0.02)


class PathServer:
    """An HTTP server with one route, what an engine has cached, on a port that it may take again."""

    def __init__(self, port: int = 0, *, status: int = 200, answer: bytes | None = None) -> None:
        self.seen: list[str] = []
        self.num_connections = 0
        self.status = status
        self._answer = answer
        self._changes: list[PathChange] = []
        self._epoch = 0
        self._loop = asyncio.new_event_loop()
        self._socket = socket.create_server(("127.0.0.1", port))
        self.port = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def publish(self, **num_tokens: int) -> None:
        self._changes += [PathChange(P, tuple(path), n) for path, n in num_tokens.items()]

    def restart_engine(self) -> None:
        """Be as with an engine that was started again."""
        self._changes, self._epoch = [], self._epoch + 1

    def close(self) -> None:
        """End at once, with all connections. May be called again."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def _run(self) -> None:
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, sock=self._socket))
        self._loop.run_forever()
        self._loop.run_until_complete(self._end(server))
        self._loop.close()

    async def _end(self, server: asyncio.Server) -> None:
        server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0.01)  # the connections close

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while True:
                self.seen.append((await reader.readuntil(b"\r\n\r\n")).decode())
                body = self._body(self.seen[-1])
                head = f"HTTP/1.1 {self.status} So\r\nContent-Length: {len(body)}\r\n\r\n"
                writer.write(head.encode() + body)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    def _body(self, question: str) -> bytes:
        """Answer with one change after another: an answer is seldom all there is."""
        if self._answer is not None:
            return self._answer
        known = re.search(r"cursor=(\w+)\.(\d+)", question)
        is_reset = known is None or int(known[1]) != self._epoch
        start = 0 if is_reset or known is None else int(known[2])
        end = min(start + 1, len(self._changes))
        answer = all_cached(self._changes[start:end], cursor=f"{self._epoch}.{end}", is_reset=is_reset)
        return json.dumps({**answer, "is_complete": end == len(self._changes)}).encode()


class PathClient(OrderingClient):
    def __init__(self, base_url: str) -> None:
        self.cached = CachedPrefixes(base_url, "secret")
        super().__init__(self.cached, RememberedOrders())

    @property
    def is_current(self) -> bool:
        return self.cached.is_current

    def ids(self, *documents: Document, **settings: Any) -> str:
        arranged = self.arrange(documents, "cache_aware", prefix=P, **settings)
        assert arranged.is_reordered == (arranged.documents != documents)
        return "".join(d.doc_id for d in arranged.documents)


@contextmanager
def serving(*args: Any, **settings: Any) -> Iterator[PathServer]:
    server = PathServer(*args, **settings)
    try:
        yield server
    finally:
        server.close()


@contextmanager
def door_to(server: PathServer) -> Iterator[PathClient]:
    door = PathClient(server.base_url)
    try:
        yield door
    finally:
        door.cached.close()


def until(is_so: Callable[[], bool]) -> None:
    assert waiting.until(is_so), "it did not happen"


def mirror_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "ragcache-mirror"]


def test_no_server_is_polled_before_the_first_use() -> None:
    with serving() as server, door_to(server) as door:
        assert door.arrange([B, A], "retrieval").documents == (B, A)
        assert door.arrange([B, A], "canonical").documents == (A, B)
        time.sleep(0.05)  # a question would have come by now
        assert server.seen == []
        assert mirror_threads() == []


def test_documents_stay_as_they_are_until_the_cache_is_known_and_are_then_arranged() -> None:
    with serving() as server, door_to(server) as door:
        assert door.ids(A, B, C) == "abc"
        server.publish(b=50)  # only now: on a busy machine the answer may come before the first order
        until(lambda: door.ids(A, B, C) == "bac")
        assert door.ids(A, B, C, keep_first=True) == "abc"
        assert "authorization: bearer secret" in server.seen[0].lower()


def test_what_changes_is_followed() -> None:
    with serving() as server, door_to(server) as door:
        door.ids(A)
        until(lambda: door.is_current)
        server.publish(c=10, cb=20)
        until(lambda: door.ids(A, B, C) == "cba")
        server.publish(c=0, cb=0, b=5)
        until(lambda: door.ids(A, B, C) == "bac")


def test_a_waiting_query_gets_an_answer_with_the_latest_cached_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ragcache_core.client.ordering.cached_prefixes._POLL_INTERVAL_S", 60.0)
    with serving() as server, door_to(server) as door:
        for doc_id in "bc":
            server.publish(**{doc_id: 50, "x": 5})
            assert door.refresh()
            assert door.ids(A, B, C)[0] == doc_id
            server.publish(**{doc_id: 0})
        server.close()
        assert not door.refresh(timeout_s=0.05)
        door.cached.close()
        assert not door.refresh(timeout_s=0.05)


def test_of_several_engines_the_order_that_one_of_them_has_counts() -> None:
    """What the one has of `a` is no use to the other, which has `b` behind it: together they would be the longest."""
    first = [PathChange(P, ("a",), 40), PathChange(P, ("c",), 50)]
    second = [PathChange(P, ("a",), 0), PathChange(P, ("a", "b"), 90), PathChange(P, ("b",), 10)]
    answer = json.dumps(all_cached(first, second)).encode()
    with serving(answer=answer) as server, door_to(server) as door:
        until(lambda: door.ids(A, B, C) == "cab")
        assert door.ids(A, B) == "ab"
        assert door.ids(B, A) == "ab"


def test_what_an_engine_had_before_it_was_started_again_is_forgotten() -> None:
    with serving() as server, door_to(server) as door:
        server.publish(b=50)
        until(lambda: door.ids(A, B, C) == "bac")
        server.restart_engine()
        server.publish(c=10)
        until(lambda: door.ids(A, B, C) == "cab")


@pytest.mark.parametrize("is_known_before", [False, True])
def test_a_fleets_index_has_what_is_known_at_any_time(*, is_known_before: bool) -> None:
    index, lock = PathIndex(), threading.Lock()

    def found() -> tuple[int, list[int]]:
        with lock:
            known = door.cached.known_in(index) or ()
            longest = index.longest(sum(paths.bit for paths in known), ["b", "a"], prefix=P)
            return len(index), [each.num_tokens for each in longest]

    with serving() as server, door_to(server) as door:
        server.publish(b=50, c=10)
        if is_known_before:
            door.ids(A)
            until(lambda: door.is_current)
        door.cached.keep_in(index, lock)
        until(lambda: found() == (2, [50]))
        server.publish(ba=70, b=50, c=0)
        until(lambda: found() == (2, [70]))
        assert door.ids(A, B) == "ba", "and it is read as before"
        server.restart_engine()
        server.publish(a=20)
        until(lambda: found() == (1, [20]))
        door.cached.keep_in(PathIndex(), threading.Lock())
        assert found() == (0, []), "it belongs to the fleet that was made last"
        door.cached.keep_in(index, lock)
        server.close()
        until(lambda: found() == (0, []))


def test_a_lost_server_is_unknown_and_found_again_with_what_it_has_then() -> None:
    with serving() as server, door_to(server) as door:
        server.publish(b=50)
        door.ids(A, B)
        until(lambda: door.ids(A, B) == "ba")
        port = server.port
        server.close()
        until(lambda: not door.is_current)
        assert door.ids(A, B, C) == "abc"
        with serving(port) as again:
            again.publish(c=50)
            until(lambda: door.ids(A, B, C) == "cab")
            assert door.ids(A, B) == "ab", "what the first engine had is gone"


@pytest.mark.parametrize(("status", "word"), [(404, "start the server with"), (401, "refused the API key")])
def test_a_server_without_statistics_is_reported_once_and_not_polled(
    status: int, word: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), serving(status=status) as server, door_to(server) as door:
        for _ in range(3):
            assert door.ids(B, A) == "ba"
            until(lambda: word in caplog.text)
        time.sleep(0.2)  # longer than the first pause before it would ask again
        assert len(server.seen) == 1
        assert caplog.text.count("keep the order of retrieval") == 1


@pytest.mark.parametrize("status", [404, 401])
def test_a_server_that_reports_later_is_followed_then(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ragcache_core.client.ordering.cached_prefixes._LAST_PAUSE_S", 0.05)
    with serving(status=status) as server, door_to(server) as door:
        server.publish(b=50)
        assert door.ids(A, B) == "ab"
        until(lambda: len(server.seen) >= 2)
        server.status = 200
        until(lambda: door.ids(A, B) == "ba")


@pytest.mark.parametrize("changes", [[], [PathChange(P, ("a",), 40)]], ids=["empty", "changes"])
def test_a_copy_that_is_never_complete_is_asked_for_ever_more_slowly(changes: list[PathChange]) -> None:
    answer = json.dumps({**all_cached(changes), "is_complete": False}).encode()
    with serving(answer=answer) as server, door_to(server) as door:
        began_s = time.monotonic()
        door.ids(A)
        time.sleep(1.5)
        num_requests = len(server.seen)
        at_most = (time.monotonic() - began_s) / 0.01 / 2  # half of what the first pause alone would allow
        assert 2 <= num_requests <= at_most
        assert not door.is_current


@pytest.mark.parametrize(
    "answer",
    [
        b"not json",
        b"<html>",
        b"[]",
        b"[" * 100_000,
        b'{"version": 3}',
        b'{"version": ' + b"9" * 5000 + b"}",
        json.dumps({**all_cached([]), "engines": [[1, 2, 3]]}).encode(),
        json.dumps(all_cached(*[[]] * 1025)).encode(),
        json.dumps(all_cached([], cursor="1" * 40_000)).encode(),
        json.dumps(all_cached([], is_reset=False)).encode(),
        json.dumps(all_cached([PathChange(P, ("a",), 10**4000)])).encode(),
        json.dumps(all_cached([PathChange(P, ("a",), -1)])).encode(),
        json.dumps(all_cached([PathChange(P, ("a",), 1e308)])).encode(),  # type: ignore[arg-type]
        json.dumps(all_cached([PathChange(P, ("a",), float("inf"))])).encode(),  # type: ignore[arg-type]
        json.dumps(all_cached([PathChange(P, ("a",), float("nan"))])).encode(),  # type: ignore[arg-type]
        json.dumps(all_cached([PathChange(P, (1, None), 5)])).encode(),  # type: ignore[arg-type]
        json.dumps(all_cached([PathChange(b"p" * 10_000, ("a",), 5)])).encode(),
        json.dumps(all_cached([PathChange(P, ("x" * 1000,) * 30, 5)] * 10)).encode(),
    ],
    ids=lambda answer: answer[:60].decode(),
)
def test_what_cannot_be_read_is_not_taken_for_a_cache(answer: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ragcache_core.client.ordering.cached_prefixes._MAX_ANSWER_BYTES", 250_000)
    with serving(answer=answer) as server, door_to(server) as door:
        assert door.ids(B, A) == "ba"
        until(lambda: len(server.seen) >= 2)
        assert not door.is_current


def test_another_versions_words_are_not_followed(caplog: pytest.LogCaptureFixture) -> None:
    with serving(answer=b'{"version": 7}') as server, door_to(server) as door:
        door.ids(A)
        until(lambda: "version 7" in caplog.text)
        assert not door.is_current


def test_closing_ends_the_thread_at_once_and_nothing_starts_it_again() -> None:
    with serving() as server:
        door = PathClient(server.base_url)
        door.ids(A, B)
        until(lambda: door.is_current)
        assert len(mirror_threads()) == 1
        began_s = time.monotonic()
        door.cached.close()
        door.cached.close()
        assert time.monotonic() - began_s < 2.0
        assert mirror_threads() == []
        assert door.ids(B, A) == "ba"
        assert not door.is_current
        assert mirror_threads() == []
        num_questions = len(server.seen)
        time.sleep(0.1)  # five would have come by now
        assert len(server.seen) == num_questions


def test_many_threads_share_one_connection() -> None:
    with serving() as server, door_to(server) as door:
        server.publish(b=50)
        found: list[str] = []
        threads = [threading.Thread(target=lambda: found.append(door.ids(A, B))) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        until(lambda: door.is_current)
        assert len(found) == 16
        assert server.num_connections == 1


def test_a_fork_does_not_take_its_parents_knowledge_for_its_own() -> None:
    with serving() as server, door_to(server) as door:
        server.publish(b=50)
        door.ids(A, B)
        until(lambda: door.is_current)

        def ask() -> None:
            with pytest.raises(EngineForkedError):
                door.ids(A, B)

        assert in_a_fork(ask)
        assert door.ids(A, B) == "ba"


# What is asked afterwards says that it was reordered


@pytest.fixture
def engine(demo_model: str) -> Iterator[tuple[Engine, ScriptedServer]]:
    with ScriptedServer(root=demo_model, cache=THREE_TIERS) as server, Engine.connect(server.url) as connected:
        yield connected, server


def sent(server: ScriptedServer) -> dict[str, Any]:
    said: dict[str, Any] = server.requests[-1].body["kv_transfer_params"]["ragcache"]
    return said


@pytest.mark.parametrize("is_rendered", [True, False])
def test_a_request_about_reordered_documents_reports_it(
    engine: tuple[Engine, ScriptedServer], is_rendered: bool
) -> None:
    it, server = engine
    layout = PromptLayout()
    for documents, expected in (([C, A, B], True), ([A, B, C], None)):
        arranged = it.arrange_documents(documents, "canonical")
        assert arranged.duration_s < 1.0
        it.remember_documents(arranged.documents)
        if is_rendered:
            it.generate(layout.render(it.tokenizer, arranged.documents, "Who?"))
        else:
            it.generate(layout.messages(arranged.documents, "Who?"))
        assert [d["id"] for d in sent(server)["documents"]] == ["a", "b", "c"]
        assert sent(server).get("reordered") is expected


def test_the_static_part_of_a_prompt_is_the_same_whatever_stands_after_it(
    engine: tuple[Engine, ScriptedServer],
) -> None:
    it, _ = engine
    prompts = [PromptLayout().render(it.tokenizer, documents, "Who?") for documents in ([A, B], [C], [B, A])]
    digests = {static_prefix_digest(prompt.token_ids, prompt.segments) for prompt in prompts}
    assert len(digests) == 1
    other = PromptLayout(static_prefix="Say it in verse.").render(it.tokenizer, [A], "Who?")
    assert static_prefix_digest(other.token_ids, other.segments) not in digests


def test_plain_vllm_keeps_the_order_of_the_search(engine: tuple[Engine, ScriptedServer]) -> None:
    it, server = engine
    server.cache = None
    arranged = it.arrange_documents([B, A], "cache_aware")
    assert (arranged.documents, arranged.is_reordered) == ((B, A), False)
    until(lambda: "cached_paths" in server.cache_questions)
    assert it.generate("Who?").text


def test_orders_are_remembered_up_to_a_number() -> None:
    orders = RememberedOrders(capacity=2)
    for name in "abc":
        orders.add((name,))
    assert [(name,) in orders for name in "abc"] == [False, True, True]
    orders.discard(("c",))
    assert ("c",) not in orders
