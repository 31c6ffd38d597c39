"""The cache of whole documents: Algorithm 1 to the letter, against a naive version of it, and its tiers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.simulated.documents import DocumentCache
from benchmarks.simulated.laboratory import LabOptions, make_cache, simulate
from ragcache_core.errors import ConfigError
from ragcache_core.ordering import CachedPaths, PathChange, arrange
from ragcache_core.sim.result import SimulationResult
from ragcache_core.sim.testbeds import TESTBEDS
from ragcache_core.sim.traces.trace import Trace, TracedRequest
from ragcache_core.sim.traces.workload import WORKLOADS, make_trace
from ragcache_core.tree import check_invariants
from ragcache_core.types import Tier

TESTBED = TESTBEDS["a10g-mistral-7b"]
Path = tuple[str, ...]


@dataclass
class Node:
    tokens: int
    frequency: int = 0
    total_cost: float = 0.0
    count: int = 0
    updated: int = 0
    pinned: bool = False
    priority: dict[str, float] = field(default_factory=dict)


class Algorithm1:
    """RAGCache's Algorithm 1 as it is written, by linear search over plain dicts."""

    def __init__(self, gpu_tokens: int, host_tokens: int, system_tokens: int) -> None:
        self.nodes: dict[Path, Node] = {}
        self.on: dict[str, set[Path]] = {"gpu": set(), "host": set()}
        self.capacity = {"gpu": gpu_tokens, "host": host_tokens}
        self.clock = {"gpu": 0.0, "host": 0.0}
        self.system_tokens = system_tokens
        self.swapped_out_tokens = self.loaded_tokens = self.updates = 0

    def serve(self, request: TracedRequest) -> tuple[list[str], float, float]:
        """Return where each document lay, the seconds of the prefill, and those of the transfer."""
        path = [request.doc_ids[: i + 1] for i in range(len(request.doc_ids))]
        tiers: list[str] = []
        for key in path:
            if key not in self.on["gpu"] and key not in self.on["host"]:
                break
            tiers.append("gpu" if key in self.on["gpu"] else "host")
        hits = len(tiers)
        alpha = self.system_tokens + sum(request.doc_tokens[:hits])
        beta = sum(request.doc_tokens[hits:]) + request.question_tokens
        seconds = 0.028 + 1.25e-5 * alpha + 2.1e-4 * beta + 1.2e-8 * beta * (alpha + beta / 2)
        loaded = sum(request.doc_tokens[i] for i in range(hits) if tiers[i] == "host")
        self.loaded_tokens += loaded
        for i, key in enumerate(path):
            if key not in self.on["gpu"] and key not in self.on["host"]:
                self.nodes[key] = Node(request.doc_tokens[i])
            node = self.nodes[key]
            node.frequency += 1
            if i >= hits:
                node.total_cost += seconds / beta
                node.count += 1
            for tier in ("gpu", "host"):
                node.priority[tier] = self.clock[tier] + node.total_cost / node.count * node.frequency
            self.updates += 1
            node.updated = self.updates
            node.pinned = True
        for key in path:
            if key in self.on["gpu"]:
                continue
            if (len(key) > 1 and key[:-1] not in self.on["gpu"]) or not self.make_room("gpu", self.nodes[key].tokens):
                break
            self.on["gpu"].add(key)
        for key in path:
            self.nodes[key].pinned = False
        return tiers + ["miss"] * (len(path) - hits), seconds, loaded / 8192 / 11.5

    def used(self, tier: str) -> int:
        return sum(self.nodes[key].tokens for key in self.on[tier])

    def make_room(self, tier: str, tokens: int) -> bool:
        while self.used(tier) + tokens > self.capacity[tier]:
            leaves = [
                key
                for key in self.on[tier]
                if not self.nodes[key].pinned and not any(k[:-1] == key for k in self.on[tier])
            ]
            if not leaves:
                return False
            key = min(leaves, key=lambda k: (self.nodes[k].priority[tier], self.nodes[k].updated))
            node = self.nodes[key]
            self.on[tier].remove(key)
            self.clock[tier] = max(self.clock[tier], node.priority[tier])
            if tier == "gpu" and key not in self.on["host"] and self.make_room("host", node.tokens):
                self.on["host"].add(key)
                self.swapped_out_tokens += node.tokens
        return True


