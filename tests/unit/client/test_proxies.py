"""Several servers behind one address: the headers by which a proxy keeps together what belongs together."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from ragcache_core.client import Engine
from ragcache_core.client.http.affinity import ProxyAffinity, RequestInfo
from ragcache_core.errors import EngineAuthError, EngineUnreachableError
from ragcache_core.prompt import PromptLayout, RenderedPrompt
from ragcache_core.routing.load import PromptInfo
from ragcache_core.types import Document
from ragcache_core.wire import SPECULATION_HEADER
from tests.conftest import DEMO_MODEL
from tests.support.asking_ahead import speculate
from tests.support.scripted_server import IDLE, THREE_TIERS, ScriptedServer
from tests.support.waiting import until

EXAMPLES = Path(__file__).parents[3] / "examples" / "deployment" / "proxies"
NAMES = [f"document-{i}" for i in range(12)]
PROXIES = [
    pytest.param(kind, marks=pytest.mark.skipif(shutil.which(kind) is None, reason=f"there is no {kind} here"))
    for kind in ("haproxy", "nginx", "vllm-router")
]


@pytest.fixture
def servers() -> Iterator[list[ScriptedServer]]:
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                ScriptedServer(api_key="key", name=name, root=str(DEMO_MODEL), cache=dict(THREE_TIERS), load=IDLE)
            )
            for name in ("left", "right")
        ]


def configured(kind: str, urls: list[str], folder: Path) -> tuple[str, list[str], list[str]]:
    """Write the example's configuration for these servers; return its address, how it is checked, and run."""
    address, metrics = free_address(), free_address()
    if kind == "vllm-router":
        port, second = address.rpartition(":")[2], metrics.rpartition(":")[2]
        run = ["vllm-router", "--policy", "consistent_hash", "--health-check-interval-secs", "1", "--api-key", "key"]
        run += ["--host", "127.0.0.1", "--port", port]
        return address, [*run, "--help"], [*run, "--prometheus-port", second, "--worker-urls", *urls]
    name = {"haproxy": "haproxy.cfg", "nginx": "nginx.conf"}[kind]
    text = (EXAMPLES / name).read_text("utf-8")
    for written, given in zip(("127.0.0.1:8000", "127.0.0.1:8001"), urls, strict=True):
        text = text.replace(written, given.removeprefix("http://"))
    path = folder / name
    path.write_text(text.replace("127.0.0.1:8080", address), "utf-8")
    if kind == "haproxy":
        return address, ["haproxy", "-c", "-f", str(path)], ["haproxy", "-db", "-f", str(path)]
    run = ["nginx", "-p", str(folder), "-c", str(path), "-e", "stderr", "-g", f"daemon off; pid {folder}/nginx.pid;"]
    return address, [*run, "-t"], run


def free_address() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


