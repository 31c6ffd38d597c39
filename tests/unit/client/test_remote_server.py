"""A server with another owner: requests wait for its restart, and are told when its engine hangs."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ragcache_core import Document, PromptLayout
from ragcache_core.client import Engine
from ragcache_core.client.http.remote_server import RemoteServerMonitor
from ragcache_core.errors import ConfigError, EngineHungError, EngineUnreachableError
from tests.support.scripted_server import ENGINE_DEAD, Reply, ScriptedServer, rest_of
from tests.support.waiting import until


def connect(server: ScriptedServer, **settings: Any) -> Engine:
    return Engine.connect(server.url, api_key=server.api_key, tokenizer=False, **settings)


def test_a_request_waits_until_its_server_is_back(server: ScriptedServer) -> None:
    server.script(ENGINE_DEAD, Reply("it is back"))
    server.is_healthy = False
    threading.Timer(0.6, lambda: setattr(server, "is_healthy", True)).start()
    with connect(server) as engine:
        assert engine.generate("a question").text == "it is back"
    assert len(server.requests) == 2


def test_a_server_that_is_not_back_in_time_is_reported_as_it_failed(server: ScriptedServer) -> None:
    server.is_healthy = False
    server.rules = [lambda _: ENGINE_DEAD]
    with connect(server, restart_timeout_s=0.3) as engine, pytest.raises(EngineUnreachableError, match="died before"):
        engine.generate("a question")
    assert len(server.requests) == 1


def test_a_request_that_waits_is_logged_once_and_so_is_the_servers_return(
    server: ScriptedServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.script(ENGINE_DEAD, ENGINE_DEAD, Reply("it is back"), Reply("it is back"))
    server.is_healthy = False
    with connect(server, restart_timeout_s=60) as engine, ThreadPoolExecutor(2) as threads:
        asked = [threads.submit(engine.generate, question) for question in ("one", "another")]
        assert until(lambda: "does not answer" in caplog.text, 20)
        server.is_healthy = True
        assert [each.result().text for each in asked] == ["it is back"] * 2
        assert until(lambda: "answers again" in caplog.text, 20)
    assert caplog.text.count(f"engine at {server.url} does not answer (status 503)") == 1
    assert caplog.text.count("wait for it, up to 60 s (restart_timeout_s)") == 1
    assert caplog.text.count("answers again") == 1


def test_a_request_that_does_not_wait_logs_nothing(server: ScriptedServer, caplog: pytest.LogCaptureFixture) -> None:
    server.rules = [lambda _: ENGINE_DEAD]
    server.is_healthy = False
    with connect(server, restart_timeout_s=0) as engine, pytest.raises(EngineUnreachableError):
        engine.generate("a question")
    assert caplog.text == ""


def test_the_tokens_of_a_prompt_wait_for_their_server_as_its_answer_would(demo_model: str) -> None:
    with ScriptedServer(root=demo_model) as server:
        engine = connect(server)
    port = int(server.url.rpartition(":")[2].partition("/")[0])
    with engine, ThreadPoolExecutor(1) as threads:
        shown = threads.submit(PromptLayout().render, engine.tokenizer, [Document("one", "The first text.")], "Who?")
        time.sleep(0.5)  # it is refused meanwhile
        with ScriptedServer(root=demo_model, port=port):
            assert "one" in {segment.doc_id for segment in shown.result(30).segments}


def test_figures_of_a_server_that_is_gone_are_not_waited_for(server: ScriptedServer) -> None:
    engine = connect(server)
    server.__exit__()
    began_s = time.monotonic()
    with pytest.raises(EngineUnreachableError):
        engine.stats()
    assert time.monotonic() - began_s < 30, "a completion would wait for a minute"
    engine.close()


async def test_an_engine_that_hangs_ends_what_waits_for_it_with_an_error_that_reports_why(
    server: ScriptedServer,
) -> None:
    server.rules = [lambda _: Reply("never", wait_s=60)]
    with connect(server, restart_timeout_s=0.3) as engine:
        threading.Timer(0.3, lambda: setattr(server, "hang", "VLLM::EngineCore is stopped")).start()
        with pytest.raises(EngineHungError, match="VLLM::EngineCore is stopped"):
            await engine.agenerate("a question")
        assert until(lambda: server.num_running == 0), "the request was given up"
        with pytest.raises(EngineHungError):
            engine.generate("another one")
        server.hang, server.rules = None, ()
        assert until(lambda: engine.generate("the same").text.endswith("the same"), 10)


def test_a_server_that_says_nothing_at_all_hangs(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ragcache_core.client.http.remote_server._TIMEOUT_S", 0.1)
    server.health_wait_s = 5.0
    watch = RemoteServerMonitor(f"{server.url}/health", retry_timeout_s=1.0, hang_timeout_s=0.3)
    try:
        assert until(lambda: watch.stall_reason() is not None)
        assert "has not said" in (watch.stall_reason() or "")
    finally:
        watch.close()


def test_no_health_check_is_sent_without_waiting_requests(server: ScriptedServer) -> None:
    def is_watched() -> bool:
        return any(thread.name == "ragcache-joined-server" for thread in threading.enumerate())

    server.rules = [lambda _: Reply("slow", wait_s=0.6)]
    with connect(server) as engine:
        assert not is_watched()
        assert engine.generate("a question").text == "slow"
        assert is_watched()
    assert not is_watched()


@pytest.mark.parametrize(("temperature", "is_resampled"), [(0.0, False), (0.7, True)])
async def test_an_answer_that_continued_reports_how(
    server: ScriptedServer, temperature: float, is_resampled: bool
) -> None:
    server.names_tokens, server.rules = True, [rest_of("one two three four")]
    with connect(server) as engine:
        for prompt in ("a question", [{"role": "user", "content": "a question"}]):
            server.script(Reply("one two three four", cut_after_tokens=2))
            whole = engine.generate(prompt, temperature=temperature)
            server.script(Reply("one two three four", cut_after_tokens=2))
            for answer in (whole, await engine.agenerate(prompt, temperature=temperature)):
                assert answer.text == "one two three four"
                assert (answer.stats.num_resumes, answer.stats.is_resampled) == (1, is_resampled)
        undisturbed = engine.generate("a question", temperature=temperature).stats
        assert (undisturbed.num_resumes, undisturbed.is_resampled) == (0, False)


@pytest.mark.parametrize("setting", ["hang_timeout_s", "first_token_timeout_s", "restart_timeout_s"])
@pytest.mark.parametrize("value", [-1.0, float("nan")])
def test_a_time_that_is_none_is_refused(setting: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{setting} is .* must be a number of seconds above 0"):
        Engine.connect("http://127.0.0.1:1", **{setting: value})  # type: ignore[arg-type]
