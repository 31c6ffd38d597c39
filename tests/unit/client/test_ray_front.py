"""The door of replicas on Ray Serve over real HTTP: who gets a request, and what is asked of all. Without Ray."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from ragcache_core import Engine, EngineDiedError, EngineError, PromptLayout, RenderedPrompt
from ragcache_core.client.ray_serve.deployment import EngineReplica
from ragcache_core.client.ray_serve.front import Front
from ragcache_core.client.ray_serve.known_replicas import ReplicaRequest, ReplicaStates
from ragcache_core.errors import RequestRejectedError
from ragcache_core.ordering import PathChange, encode_changes, static_prefix_digest
from ragcache_core.routing.load import PromptInfo
from ragcache_core.runtime.api_keys import hashed
from ragcache_core.stats import ForgetReceipt
from ragcache_core.types import Document, SegmentKind
from tests.conftest import DEMO_MODEL
from tests.support.asking_ahead import speculate
from tests.support.local_tokenizer import LocalTokenizer
from tests.support.scripted_server import ENGINE_DEAD, IDLE, THREE_TIERS, Refusal, Reply, ScriptedServer
from tests.support.serving import ScriptedHandle, served
from tests.support.waiting import until

NAMES = [f"document-{i}" for i in range(12)]
KEY = {"Authorization": "Bearer key"}


@pytest.fixture
def servers() -> Iterator[list[ScriptedServer]]:
    cache = {**THREE_TIERS, "max_overtaken": 0}
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                ScriptedServer(api_key="key", name=name, root=str(DEMO_MODEL), cache=dict(cache), load=IDLE)
            )
            for name in ("left", "middle", "right")
        ]


@pytest.fixture
def handle(servers: list[ScriptedServer], monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedHandle]:
    monkeypatch.setattr("ragcache_core.client.ordering.cached_prefixes._POLL_INTERVAL_S", 0.02)
    with ExitStack() as stack:
        joined = [stack.enter_context(Engine.connect(s.url, api_key="key", tokenizer=False)) for s in servers]
        replicas = {f"replica-{i}": EngineReplica(engine, f"replica-{i}") for i, engine in enumerate(joined)}
        known = ReplicaStates()
        yield ScriptedHandle(replicas, known)
        known.update({})


@contextmanager
def joined(handle: ScriptedHandle, retry_timeout_s: float = 5.0) -> Iterator[Engine]:
    """Give the engine that a front of its own is."""
    with (
        served(front(handle, retry_timeout_s)) as url,
        Engine.connect(url, api_key="key", restart_timeout_s=0.3) as engine,
    ):
        yield engine


@pytest.fixture
def engine(handle: ScriptedHandle) -> Iterator[Engine]:
    with joined(handle) as one:
        yield one


def front(handle: ScriptedHandle, retry_timeout_s: float) -> Front:
    return Front(handle, retry_timeout_s, [hashed("key"), hashed("tenant")])


def put_at(handle: ScriptedHandle, name: str, url: str) -> None:
    """Have a replica ask another server than its engine's, without telling the ingress."""
    told = handle.replicas[name].record_replica_metadata()
    engine: Any = SimpleNamespace(base_url=f"{url}/v1", close=list)
    handle.replicas[name] = replica = EngineReplica(engine, name)
    replica.record_replica_metadata = lambda: told  # type: ignore[method-assign]  # its server cannot be asked


def prompt(engine: Engine, *names: str, question: str = "Who?") -> RenderedPrompt:
    return PromptLayout().render(engine.tokenizer, [Document(n, f"The text of {n} is here.") for n in names], question)


def asked(servers: list[ScriptedServer]) -> list[int]:
    return [len(server.requests) for server in servers]


def idlest(handle: ScriptedHandle) -> str:
    """Return who would get a request that is no completion."""
    return handle.known.choose(list(handle.replicas), ReplicaRequest("GET", "/", [], b""))[0]


def rendezvous_replica(handle: ScriptedHandle, shown: RenderedPrompt) -> str:
    """Return who would get a question about documents that no replica has."""
    names = tuple(segment.doc_id or "" for segment in shown.segments if segment.kind is SegmentKind.DOCUMENT)
    ask = ReplicaRequest("POST", "/", [], b"", PromptInfo(names, (), 0, 100, None, f"None\0{names[0]}"))
    handle.remote(ask)
    ask.end()
    assert ask.sent_to is not None
    return ask.sent_to