@contextmanager
def proxy(kind: str, servers: list[ScriptedServer], folder: Path) -> Iterator[str]:
    address, check, run = configured(kind, [server.url for server in servers], folder)
    checked = subprocess.run(check, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
    with subprocess.Popen(run, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as process:
        try:
            assert until(lambda: is_up(address), 30)
            yield f"http://{address}"
        finally:
            process.terminate()
            process.wait(10)


def is_up(address: str) -> bool:
    try:
        return httpx.get(f"http://{address}/health", timeout=1).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.fixture(params=PROXIES)
def engine(request: pytest.FixtureRequest, servers: list[ScriptedServer], tmp_path: Path) -> Iterator[Engine]:
    with (
        proxy(request.param, servers, tmp_path) as url,
        Engine.connect(url, api_key="key", restart_timeout_s=5.0) as joined,
    ):
        yield joined


def prompt(engine: Engine, *names: str, question: str = "Who?") -> RenderedPrompt:
    documents = [Document(name, f"The text of {name} is here.") for name in names]
    return PromptLayout().render(engine.tokenizer, documents, question)


def one_that(servers: list[ScriptedServer], has: Callable[[ScriptedServer], object]) -> ScriptedServer:
    (found,) = [server for server in servers if has(server)]
    return found


def test_a_document_stays_at_one_replica_and_different_ones_are_spread(
    engine: Engine, servers: list[ScriptedServer]
) -> None:
    places: dict[str, str] = {}
    for name in NAMES * 2:
        before = [len(server.requests) for server in servers]
        engine.generate(prompt(engine, name, "another", question=f"What of {name}?"))
        (place,) = [s.name for s, num in zip(servers, before, strict=True) if len(s.requests) > num]
        assert places.setdefault(name, place) == place
    assert set(places.values()) == {"left", "right"}


def test_a_requests_figures_are_asked_of_the_replica_that_answered(
    engine: Engine, servers: list[ScriptedServer]
) -> None:
    for name in NAMES:
        assert engine.generate(prompt(engine, name)).stats.num_host_tokens is not None
    for server in servers:
        asked = [question for question in server.cache_questions if question.startswith("requests/")]
        assert len(asked) == len(server.requests)
        assert all(server.name in question for question in asked)


def test_a_speculation_is_confirmed_where_it_was_sent(engine: Engine, servers: list[ScriptedServer]) -> None:
    for name in NAMES[:6]:
        shown = prompt(engine, name)

        def ask(shown: RenderedPrompt = shown) -> str:
            return engine.generate(shown, max_tokens=4).text

        speculation = speculate(engine, ask)
        assert until(lambda: any(s.requests for s in servers), 5)
        ask()
        assert speculation.is_claimed
        assert until(lambda: any(server.confirmed for server in servers), 5)
        place = one_that(servers, lambda server: server.confirmed)
        assert place is one_that(servers, lambda server: server.requests)
        waits = [re.match(r"speculations/([^?/]+)", question) for s in servers for question in s.cache_questions]
        assert {found[1] for found in waits if found} <= set(place.confirmed)
        for server in servers:
            server.confirmed.clear()
            server.requests.clear()
            server.cache_questions.clear()


@pytest.mark.skipif(shutil.which("haproxy") is None, reason="there is no haproxy here")
def test_a_proxy_that_removes_headers_costs_no_answer_and_is_named_once(
    servers: list[ScriptedServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "stripping").mkdir()
    removed = "".join(
        f"    http-{way} del-header {name} -m beg\n"
        for way in ("request", "response")
        for name in ("x-session-id", "x-ragcache-")
    )
    text = (EXAMPLES / "haproxy.cfg").read_text("utf-8").replace("    balance hash", f"{removed}    balance hash")
    (tmp_path / "haproxy.cfg").write_text(text, "utf-8")
    monkeypatch.setattr(sys.modules[__name__], "EXAMPLES", tmp_path)
    with (
        proxy("haproxy", servers, tmp_path / "stripping") as url,
        Engine.connect(url, api_key="key", restart_timeout_s=5.0) as engine,
    ):
        for name in NAMES:
            shown = prompt(engine, name)
            speculation = speculate(engine, lambda shown=shown: engine.generate(shown, max_tokens=4).text)  # type: ignore[misc]  # a default
            assert engine.generate(shown, max_tokens=4).text
            assert speculation.is_claimed
            assert engine.generate(prompt(engine, name, "another")).text
        with pytest.raises(EngineAuthError):
            Engine.connect(url, api_key="another's").close()
    assert caplog.text.count("RC-PROXY-HEADERS") == 1
    assert "let x-session-id and x-ragcache-* pass" in caplog.text
    assert not any(request.session for server in servers for request in server.requests)


def test_what_a_replica_that_dies_had_not_begun_is_answered_by_another(
    engine: Engine, servers: list[ScriptedServer]
) -> None:
    engine.generate(prompt(engine, "a"))
    shown = prompt(engine, "a", question="And now?")
    one_that(servers, lambda server: server.requests).__exit__()
    assert engine.generate(shown).text
    assert all(server.requests for server in servers)


def test_the_tokens_of_prompts_are_asked_of_every_replica_and_of_no_dead_one(
    engine: Engine, servers: list[ScriptedServer]
) -> None:
    for name in NAMES:
        prompt(engine, name)
    assert all(server.laid_out for server in servers), "no replica lays out all prompts"
    servers[0].__exit__()

    def is_told() -> bool:
        try:
            return all(prompt(engine, name, question=f"What of {name} now?").token_ids for name in NAMES)
        except EngineUnreachableError:
            return False

    assert until(is_told, 30)


def test_one_server_without_a_proxy_gets_the_same_answers_and_headers_of_an_application_stay(
    servers: list[ScriptedServer],
) -> None:
    with Engine.connect(servers[0].url, api_key="key") as engine:
        first = engine.generate(prompt(engine, "a"))
        engine.generate(prompt(engine, "a"), extra_headers={"X-Session-Id": "mine"})
        engine.generate(prompt(engine, "b"))
    assert first.text
    sessions = [request.session for request in servers[0].requests]
    assert sessions[1] == "mine"
    assert len(set(sessions)) == 3
    assert all(re.fullmatch("[0-9a-f]{16}", session or "") for session in (sessions[0], sessions[2]))


@pytest.mark.parametrize("speculation", ["line\r\nX-Other: yes", "na\u00efve", "\ud800", 5])
def test_an_id_that_no_header_can_hold_is_left_to_the_server(speculation: object) -> None:
    said = {"prompt": "Who?", "kv_transfer_params": {"ragcache": {"documents": [], "speculation": speculation}}}
    request = httpx.Request("POST", "http://proxy/v1/completions", content=json.dumps(said))
    sent = ProxyAffinity().send(request).request
    assert SPECULATION_HEADER not in sent.headers
    assert json.loads(sent.content) == said


def test_a_chat_whose_documents_are_named_by_texts_has_lengths_by_its_characters() -> None:
    def info(static: str, *texts: str) -> PromptInfo:
        named = [{"id": text[:3], "text": text} for text in texts]
        content = static + "\n".join(texts) + "\nWhy?"
        body = {
            "messages": [{"role": "user", "content": content}],
            "kv_transfer_params": {"ragcache": {"version": 1, "documents": named}},
        }
        return RequestInfo.of(httpx.Request("POST", "http://host/v1/chat/completions", json=body)).prompt

    sun, moon = "sun " * 100, "moon " * 100
    one, other = info("Answer. ", sun, moon), info("Answer. ", moon, sun)
    assert (one.documents, one.prefix, one.num_static_tokens) == (("sun", "moo"), None, 2)
    assert [abs(end - expected) <= 1 for end, expected in zip(one.ends, (102, 227), strict=True)] == [True, True]
    assert one.text_digest == other.text_digest != info("Answer briefly. ", sun).text_digest
    assert info("Answer. ").text_digest is None
