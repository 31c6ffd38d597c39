"""From the scheduler's process to the server's: statistics that are merged, sent, counted and asked for."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import vllm
from fastapi import HTTPException
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import PrefixCacheStats, SchedulerStats

from ragcache_core._version import __version__
from ragcache_core.policy import PrefillCostModel
from ragcache_core.types import PromptSegment, SegmentKind, Tier
from ragcache_core.vllm_plugin.cache.controller import CacheController, TierReport
from ragcache_core.vllm_plugin.chunks.manager.manager import ChunkManager
from ragcache_core.vllm_plugin.compat import broadcast_to_api_servers
from ragcache_core.vllm_plugin.connector.gpu_connector import RAGCacheStats
from ragcache_core.vllm_plugin.server import routes
from ragcache_core.vllm_plugin.server.engine_view import Received
from ragcache_core.vllm_plugin.server.metrics.prometheus import RAGCachePromMetrics
from ragcache_core.vllm_plugin.server.routes import RAGCacheEndpoint
from ragcache_core.vllm_plugin.settings import PluginSettings
from ragcache_core.wire import RequestMetadata


class Engine:
    """A controller with a GPU and a disk, as an engine has it."""

    def __init__(self, chunks: ChunkManager | None = None) -> None:
        self.controller = CacheController(
            PluginSettings(policy="lru"),
            tokens_per_block=4,
            prefill_cost=PrefillCostModel.default(),
            tiers={Tier.GPU: TierReport(1000, 100)},
            chunks=chunks,
        )
        self.controller.add_tier(Tier.DISK, TierReport(9000, 300))

    def serve(self, request_id: str, num_gpu: int, num_disk: int) -> None:
        keys = [b"0", b"1"]
        segments = (PromptSegment(SegmentKind.DOCUMENT, 0, 8, "a"), PromptSegment(SegmentKind.QUESTION, 8, 10))
        self.controller.on_new_request(request_id, RequestMetadata(segments), keys, 10, 1.0)
        self.controller.on_admitted(request_id, keys, {Tier.GPU: num_gpu, Tier.DISK: num_disk}, 2.0)
        self.controller.on_finished(request_id)

    def speculate(self, request_id: str, speculation: str) -> None:
        metadata = RequestMetadata((PromptSegment(SegmentKind.QUESTION, 0, 10),), speculation)
        self.controller.on_new_request(request_id, metadata, [b"0", b"1"], 10, 1.0)
        self.controller.on_speculated(request_id, 10)
        self.controller.on_finished(request_id)

    def stats(self, offload: OffloadingConnectorStats | None = None) -> RAGCacheStats:
        controller = self.controller
        return RAGCacheStats.of(requests=controller.take_finished(), engine=controller.take_report(), offload=offload)


def front_end(index: int = 0) -> SimpleNamespace:
    """Return what vLLM's parallel configuration says of one of several API servers."""
    return SimpleNamespace(_api_process_rank=index, _api_process_count=2)


class Server:
    """The series of ``/metrics`` in a registry of this test's own."""

    def __init__(
        self,
        *,
        num_engines: int = 1,
        first: int = 0,
        has_tiers: bool = False,
        reuses_chunks: bool = False,
        index: int = 0,
    ) -> None:
        self.registry = CollectorRegistry()
        kinds = {kind: self._in_registry(kind) for kind in (Counter, Gauge, Histogram)}
        spec = {"spec_name": "RAGCacheSpec", "spec_module_path": "ragcache_core.vllm_plugin.offload.spec"}
        extra = {**(spec if has_tiers else {}), "ragcache": {"chunk_reuse": {}} if reuses_chunks else {}}
        config = SimpleNamespace(
            kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra),
            parallel_config=front_end(index),
            scheduler_config=SimpleNamespace(max_num_seqs=4),
        )
        labels: dict[int, list[object]] = {i: ["demo", str(i)] for i in range(first, first + num_engines)}
        self.metrics = RAGCachePromMetrics(config, kinds, ["model_name", "engine"], labels)

    def _in_registry(self, kind: Any) -> Any:
        return lambda *args, **kwargs: kind(*args, **kwargs, registry=self.registry)

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, {"model_name": "demo", "engine": "0", **labels})