def publish(server: ScriptedServer, shown: RenderedPrompt, *documents: str) -> None:
    """Have a server say that it has these documents cached, behind the static prefix of a prompt."""
    prefix = static_prefix_digest(shown.token_ids, shown.segments)
    assert prefix is not None
    changes = [PathChange(prefix, documents[:n], 10 + 100 * n) for n in range(len(documents) + 1)]
    engines = [{"is_reset": True, "changes": encode_changes(changes)}]
    server.cached_paths = {"version": 3, "cursor": "1.1", "is_complete": True, "engines": engines}


def test_documents_meet_again_at_one_replica_and_different_ones_are_spread(
    engine: Engine, servers: list[ScriptedServer]
) -> None:
    places: dict[str, int] = {}
    for name in NAMES * 2:
        before = asked(servers)
        engine.generate(prompt(engine, name, question=f"What of {name}?"))
        (place,) = [i for i, (now, then) in enumerate(zip(asked(servers), before, strict=True)) if now > then]
        assert places.setdefault(name, place) == place
    assert set(places.values()) == {0, 1, 2}


def test_the_order_is_that_of_the_replica_that_has_the_documents_and_it_gets_the_request(
    engine: Engine, servers: list[ScriptedServer]
) -> None:
    documents = [Document(n, f"The text of {n} is here.") for n in ("a", "b")]
    for server, has in zip(servers, (("x",), ("b", "a"), ("y",)), strict=True):
        publish(server, prompt(engine, "b", "a"), *has)
    assert engine.integration.ordering.refresh(), "of all replicas, through the front"
    arranged = engine.arrange_documents(documents, "cache_aware").documents
    assert [d.doc_id for d in arranged] == ["b", "a"]
    shown = PromptLayout().render(engine.tokenizer, arranged, "Who?")
    num_submitted = 0

    def goes_there() -> bool:  # as soon as the front follows the mirrors, which its first request begins
        nonlocal num_submitted
        num_submitted += 1
        before = asked(servers)[1]
        engine.generate(shown)
        return asked(servers)[1] > before

    assert until(goes_there)
    before = asked(servers)
    engine.generate(shown)
    assert asked(servers) == [before[0], before[1] + 1, before[2]]


def test_a_requests_figures_are_asked_of_the_replica_that_answered_and_of_all_where_that_is_not_known(
    handle: ScriptedHandle, engine: Engine, servers: list[ScriptedServer]
) -> None:
    for name in NAMES:
        assert engine.generate(prompt(engine, name)).stats.num_host_tokens is not None
    for server in servers:
        questions = [question for question in server.cache_questions if question.startswith("requests/")]
        assert len(questions) == len(server.requests) > 0
    body = {"model": engine.model, "prompt": "Who?", "max_tokens": 2}
    answer = httpx.post(f"{engine.base_url}/completions", json=body, headers=KEY).json()
    with served(front(handle, 1.0)) as other:
        figures = httpx.get(f"{other}/v1/ragcache/requests/{answer['id']}", headers=KEY)
    assert figures.json()["num_gpu_tokens"] is not None


def test_a_speculation_is_confirmed_at_its_replica_through_any_front(
    handle: ScriptedHandle, engine: Engine, servers: list[ScriptedServer]
) -> None:
    for name in NAMES[:3]:
        shown = prompt(engine, name)
        ahead = speculate(engine, lambda shown=shown: engine.generate(shown, max_tokens=4))
        assert until(lambda ahead=ahead: ahead.started_s is not None)
        assert engine.generate(shown, max_tokens=4).text
        assert not ahead.is_failed
    for server in servers:
        sent = [seen.speculation for seen in server.requests]
        assert until(lambda server=server, sent=sent: server.confirmed == sent), "its own, and no other's"
    has = next(server for server in servers if server.requests)
    with served(front(handle, 1.0)) as other:
        told = httpx.post(f"{other}/v1/ragcache/speculations/unheard/confirm", headers=KEY)
        waited = httpx.get(f"{other}/v1/ragcache/speculations/{has.confirmed[0]}?after=0", headers=KEY)
    assert told.status_code == 204
    assert all("unheard" in server.confirmed for server in servers), "the replica that has it was told"
    assert waited.json()["waited_s"] is not None, "the replica that has it says so"


