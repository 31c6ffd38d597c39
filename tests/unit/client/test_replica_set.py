"""Which replica of a fleet gets a request, and what is known of their load, whatever becomes of the requests."""

from __future__ import annotations

import gc
import json
import random
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import closing, suppress
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import quote

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragcache_core.client.fleet.replicas import HOME, ReplicaSet
from ragcache_core.client.http.attempt import NO_RETRY, Health
from ragcache_core.client.http.network import Blocking, Unblocked
from ragcache_core.client.http.routing import AsyncRoutedTransport
from ragcache_core.errors import EngineForkedError
from ragcache_core.routing.index import PathIndex
from tests.support.forks import in_a_fork

ANSWERS = ["said", "refused", "drained", "dead", "cut", "left", "interrupted"]


class FakeWatch:
    """A server that is alive whenever it is asked."""

    run = 1

    def health(self) -> Health:
        return Health.READY

    def request_health_check(self, run: int) -> None: ...

    def healthy_since(self, monotonic_s: float) -> bool:
        return True

    def stall_reason(self) -> str | None:
        return None


class NothingCached:
    def keep_in(self, index: PathIndex, lock: threading.Lock) -> None: ...

    def known_in(self, index: PathIndex) -> None: ...


def replica_set(num: int = 3) -> ReplicaSet:
    parts = SimpleNamespace(watch=FakeWatch(), cached_prefixes=NothingCached())
    engines = [SimpleNamespace(base_url=f"http://replica-{i}/v1", api_key="key", integration=parts) for i in range(num)]
    return ReplicaSet(cast("Any", engines), None)


def new_request(document: str = "a", **body: object) -> httpx.Request:
    named = {"ragcache": {"documents": [{"id": document, "start": 0}]}}
    asked = {"prompt": "Who?", "kv_transfer_params": named, **body}
    return httpx.Request("POST", f"{HOME}/v1/completions", content=json.dumps(asked))


def load(replicas: ReplicaSet) -> list[int]:
    return [replica.load.num_running for replica in replicas.all]


class Body(httpx.SyncByteStream):
    def __init__(self, error: BaseException | None) -> None:
        self._error = error

    def __iter__(self) -> Iterator[bytes]:
        yield b"one"
        if self._error is not None:
            raise self._error
        yield b"two"


class AsyncBody(httpx.AsyncByteStream):
    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield b"one"
        yield b"two"


class FakeServers(httpx.BaseTransport):
    """Answers as the request's ``user`` says."""

    def __init__(self, replicas: ReplicaSet) -> None:
        self._replicas = replicas

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        assert sum(load(self._replicas)) > 0
        how = json.loads(request.content)["user"]
        if how == "dead":
            raise httpx.ConnectError("refused")
        if how == "interrupted":
            raise KeyboardInterrupt
        error = httpx.ReadError("cut") if how == "cut" else None
        return httpx.Response({"refused": 400, "drained": 503}.get(how, 200), stream=Body(error))


def routed(replicas: ReplicaSet) -> Blocking:
    return Blocking(AsyncRoutedTransport(replicas, Unblocked(FakeServers(replicas))))


def ask(transport: Blocking, document: str, how: str) -> None:
    try:
        response = transport.handle_request(new_request(document, user=how))
    except (httpx.ConnectError, KeyboardInterrupt):
        return
    try:
        for _ in cast("httpx.SyncByteStream", response.stream):
            if how == "left":
                break
    except httpx.ReadError:
        assert how == "cut"
    finally:
        response.close()
        response.stream.close()  # type: ignore[union-attr]  # a blocking one


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from(ANSWERS)), max_size=20))
def test_however_requests_end_none_of_them_counts_afterwards(asked: list[tuple[str, str]]) -> None:
    replicas = replica_set()
    transport = routed(replicas)
    for document, how in asked:
        ask(transport, document, how)
        assert load(replicas) == [0, 0, 0]


@pytest.mark.parametrize("num_read", [0, 1, 2])
def test_an_answer_that_is_left_without_closing_it_does_not_count(num_read: int) -> None:
    replicas = replica_set()
    response = routed(replicas).handle_request(new_request(user="said"))
    parts = iter(cast("httpx.SyncByteStream", response.stream))
    assert next(parts) == b"one"  # as the transport above does before it hands an answer on
    for _ in range(num_read):
        next(parts, None)
    del parts, response
    gc.collect()
    assert load(replicas) == [0, 0, 0]


@pytest.mark.asyncio
async def test_an_asynchronous_answer_that_is_left_does_not_count() -> None:
    replicas = replica_set()
    inner = httpx.MockTransport(lambda _: httpx.Response(200, stream=AsyncBody()))
    response = await AsyncRoutedTransport(replicas, inner).handle_async_request(new_request())
    parts = aiter(cast("httpx.AsyncByteStream", response.stream))
    assert await anext(parts) == b"one"
    assert sum(load(replicas)) == 1
    await parts.aclose()  # type: ignore[attr-defined]  # as its event loop does with a generator that is left
    assert load(replicas) == [0, 0, 0]