@pytest.fixture(autouse=True)
def received(monkeypatch: pytest.MonkeyPatch) -> Received:
    """This process's memory of requests, new for each test."""
    new = Received()
    monkeypatch.setattr("ragcache_core.vllm_plugin.server.metrics.prometheus.received", new)
    monkeypatch.setattr("ragcache_core.vllm_plugin.server.routes.received", new)
    return new


def test_the_series_are_what_the_engine_counted() -> None:
    engine, server = Engine(), Server()
    engine.serve("r1", 4, 0)
    server.metrics.observe(engine.stats().data)
    engine.serve("r2", 0, 8)
    engine.controller.counters.num_corrupt_blocks = 3
    engine.controller.counters.num_dropped_blocks = 5
    server.metrics.observe(engine.stats().data)
    assert server.value("ragcache_requests_total") == 2
    assert server.value("ragcache_prompt_tokens_total") == 20
    assert server.value("ragcache_corrupt_blocks_total", tier="disk") == 3
    assert server.value("ragcache_dropped_blocks_total", tier="disk") == 5
    assert server.value("ragcache_dropped_blocks_total", tier="gpu") == 0
    assert server.value("ragcache_tier_hit_tokens_total", tier="gpu") == 4
    assert server.value("ragcache_tier_hit_tokens_total", tier="disk") == 8
    assert server.value("ragcache_tier_capacity_bytes", tier="disk") == 9000
    assert server.value("ragcache_tier_enabled", tier="disk") == 1
    engine.controller.tiers[Tier.DISK].is_enabled = False
    engine.controller.record_change()
    server.metrics.observe(engine.stats().data)
    assert server.value("ragcache_tier_enabled", tier="disk") == 0
    assert server.value("ragcache_requests_total") == 2
    assert b"# HELP ragcache_lost_blocks_total" in generate_latest(server.registry)


def test_times_of_requests_are_labelled_by_their_slowest_tier() -> None:
    engine, server = Engine(), Server()
    engine.serve("from both", 4, 4)
    engine.serve("new", 0, 0)
    engine.speculate("guess", "s1")
    engine.controller.on_finished("guess")
    loaded = engine.controller
    loaded.on_new_request("loaded", RequestMetadata((PromptSegment(SegmentKind.QUESTION, 0, 10),)), [b"0"], 10, 1.0)
    loaded.on_admitted("loaded", [b"0"], {Tier.DISK: 4}, 1.5)
    loaded.on_load_ended("loaded", 4.0)
    loaded.on_finished("loaded")
    server.metrics.observe(engine.stats().data)
    queue, load = "ragcache_queue_seconds", "ragcache_load_seconds"
    assert server.value(f"{queue}_count", tier="disk") == 2
    assert server.value(f"{queue}_sum", tier="disk") == 1.0 + 0.5
    assert server.value(f"{queue}_count", tier="none") == 1
    assert server.value(f"{queue}_count", tier="gpu") is None
    assert (server.value(f"{load}_count", tier="disk"), server.value(f"{load}_sum", tier="disk")) == (1, 2.5)


def test_the_releases_that_run_are_a_series() -> None:
    build = {"version": __version__, "vllm_version": vllm.__version__, "policy": "mixture"}
    assert Server().value("ragcache_build_info", **build) == 1


def of_tenants(**num_requests: int) -> dict[str, Any]:
    """Return a report of an engine with a host tier and tenants, with these numbers of requests."""
    data = Engine().stats().data
    tiers = ("gpu", "disk")
    data["engine"]["tenants"] = {
        name: {
            "num_requests": num,
            "num_prompt_tokens": 10 * num,
            "tiers": [
                {"name": tier, "num_hit_tokens": 2 * num, "num_evicted_blocks": num, "used_bytes": 100 * num}
                for tier in tiers
            ],
        }
        for name, num in num_requests.items()
    }
    return data