def test_a_speculation_is_confirmed_while_its_answer_has_not_begun(
    engine: Engine, servers: list[ScriptedServer]
) -> None:
    for server in servers:
        server.rules = [lambda request: Reply("later", wait_s=1.0)]
    shown = prompt(engine, "a")
    ahead = speculate(engine, lambda: engine.generate(shown, max_tokens=4))
    assert until(lambda: ahead.started_s is not None)
    assert engine.generate(shown, max_tokens=4).text == "later"
    confirmed = [server.confirmed for server in servers if server.requests]
    assert until(lambda: len(confirmed[0]) == 1)
    assert sum(len(server.confirmed) for server in servers) == 1, "no other replica was asked"


def test_figures_of_all_replicas_are_one_report_and_one_page_that_names_them(
    handle: ScriptedHandle, engine: Engine, servers: list[ScriptedServer]
) -> None:
    for name in NAMES:
        engine.generate(prompt(engine, name))
    stats = engine.stats()
    assert stats.num_first_tokens == len(NAMES)
    assert stats.num_corrupt_blocks == 2 * len(servers)
    root = engine.base_url.removesuffix("/v1")
    page = httpx.get(f"{root}/metrics", headers=KEY).text
    first = [line for line in page.splitlines() if line.startswith("vllm:time_to_first_token_seconds_count{")]
    assert sorted(line.partition('replica="')[2].partition('"')[0] for line in first) == sorted(handle.replicas)
    assert sorted(float(line.rpartition(" ")[2]) for line in first) == sorted(map(float, asked(servers)))
    assert all(f'replica="{name}"' in httpx.get(f"{root}/metrics/", headers=KEY).text for name in handle.replicas)


