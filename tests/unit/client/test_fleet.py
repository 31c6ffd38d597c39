"""A fleet over real HTTP: who gets a request, what becomes of one whose replica fails, and what is asked of all."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from ragcache_core.client import Engine, Fleet
from ragcache_core.errors import ConfigError, EngineAuthError, EngineError, EngineUnreachableError
from ragcache_core.ordering import PathChange, encode_changes, static_prefix_digest
from ragcache_core.prompt import PromptLayout, RenderedPrompt
from ragcache_core.stats import ForgetReceipt
from ragcache_core.types import Document
from ragcache_integrations.langchain import ChatRAGCache
from ragcache_integrations.llamaindex import RAGCacheLLM
from tests.conftest import DEMO_MODEL
from tests.support.asking_ahead import speculate
from tests.support.local_tokenizer import LocalTokenizer
from tests.support.scripted_server import ENGINE_DEAD, IDLE, THREE_TIERS, Refusal, Reply, ScriptedServer
from tests.support.waiting import until

NAMES = [f"document-{i}" for i in range(12)]


@pytest.fixture
def servers() -> Iterator[list[ScriptedServer]]:
    with ExitStack() as stack:
        yield [stack.enter_context(replica()) for _ in range(3)]


@pytest.fixture
def fleet(servers: list[ScriptedServer], monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    monkeypatch.setattr("ragcache_core.client.ordering.cached_prefixes._POLL_INTERVAL_S", 0.02)
    with Fleet.connect([server.url for server in servers], api_key="key", restart_timeout_s=0.3) as joined:
        yield joined


def replica() -> ScriptedServer:
    return ScriptedServer(api_key="key", root=str(DEMO_MODEL), cache=dict(THREE_TIERS), load=IDLE)


def prompt(fleet: Fleet, *names: str, question: str = "Who?") -> RenderedPrompt:
    return PromptLayout().render(fleet.tokenizer, [Document(n, f"The text of {n} is here.") for n in names], question)


def asked(servers: list[ScriptedServer]) -> list[int]:
    """Return how many requests each server got."""
    return [len(server.requests) for server in servers]


def publish(server: ScriptedServer, shown: RenderedPrompt, *documents: str, num_tokens: int = 400) -> None:
    """Have a server say that it has these documents cached, behind the static prefix of a prompt."""
    prefix = static_prefix_digest(shown.token_ids, shown.segments)
    assert prefix is not None
    changes = [PathChange(prefix, (), 10)]
    changes += [PathChange(prefix, documents[: n + 1], num_tokens + n) for n in range(len(documents))]
    server.cached_paths = said(changes)


def said(changes: list[PathChange]) -> dict[str, Any]:
    engines = [{"is_reset": True, "changes": encode_changes(changes)}]
    return {"version": 3, "cursor": "1.1", "is_complete": True, "engines": engines}


def test_documents_meet_again_at_one_replica_and_different_ones_are_spread(
    fleet: Fleet, servers: list[ScriptedServer]
) -> None:
    places: dict[str, int] = {}
    for name in [f"document-{i}" for i in range(40)] * 2:  # of a dozen, one replica of three gets none now and then
        before = asked(servers)
        fleet.generate(prompt(fleet, name, question=f"What of {name}?"))
        (place,) = [i for i, (now, then) in enumerate(zip(asked(servers), before, strict=True)) if now > then]
        assert places.setdefault(name, place) == place
    assert set(places.values()) == {0, 1, 2}


def test_a_conversation_stays_where_it_began(fleet: Fleet, servers: list[ScriptedServer]) -> None:
    messages = [{"role": "user", "content": "Hello, I am Anna."}]
    for turn in range(4):
        messages += [{"role": "assistant", "content": fleet.generate(messages).text}]
        messages += [{"role": "user", "content": f"And what of {turn}?"}]
    assert sorted(asked(servers)) == [0, 0, 4]


@pytest.mark.parametrize("place", range(3))
def test_a_request_goes_where_most_of_its_documents_are_cached_not_counting_the_static_prefix(
    fleet: Fleet, servers: list[ScriptedServer], place: int
) -> None:
    shown = prompt(fleet, "a", "b")
    for server in servers:
        publish(server, shown, "a", num_tokens=100)
    publish(servers[place], shown, "a", "b", num_tokens=100)
    assert fleet.integration.ordering.refresh()
    fleet.generate(shown)
    assert asked(servers) == [int(i == place) for i in range(3)]


def test_order_and_replica_are_chosen_together(fleet: Fleet, servers: list[ScriptedServer]) -> None:
    documents = [Document(n, f"The text of {n} is here.") for n in ("a", "b")]
    for server in servers:
        server.cached_paths = said([])
    publish(servers[1], prompt(fleet, "b", "a"), "b", "a")
    assert fleet.integration.ordering.refresh()
    arranged = fleet.arrange_documents(documents, "cache_aware").documents
    assert [d.doc_id for d in arranged] == ["b", "a"]
    fleet.generate(PromptLayout().render(fleet.tokenizer, arranged, "Who?"))
    assert asked(servers) == [0, 1, 0]


def test_a_busy_replica_is_left_to_those_that_wait_for_it(fleet: Fleet, servers: list[ScriptedServer]) -> None:
    shown = prompt(fleet, "a")
    for server in servers:
        server.cached_paths = said([])
    publish(servers[0], shown, "a")
    assert fleet.integration.ordering.refresh()
    slow = Reply("slowly said " * 40, token_wait_s=0.05)
    servers[0].script(*[slow] * 12)
    streams = [fleet.stream(shown, max_tokens=64) for _ in range(12)]
    for stream in streams:
        next(stream)
    assert 3 < asked(servers)[0] < 12
    assert sum(asked(servers)) == 12
    for stream in streams:
        stream.close()


def test_what_a_dead_replica_had_not_begun_is_answered_by_another(fleet: Fleet, servers: list[ScriptedServer]) -> None:
    homes = {}
    for name in NAMES:
        before = asked(servers)
        fleet.generate(prompt(fleet, name))
        homes[name] = next(i for i, (now, then) in enumerate(zip(asked(servers), before, strict=True)) if now > then)
    dead = homes[NAMES[0]]
    servers[dead].__exit__()
    before = asked(servers)
    for name in NAMES:
        assert fleet.generate(prompt(fleet, name)).text
    after = asked(servers)
    num_orphans = list(homes.values()).count(dead)
    assert after[dead] == before[dead]
    assert sum(after) - sum(before) == len(NAMES)
    for place in {0, 1, 2} - {dead}:  # what was at home with those that live has stayed there
        assert after[place] - before[place] >= list(homes.values()).count(place)
        assert after[place] - before[place] <= list(homes.values()).count(place) + num_orphans


@pytest.mark.parametrize("failure", [Refusal(503, "The server is being shut down.", "ServiceUnavailable"), ENGINE_DEAD])
def test_a_replica_that_is_drained_or_whose_engine_died_is_left_alone(
    fleet: Fleet, servers: list[ScriptedServer], failure: Refusal
) -> None:
    shown = prompt(fleet, "a")
    fleet.generate(shown)
    home = asked(servers).index(1)
    servers[home].script(*[failure] * 3)
    servers[home].is_healthy = False
    assert fleet.generate(shown).text
    assert fleet.generate(shown).text
    assert asked(servers)[home] == 2
    assert sum(asked(servers)) == 4


def test_a_hung_replica_is_left_for_another(fleet: Fleet, servers: list[ScriptedServer]) -> None:
    shown = prompt(fleet, "a")
    fleet.generate(shown)
    home = asked(servers).index(1)
    servers[home].hang = "no step for 60 s"
    servers[home].script(Reply("too late", wait_s=20.0))
    assert fleet.generate(shown).text
    assert sum(asked(servers)) == 3


def test_a_request_whose_first_token_is_late_is_sent_to_another_replica(servers: list[ScriptedServer]) -> None:
    urls = [server.url for server in servers]
    with Fleet.connect(urls, api_key="key", first_token_timeout_s=0.5) as fleet:
        shown = prompt(fleet, "a")
        fleet.generate(shown)
        home = asked(servers).index(1)
        servers[home].script(Reply("too late", wait_s=20.0))
        assert fleet.generate(shown).text
        assert asked(servers)[home] == 2
        assert sum(asked(servers)) == 3
        fleet.generate(shown)
        assert asked(servers)[home] == 3, "the next one goes where its documents go"


def test_where_all_replicas_are_drained_the_error_is_their_own(fleet: Fleet, servers: list[ScriptedServer]) -> None:
    for server in servers:
        server.script(*[Refusal(503, "Try again later.", "ServiceUnavailable")] * 5)
    with pytest.raises(EngineError, match="Try again later"):
        fleet.generate(prompt(fleet, "a"))


def test_without_any_replica_the_error_names_them(fleet: Fleet, servers: list[ScriptedServer]) -> None:
    for server in servers:
        server.__exit__()
    with pytest.raises(EngineUnreachableError):
        fleet.generate(prompt(fleet, "a"))
    with pytest.raises(EngineUnreachableError, match="none of the 3 replicas takes requests: http://127"):
        fleet.generate(prompt(fleet, "a"))


def test_a_speculation_and_its_confirmation_reach_one_replica(fleet: Fleet, servers: list[ScriptedServer]) -> None:
    shown = prompt(fleet, "a")
    assert asyncio.run(fleet.integration.speculation.acan_speculate())
    speculation = speculate(fleet, lambda: fleet.generate(shown))
    assert until(lambda: speculation.started_s is not None)
    assert fleet.generate(shown).text
    assert until(lambda: sum(len(server.confirmed) for server in servers) == 1)
    assert sorted(asked(servers)) == [0, 0, 1]
    assert [len(server.confirmed) for server in servers] == asked(servers)


@pytest.mark.parametrize("place", range(3))
def test_candidates_of_an_early_stage_choose_the_replica_that_has_them(
    fleet: Fleet, servers: list[ScriptedServer], place: int
) -> None:
    shown = prompt(fleet, "a")
    for server in servers:
        server.cached_paths = said([])
    publish(servers[place], shown, "a")
    assert fleet.integration.ordering.refresh()
    speculation = speculate(fleet, lambda: fleet.generate(shown))
    assert until(lambda: speculation.started_s is not None)
    assert asked(servers) == [int(i == place) for i in range(3)], "before the search ends"
    servers[place].cached_paths = said([])
    assert fleet.integration.ordering.refresh()
    assert fleet.generate(shown).text, "the answer is the one that is on its way"
    assert until(lambda: len(servers[place].confirmed) == 1)
    assert sum(asked(servers)) == 1


def test_frameworks_take_a_fleet_for_an_engine(fleet: Fleet, servers: list[ScriptedServer]) -> None:
    assert ChatRAGCache(engine=fleet).invoke("Who?").content
    assert RAGCacheLLM(engine=fleet).complete("Who?").text
    assert sum(asked(servers)) == 2


def test_figures_of_all_replicas_add_up(fleet: Fleet, servers: list[ScriptedServer]) -> None:
    for name in NAMES:
        fleet.generate(prompt(fleet, name))
    one, all_three = fleet.engines[0].stats(), fleet.stats()
    assert all_three.num_prompt_tokens == sum(engine.stats().num_prompt_tokens for engine in fleet.engines)
    assert all_three.tiers[0].capacity_bytes == 3 * one.tiers[0].capacity_bytes
    assert [tier.name for tier in all_three.tiers] == [tier.name for tier in one.tiers]
    assert asyncio.run(fleet.astats()) == all_three


def test_replicas_that_hang_are_waited_for_at_once(fleet: Fleet, servers: list[ScriptedServer]) -> None:
    for server in servers:
        server.cache_wait_s = 1.0
    began_s = time.monotonic()
    fleet.stats()
    assert time.monotonic() - began_s < 2.5


def test_all_replicas_forget_and_unknown_is_what_none_knows(fleet: Fleet, servers: list[ScriptedServer]) -> None:
    for place, server in enumerate(servers):
        known = ["a"] if place == 1 else []
        server.receipt = {"forgotten": known, "unknown": [n for n in ("a", "b") if n not in known], "num_paths": place}
    receipt = fleet.forget(["a", "b"])
    assert (receipt.forgotten, receipt.unknown, receipt.num_paths) == (("a",), ("b",), 3)
    assert [server.forgotten for server in servers] == [[["a", "b"]]] * 3
    assert asyncio.run(fleet.aforget(["a", "b"])).forgotten == ("a",)


def test_documents_are_registered_with_every_replica(fleet: Fleet, servers: list[ScriptedServer]) -> None:
    good = {"id": "a", "registered": True}
    bad = {"id": "b", "registered": False, "error": "it is too short"}
    for place, server in enumerate(servers):
        server.cache_answers["documents/register"] = {"documents": [good, bad if place == 1 else {**good, "id": "b"}]}
    done: list[int] = []
    receipt = fleet.register([Document("a", "A text."), Document("b", "Another.")], progress=done.append)
    assert (receipt.num_registered, receipt.errors, done) == (1, {"b": "it is too short"}, [2])


def test_answers_that_were_kept_for_a_fleet_are_dropped_with_their_documents(
    fleet: Fleet, servers: list[ScriptedServer]
) -> None:
    class Kept:
        def __init__(self) -> None:
            self.forgotten: list[str] = []

        def forget(self, doc_ids: list[str]) -> None:
            self.forgotten += doc_ids

    kept = Kept()
    fleet.integration.answer_caches.add(kept)
    with pytest.raises(EngineError):  # of plain servers
        fleet.forget(["a"])
    assert kept.forgotten == ["a"]


def test_each_replica_reads_ahead_what_it_has_on_disk(fleet: Fleet, servers: list[ScriptedServer]) -> None:
    servers[2].num_read_tokens = 64
    assert fleet.prefetch(prompt(fleet, "a")) == 64
    assert all(server.prefetched for server in servers)


def test_replicas_that_take_their_time_are_joined_at_once() -> None:
    with ExitStack() as stack:
        many = [stack.enter_context(replica()) for _ in range(8)]
        for server in many:
            server.cache_wait_s = 0.5
        began_s = time.monotonic()
        with Fleet.connect([server.url for server in many], api_key="key"):
            assert time.monotonic() - began_s < 8 * 0.5


@pytest.mark.parametrize(("what", "value"), [("model", "another"), ("max_model_len", 99), ("tokenizer", "other")])
def test_replicas_that_answer_differently_are_refused(
    servers: list[ScriptedServer], what: str, value: Any, tmp_path: Path
) -> None:
    if what == "tokenizer":
        servers[1].tokenizer = LocalTokenizer.of_bytes("")
        servers[1].tokenizer.identity = value
    else:
        setattr(servers[1], what, value)
    with pytest.raises(ConfigError, match=f"another {what} than"):
        Fleet.connect([servers[0].url, servers[1].url], api_key="key")


def test_a_wrong_key_and_a_missing_replica_are_rejected_at_the_entry(servers: list[ScriptedServer]) -> None:
    with pytest.raises(EngineAuthError):
        Fleet.connect([server.url for server in servers], api_key="wrong")
    with pytest.raises(EngineUnreachableError, match="127.0.0.1:1"):
        Fleet.connect([servers[0].url, "http://127.0.0.1:1"], api_key="key")


def test_a_fleet_of_given_engines_closes_them(servers: list[ScriptedServer]) -> None:
    engines = [Engine.connect(server.url, api_key="key") for server in servers]
    with Fleet(engines) as fleet:
        assert fleet.generate(prompt(fleet, "a")).text
    fleet.close()
    assert all(engine._async_transport._closed for engine in engines)


@pytest.mark.parametrize("speculation", [[], {}, 5])
def test_a_request_that_makes_no_sense_is_for_a_server_to_refuse_and_counts_no_longer_than_its_answer(
    fleet: Fleet, servers: list[ScriptedServer], speculation: Any
) -> None:
    body = {"model": fleet.model, "prompt": "Who?", "kv_transfer_params": {"ragcache": {"speculation": speculation}}}
    for server in servers:
        server.rules = [lambda _: Refusal(400, "no id", "BadRequestError")]
    for _ in range(4):
        assert fleet.http_client().post(f"{fleet.base_url}/completions", json=body).status_code == 400
    assert {replica.load.num_running for replica in fleet._replicas.all} == {0}


@pytest.mark.parametrize("is_drained", [False, True])
def test_one_replica_that_is_left_of_many_answers(monkeypatch: pytest.MonkeyPatch, *, is_drained: bool) -> None:
    monkeypatch.setattr("ragcache_core.client.fleet.replicas.choose_replica", lambda _, known, __: known[0])
    with ExitStack() as stack:
        many = sorted((stack.enter_context(replica()) for _ in range(7)), key=lambda server: server.base_url)
        with Fleet.connect([server.url for server in many], api_key="key", restart_timeout_s=0.3) as fleet:
            for server in many[:-1]:
                if is_drained:
                    server.script(Refusal(503, "The server is being shut down.", "ServiceUnavailable"))
                else:
                    server.__exit__()
            assert fleet.generate(prompt(fleet, "a")).text
    assert len(many[-1].requests) == 1


def test_where_many_replicas_are_gone_at_once_a_request_waits_for_one_to_come_back() -> None:
    with ExitStack() as stack:
        many = [stack.enter_context(replica()) for _ in range(6)]
        with Fleet.connect([server.url for server in many], api_key="key", restart_timeout_s=20.0) as fleet:
            shown, port = prompt(fleet, "a"), int(many[0].url.rpartition(":")[2])
            for server in many:
                server.__exit__()
            with ThreadPoolExecutor(1) as threads:
                answer = threads.submit(fleet.generate, shown)
                time.sleep(0.3)  # more than all retries take that do not wait
                stack.enter_context(ScriptedServer(api_key="key", root=str(DEMO_MODEL), port=port))
                assert answer.result().text


def test_all_other_replicas_have_forgotten_when_one_fails_to(
    fleet: Fleet, servers: list[ScriptedServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = fleet.engines[2]
    forget = engine.aforget

    async def late(*asked: Any, **how: Any) -> ForgetReceipt:
        await asyncio.sleep(0.2)  # the others have answered or failed by then
        return await forget(*asked, **how)

    monkeypatch.setattr(engine, "aforget", late)
    for server in servers[1:]:
        server.receipt = {"forgotten": ["a"], "unknown": [], "num_paths": 1}
    with pytest.raises(EngineError):  # the first is plain vLLM
        asyncio.run(fleet.aforget(["a"]))
    assert [server.forgotten for server in servers[1:]] == [[["a"]]] * 2


def test_what_is_done_to_the_cache_of_one_replica_is_not_taken_for_that_of_all(
    fleet: Fleet, servers: list[ScriptedServer]
) -> None:
    for act in ("purge", "gc", "ls", "apin"):
        with pytest.raises(ConfigError, match=rf"engine.cache.{act} for each engine of fleet.engines"):
            getattr(fleet.cache, act)
    assert not any(server.cache_requests for server in servers)