def test_tenants_have_series_up_to_a_number_and_all_others_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAGCACHE_TENANT_METRICS", "2")
    server = Server()
    server.metrics.observe(of_tenants(acme=1, globex=2, initech=3, umbrella=4))
    server.metrics.observe(of_tenants(acme=5, globex=2, initech=4, umbrella=4))
    requests = {
        name: server.value("ragcache_tenant_requests_total", tenant=name) for name in ("acme", "globex", "(others)")
    }
    assert requests == {"acme": 5, "globex": 2, "(others)": 8}
    assert server.value("ragcache_tenant_requests_total", tenant="initech") is None
    assert server.value("ragcache_tenant_prompt_tokens_total", tenant="(others)") == 80
    assert server.value("ragcache_tenant_hit_tokens_total", tenant="acme", tier="disk") == 10
    assert server.value("ragcache_tenant_used_bytes", tenant="(others)", tier="gpu") == 800
    assert server.value("ragcache_tenant_evicted_blocks_total", tenant="globex", tier="gpu") == 2


Begin = Callable[..., Awaitable[Any]]


@pytest.fixture
def begin(received: Received) -> Begin:
    """Begin to serve, with engines that answer our utility calls so; return a request to the server."""

    async def with_engine(answer: Callable[[], object], *, has_peers: bool = False) -> Any:
        async def is_sleeping() -> bool:
            return False

        async def call_utility_all_async(name: str) -> list[object]:
            assert name == "ragcache_report"
            return [answer() for _ in range(received.num_engines)]

        engine_client = SimpleNamespace(
            engine_core=SimpleNamespace(call_utility_all_async=call_utility_all_async),
            model_config=SimpleNamespace(
                max_model_len=2048,
                is_multimodal_model=False,
                multimodal_config=None,
                generation_config="auto",
                override_generation_config={},
                hf_config=SimpleNamespace(model_type="llama"),
                get_diff_sampling_param=dict,
            ),
            vllm_config=SimpleNamespace(
                kv_transfer_config=SimpleNamespace(
                    kv_connector_extra_config={}, kv_connector_module_path=None, engine_id="one"
                ),
                ec_transfer_config=None,
                parallel_config=SimpleNamespace(pipeline_parallel_size=1, data_parallel_size=1),
            ),
            is_sleeping=is_sleeping,
        )
        state = SimpleNamespace(ragcache_has_peers=has_peers)
        await RAGCacheEndpoint().init_state(engine_client, state, Namespace())
        return SimpleNamespace(app=SimpleNamespace(state=state), scope={})

    return with_engine


@pytest.mark.parametrize("num_engines", [1, 2])
async def test_a_server_of_several_engines_has_a_choice_and_the_report_of_each(begin: Begin, num_engines: int) -> None:
    server = Server(num_engines=num_engines)
    request = await begin(Engine().controller.report)
    assert hasattr(request.app.state, "ragcache_rank_choice") == (num_engines > 1)
    capacity = [server.value("ragcache_tier_capacity_bytes", tier="gpu", engine=str(i)) for i in range(num_engines)]
    assert capacity == [1000] * num_engines
    assert (await routes.stats(request))["tiers"][0]["capacity_bytes"] == 1000 * num_engines


async def test_a_server_asks_the_engine_for_what_no_step_has_reported(begin: Begin) -> None:
    engine = Engine()
    Server()
    requests = [await begin(engine.controller.report, has_peers=has_peers) for has_peers in (False, True)]
    engine.serve("r1", 4, 0)
    assert [(await routes.stats(request))["num_requests"] for request in requests] == [1, 1]
    with pytest.raises(HTTPException, match="leave --api-server-count out"):
        await routes.drain(requests[1])


