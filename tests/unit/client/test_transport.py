"""The retrying transports: what is sent again, when, and what is not. Both transports keep one contract."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Protocol

import httpx
import pytest

from ragcache_core.client.http.attempt import NO_RETRY, Health, RetryPolicy
from ragcache_core.client.http.resume import ResumeStreams
from ragcache_core.client.http.transport import AsyncRetryingTransport, RetryingTransport
from ragcache_core.errors import EngineClosedError, EngineDiedError, EngineForkedError, EngineHungError
from ragcache_core.wire import DEFAULTS_HEADER
from tests.support.forks import in_a_fork
from tests.support.greedy_server import PROMPT, GreedyServer

DEAD = b'{"error":{"message":"EngineCore encountered an issue. See stack trace","code":500}}'
Answer = Callable[[BaseHTTPRequestHandler], None]


def _reply(handler: BaseHTTPRequestHandler, status: int, body: bytes, kind: str = "application/json") -> None:
    handler.send_response(status)
    handler.send_header("content-type", kind)
    handler.send_header("content-length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


def engine_dead(handler: BaseHTTPRequestHandler) -> None:
    """Answer as vLLM's server does when its engine process is gone."""
    _reply(handler, 500, DEAD)


def engine_dead_in_stream(handler: BaseHTTPRequestHandler) -> None:
    """Answer a stream whose first event is the engine's death."""
    _reply(handler, 200, b"data: " + DEAD + b"\n\ndata: [DONE]\n\n", "text/event-stream")


def cut(handler: BaseHTTPRequestHandler) -> None:
    """Close the connection without an answer."""
    handler.connection.close()


def cut_in_the_middle(handler: BaseHTTPRequestHandler) -> None:
    """Promise more than is sent."""
    handler.send_response(200)
    handler.send_header("content-type", "text/event-stream")
    handler.send_header("content-length", "1000")
    handler.end_headers()
    handler.wfile.write(b"data: first\n\n")
    handler.wfile.flush()
    handler.connection.close()


def fine(handler: BaseHTTPRequestHandler) -> None:
    """Answer."""
    _reply(handler, 200, b"data: token\n\n", "text/event-stream")


def silent(handler: BaseHTTPRequestHandler) -> None:
    """Begin a stream, and send nothing until the client hangs up."""
    handler.send_response(200)
    handler.send_header("content-type", "text/event-stream")
    handler.end_headers()
    handler.wfile.flush()
    assert handler.connection.recv(1) == b"", "the client hangs up"


def greedy(text: str, end: str | None = None) -> Answer:
    """Return an answer that says the words of ``text`` after what the prompt holds of them, and breaks off at one."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        data = GreedyServer(tuple(text.split())).answer(json.loads(handler.server.last_body))  # type: ignore[attr-defined]
        handler.send_response(200)
        handler.send_header("content-type", "text/event-stream")
        handler.send_header("content-length", str(len(data)))
        handler.send_header(DEFAULTS_HEADER, "{}")
        handler.end_headers()
        handler.wfile.write(data if end is None else data[: data.index(end.encode())])
        handler.wfile.flush()

    return answer


def our_mistake(handler: BaseHTTPRequestHandler) -> None:
    """Answer with an ordinary server error."""
    _reply(handler, 500, b'{"error":{"message":"a bug"}}')


class FakeServer:
    """An HTTP server that gives the scripted answers one after the other, and keeps what it was asked."""

    def __init__(self) -> None:
        self.script: list[Answer] = []
        self.bodies: list[bytes] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                outer.bodies.append(self.rfile.read(int(self.headers["content-length"])))
                self.server.last_body = outer.bodies[-1]  # type: ignore[attr-defined]
                self.close_connection = True
                outer.script.pop(0)(self)

            def log_message(self, *args: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1/completions"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class FakeWatch:
    """A server's owner that restarts it (or finds it alive, or gives it up) as soon as it is suspected."""

    def __init__(self, finds: Health | str) -> None:
        self.finds = finds
        self.run = 1
        self.retry_timeout_s: float | None = None
        self.hang: str | None = None
        self.suspected: list[int] = []
        self._health = Health.READY
        self._alive = False

    def health(self) -> Health:
        return self._health

    def request_health_check(self, run: int) -> None:
        self.suspected.append(run)
        if self.finds == "restarts":
            self.run += 1
        elif self.finds == "is alive":
            self._alive = True
        else:
            self._health = Health.GONE

    def healthy_since(self, monotonic_s: float) -> bool:
        return self._alive

    def stall_reason(self) -> str | None:
        return self.hang

    def exit_reason(self) -> str:
        return "the engine died and stays dead"


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer()
    yield fake
    fake.close()