def test_figures_of_the_others_do_not_wait_for_a_replica_that_never_answers(
    handle: ScriptedHandle, engine: Engine, servers: list[ScriptedServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    for server in servers:
        publish(server, prompt(engine, "a"), "a")
    monkeypatch.setattr("ragcache_core.client.ray_serve.deployment._FIGURES_TIMEOUT_S", 0.5)
    root = engine.base_url.removesuffix("/v1")
    with socket.create_server(("127.0.0.1", 0)) as silent, httpx.Client(base_url=root, headers=KEY, timeout=20) as http:
        put_at(handle, "replica-1", f"http://127.0.0.1:{silent.getsockname()[1]}")
        page = http.get("/metrics").text
        assert 'replica="replica-0"' in page
        assert 'replica="replica-1"' not in page
        assert http.get("/v1/ragcache/stats").status_code == 200
        assert len(http.get("/v1/ragcache/cached_paths").json()["engines"]) == 2


def test_what_is_forgotten_is_forgotten_by_all_or_it_is_reported_that_it_is_not(
    handle: ScriptedHandle, engine: Engine, servers: list[ScriptedServer]
) -> None:
    for server, known in zip(servers, (("a",), ("b",), ()), strict=True):
        receipt = ForgetReceipt(forgotten=known, unknown=tuple({"a", "b", "c"} - set(known)), num_paths=len(known))
        server.receipt = receipt.to_dict()
    receipt = engine.forget(["a", "b", "c"])
    assert set(receipt.forgotten) == {"a", "b"}
    assert receipt.unknown == ("c",)
    assert receipt.num_paths == 2
    assert [server.forgotten for server in servers] == [[["a", "b", "c"]]] * 3
    handle.dead.add("replica-1")
    with pytest.raises(EngineError, match="answered 503"):
        engine.forget(["a"])


def test_what_a_replica_that_fails_had_not_begun_to_answer_is_answered_by_another(
    handle: ScriptedHandle, engine: Engine, servers: list[ScriptedServer]
) -> None:
    shown = prompt(engine, "a")
    engine.generate(shown)
    home = asked(servers).index(1)
    servers[home].script(ENGINE_DEAD)
    assert engine.generate(shown).text
    assert asked(servers)[home] == 2
    assert sum(asked(servers)) == 3
    assert handle.answers[-2].is_cancelled, "no caller waits for what failed"
    handle.dead.add(f"replica-{home}")
    assert engine.generate(shown).text
    assert "".join(chunk.text for chunk in engine.stream(shown, max_tokens=8))
    assert asked(servers)[home] == 2, "it rests, and is dead besides"


def test_a_request_that_crashes_replicas_is_not_sent_to_all_of_them(
    handle: ScriptedHandle, servers: list[ScriptedServer]
) -> None:
    for server in servers:
        server.rules = [lambda request: ENGINE_DEAD]
    with served(front(handle, 5.0)) as url:
        body = {"prompt": "Who?", "max_tokens": 2}
        answer = httpx.post(f"{url}/v1/completions", json=body, headers=KEY, timeout=30)
    assert answer.status_code == 500
    assert answer.json()["error"]["message"].startswith("3 replicas lost this request")
    assert sum(asked(servers)) == 3


def test_what_a_replica_may_have_done_is_sent_to_no_other_and_what_no_server_took_is(
    handle: ScriptedHandle, servers: list[ScriptedServer]
) -> None:
    for server in servers:
        server.tokenizer = LocalTokenizer.of_bytes("")
    put_at(handle, "replica-0", "http://127.0.0.1:1")  # where nothing listens
    with served(front(handle, 5.0)) as url, httpx.Client(base_url=url, headers=KEY, timeout=30) as http:
        assert http.post("/tokenize", json={"prompt": "Who?", "add_special_tokens": False}).json()["tokens"]
        assert handle.answers[-2].is_cancelled, "it was sent to another one before"
        handle.dead.update(handle.replicas)
        answer = http.post("/tokenize", json={"prompt": "Who?"})
        assert answer.status_code == 500
        assert "sent to no other" in answer.json()["error"]["message"]


def test_while_no_replica_takes_requests_they_wait_and_are_answered_when_one_does(
    handle: ScriptedHandle, engine: Engine, servers: list[ScriptedServer]
) -> None:
    for server in servers:
        server.script(*[Refusal(503, "draining")] * 3)
    assert engine.generate(prompt(engine, "a")).text
    assert sum(asked(servers)) > len(servers)
    for server in servers:
        server.rules = [lambda request: Refusal(503, "draining")]
    with served(front(handle, 0.3)) as url:
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": "Who?"}, headers=KEY, timeout=30)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
    assert "no replica answers" in answer.text


def test_probes_fail_at_once_while_there_is_no_replica(
    handle: ScriptedHandle, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = engine.base_url.removesuffix("/v1")
    assert httpx.get(f"{root}/health").status_code == 200
    monkeypatch.setattr("ragcache_core.client.ray_serve.front._PROBE_S", 0.1)
    handle.replicas.clear()
    assert [httpx.get(f"{root}/{probe}", timeout=10).status_code for probe in ("health", "ready")] == [503, 503]
    assert [answer.is_cancelled for answer in handle.answers[-2:]] == [True, True], "no caller waits any more"


def test_an_answer_that_is_cut_is_seen_to_be_cut(engine: Engine, servers: list[ScriptedServer]) -> None:
    for server in servers:
        server.rules = [lambda request: Reply("one two three four five six", cut_after_tokens=3)]
    with pytest.raises(EngineDiedError):
        for _ in engine.stream(prompt(engine, "a"), max_tokens=8, temperature=1.0):
            pass


def test_tokens_pass_as_they_come_and_who_hangs_up_ends_the_request(
    handle: ScriptedHandle, engine: Engine, servers: list[ScriptedServer]
) -> None:
    for server in servers:
        server.rules = [lambda request: Reply(" ".join(["word"] * 200), token_wait_s=0.05)]
    home = next(name for name in NAMES if rendezvous_replica(handle, prompt(engine, name)) == "replica-0")
    stream = engine.stream(prompt(engine, home), max_tokens=200)
    assert next(stream).text
    assert idlest(handle) != "replica-0"
    assert sum(server.num_running for server in servers) == 1
    assert not handle.answers[-1].is_cancelled
    stream.close()
    assert until(lambda: sum(server.num_running for server in servers) == 0)
    assert until(lambda: handle.answers[-1].is_cancelled), "Serve ends what its replica does for it"
    assert until(lambda: idlest(handle) == "replica-0"), "the first of equals: no request counts as its load any more"


def test_requests_that_are_refused_and_names_that_need_quoting_pass_as_they_are(
    engine: Engine, servers: list[ScriptedServer]
) -> None:
    for server in servers:
        server.rules = [lambda request: Refusal(400, "not like that")]
    with pytest.raises(RequestRejectedError, match="not like that"):
        engine.generate(prompt(engine, "a"))
    assert sum(asked(servers)) == 1
    answer = httpx.get(f"{engine.base_url}/ragcache/requests/a%2Fb%20c?x=%26", headers=KEY)
    assert answer.status_code == 404
    assert any("requests/a%2Fb%20c" in question for server in servers for question in server.cache_questions)
    assert httpx.get(f"{engine.base_url}/models", headers={"Authorization": "Bearer wrong"}).status_code == 401


@pytest.mark.parametrize("route", ["completions", "ragcache/documents/forget", "ragcache/speculations/x/confirm"])
def test_a_request_without_a_key_is_rejected_before_its_body_is_read(
    handle: ScriptedHandle, servers: list[ScriptedServer], route: str
) -> None:
    with served(front(handle, 1.0)) as url, socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as raw:
        raw.sendall(f"POST /v1/{route} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{{".encode())
        raw.settimeout(10)
        assert raw.recv(64).startswith(b"HTTP/1.1 401 ")
    assert not any(server.cache_questions or server.requests for server in servers)


def test_a_body_that_no_engine_takes_is_refused_with_and_without_a_length(
    handle: ScriptedHandle, servers: list[ScriptedServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ragcache_core.client.ray_serve.front._MAX_BODY_BYTES", 1000)
    body = json.dumps({"prompt": "Who?" * 300}).encode()
    with served(front(handle, 1.0)) as url:
        for content in (body, iter([body[:600], body[600:]])):
            answer = httpx.post(f"{url}/v1/completions", content=content, headers=KEY)
            assert answer.status_code == 413
            assert "more than 1000 bytes: send fewer" in answer.json()["error"]["message"]
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "Who?"}, headers=KEY).status_code == 200
    assert sum(asked(servers)) == 1


def test_a_tenants_key_passes_authentication_and_the_engine_decides(
    handle: ScriptedHandle, servers: list[ScriptedServer]
) -> None:
    for server in servers:
        server.api_key = "tenant"
    with served(front(handle, 1.0)) as url:
        body, key = {"prompt": "Who?"}, {"Authorization": "Bearer tenant"}
        assert httpx.post(f"{url}/v1/completions", json=body, headers=key).status_code == 200
        assert httpx.post(f"{url}/v1/completions", json=body, headers=KEY).status_code == 401


def test_below_a_prefix_a_request_reaches_the_replicas_and_no_other_server(
    handle: ScriptedHandle, servers: list[ScriptedServer]
) -> None:
    with ScriptedServer(api_key="key", name="other") as other, served(front(handle, 1.0), prefix="/llm") as url:
        assert httpx.get(f"{url}/llm/v1/models", headers=KEY).json()["data"]
        host = other.url.removeprefix("http://")
        for path in (f"/llm%2F@{host}/v1/ragcache/requests/x", f"/llm@{host}/v1/ragcache/requests/x", "/llm"):
            assert httpx.get(f"{url}{path}", headers=KEY).status_code == 404
        assert not other.cache_questions
        for path in (f"//@{host}/v1/ragcache/requests/x", f"/@{host}/v1/ragcache/requests/x"):
            assert httpx.get(f"{url}/llm{path}", headers=KEY).status_code in (400, 404)
        assert not other.cache_questions


def test_what_is_each_replicas_own_is_refused(engine: Engine) -> None:
    with pytest.raises(RequestRejectedError, match="each replica's own"):
        engine.cache.ls()
    with pytest.raises(RequestRejectedError, match="each replica's own"):
        engine.cache.pin(["a"])


async def test_a_replica_is_well_while_its_engine_is(servers: list[ScriptedServer]) -> None:
    server = servers[0]
    with Engine.connect(server.url, api_key="key", tokenizer=False) as joined:
        replica = EngineReplica(joined, "replica-0")
        await replica.check_health()
        server.hang = "no step for 40 s"
        with pytest.raises(EngineError, match="no step for 40 s"):
            await replica.check_health()
        server.hang = None
        server.is_healthy = False
        with pytest.raises(EngineError, match="replica-0 is unhealthy"):
            await replica.check_health()