def check_against_algorithm_1(trace: Trace, options: LabOptions) -> SimulationResult:
    reference = Algorithm1(options.gpu_tokens, options.host_tokens, options.system_tokens)
    result = simulate(trace, options, keeps_requests=True)
    assert result.requests is not None
    free_s = 0.0
    for request, record in zip(trace, result.requests, strict=True):
        tiers, seconds, transfer_s = reference.serve(request)
        free_s = max(request.arrival_s + options.retrieval_s, free_s) + max(seconds, transfer_s)
        assert record.documents == tuple(tiers)
        assert record.ttft_s == pytest.approx(free_s - request.arrival_s, rel=1e-12, abs=1e-9)
    assert result.summary.swapped_out_tokens == reference.swapped_out_tokens
    assert result.summary.loaded_tokens == reference.loaded_tokens
    return result


LENGTHS = {"A": 3, "B": 5, "C": 4, "D": 7, "E": 1, "F": 12}
requests = st.lists(
    st.tuples(st.lists(st.sampled_from("ABCDEF"), max_size=4), st.integers(1, 6), st.floats(0, 0.2)),
    min_size=1,
    max_size=60,
)


def small_trace(drawn: list[tuple[list[str], int, float]]) -> Trace:
    now_s = 0.0
    made = []
    for documents, question, gap_s in drawn:
        now_s += gap_s
        made.append(TracedRequest(now_s, tuple(documents), tuple(LENGTHS[d] for d in documents), question, 1))
    return Trace.from_requests(made)


@settings(max_examples=300, deadline=None)
@given(drawn=requests, gpu=st.integers(1, 25), host=st.integers(0, 25), system=st.sampled_from([0, 9]))
def test_every_request_finds_what_algorithm_1_left_it(
    drawn: list[tuple[list[str], int, float]], gpu: int, host: int, system: int
) -> None:
    options = LabOptions(policy="pgdsf", gpu_tokens=gpu, host_tokens=host, system_tokens=system)
    check_against_algorithm_1(small_trace(drawn), options)


@pytest.mark.slow
@pytest.mark.parametrize(("documents", "num_requests"), [(2, 3_000), (5, 1_000)])
def test_thousands_of_requests_find_what_algorithm_1_left_them(documents: int, num_requests: int) -> None:
    workload = replace(WORKLOADS["mmlu"], documents_per_request=documents)
    options = LabOptions(policy="pgdsf", gpu_tokens=40_960, host_tokens=65_536, system_tokens=100)
    result = check_against_algorithm_1(make_trace(workload, num_requests, seed=7), options)
    assert 0.0 < result.summary.document_hit_rate < 0.5
    assert result.summary.hits_by_tier["gpu"] > 0
    assert result.summary.hits_by_tier["host"] > 0


POLICIES = ["pgdsf", "gdsf", "lru", "lfu", "s3fifo", "arc", "mixture", "belady", "infinite"]


@settings(max_examples=150, deadline=None)
@given(
    drawn=requests,
    policy=st.sampled_from(POLICIES),
    capacities=st.tuples(st.integers(1, 25), st.integers(1, 25), st.integers(0, 40)),
)
def test_no_tier_holds_more_than_it_can_and_no_token_is_lost(
    drawn: list[tuple[list[str], int, float]], policy: str, capacities: tuple[int, int, int]
) -> None:
    gpu, host, disk = capacities
    trace = small_trace(drawn)
    options = LabOptions(policy=policy, gpu_tokens=gpu, host_tokens=host, disk_tokens=disk)
    cache = make_cache(trace, options, TESTBED)
    assert isinstance(cache, DocumentCache)
    for number, request in enumerate(trace):
        expected = cache.num_cached_tokens(request)
        served = cache.serve(request, number)
        assert served.num_cached_tokens == expected
        assert served.num_cached_tokens + served.num_new_tokens == sum(request.doc_tokens) + request.question_tokens
        check_invariants(cache.tree, is_connected=False)
        for tier, capacity in zip(Tier, capacities, strict=True):
            held = sum(n.num_tokens for n in cache.tree.nodes() if cache.tree.resident_mask(n, tier))
            assert held == cache.num_tokens(tier)
            assert held <= capacity or policy == "infinite"
        for node in cache.tree.nodes():
            assert node.num_pins == 0
            if cache.tree.resident_mask(node, Tier.GPU) and node.parent is not cache.tree.root:
                assert node.parent is not None
                assert cache.tree.resident_mask(node.parent, Tier.GPU)