PLAIN = RetryPolicy()


class Ask(Protocol):
    def __call__(
        self,
        server: FakeServer,
        watch: FakeWatch | None,
        body: bytes = ...,
        policy: RetryPolicy = ...,
        timeout_s: float | None = ...,
    ) -> bytes: ...


def ask_blocking(
    server: FakeServer,
    watch: FakeWatch | None,
    body: bytes = b"prompt",
    policy: RetryPolicy = PLAIN,
    timeout_s: float | None = 5.0,
) -> bytes:
    with httpx.Client(transport=RetryingTransport(watch, policy=policy), timeout=timeout_s) as client:
        return client.post(server.url, content=body).raise_for_status().content


def ask_async(
    server: FakeServer,
    watch: FakeWatch | None,
    body: bytes = b"prompt",
    policy: RetryPolicy = PLAIN,
    timeout_s: float | None = 5.0,
) -> bytes:
    async def run() -> bytes:
        transport = AsyncRetryingTransport(watch, policy=policy)
        async with httpx.AsyncClient(transport=transport, timeout=timeout_s) as client:
            return (await client.post(server.url, content=body)).raise_for_status().content

    return asyncio.run(run())


both = pytest.mark.parametrize("ask", [ask_blocking, ask_async])


@both
@pytest.mark.parametrize("death", [engine_dead, engine_dead_in_stream, cut])
def test_a_request_before_its_first_token_is_sent_again_after_a_restart(
    server: FakeServer, ask: Ask, death: Answer
) -> None:
    server.script, watch = [death, fine], FakeWatch("restarts")
    assert ask(server, watch) == b"data: token\n\n"
    assert server.bodies == [b"prompt", b"prompt"]
    assert watch.suspected == [1]


@both
def test_a_broken_connection_to_a_living_server_is_tried_again(server: FakeServer, ask: Ask) -> None:
    server.script = [cut, fine]
    assert ask(server, FakeWatch("is alive")) == b"data: token\n\n"


@both
def test_a_server_that_keeps_breaking_is_not_asked_forever(server: FakeServer, ask: Ask) -> None:
    server.script = [cut] * 10
    with pytest.raises(httpx.RemoteProtocolError):
        ask(server, FakeWatch("is alive"))
    assert len(server.bodies) == 4


@both
def test_a_server_that_stays_dead_is_reported_with_its_reason(server: FakeServer, ask: Ask) -> None:
    server.script = [engine_dead]
    with pytest.raises(EngineDiedError, match="stays dead"):
        ask(server, FakeWatch("stays dead"))


@both
def test_nothing_is_sent_again_after_the_first_token(server: FakeServer, ask: Ask) -> None:
    server.script, watch = [cut_in_the_middle, fine], FakeWatch("restarts")
    with pytest.raises(httpx.RemoteProtocolError):
        ask(server, watch)
    assert len(server.bodies) == 1
    assert watch.suspected == []


@both
def test_an_ordinary_server_error_is_not_taken_for_a_death(server: FakeServer, ask: Ask) -> None:
    server.script, watch = [our_mistake], FakeWatch("restarts")
    with pytest.raises(httpx.HTTPStatusError):
        ask(server, watch)
    assert watch.suspected == []


GREEDY = json.dumps({"prompt": PROMPT, "stream": True, "temperature": 0}).encode()
SAMPLED = json.dumps({"prompt": PROMPT, "stream": True, "seed": 7}).encode()


def text_of(answer: bytes) -> str:
    events = [json.loads(line[6:]) for line in answer.decode().split("\n\n") if line.startswith("data: {")]
    return "".join(choice["text"] for event in events for choice in event["choices"])