async def test_a_query_for_cached_prefixes_is_answered_by_all_engines(received: Received) -> None:
    engines = [Engine(), Engine()]

    async def call_utility_all_async(name: str, cursor: str, tenant: str | None) -> list[object]:
        assert name == "ragcache_cached_paths"
        return [engine.controller.paths_of(tenant).changes(cursor) for engine in engines]

    engine_client = SimpleNamespace(engine_core=SimpleNamespace(call_utility_all_async=call_utility_all_async))
    state = SimpleNamespace(ragcache_engine_client=engine_client)
    request: Any = SimpleNamespace(app=SimpleNamespace(state=state), scope={})
    with pytest.raises(HTTPException, match="without RAGCache"):
        await routes.cached_paths(request)
    Server()
    first = json.loads((await routes.cached_paths(request)).body)
    again = json.loads((await routes.cached_paths(request, first["cursor"])).body)
    assert first["is_complete"]
    assert [[each["is_reset"] for each in answer["engines"]] for answer in (first, again)] == [[True] * 2, [False] * 2]


def test_the_load_is_that_of_the_last_step_over_all_engines(received: Received) -> None:
    assert received.load() is None
    Server()
    assert received.load() == {
        "reads_ahead": False,
        "num_pending_prefills": 0,
        "pending_prefill_s": 0.0,
        "max_prefill_bs": 4,
        "is_speculative": True,
        "has_room": True,
    }
    step = RAGCacheStats.of(requests={}, engine=None, offload=None, num_pending_prefills=3)
    assert not step.is_empty()
    none_left = RAGCacheStats.of(requests={}, engine=None, offload=None, num_pending_prefills=0)
    assert step.aggregate(none_left).data["num_pending_prefills"] == 0
    assert none_left.aggregate(RAGCacheStats()).data["num_pending_prefills"] == 0
    full = RAGCacheStats.of(requests={}, engine=None, offload=None, has_room=False)
    assert not full.is_empty()
    assert full.aggregate(step).data["has_room"] is False
    assert step.aggregate(full).data["num_pending_prefills"] == 3
    began, again = (
        RAGCacheStats.of(requests={}, engine=None, offload=None, waited_s={"s": (s, None)}) for s in (0.5, 2.5)
    )
    assert not began.is_empty()
    assert began.aggregate(again).data["waited_s"] == {"s": (2.5, None)}
    assert began.aggregate(RAGCacheStats()).data["waited_s"] == RAGCacheStats().aggregate(began).data["waited_s"]
    received.add(full.aggregate(step).data, 0)
    received.add(step.data, 1)
    received.add(none_left.data, 0)
    received.add({}, 1)
    load = received.load()
    assert load is not None
    assert (load["num_pending_prefills"], load["has_room"]) == (3, False)


def test_an_engine_that_was_reset_counts_on() -> None:
    server = Server()
    for num_requests in (3, 2):
        engine = Engine()
        for i in range(num_requests):
            engine.serve(f"r{i}", 4, 0)
        server.metrics.observe(engine.stats().data)
    assert server.value("ragcache_requests_total") == 5
    assert server.value("ragcache_tier_hit_tokens_total", tier="gpu") == 20


def test_several_engines_have_series_of_their_own(received: Received) -> None:
    server = Server(num_engines=2)
    for index, num_requests in enumerate((1, 2)):
        engine = Engine()
        for i in range(num_requests):
            engine.serve(f"{index}-{i}", 4, 0)
        server.metrics.observe(engine.stats().data, index)
    assert server.value("ragcache_requests_total") == 1
    assert server.value("ragcache_requests_total", engine="1") == 2
    report = received.engine()
    assert report is not None
    assert report["num_requests"] == 3, "together"


def test_the_first_of_several_api_servers_exports_metrics_and_all_know_the_engine(
    received: Received,
) -> None:
    engine = Engine()
    engine.serve("r1", 4, 0)
    data = engine.stats().data
    first, second = Server(), Server(index=1)
    for server in (first, second):
        server.metrics.observe(data)
        assert received.request("r1") is not None
    assert first.value("ragcache_requests_total") == 1
    assert b"ragcache_requests" not in generate_latest(second.registry)