def test_an_answer_that_is_collected_while_its_thread_counts_is_counted_afterwards() -> None:
    replicas = replica_set()
    sending = replicas.send(new_request())

    def collect() -> None:
        with replicas.known():
            sending.end()

    thread = threading.Thread(target=collect, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    assert load(replicas) == [0, 0, 0]


def test_requests_of_many_threads_are_counted_right() -> None:
    replicas = replica_set()
    transport = routed(replicas)
    least: list[int] = []

    def run(seed: int) -> None:
        chosen = random.Random(seed)
        for _ in range(60):
            ask(transport, chosen.choice("abcd"), chosen.choice([how for how in ANSWERS if how != "drained"]))
            least.append(min(load(replicas)))

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert min(least) >= 0
    assert load(replicas) == [0, 0, 0]


@given(st.lists(st.sampled_from("abcdef"), max_size=40), st.integers(1, 9))
def test_none_has_more_than_its_share_of_what_is_being_answered(documents: list[str], num: int) -> None:
    replicas = replica_set(num)
    for number, document in enumerate(documents, 1):
        replicas.send(new_request(document))
        assert max(load(replicas)) <= -(-1.25 * number // num)
    assert sum(load(replicas)) == len(documents)


def test_a_fork_chooses_none_and_waits_for_no_lock_of_its_parent() -> None:
    replicas = replica_set()

    def ask() -> None:
        with pytest.raises(EngineForkedError):
            replicas.send(new_request())

    with replicas._lock:  # as another thread of the parent may have it
        assert in_a_fork(ask)


def test_a_request_that_cannot_be_sent_counts_nowhere() -> None:
    replicas = replica_set()
    nameless = new_request()
    del nameless.headers["Host"]
    replicas.send(nameless).end()
    for replica in replicas.all:
        replica.name = "http://no\naddress"
    with pytest.raises(httpx.InvalidURL):
        replicas.send(new_request())
    assert load(replicas) == [0, 0, 0]


@pytest.mark.parametrize("error", [httpx.ConnectError("refused"), KeyboardInterrupt()])
def test_a_request_is_over_even_where_its_replica_cannot_be_looked_at(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    replicas = replica_set()
    sending = replicas.send(new_request())

    def request_health_check(_: FakeWatch, __: int) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(FakeWatch, "request_health_check", request_health_check)
    with suppress(RuntimeError):
        sending.failed(error)
    assert load(replicas) == [0, 0, 0]


@pytest.mark.parametrize("retry_after", ["1", "nan", "inf", "-1", "Wed, 21 Oct 2026 07:28:00 GMT", "", None])
def test_a_drained_replica_rests_whatever_it_says_of_how_long(retry_after: str | None) -> None:
    replicas = replica_set()
    sending = replicas.send(new_request())
    drained = str(sending.request.url.host)
    headers = {} if retry_after is None else {"Retry-After": retry_after}
    with pytest.raises(httpx.ConnectError):
        sending.answered(httpx.Response(503, headers=headers))
    sending.end()
    assert replicas.send(new_request()).request.url.host != drained


@pytest.mark.parametrize(("retry_after", "rest_s"), [("7", 7.0), (None, 2.0), ("1e9", 60.0)])
def test_after_as_long_as_it_said_a_drained_replica_gets_what_hashes_to_it(
    retry_after: str | None, rest_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 1000.0
    monkeypatch.setattr("ragcache_core.client.fleet.replicas.time", SimpleNamespace(monotonic=lambda: now_s))
    replicas = replica_set()
    sending = replicas.send(new_request())
    home = sending.request.url.host
    headers = {} if retry_after is None else {"Retry-After": retry_after}
    with pytest.raises(httpx.ConnectError):
        sending.answered(httpx.Response(503, headers=headers))
    sending.end()
    for wait_s, is_back in ((rest_s - 0.1, False), (0.2, True)):
        now_s += wait_s
        again = replicas.send(new_request())
        again.end()
        assert (again.request.url.host == home) is is_back


@pytest.mark.parametrize("status", [502, 503])
def test_a_replica_that_its_proxy_does_not_reach_is_left_for_another(status: int) -> None:
    replicas = replica_set(2)
    sending = replicas.send(new_request())
    with pytest.raises(httpx.ConnectError):
        sending.answered(httpx.Response(status))
    sending.end()
    other = replicas.send(new_request())
    assert other.request.url.host != sending.request.url.host
    other.answered(httpx.Response(status))  # no replica is left: it is the answer


def test_figures_are_asked_of_who_gave_the_rest_whatever_an_answer_is_called() -> None:
    replicas = replica_set(2)
    first = replicas.send(new_request(request_id="50% of a/b"))
    name = first.request.headers["X-Request-Id"]
    replicas.all[[replica.load.num_running for replica in replicas.all].index(1)].rest(60)
    first.end()
    rest = replicas.send(new_request(request_id=name))
    rest.end()
    url = f"{HOME}/v1/ragcache/requests/{quote('cmpl-' + name, safe='')}"
    asked = replicas.send(httpx.Request("GET", url)).request
    assert asked.url.host == rest.request.url.host != first.request.url.host
    assert asked.url.path.endswith("/cmpl-" + rest.request.headers["X-Request-Id"])


def test_what_a_proxy_gave_up_waiting_for_is_not_computed_by_another_too() -> None:
    replicas = replica_set(2)
    sending = replicas.send(new_request())
    sending.answered(httpx.Response(504))  # it is the answer: this replica may still be at it
    sending.end()
    assert replicas.send(new_request()).request.url.host == sending.request.url.host


def test_a_failed_single_try_marks_no_replica() -> None:
    replicas = replica_set(1)
    (replica,) = replicas.all
    replica.engine.integration.watch.healthy_since = lambda _: False  # type: ignore[method-assign, assignment]  # a fake
    once = httpx.Request("GET", f"{HOME}/v1/ragcache/stats", extensions=NO_RETRY)
    replicas.send(once).failed(httpx.ConnectTimeout("late"))
    assert replica.is_ready()
    replicas.send(new_request()).failed(httpx.ConnectTimeout("late"))
    assert not replica.is_ready()


@pytest.mark.parametrize("header", [None, "mine"])
def test_the_figures_of_an_answer_that_went_on_elsewhere_are_asked_of_who_gave_the_rest(header: str | None) -> None:
    replicas = replica_set(3)
    headers = {} if header is None else {"X-Request-Id": header}
    name = first = ""
    hosts = []
    for turn in range(3):  # as an answer that was cut twice is asked for
        request = new_request(request_id=name) if name else new_request()
        request.headers.update(headers)
        sending = replicas.send(request)
        name = sending.request.headers["X-Request-Id"]
        first = first or name
        hosts.append(sending.request.url.host)
        replicas.all[[replica.load.num_running for replica in replicas.all].index(1)].rest(60)
        sending.end()
        assert turn == 0 or name != first
    for replica in replicas.all:
        replica.rest(0)
    assert len(set(hosts)) == 3
    figures = replicas.send(httpx.Request("GET", f"{HOME}/v1/ragcache/requests/chatcmpl-{first}"))
    assert (figures.request.url.host, figures.request.url.path) == (hosts[-1], f"/v1/ragcache/requests/chatcmpl-{name}")


@pytest.mark.parametrize(
    ("said", "sent"),
    [("mine", "mine-r"), ("mine-r7", "mine-r7-r"), ("line\nbreak", ""), ("naïve", ""), (5, ""), ("", "")],
)
def test_a_request_keeps_the_id_that_its_body_names_where_a_header_can_hold_it(said: object, sent: str) -> None:
    replicas = replica_set()
    sending = replicas.send(new_request(request_id=said))
    name = sending.request.headers["X-Request-Id"]
    place = [replica.load.num_running for replica in replicas.all].index(1)
    assert name == f"{sent}{place}" if sent else len(name) == len(f"-r{place}") + 32
    figures = replicas.send(httpx.Request("GET", f"{HOME}/v1/ragcache/requests/cmpl-{name}"))
    assert figures.request.url.host == sending.request.url.host


def test_replicas_that_come_and_go_under_requests_leave_no_count_and_no_cached_path() -> None:
    replicas, spare = replica_set(2), replica_set(40)
    answering = httpx.MockTransport(lambda _: httpx.Response(200, stream=AsyncBody()))
    transport = Blocking(AsyncRoutedTransport(replicas, answering))
    errors: list[BaseException] = []
    stopped, has_paths = threading.Event(), threading.Event()

    def run(seed: int) -> None:
        chosen = random.Random(seed)
        try:
            while not stopped.is_set():
                named = {"ragcache": {"documents": [{"id": chosen.choice("abcd"), "start": 10, "end": 30}]}}
                request = new_request(prompt=[*range(40)], kv_transfer_params=named)
                with closing(transport.handle_request(request).stream) as stream:  # type: ignore[type-var]
                    if len(replicas.index):
                        has_paths.set()
                    assert [*cast("httpx.SyncByteStream", stream)] == [b"one", b"two"]
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    assert has_paths.wait(20)
    retired = []
    for each in spare.all:
        replicas.add(each.engine)
        retired.append(replicas.all[0])
        replicas.remove(replicas.all[0])
    stopped.set()
    for thread in threads:
        thread.join()
    assert errors == []
    assert [replica.load.num_running for replica in retired] == [0] * 40
    assert len({replica.number for replica in (*replicas.all, *retired)}) == 42
    for replica in retired:
        replicas.forget(replica)
    assert len(replicas.index) == 0
    assert load(replicas) == [0, 0]