@both
def test_a_greedy_answer_that_lost_its_engine_goes_on_where_it_was_cut(server: FakeServer, ask: Ask) -> None:
    words = ("the_first_of_many", "the_second_of_many", "the_third_of_many", "the_last")
    text, watch = " ".join(words), FakeWatch("restarts")
    server.script = [greedy(text, "the_third"), greedy(text, "the_last"), greedy(text)]
    answer = ask(server, watch, GREEDY)
    assert text_of(answer) == "".join(words)
    assert answer.endswith(b"data: [DONE]\n\n")
    assert [len(json.loads(body)["prompt"]) - len(PROMPT) for body in server.bodies] == [0, 1, 2]
    assert watch.suspected == [1, 2]


@both
def test_a_sampled_answer_continues_after_the_tokens_that_the_client_has(server: FakeServer, ask: Ask) -> None:
    server.script, watch = [greedy("one two three", "three"), greedy("one two else")], FakeWatch("restarts")
    assert text_of(ask(server, watch, SAMPLED)) == "onetwoelse"
    assert [json.loads(body)["prompt"] for body in server.bodies] == [PROMPT, [*PROMPT, 100, 101]]


@both
@pytest.mark.parametrize(("body", "which"), [(SAMPLED, "greedy"), (SAMPLED, "off"), (GREEDY, "off")])
def test_an_answer_fails_where_such_answers_may_not_continue(
    server: FakeServer, ask: Ask, body: bytes, which: ResumeStreams
) -> None:
    server.script = [greedy("one two three", "three"), fine]
    with pytest.raises(httpx.RemoteProtocolError):
        ask(server, FakeWatch("restarts"), body, RetryPolicy(resume_streams=which))
    assert server.bodies == [body]


@both
def test_a_server_that_refuses_the_rest_of_an_answer_is_reported(server: FakeServer, ask: Ask) -> None:
    server.script = [greedy("one two three", "three"), our_mistake]
    with pytest.raises(EngineDiedError, match="answered the continuation with status 500"):
        ask(server, FakeWatch("restarts"), GREEDY)


@both
def test_a_request_without_a_first_token_in_time_is_cancelled_and_sent_once_more(server: FakeServer, ask: Ask) -> None:
    server.script, watch = [silent, greedy("one two")], FakeWatch("is alive")
    assert text_of(ask(server, watch, GREEDY, RetryPolicy(first_token_timeout_s=0.1))) == "onetwo"
    assert len(server.bodies) == 2
    assert watch.suspected == [], "a slow engine is not dead"


@both
def test_a_whole_answer_has_no_first_token_to_wait_for(server: FakeServer, ask: Ask) -> None:
    def slow(handler: BaseHTTPRequestHandler) -> None:
        time.sleep(0.7)
        fine(handler)

    server.script = [slow]
    assert ask(server, FakeWatch("is alive"), b'{"stream":false}', RetryPolicy(first_token_timeout_s=0.1))
    assert len(server.bodies) == 1


@both
@pytest.mark.parametrize(("own_s", "is_repeated"), [(0.8, True), (0.4, False)])
def test_by_default_a_long_timeout_ends_in_one_more_try_and_a_short_one_in_its_error(
    server: FakeServer, ask: Ask, monkeypatch: pytest.MonkeyPatch, own_s: float, is_repeated: bool
) -> None:
    monkeypatch.setattr("ragcache_core.client.http.attempt._LONG_TIMEOUT_S", 0.6)
    monkeypatch.setattr("ragcache_core.client.http.attempt._BEFORE_TIMEOUT_S", 0.5)
    server.script, watch = [silent, greedy("one two")], FakeWatch("is alive")
    if is_repeated:
        assert text_of(ask(server, watch, GREEDY, timeout_s=own_s)) == "onetwo"
    else:
        with pytest.raises(httpx.ReadTimeout):
            ask(server, watch, GREEDY, timeout_s=own_s)
    assert len(server.bodies) == 1 + is_repeated
    assert watch.suspected == [], "a slow engine is not dead"