@settings(max_examples=100, deadline=None)
@given(drawn=requests, gpu=st.integers(5, 25), host=st.integers(0, 25))
def test_the_order_with_the_longest_cached_prefix_is_that_of_a_mirror_of_the_tree(
    drawn: list[tuple[list[str], int, float]], gpu: int, host: int
) -> None:
    trace = small_trace(drawn)
    options = LabOptions(policy="lru", order="cache_aware", gpu_tokens=gpu, host_tokens=host)
    cache = make_cache(trace, options, TESTBED)
    assert isinstance(cache, DocumentCache)
    for number, request in enumerate(trace):
        mirror = CachedPaths()
        for node in cache.tree.nodes():
            num_tokens = sum(step.num_tokens for step in node.path())
            if any(cache.tree.resident_mask(node, tier) for tier in Tier):
                mirror.set(PathChange(b"", tuple(step.doc_id or "" for step in node.path()), num_tokens))
        order = cache.best_order(request)
        assert order == arrange(request.doc_ids, "cache_aware", mirror, prefix=b"")
        shown = replace(
            request,
            doc_ids=tuple(request.doc_ids[i] for i in order),
            doc_tokens=tuple(request.doc_tokens[i] for i in order),
        )
        assert cache.num_cached_tokens(shown) >= cache.num_cached_tokens(request)
        cache.serve(shown, number)


def serve_all(
    documents: str, lengths: dict[str, int] | None = None, **options: object
) -> list[tuple[Tier | None, ...]]:
    """Serve requests of one document each, and return where each lay."""
    lengths = lengths or {}
    trace = Trace.from_requests(TracedRequest(0.0, (d,), (lengths.get(d, 10),), 1, 1) for d in documents)
    cache = make_cache(trace, LabOptions(**options), TESTBED)  # type: ignore[arg-type]
    return [cache.serve(request, number).tiers for number, request in enumerate(trace)]


def test_a_document_goes_down_tier_by_tier() -> None:
    tiers = serve_all("ABCA", policy="lru", gpu_tokens=10, host_tokens=10, disk_tokens=10)
    assert tiers == [(None,), (None,), (None,), (Tier.DISK,)]
    assert serve_all("ABA", policy="lru", gpu_tokens=10, host_tokens=10)[-1] == (Tier.HOST,)
    assert serve_all("ABCA", policy="lru", gpu_tokens=10, host_tokens=10)[-1] == (None,)
    assert serve_all("ABA", policy="lru", gpu_tokens=10, host_tokens=0)[-1] == (None,)


def test_a_document_is_swapped_out_once() -> None:
    trace = Trace.from_requests(TracedRequest(float(i), (d,), (10,), 1, 1) for i, d in enumerate("ABABAB"))
    summary = simulate(trace, LabOptions(policy="lru", gpu_tokens=10, host_tokens=20)).summary
    assert summary.swapped_out_tokens == 20  # A once, B once, though A left the GPU three times
    assert summary.loaded_tokens == 40
    assert summary.hits_by_tier == {"gpu": 0, "host": 4, "disk": 0}


def test_a_document_larger_than_the_gpu_is_never_cached_and_empties_it() -> None:
    tiers = serve_all("AXXA", {"X": 50}, policy="lru", gpu_tokens=20, host_tokens=0)
    assert tiers == [(None,), (None,), (None,), (None,)]


def test_a_document_of_another_length_is_another_document() -> None:
    trace = Trace.from_requests(TracedRequest(float(i), ("A",), (n,), 1, 1) for i, n in enumerate([10, 12, 10, 12]))
    cache = make_cache(trace, LabOptions(policy="lru", gpu_tokens=100, host_tokens=0), TESTBED)
    assert [cache.serve(request, i).num_new_tokens for i, request in enumerate(trace)] == [11, 13, 1, 1]


def test_conversations_are_refused() -> None:
    trace = Trace.from_requests([TracedRequest(0.0, (), (), 5, 5, conversation=1)])
    with pytest.raises(ConfigError):
        simulate(trace, LabOptions())
