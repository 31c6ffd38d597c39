"""A door that knows what the engine has cached, over real HTTP: it follows, loses and finds the server again."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager, suppress
from typing import Any

import pytest

from ragcache_core.client import Engine
from ragcache_core.client.ordering.cached_prefixes import CachedPrefixes
from ragcache_core.client.ordering.document_order import OrderingClient, RememberedOrders
from ragcache_core.ordering import PathChange, encode_delta, static_prefix_digest
from ragcache_core.prompt import PromptLayout
from ragcache_core.types import Document
from ragcache_core.vllm_plugin.server.prefix_feed import PrefixFeed
from tests.support import waiting
from tests.support.scripted_server import THREE_TIERS, ScriptedServer

P = b"p" * 16
A, B, C = (Document(name, f"The text of {name} is short, but it is there.") for name in "abc")


class FeedServer:
    """An HTTP server with one route, the engine's feed of cached paths, on a port that it may take again."""

    def __init__(self, port: int = 0, *, status: int = 200, lines: list[bytes] | None = None) -> None:
        self.feed = PrefixFeed(heartbeat_s=0.5)
        self.seen: list[str] = []
        self._status = status
        self._lines = lines
        self._loop = asyncio.new_event_loop()
        self._socket = socket.create_server(("127.0.0.1", port))
        self.port = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def tell(self, **num_tokens: int) -> None:
        self.feed.add([encode_delta(PathChange(P, tuple(path), n) for path, n in num_tokens.items())])

    def close(self) -> None:
        """End at once, with whoever is connected. May be called again."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def _run(self) -> None:
        server = self._loop.run_until_complete(asyncio.start_server(self._answer, sock=self._socket))
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

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            self.seen.append((await reader.readuntil(b"\r\n\r\n")).decode())
            if self._status != 200:
                writer.write(b"HTTP/1.1 %d No\r\nContent-Length: 0\r\n\r\n" % self._status)
                return
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            if self._lines is not None:
                for line in self._lines:
                    writer.write(b"%x\r\n%b\r\n" % (len(line), line))
                await asyncio.sleep(60)  # the connection stays, and is silent
            async with aclosing(self.feed.lines()) as lines:
                async for line in lines:
                    writer.write(b"%x\r\n%b\r\n" % (len(line), line))
                    await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


class Door(OrderingClient):
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
def serving(*args: Any, **settings: Any) -> Iterator[FeedServer]:
    server = FeedServer(*args, **settings)
    try:
        yield server
    finally:
        server.close()


@contextmanager
def door_to(server: FeedServer) -> Iterator[Door]:
    door = Door(server.base_url)
    try:
        yield door
    finally:
        door.cached.close()


def until(is_so: Callable[[], bool]) -> None:
    assert waiting.until(is_so), "it did not happen"


def mirror_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "ragcache-mirror"]


def test_nobody_is_asked_before_the_first_use() -> None:
    with serving() as server, door_to(server) as door:
        assert door.arrange([B, A], "retrieval").documents == (B, A)
        assert door.arrange([B, A], "canonical").documents == (A, B)
        time.sleep(0.05)  # a question would have come by now
        assert server.seen == []
        assert mirror_threads() == []


def test_documents_stay_as_they_are_until_the_cache_is_known_and_are_then_arranged() -> None:
    with serving() as server, door_to(server) as door:
        server.tell(b=50)
        assert door.ids(A, B, C) == "abc"
        until(lambda: door.is_current)
        assert door.ids(A, B, C) == "bac"
        assert door.ids(A, B, C, keep_first=True) == "abc"
        assert "authorization: bearer secret" in server.seen[0].lower()


def test_what_changes_is_followed() -> None:
    with serving() as server, door_to(server) as door:
        door.ids(A)
        until(lambda: door.is_current)
        server.tell(c=10, cb=20)
        until(lambda: door.ids(A, B, C) == "cba")
        server.tell(c=0, cb=0, b=5)
        until(lambda: door.ids(A, B, C) == "bac")


def test_a_lost_server_is_unknown_and_found_again_with_what_it_has_then() -> None:
    with serving() as server, door_to(server) as door:
        server.tell(b=50)
        door.ids(A, B)
        until(lambda: door.ids(A, B) == "ba")
        port = server.port
        server.close()
        until(lambda: not door.is_current)
        assert door.ids(A, B, C) == "abc"
        with serving(port) as again:
            again.tell(c=50)
            until(lambda: door.ids(A, B, C) == "cab")
            assert door.ids(A, B) == "ab", "what the first engine had is gone"


@pytest.mark.parametrize(("status", "word"), [(404, "start the server with"), (401, "refused the API key")])
def test_a_server_that_does_not_tell_is_said_once_and_left_alone(
    status: int, word: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), serving(status=status) as server, door_to(server) as door:
        for _ in range(3):
            assert door.ids(B, A) == "ba"
            until(lambda: word in caplog.text)
        time.sleep(0.2)  # longer than the first pause before it would ask again
        assert len(server.seen) == 1
        assert caplog.text.count("keep the order of retrieval") == 1


def test_a_server_that_is_not_ready_is_asked_again() -> None:
    with serving(status=503) as server, door_to(server) as door:
        assert door.ids(B, A) == "ba"
        until(lambda: len(server.seen) >= 2)
        assert not door.is_current


@pytest.mark.parametrize("line", [b"not json\n", b"[]\n", b'{"set": [[1, 2, 3]]}\n'])
def test_what_cannot_be_read_is_not_taken_for_a_cache(line: bytes) -> None:
    with serving(lines=[b'{"version":1,"reset":true,"set":[]}\n', line, b'{"ready":true}\n']) as server:
        with door_to(server) as door:
            assert door.ids(B, A) == "ba"
            until(lambda: len(server.seen) >= 2)
            assert not door.is_current


def test_another_versions_words_are_not_followed(caplog: pytest.LogCaptureFixture) -> None:
    with serving(lines=[b'{"version":7,"reset":true}\n', b'{"ready":true}\n']) as server, door_to(server) as door:
        door.ids(B, A)
        until(lambda: "version 7" in caplog.text)
        assert not door.is_current


def test_closing_ends_the_thread_at_once_and_nothing_starts_it_again() -> None:
    with serving() as server:
        door = Door(server.base_url)
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
        until(lambda: server.feed.num_readers == 0)


def test_many_threads_share_one_connection() -> None:
    with serving() as server, door_to(server) as door:
        server.tell(b=50)
        found: list[str] = []
        threads = [threading.Thread(target=lambda: found.append(door.ids(A, B))) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        until(lambda: door.is_current)
        assert len(found) == 16
        assert len(server.seen) == 1


def test_a_fork_does_not_take_its_parents_knowledge_for_its_own() -> None:
    with serving() as server, door_to(server) as door:
        server.tell(b=50)
        door.ids(A, B)
        until(lambda: door.is_current)
        child = os.fork()
        if child == 0:
            status = 1
            with suppress(BaseException):
                was_current, order = door.is_current, door.ids(A, B)
                until(lambda: door.ids(A, B) == "ba")
                status = 0 if (was_current, order) == (False, "ab") else 2
            os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert door.ids(A, B) == "ba"


def test_no_documents_are_arranged_as_none() -> None:
    with serving() as server, door_to(server) as door:
        door.ids()
        until(lambda: door.is_current)
        assert door.ids() == ""


# What is asked afterwards says that it was reordered


@pytest.fixture
def engine(demo_model: str) -> Iterator[tuple[Engine, ScriptedServer]]:
    with ScriptedServer(root=demo_model, cache=THREE_TIERS) as server, Engine.connect(server.url) as connected:
        yield connected, server


def sent(server: ScriptedServer) -> dict[str, Any]:
    said: dict[str, Any] = server.requests[-1].body["kv_transfer_params"]["ragcache"]
    return said


@pytest.mark.parametrize("is_rendered", [True, False])
def test_a_request_about_reordered_documents_says_so(engine: tuple[Engine, ScriptedServer], is_rendered: bool) -> None:
    it, server = engine
    layout = PromptLayout()
    for documents, expected in (([C, A, B], True), ([A, B, C], None)):
        arranged = it.arrange_documents(documents, "canonical")
        assert arranged.took_s < 1.0
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