@both
def test_by_default_no_wait_ends_before_its_own_timeout(
    server: FakeServer, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ragcache_core.client.http.attempt._LONG_TIMEOUT_S", 0.1)
    monkeypatch.setattr("ragcache_core.client.http.attempt._BEFORE_TIMEOUT_S", 0.0)

    def queued(handler: BaseHTTPRequestHandler) -> None:
        time.sleep(0.7)
        greedy("one")(handler)

    server.script = [queued, queued]
    for own_s in (None, 5.0):
        assert text_of(ask(server, FakeWatch("is alive"), GREEDY, timeout_s=own_s)) == "one"
    assert len(server.bodies) == 2


class Hanging(FakeWatch):
    """Who knows that a server hangs, and may see it restarted."""

    def __init__(self, finds: Health | str) -> None:
        super().__init__(finds)
        self.retry_timeout_s = 0.2
        self.hang = "its worker is stopped"

    def request_health_check(self, run: int) -> None:
        self.suspected.append(run)
        if self.finds == "restarts":
            self.run, self.hang = self.run + 1, None


@both
def test_an_engine_that_hangs_is_reported_long_before_a_requests_own_timeout(server: FakeServer, ask: Ask) -> None:
    server.script = [silent]
    with pytest.raises(EngineHungError, match="its worker is stopped"):
        ask(server, Hanging("never"), GREEDY)


@both
def test_a_request_at_an_engine_that_hangs_is_sent_again_when_that_is_back(server: FakeServer, ask: Ask) -> None:
    server.script = [silent, greedy("one two")]
    assert text_of(ask(server, Hanging("restarts"), GREEDY)) == "onetwo"


@both
def test_an_answer_that_hangs_in_the_middle_goes_on_elsewhere_if_it_is_greedy(server: FakeServer, ask: Ask) -> None:
    def stuck(handler: BaseHTTPRequestHandler) -> None:
        data = GreedyServer(("one", "two")).answer(json.loads(GREEDY))
        handler.send_response(200)
        handler.send_header("content-type", "text/event-stream")
        handler.send_header(DEFAULTS_HEADER, "{}")
        handler.end_headers()
        handler.wfile.write(data[: data.index(b"two")])
        handler.wfile.flush()
        watch.hang = "its core is stopped"
        handler.connection.recv(1)

    watch = Hanging("restarts")
    watch.hang = None
    server.script = [stuck, greedy("one two")]
    assert text_of(ask(server, watch, GREEDY)) == "onetwo"
    server.script = [stuck]
    with pytest.raises(EngineHungError, match="its core is stopped"):
        ask(server, watch, GREEDY, RetryPolicy(resume_streams="off"))


class NeverBack(FakeWatch):
    """A server's owner whose restart takes forever."""

    def request_health_check(self, run: int) -> None:
        self.suspected.append(run)
        self._health = Health.RESTARTING


def test_waiting_for_a_restart_ends_with_the_requests_own_timeout(server: FakeServer) -> None:
    server.script, watch = [cut, cut], NeverBack("never")
    with (
        httpx.Client(transport=RetryingTransport(watch), timeout=0.2) as client,
        pytest.raises(httpx.ReadTimeout, match=r"did not answer again within 0\.2 s"),
    ):
        client.post(server.url, content=b"prompt")

    async def ask() -> None:
        async with httpx.AsyncClient(transport=AsyncRetryingTransport(watch), timeout=0.2) as client:
            await client.post(server.url, content=b"prompt")

    watch._health = Health.READY
    with pytest.raises(httpx.ReadTimeout):
        asyncio.run(ask())


@both
@pytest.mark.parametrize("retry_timeout_s", [None, 60.0])
def test_the_tokens_of_a_prompt_are_waited_for_as_long_as_its_completion(
    server: FakeServer, ask: Ask, retry_timeout_s: float | None
) -> None:
    """A large model takes longer to load again than its tokenizer may take to answer."""

    class BackAfterTheTimeout(NeverBack):
        began_s = 0.0
        retry_timeout_s: float | None = None

        def health(self) -> Health:
            if self.suspected and time.monotonic() > self.began_s + 1.2:
                self._health = Health.READY
                self._alive = True
            return super().health()

    watch = BackAfterTheTimeout("is back later")
    watch.began_s, watch.retry_timeout_s = time.monotonic(), retry_timeout_s
    server.url = server.url.replace("/v1/completions", "/v1/ragcache/prompt")
    server.script = [cut, fine]
    assert ask(server, watch, timeout_s=1.0) == b"data: token\n\n"
    assert len(server.bodies) == 2


@pytest.mark.parametrize("death", [engine_dead, engine_dead_in_stream, cut])
def test_a_request_with_one_try_neither_waits_nor_requests_a_health_check(server: FakeServer, death: Answer) -> None:
    server.script, watch = [death, death, fine, fine], FakeWatch("restarts")
    with (
        httpx.Client(transport=RetryingTransport(watch)) as client,
        pytest.raises(httpx.RemoteProtocolError),
    ):
        client.post(server.url, content=b"prompt", extensions=NO_RETRY)

    async def ask() -> None:
        async with httpx.AsyncClient(transport=AsyncRetryingTransport(watch)) as client:
            await client.post(server.url, content=b"prompt", extensions=NO_RETRY)

    with pytest.raises(httpx.RemoteProtocolError):
        asyncio.run(ask())
    assert len(server.bodies) == 2
    assert watch.suspected == []


@both
def test_without_an_owner_nothing_is_sent_again(server: FakeServer, ask: Ask) -> None:
    server.script = [cut, fine]
    with pytest.raises(httpx.RemoteProtocolError):
        ask(server, None)


def test_one_async_client_serves_several_event_loops(server: FakeServer) -> None:
    server.script = [fine, fine, fine]
    client = httpx.AsyncClient(transport=AsyncRetryingTransport())

    async def ask() -> int:
        return (await client.post(server.url, content=b"prompt")).status_code

    assert [asyncio.run(ask()) for _ in range(3)] == [200, 200, 200]
    asyncio.run(client.aclose())


@pytest.mark.parametrize("kind", [RetryingTransport, AsyncRetryingTransport])
def test_a_fork_sends_nothing_and_gets_the_reason(
    server: FakeServer, kind: type[RetryingTransport] | type[AsyncRetryingTransport]
) -> None:
    transport = kind()

    def ask() -> None:
        with pytest.raises(EngineForkedError, match="launch or connect in the process that asks"):
            if isinstance(transport, RetryingTransport):
                httpx.Client(transport=transport).post(server.url, content=b"prompt")
            else:
                asyncio.run(httpx.AsyncClient(transport=transport).post(server.url, content=b"prompt"))

    assert in_a_fork(ask)
    assert server.bodies == []


def test_blocking_requests_share_an_idle_connection() -> None:
    peers: list[object] = []

    class Echo(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # keeps its connections

        def do_POST(self) -> None:
            peers.append(self.client_address)
            _reply(self, 200, self.rfile.read(int(self.headers["content-length"])))

        def log_message(self, *args: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Echo) as server:
        serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        serving.start()
        with httpx.Client(transport=RetryingTransport(), base_url=f"http://127.0.0.1:{server.server_port}") as client:
            assert [client.post("/", content=body).content for body in (b"one", b"two")] == [b"one", b"two"]
        server.shutdown()
        serving.join()
    assert len(set(peers)) == 1


def test_a_closed_transport_reports_it(server: FakeServer) -> None:
    transport = RetryingTransport()
    transport.close()
    with pytest.raises(EngineClosedError, match="launch or connect again"):
        httpx.Client(transport=transport).post(server.url, content=b"prompt")


@pytest.mark.parametrize("kind", [RetryingTransport, AsyncRetryingTransport])
def test_a_request_waiting_for_a_dead_server_fails_when_the_transport_closes(
    server: FakeServer, kind: type[RetryingTransport] | type[AsyncRetryingTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = FakeWatch("is alive")
    transport = kind(watch)
    monkeypatch.setattr(watch, "request_health_check", lambda _: transport.close())  # and nothing finds it alive
    server.script = [cut]
    with pytest.raises(EngineClosedError, match="launch or connect again"):
        if isinstance(transport, RetryingTransport):
            httpx.Client(transport=transport).post(server.url, content=b"prompt")
        else:
            asyncio.run(httpx.AsyncClient(transport=transport).post(server.url, content=b"prompt"))
