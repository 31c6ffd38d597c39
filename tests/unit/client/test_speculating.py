"""Speculations: captured from the code that will ask, buffered, joined once, and gone without a trace otherwise."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import openai
import pytest
from langchain_core.messages import HumanMessage
from llama_index.core.llms import ChatMessage

from ragcache_core.client import Engine
from ragcache_core.client.http.buffered_response import BufferedResponse
from ragcache_core.client.http.routing import BackgroundLoop
from ragcache_core.client.speculation import speculation as speculating
from ragcache_core.client.speculation.client import EngineLoad
from ragcache_core.client.speculation.request_capture import request_scope
from ragcache_core.client.speculation.speculation import Speculation, receive
from ragcache_core.errors import ConfigError, EngineClosedError, EngineDiedError, EngineError, EngineForkedError
from ragcache_core.prompt import PromptLayout
from ragcache_core.types import Document
from ragcache_integrations.langchain import ChatRAGCache
from ragcache_integrations.llamaindex import RAGCacheLLM
from tests.support import scripted_server
from tests.support.asking_ahead import speculate, warm
from tests.support.forks import in_a_fork
from tests.support.scripted_server import ENGINE_DEAD, IDLE, Refusal, Reply, ScriptedServer, rest_of
from tests.support.waiting import until

MODEL = "examples/demo_model"
ASKED: Any = [{"role": "user", "content": "Who founded Zorval?"}]
SLOW = Reply("one two three four", wait_s=0.2, token_wait_s=0.02)
NEVER = Reply("never", wait_s=60.0)


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer(root=MODEL, load=IDLE) as server:
        yield server


def done(speculation: Speculation) -> bool:
    return until(lambda: speculation.is_done)


def threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "ragcache-speculation"]


# The four libraries that ask. Each entry: ask for text, and begin the same request (for a rehearsal).


def of_the_engine(engine: Engine) -> str:
    return engine.generate(ASKED, max_tokens=8).text


def of_the_engine_in_a_loop(engine: Engine) -> str:
    return asyncio.run(engine.agenerate(ASKED, max_tokens=8)).text


def of_the_sdk(engine: Engine) -> str:
    client = openai.OpenAI(base_url=engine.base_url, api_key=engine.api_key, http_client=engine.http_client())
    answer = client.chat.completions.create(model=engine.model, messages=ASKED)
    return answer.choices[0].message.content or ""


def of_the_sdk_in_a_loop(engine: Engine) -> str:
    client = openai.AsyncOpenAI(
        base_url=engine.base_url, api_key=engine.api_key, http_client=engine.http_async_client()
    )
    answer = asyncio.run(client.chat.completions.create(model=engine.model, messages=ASKED))
    return answer.choices[0].message.content or ""


def of_langchain(engine: Engine) -> str:
    return str(ChatRAGCache(engine=engine).invoke("Who founded Zorval?").content)


def of_llamaindex(engine: Engine) -> str:
    return RAGCacheLLM(engine=engine).chat([ChatMessage("Who founded Zorval?")]).message.content or ""


def engine_stream(engine: Engine) -> str:
    return "".join(chunk.text for chunk in engine.stream(ASKED, max_tokens=8))


def langchain_inside(engine: Engine) -> object:
    return ChatRAGCache(engine=engine)._generate([HumanMessage("Who founded Zorval?")])


def llamaindex_inside(engine: Engine) -> object:
    return RAGCacheLLM(engine=engine)._chat([ChatMessage("Who founded Zorval?")])


WAYS = [
    (of_the_engine, of_the_engine),
    (of_the_engine, of_the_engine_in_a_loop),
    (of_the_sdk, of_the_sdk),
    (of_the_sdk, of_the_sdk_in_a_loop),
    (langchain_inside, of_langchain),
    (llamaindex_inside, of_llamaindex),
]
ways = pytest.mark.parametrize(("rehearsed", "ask"), WAYS, ids=lambda way: way.__name__)
sent_unconditionally = pytest.mark.parametrize("ask", [of_the_engine, of_the_engine_in_a_loop])


@ways
def test_the_real_request_joins_the_speculation_and_the_engine_is_called_once(
    server: ScriptedServer, engine: Engine, rehearsed: Callable[[Engine], object], ask: Callable[[Engine], str]
) -> None:
    server.script(SLOW)
    speculation = speculate(engine, lambda: rehearsed(engine))
    assert until(lambda: server.num_running == 1)
    assert ask(engine) == "one two three four"
    assert [r.speculation for r in server.requests] == [speculation.id]
    assert until(lambda: server.confirmed == [speculation.id])
    assert until(lambda: speculation.is_done)  # its reader may be a moment later than the request that joined it
    assert not speculation.is_failed
    server.script(Reply("alone"))
    assert ask(engine) == "alone"


@ways
def test_a_finished_speculation_is_joined_as_a_whole(
    server: ScriptedServer, engine: Engine, rehearsed: Callable[[Engine], object], ask: Callable[[Engine], str]
) -> None:
    server.script(Reply("short"))
    assert done(speculate(engine, lambda: rehearsed(engine)))
    assert ask(engine) == "short"
    assert len(server.requests) == 1
    assert server.aborted == []


def test_a_rehearsal_sends_nothing_and_captures_what_would_have_been_sent(
    server: ScriptedServer, engine: Engine
) -> None:
    captured = engine.integration.speculation.capture_request(lambda: of_langchain(engine))
    assert server.requests == []
    server.script(Reply("yes"))
    of_langchain(engine)
    assert httpx.Response(200, content=captured.body).json() == server.requests[0].body
    assert captured.url == f"{engine.base_url}/chat/completions"


def test_a_speculation_asks_what_the_request_asks_and_reports_what_it_is(
    server: ScriptedServer, engine: Engine
) -> None:
    layout, documents = PromptLayout(), [Document("zorval", "Zorval was founded by Anna.")]
    prompt = layout.render(engine.tokenizer, documents, "Who?")
    assert done(speculate(engine, lambda: engine.generate(prompt)))
    engine.generate([*ASKED, {"role": "user", "content": "Other"}])
    assert done(speculate(engine, lambda: of_the_sdk(engine)))
    [first, _, plain] = server.requests
    assert [d["id"] for d in first.documents] == ["zorval"]
    assert first.body["prompt"] == list(prompt.token_ids)
    assert plain.kv_transfer_params == {"ragcache": {"version": 1, "documents": [], "speculation": plain.speculation}}


def test_a_rehearsal_lets_other_questions_pass(server: ScriptedServer, engine: Engine) -> None:
    seen: list[int] = []

    def ask() -> None:
        seen.append(engine.http_client().get(f"{engine.base_url}/models").status_code)
        of_the_engine(engine)

    assert engine.integration.speculation.capture_request(ask).url.endswith("/chat/completions")
    assert seen == [200]


def test_code_that_hides_every_exception_is_rehearsed_all_the_same(engine: Engine) -> None:
    def hides() -> None:
        try:
            of_the_engine(engine)
        except BaseException as error:
            raise ValueError("something went wrong") from error

    assert engine.integration.speculation.capture_request(hides).url.endswith("/chat/completions")


def test_a_rehearsal_of_one_engine_leaves_another_ones_requests_alone(engine: Engine) -> None:
    with ScriptedServer(root=MODEL) as elsewhere, Engine.connect(elsewhere.url) as other:
        elsewhere.script(Reply("sent"))
        with pytest.raises(ConfigError):
            engine.integration.speculation.capture_request(lambda: of_the_engine(other))
        assert len(elsewhere.requests) == 1


def test_a_rehearsal_leaves_a_request_to_another_server_alone(engine: Engine) -> None:
    with ScriptedServer() as elsewhere, pytest.raises(ConfigError, match="base_url"):
        elsewhere.script(Reply("sent"))
        other = openai.OpenAI(base_url=elsewhere.base_url, api_key="theirs", http_client=engine.http_client())
        engine.integration.speculation.capture_request(
            lambda: other.chat.completions.create(model=elsewhere.model, messages=ASKED)
        )
    assert len(elsewhere.requests) == 1


def test_a_request_with_another_key_or_to_another_server_does_not_join(engine: Engine, server: ScriptedServer) -> None:
    speculation = speculate(engine, lambda: of_the_sdk(engine))
    assert done(speculation)
    with ScriptedServer() as elsewhere:
        for base_url, api_key in [(engine.base_url, "wrong"), (elsewhere.base_url, engine.api_key)]:
            client = openai.OpenAI(base_url=base_url, api_key=api_key, http_client=engine.http_client())
            client.chat.completions.create(model=engine.model, messages=ASKED)
        assert (len(server.requests), len(elsewhere.requests)) == (2, 1)
    of_the_sdk(engine)
    assert len(server.requests) == 2


def test_a_cancelled_speculation_leaves_the_engine_and_is_not_joined(server: ScriptedServer, engine: Engine) -> None:
    server.script(NEVER, Reply("sent"))
    speculation = speculate(engine, lambda: of_the_engine(engine))
    assert until(lambda: server.num_running == 1)
    speculation.cancel()
    speculation.cancel()
    assert speculation.is_cancelled
    assert not speculation.is_failed
    assert until(lambda: len(server.aborted) == 1)
    assert of_the_engine(engine) == "sent"
    speculation.confirm()
    assert server.confirmed == []


def test_a_speculation_cancelled_before_it_was_sent_is_never_sent(server: ScriptedServer, engine: Engine) -> None:
    server.script(Reply("first"), Reply("sent"))
    assert done(speculate(engine, lambda: of_the_engine(engine)))
    assert of_the_engine(engine) == "first"
    is_busy, may_go_on = threading.Event(), threading.Event()
    background = engine._speculations._background
    assert background is not None

    def stay_busy() -> None:
        is_busy.set()
        may_go_on.wait(5.0)

    background._loop.call_soon_threadsafe(stay_busy)
    assert is_busy.wait(5.0)
    speculate(engine, lambda: of_the_engine(engine)).cancel()
    may_go_on.set()
    assert of_the_engine(engine) == "sent"
    assert len(server.requests) == 2


def test_a_speculation_that_is_aborted_while_it_is_started_leaves_the_engine(
    server: ScriptedServer, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.script(NEVER)
    run = engine._speculations._run

    def run_while_another_thread_aborts(work: Any) -> Any:
        future = run(work)
        assert until(lambda: server.num_running == 1)
        for speculation in list(engine._speculations._live):
            speculation.abort()
        return future

    monkeypatch.setattr(engine._speculations, "_run", run_while_another_thread_aborts)
    assert speculate(engine, lambda: of_the_engine(engine)).is_cancelled
    assert until(lambda: server.num_running == 0)


def test_a_whole_answer_that_is_cancelled_is_not_joined(server: ScriptedServer, engine: Engine) -> None:
    server.script(Reply("stale"), Reply("fresh"))
    speculation = speculate(engine, lambda: of_the_engine(engine))
    assert done(speculation)
    speculation.cancel()
    assert of_the_engine(engine) == "fresh"


@sent_unconditionally
@pytest.mark.parametrize(
    "failure", [ENGINE_DEAD, Refusal(400, "no"), Refusal(503, "later"), Reply("cut here", cut_after_tokens=1)]
)
def test_a_failed_speculation_is_as_if_it_had_never_been(
    server: ScriptedServer, engine: Engine, ask: Callable[[Engine], str], failure: Refusal | Reply
) -> None:
    server.script(failure, Reply("sent"))
    speculation = speculate(engine, lambda: of_the_engine(engine))
    assert done(speculation)
    assert speculation.is_failed
    assert speculation.error is not None
    assert ask(engine) == "sent"


def test_an_error_inside_a_stream_fails_an_unadopted_speculation(server: ScriptedServer, engine: Engine) -> None:
    server.script(Reply("half an answer", error_after_tokens=1), Reply("sent"))
    speculation = speculate(engine, lambda: engine_stream(engine))
    assert done(speculation)
    assert "out of room" in str(speculation.error)
    assert engine_stream(engine) == "sent"


async def test_an_error_event_that_arrives_in_two_pieces_is_seen() -> None:
    pieces = [b'data: {"id": "1", "text": "data: {\\"error\\": 1}"}\n\nda', b'ta: {"error": {"message": "no"}}\n\n']

    async def body() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    transport, response = httpx.MockTransport(lambda _: httpx.Response(200, content=body())), BufferedResponse()
    request = httpx.Request("POST", "http://engine/v1/completions")
    with pytest.raises(EngineError, match="no"):
        await receive(transport, request, response, is_reserved=lambda: False)
    assert response.last_bytes() == pieces[0]


@sent_unconditionally
def test_a_request_that_joined_is_sent_when_the_engine_dies_before_the_first_token(
    server: ScriptedServer, engine: Engine, ask: Callable[[Engine], str]
) -> None:
    server.script(Reply("lost", wait_s=0.3, cut_after_tokens=-1), Reply("sent"))
    speculation = speculate(engine, lambda: of_the_engine(engine))
    assert until(lambda: server.num_running == 1)
    assert ask(engine) == "sent"
    assert speculation.is_failed
    assert not speculation.is_claimed, "the answer is another request's"


def test_an_answer_that_was_joined_and_is_cut_off_fails_as_any_other(server: ScriptedServer, engine: Engine) -> None:
    server.script(Reply("one two three", token_wait_s=0.2, cut_after_tokens=2))
    speculate(engine, lambda: of_the_engine(engine))
    with pytest.raises(EngineDiedError):
        of_the_engine(engine)
    assert len(server.requests) == 1


def test_an_answer_that_was_joined_goes_on_when_its_engine_hangs_and_is_back(
    server: ScriptedServer, engine: Engine
) -> None:
    server.names_tokens, server.rules = True, [rest_of("one two three")]
    server.script(Reply("one two three", token_wait_s=60.0))
    text = "Who founded Zorval?"  # of a chat, the first event has no token yet
    speculate(engine, lambda: engine.generate(text, max_tokens=8))
    stream = engine.stream(text, max_tokens=8)
    assert next(stream).text == "one"
    server.hang = "VLLM::Worker has been stopped"
    assert until(lambda: server.num_running == 0, 20), "the speculation is given up"
    server.hang = None
    assert "".join(chunk.text for chunk in stream) == " two three"


@sent_unconditionally
def test_a_greedy_answer_that_was_joined_and_is_cut_off_goes_on(
    server: ScriptedServer, engine: Engine, ask: Callable[[Engine], str]
) -> None:
    server.names_tokens, server.rules = True, [rest_of("one two three")]
    server.script(Reply("one two three", token_wait_s=0.2, cut_after_tokens=2))
    speculation = speculate(engine, lambda: ask(engine))
    assert until(lambda: server.num_running == 1)
    assert ask(engine) == "one two three"
    assert [request.speculation for request in server.requests] == [speculation.id, None]


@sent_unconditionally
def test_a_reader_that_leaves_ends_the_request_in_the_engine(
    server: ScriptedServer, engine: Engine, ask: Callable[[Engine], str]
) -> None:
    server.script(Reply("one two three four", token_wait_s=0.5))
    speculation = speculate(engine, lambda: of_the_engine(engine))
    if ask is of_the_engine:
        stream = engine.stream(ASKED, max_tokens=8)
        assert next(stream).text == "one"
        stream.close()
    else:

        async def leave() -> None:
            chunks = engine.astream(ASKED, max_tokens=8)
            assert (await anext(chunks)).text == "one"
            await chunks.aclose()

        asyncio.run(leave())
    assert until(lambda: len(server.aborted) == 1)
    assert speculation.is_cancelled


async def test_a_cancelled_task_that_waits_for_a_speculation_ends_it(server: ScriptedServer, engine: Engine) -> None:
    server.script(NEVER)
    speculation = await asyncio.to_thread(speculate, engine, lambda: of_the_engine(engine))
    asking = asyncio.create_task(engine.agenerate(ASKED, max_tokens=8))
    await asyncio.to_thread(until, lambda: server.confirmed == [speculation.id])
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert await asyncio.to_thread(until, lambda: len(server.aborted) == 1)


def test_an_interrupted_wait_for_a_speculation_ends_it(server: ScriptedServer, engine: Engine) -> None:
    server.script(NEVER)
    speculation = speculate(engine, lambda: of_the_engine(engine))
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        assert until(lambda: server.confirmed)
        signal.pthread_kill(main, signal.SIGINT)

    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    with pytest.raises(KeyboardInterrupt):
        of_the_engine(engine)
    interrupting.join()
    assert speculation.is_cancelled
    assert until(lambda: len(server.aborted) == 1)


@sent_unconditionally
def test_a_request_that_joined_keeps_its_own_timeout(
    server: ScriptedServer, engine: Engine, ask: Callable[[Engine], str]
) -> None:
    server.script(NEVER)
    speculation = speculate(engine, lambda: of_the_sdk(engine))
    with pytest.raises(openai.APITimeoutError):
        if ask is of_the_engine:
            engine._openai.with_options(timeout=0.2).chat.completions.create(model=engine.model, messages=ASKED)
        else:
            client = engine._openai_async.with_options(timeout=0.2)
            asyncio.run(client.chat.completions.create(model=engine.model, messages=ASKED))
    assert speculation.is_cancelled


def test_of_many_equal_requests_only_one_joins(server: ScriptedServer, engine: Engine) -> None:
    server.script(Reply("the one", wait_s=0.1))
    server.rules = [lambda _: Reply("another")]
    speculate(engine, lambda: of_the_engine(engine))
    answers: list[str] = []
    asking = [threading.Thread(target=lambda: answers.append(of_the_engine(engine))) for _ in range(8)]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    assert sorted(answers) == ["another"] * 7 + ["the one"]
    assert len(server.requests) == 8


def test_each_asker_joins_its_own_of_equal_speculations(server: ScriptedServer, engine: Engine) -> None:
    speculations = {}
    for scope in ("first", "second", "none"):
        server.script(Reply(scope))
        with request_scope(None if scope == "none" else scope):
            speculations[scope] = speculate(engine, lambda: of_the_engine(engine))
        assert done(speculations[scope])
    for scope in ("second", "first"):
        with request_scope(scope):
            assert of_the_engine(engine) == scope
        assert speculations[scope].is_claimed
    with request_scope("third"):
        assert of_the_engine(engine) == "none"
    assert len(server.requests) == 3


def test_a_request_is_sent_in_the_name_that_it_was_made_in(server: ScriptedServer, engine: Engine) -> None:
    server.script(Reply("mine"), Reply("again"))
    with request_scope("me"):
        send = engine.integration.speculation.prepare(lambda: of_the_engine(engine))
    assert server.requests == []
    assert done(mine := send())
    with request_scope("you"):
        assert of_the_engine(engine) == "again"
    with request_scope("me"):
        assert of_the_engine(engine) == "mine"
    assert mine.is_claimed


def test_a_request_does_not_adopt_a_speculation_of_another_scope(server: ScriptedServer, engine: Engine) -> None:
    server.script(Reply("mine"), Reply("again"))
    with request_scope("me"):
        mine = speculate(engine, lambda: of_the_engine(engine))
    assert done(mine)
    with request_scope("you"):
        assert of_the_engine(engine) == "again"
    assert of_the_engine(engine) == "mine"
    assert not mine.is_claimed


def test_its_owner_cannot_cut_off_the_answer_that_another_request_joined(
    server: ScriptedServer, engine: Engine
) -> None:
    server.script(SLOW, SLOW)
    mine, _ = (speculate(engine, lambda: of_the_engine(engine)) for _ in range(2))
    chunks = engine.stream(ASKED, max_tokens=8)
    assert next(chunks).text
    mine.cancel()  # the oldest was handed out, to a request that is not mine
    assert "".join(chunk.text for chunk in chunks)
    assert done(mine)
    assert not mine.is_cancelled
    assert server.aborted == []


def test_a_callback_is_called_once_when_the_speculation_ends(server: ScriptedServer, engine: Engine) -> None:
    server.script(Reply("yes", wait_s=0.05), NEVER)
    told: list[str] = []
    finished = speculate(engine, lambda: of_the_engine(engine))
    finished.add_done_callback(lambda s: told.append(f"early {s.id}"))
    assert done(finished)
    finished.add_done_callback(lambda s: told.append(f"late {s.id}"))
    finished.cancel()
    assert until(lambda: told == [f"early {finished.id}", f"late {finished.id}"])
    cancelled = speculate(engine, lambda: of_the_engine(engine))
    cancelled.add_done_callback(lambda s: told.append(f"cancelled {s.id}"))
    cancelled.cancel()
    assert told[2:] == [f"cancelled {cancelled.id}"]


def test_a_warm_up_prefills_a_prefix_and_is_never_joined(server: ScriptedServer, engine: Engine) -> None:
    prompt = PromptLayout().render(engine.tokenizer, [Document("zorval", "Zorval was founded by Anna.")], "Who?")
    speculation = warm(engine, prompt)
    assert done(speculation)
    [warmed] = server.requests
    assert warmed.path == "/v1/completions"
    assert (warmed.body["prompt"], warmed.body["max_tokens"]) == (list(prompt.token_ids), 1)
    assert [d["id"] for d in warmed.documents] == ["zorval"]
    assert warmed.body["kv_transfer_params"]["ragcache"]["prefill"] is True, "the request that it is for counts"
    speculation.confirm()
    speculation.confirm()
    assert until(lambda: server.confirmed)
    assert server.confirmed == [speculation.id]
    assert not engine._speculations


def test_a_confirmation_is_repeated_until_the_engine_has_heard_it(server: ScriptedServer, engine: Engine) -> None:
    server.script(NEVER)
    server.cache_status = 503
    speculation = speculate(engine, lambda: of_the_engine(engine))
    speculation.confirm()
    confirmation = f"speculations/{speculation.id}/confirm"
    assert until(lambda: server.cache_questions.count(confirmation) == 2)
    assert server.confirmed == []
    server.cache_status = 200
    assert until(lambda: server.confirmed == [speculation.id])
    speculation.abort()


@pytest.mark.parametrize("ends", [True, False])
def test_a_confirmation_is_not_repeated_in_vain(
    server: ScriptedServer, engine: Engine, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    monkeypatch.setattr(speculating, "_CONFIRM_PAUSES_S", (0.02,))
    server.script(Reply("done") if ends else NEVER)
    server.cache_status = 503 if ends else 404
    speculation = speculate(engine, lambda: of_the_engine(engine))
    assert not ends or done(speculation)
    speculation.confirm()
    confirmation = f"speculations/{speculation.id}/confirm"
    assert until(lambda: confirmation in server.cache_questions)
    time.sleep(0.1)  # a second confirmation would have come by now
    assert server.cache_questions.count(confirmation) == 1
    speculation.abort()


def test_a_speculation_starts_as_much_later_than_it_was_sent_as_it_waited(
    server: ScriptedServer, engine: Engine
) -> None:
    server.script(NEVER)
    server.admits_after_s = 0.1
    speculation = speculate(engine, lambda: of_the_engine(engine))
    assert until(lambda: speculation.started_s is not None)
    assert not speculation.is_done
    assert speculation.started_s == speculation.sent_s + 0.1, "the way to the engine is not counted"
    speculation.abort()


@pytest.mark.parametrize("is_reported_late", [False, True])
def test_a_pause_is_not_hidden_search_time(
    server: ScriptedServer, engine: Engine, is_reported_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scripted_server, "_TIMEOUT_S", 0.05)
    if is_reported_late:
        monkeypatch.setattr(speculating, "_RETRY_S", 0.2)  # the answer ends before it asks again
    server.script(Reply("one two", wait_s=0.1))
    speculation = speculate(engine, lambda: of_the_engine(engine))
    assert until(lambda: speculation.started_s == speculation.sent_s)
    server.paused_s += [0.25, 0.5]
    assert until(lambda: speculation.started_s == speculation.sent_s + 0.75)
    assert done(speculation)
    assert speculation._work is not None
    speculation._work.result(5.0)  # its polling has ended
    speculation.cancel()


def test_an_engine_that_begins_late_is_queried_again(
    server: ScriptedServer, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scripted_server, "_TIMEOUT_S", 0.01)
    server.script(NEVER)
    server.admits_after_s = None
    speculation = speculate(engine, lambda: of_the_engine(engine))
    time.sleep(0.2)  # many times as long as it waits for an answer
    assert speculation.started_s is None
    server.admits_after_s = 0.0
    assert until(lambda: speculation.started_s is not None)
    speculation.abort()


def test_a_question_that_is_lost_is_queried_again(server: ScriptedServer, engine: Engine) -> None:
    server.script(NEVER)
    server.admits_after_s, server.cache_status = 0.05, 503
    speculation = speculate(engine, lambda: of_the_engine(engine))
    time.sleep(0.1)  # the first question is answered with an error
    server.cache_status = 200
    assert until(lambda: speculation.started_s is not None)
    speculation.abort()


@pytest.mark.parametrize("says", ["nothing", "no such route"])
def test_a_server_without_statistics_is_not_polled_after_the_end(
    server: ScriptedServer, engine: Engine, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scripted_server, "_TIMEOUT_S", 0.01)
    server.admits_after_s = None
    if says == "no such route":
        server.cache_status = 404
    speculation = speculate(engine, lambda: of_the_engine(engine))
    assert done(speculation)
    assert speculation._work is not None
    speculation._work.result(5.0)
    assert speculation.started_s is None


def test_a_speculation_that_was_read_to_its_end_is_done_and_not_cancelled(
    server: ScriptedServer, engine: Engine
) -> None:
    for _ in range(20):
        server.script(Reply("one two", wait_s=0.01))
        speculation = speculate(engine, lambda: of_the_engine(engine))
        assert of_the_engine(engine) == "one two"
        assert done(speculation)
        assert not speculation.is_cancelled
    assert server.aborted == []


def test_unclaimed_answers_are_dropped(server: ScriptedServer, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculating, "_MAX_KEPT", 2)
    speculations = []
    for i in range(4):
        server.script(Reply(f"answer {i}"))
        speculations.append(speculate(engine, lambda: of_the_engine(engine)))
        assert done(speculations[-1])
    assert of_the_engine(engine) == "answer 2"
    monkeypatch.setattr(speculating, "_KEEP_S", 0.05)
    server.script(Reply("late"))
    engine._speculations._claims.take(speculations[-1].key, None)
    assert done(speculate(engine, lambda: of_the_engine(engine)))
    assert until(lambda: not engine._speculations)


def test_an_answer_that_was_joined_or_dropped_leaves_the_memory(server: ScriptedServer, engine: Engine) -> None:
    server.script(Reply("joined"), Reply("dropped"))
    joined = speculate(engine, lambda: of_the_engine(engine))
    assert done(joined)
    assert of_the_engine(engine) == "joined"
    dropped = speculate(engine, lambda: of_the_engine(engine))
    assert done(dropped)
    dropped.cancel()
    held = [weakref.ref(joined), weakref.ref(dropped)]
    del joined, dropped
    assert until(lambda: gc.collect() >= 0 and not any(s() for s in held))


# What the engine says before anything is speculated


async def test_the_engines_load_is_asked_and_speculation_is_possible(server: ScriptedServer, engine: Engine) -> None:
    client = engine.integration.speculation
    assert await client.acan_speculate()
    assert await client.acan_speculate()
    assert server.cache_questions.count("load") == 1
    server.load = {**IDLE, "num_pending_prefills": 3}
    load = await client.apending_prefills()
    assert load == EngineLoad(0, 4, has_room=True), "an answer serves all who ask at the same moment"
    await asyncio.sleep(0.03)  # the answer is too old to serve for another moment
    assert await client.apending_prefills() == EngineLoad(num_pending_prefills=3, max_prefill_bs=4, has_room=True)
    await asyncio.sleep(0.03)  # again
    server.load = {**IDLE, "has_room": False}
    assert await client.apending_prefills() == EngineLoad(0, 4, has_room=False)
    assert await client.acan_speculate()


@pytest.mark.parametrize(("num_pending", "has_room"), [(3, True), (4, False)])
async def test_an_older_engine_that_does_not_say_whether_there_is_room_has_it_by_its_count(
    server: ScriptedServer, engine: Engine, num_pending: int, has_room: bool
) -> None:
    client = engine.integration.speculation
    server.load = {"num_pending_prefills": num_pending, "max_prefill_bs": 4, "is_speculative": True}
    assert await client.apending_prefills() == EngineLoad(num_pending, 4, has_room)


@pytest.mark.parametrize("load", [None, {**IDLE, "is_speculative": False}, {"other": "words"}])
async def test_a_server_without_our_plugin_is_named_in_one_warning(
    server: ScriptedServer, engine: Engine, load: Any, caplog: pytest.LogCaptureFixture
) -> None:
    client = engine.integration.speculation
    server.load = load
    with caplog.at_level(logging.WARNING):
        assert not await client.acan_speculate()
        assert not await client.acan_speculate()
    assert [r.message for r in caplog.records if "cannot prefill" in r.message and "ragcache serve" in r.message]
    assert len(caplog.records) == 1
    assert await client.apending_prefills() is None
    assert server.cache_questions.count("load") == 1


async def test_a_server_that_takes_speculations_later_gets_them_then(
    server: ScriptedServer, engine: Engine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ragcache_core.client.speculation.client._UNSUPPORTED_PAUSE_S", 0.0)
    client = engine.integration.speculation
    server.load = None
    for _ in range(2):
        assert not await client.acan_speculate()
    assert len(caplog.records) == 1
    server.load = IDLE
    assert await client.acan_speculate()


# Ending


def test_closing_the_engine_ends_its_speculations_and_its_thread(server: ScriptedServer) -> None:
    server.script(NEVER, NEVER)
    engine = Engine.connect(server.url)
    assert threads() == []
    speculations = [speculate(engine, lambda: of_the_engine(engine)) for _ in range(2)]
    assert until(lambda: server.num_running == 2)
    assert len(threads()) == 1
    engine.close()
    engine.close()
    assert threads() == []
    assert all(s.is_cancelled for s in speculations)
    assert until(lambda: server.num_running == 0)
    with pytest.raises(EngineClosedError, match="launch or connect again"):
        speculate(engine, lambda: of_the_engine(engine))


def test_closing_the_thread_twice_does_not_cut_off_what_it_still_ends() -> None:
    is_running, is_ending, ended = threading.Event(), threading.Event(), []
    background = BackgroundLoop("ragcache-twice", verify=False)

    async def work() -> None:
        try:
            is_running.set()
            await asyncio.sleep(60.0)  # until it is cancelled
        finally:
            is_ending.set()
            await asyncio.sleep(0.1)  # a clean-up that a second stop could cut off
            ended.append(True)

    background.run(work())
    assert is_running.wait(5.0)
    closing = threading.Thread(target=background.close)
    closing.start()
    assert is_ending.wait(5.0)
    background.close()
    closing.join()
    background.close()
    assert ended == [True]


def test_a_request_that_waits_for_a_speculation_hears_of_the_close(server: ScriptedServer) -> None:
    server.script(NEVER)
    engine = Engine.connect(server.url)
    speculation = speculate(engine, lambda: of_the_engine(engine))

    def close() -> None:
        assert until(lambda: server.confirmed)
        engine.close()

    closing = threading.Thread(target=close)
    closing.start()
    with pytest.raises(EngineClosedError, match="launch or connect again"):
        of_the_engine(engine)
    closing.join()
    assert speculation.is_cancelled


def test_an_engine_that_never_speculates_starts_no_thread(server: ScriptedServer, engine: Engine) -> None:
    server.script(Reply("yes"))
    assert of_the_engine(engine) == "yes"
    assert threads() == []


def test_a_fork_of_the_process_uses_nothing_of_the_engine(server: ScriptedServer, engine: Engine) -> None:
    server.script(Reply("of the parent", wait_s=0.5))
    speculation = speculate(engine, lambda: of_the_engine(engine))
    assert until(lambda: server.num_running == 1)

    def ask() -> None:
        uses: list[Callable[[], object]] = [
            lambda: of_the_engine(engine),
            lambda: of_the_sdk(engine),
            engine.stats,
            engine.cache.ls,
            lambda: engine.tokenize("Who?"),
            lambda: engine.integration,
            lambda: asyncio.run(engine.astats()),
        ]
        for use in uses:
            with pytest.raises((EngineForkedError, openai.APIConnectionError)):
                use()
        engine.close()

    with engine._speculations._lock, engine._closing:  # as other threads of the parent may have them
        assert in_a_fork(ask)
    assert of_the_engine(engine) == "of the parent"
    assert not speculation.is_failed