def test_every_api_server_has_what_our_connector_says_and_nothing_is_counted_twice() -> None:
    said = {"requests": {"r1": {}}, "offload": {"bytes": 1}}
    hits = PrefixCacheStats(queries=64, hits=32)
    stats = SchedulerStats(num_running_reqs=3, kv_cache_usage=0.5, prefix_cache_stats=hits, kv_connector_stats=said)
    outputs = {1: EngineCoreOutputs(scheduler_stats=stats)}
    broadcast_to_api_servers(outputs, 3)
    assert sorted(outputs) == [0, 1, 2]
    assert outputs[1].scheduler_stats is stats
    for index in (0, 2):
        told = outputs[index].scheduler_stats
        assert told is not None
        assert told.kv_connector_stats == {"requests": {"r1": {}}, "offload": None}
        assert (told.num_running_reqs, told.kv_cache_usage) == (3, 0.5)
        assert (told.prefix_cache_stats.queries, told.prefix_cache_stats.hits) == (0, 0)
    for silent in ({}, {0: EngineCoreOutputs()}, {0: EngineCoreOutputs(scheduler_stats=SchedulerStats())}):
        num_before = len(silent)
        broadcast_to_api_servers(silent, 3)
        assert len(silent) == num_before


def test_statistics_survive_the_way_between_the_processes() -> None:
    engine = Engine()
    engine.serve("r1", 4, 0)
    stats = engine.stats()
    data = msgspec.msgpack.decode(msgspec.msgpack.encode(stats.data))
    assert data == json.loads(json.dumps(stats.data)) == stats.data
    server = Server()
    server.metrics.observe(data)
    assert server.value("ragcache_requests_total") == 1


def test_steps_are_merged_and_the_later_report_counts() -> None:
    engine = Engine()
    engine.serve("r1", 4, 0)
    first = engine.stats()
    engine.serve("r2", 0, 8)
    merged = first.aggregate(engine.stats())
    assert set(merged.data["requests"]) == {"r1", "r2"}
    assert merged.data["engine"]["num_requests"] == 2
    nothing_new = merged.aggregate(engine.stats())
    assert nothing_new.data["engine"]["num_requests"] == 2
    assert not nothing_new.is_empty()
    assert engine.stats().is_empty()
    assert RAGCacheStats().is_empty()
    assert RAGCacheStats().aggregate(RAGCacheStats()).is_empty()
    merged.reset()
    assert merged.is_empty()
    assert merged.reduce() == {"ragcache_requests": 0}


@pytest.mark.parametrize(
    ("inside", "response_id"),
    [
        ("cmpl-5f3a-0-1a2b3c4d", "cmpl-5f3a"),
        ("chatcmpl-5f3a-1a2b3c4d", "chatcmpl-5f3a"),
        ("0_chatcmpl-5f3a-1a2b3c4d", "chatcmpl-5f3a"),
        ("plain", "plain"),
    ],
)
def test_a_request_is_found_by_the_id_of_its_response(inside: str, response_id: str) -> None:
    received = Received()
    received.add({"requests": {inside: {"num_gpu_tokens": 4}}}, 0)
    assert received.request(response_id) == {"num_gpu_tokens": 4}
    assert received.request("another") is None


def test_a_server_of_a_later_engine_shows_what_that_engine_says_last(received: Received) -> None:
    """Of several servers, each has one engine, which keeps its number."""
    engine, server = Engine(), Server(first=3)
    received.update([engine.controller.report()])
    first = received.engine()
    assert first is not None
    assert first["num_requests"] == 0
    engine.serve("r1", 4, 0)
    server.metrics.observe(engine.stats().data, 3)
    latest = received.engine()
    assert latest is not None
    assert latest["num_requests"] == 1
    labels = {"model_name": "demo", "engine": "3"}
    assert server.registry.get_sample_value("ragcache_requests_total", labels) == 1
