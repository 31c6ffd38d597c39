"""What every replacement policy promises."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from ragcache_core.policy import (
    POLICIES,
    GDSFPolicy,
    MixturePolicy,
    NodeStats,
    PGDSFPolicy,
    PrefillCostModel,
    ReplacementPolicy,
    make_policy,
)
from ragcache_core.tree import KnowledgeTree, PathSegment
from ragcache_core.types import Tier


@pytest.fixture(params=sorted(POLICIES))
def policy(request: pytest.FixtureRequest) -> ReplacementPolicy:
    return make_policy(request.param)


def retrieve(
    policy: ReplacementPolicy, stats: NodeStats, at: int, cost_s: float = 2e-4, is_missed: bool = True
) -> None:
    stats.frequency += 1
    if is_missed:
        stats.total_cost_s += cost_s
        stats.num_computed += 1
    policy.on_access(stats, at)
    stats.last_request = at


def worth(policy: ReplacementPolicy, stats: NodeStats, now: int) -> float:
    return policy.score(stats, policy.rank(stats, 0.0), now)


def serve(tree: KnowledgeTree, doc: str, capacity: int, num_tokens: int = 16, cost_s: float = 1e-3) -> bool:
    segments = [PathSegment([(doc,)], num_tokens, doc)]
    (node,) = tree.insert(segments)
    is_hit = bool(tree.resident_mask(node, Tier.GPU))
    tree.record_access([node], num_hit_units=int(is_hit), cost_per_token_s=cost_s)
    if not is_hit:
        if tree.tiers[Tier.GPU].num_units >= capacity:
            tree.evict(Tier.GPU)
        tree.add(node, 1, Tier.GPU)
    return is_hit


def test_a_rank_is_a_finite_number(policy: ReplacementPolicy) -> None:
    stats = NodeStats(0, 512)
    for at in range(1, 200):
        retrieve(policy, stats, at, cost_s=10.0 ** random.Random(at).uniform(-9, 3), is_missed=at % 3 == 0)
        assert math.isfinite(worth(policy, stats, at))


def test_a_later_access_never_lowers_the_priority(policy: ReplacementPolicy) -> None:
    old, new = NodeStats(0, 512), NodeStats(1, 512)
    for at in (1, 3):
        retrieve(policy, old, at)
    for at in (2, 40):
        retrieve(policy, new, at)
    assert worth(policy, new, 41) >= worth(policy, old, 41)


def test_a_higher_frequency_never_lowers_the_priority(policy: ReplacementPolicy) -> None:
    rare, frequent = NodeStats(0, 512), NodeStats(1, 512)
    for at in (1, 2, 3):
        retrieve(policy, frequent, at)
    retrieve(policy, rare, 4)
    retrieve(policy, frequent, 4)
    assert worth(policy, frequent, 5) >= worth(policy, rare, 5)


def test_order_within_a_bucket_does_not_depend_on_the_time(policy: ReplacementPolicy) -> None:
    nodes = [NodeStats(i, 64 * (i + 1)) for i in range(12)]
    rng = random.Random(7)
    for at in range(1, 120):
        retrieve(policy, rng.choice(nodes), at, cost_s=rng.uniform(1e-5, 1e-3))
    ranks = {id(n): policy.rank(n, 0.0) for n in nodes}
    if policy.rank_ages:
        return  # a tier ranks these again
    for bucket in {policy.bucket(n) for n in nodes}:
        inside = sorted((n for n in nodes if policy.bucket(n) == bucket), key=lambda n: ranks[id(n)])
        for now in (120, 500, 100_000):
            scores = [policy.score(n, ranks[id(n)], now) for n in inside]
            assert scores == sorted(scores)


def test_a_tree_evicts_what_the_policy_scores_lowest(policy: ReplacementPolicy) -> None:
    tree = KnowledgeTree(policy)
    rng = random.Random(3)
    for _ in range(400):
        serve(tree, f"d{min(int(rng.paretovariate(0.7)), 60)}", capacity=20, num_tokens=rng.choice([16, 64, 256]))
    state = tree.tiers[Tier.GPU]
    residents = [n for n in tree.nodes() if state.resident[n.id]]
    scores = {n.id: state.score(n, tree.num_requests) for n in residents}
    evicted = tree.evict(Tier.GPU)
    assert evicted is not None
    assert scores[evicted[0].node.id] == min(scores.values())


def test_a_skewed_popularity_is_learned(policy: ReplacementPolicy) -> None:
    rng = random.Random(11)
    docs = [f"d{min(int(rng.paretovariate(0.8)), 300)}" for _ in range(4000)]
    tree = KnowledgeTree(policy)
    hits = sum(serve(tree, doc, capacity=16) for doc in docs)
    fifo: list[str] = []
    baseline = 0
    for doc in docs:
        baseline += doc in fifo
        if doc not in fifo:
            fifo = [*fifo, doc][-16:]
    assert hits > baseline


def test_pgdsf_follows_equations_1_to_3() -> None:
    stats = NodeStats(0, 100)
    policy = PGDSFPolicy()
    retrieve(policy, stats, 1, cost_s=2e-4)
    retrieve(policy, stats, 2, cost_s=4e-4)
    retrieve(policy, stats, 3, is_missed=False)
    assert policy.rank(stats, 5.0) == pytest.approx(5.0 + 3 * (2e-4 + 4e-4) / 2)


def test_pgdsf_in_a_tree_follows_algorithm_1_to_the_letter() -> None:
    """Against a transcription of lines 1 to 23, over random requests for single documents of one unit."""
    rng = random.Random(5)
    tree = KnowledgeTree(PGDSFPolicy(), keeps_frequency=False)
    capacity, clock = 6, 0.0
    nodes: dict[str, dict[str, float]] = {}
    in_gpu: dict[str, int] = {}  # in order of the last update
    for i in range(600):
        doc = f"d{min(int(rng.paretovariate(0.9)), 20)}"
        cost = rng.uniform(1e-4, 1e-2)
        if doc not in in_gpu:
            nodes[doc] = {"frequency": 0, "total": 0.0, "computed": 0}
        node = nodes[doc]
        node["frequency"] += 1
        if doc not in in_gpu:
            node["total"] += cost
            node["computed"] += 1
        node["priority"] = clock + node["total"] / node["computed"] * node["frequency"]
        if doc not in in_gpu and len(in_gpu) >= capacity:
            victim = min(in_gpu, key=lambda d: (nodes[d]["priority"], in_gpu[d]))
            clock = max(clock, nodes[victim]["priority"])
            del in_gpu[victim]
        in_gpu[doc] = i
        serve(tree, doc, capacity, cost_s=cost)
        assert {n.doc_id for n in tree.nodes() if tree.resident_mask(n, Tier.GPU)} == set(in_gpu)
        assert tree.tiers[Tier.GPU].clock == pytest.approx(clock)


def test_gdsf_knows_no_prefix() -> None:
    cost = PrefillCostModel.default()
    policy = GDSFPolicy(cost)
    alone, after_others = NodeStats(0, 400), NodeStats(1, 400)
    retrieve(policy, alone, 1, cost_s=1e-3)
    retrieve(policy, after_others, 1, cost_s=9e-3)
    assert policy.rank(alone, 0.0) == policy.rank(after_others, 0.0) == pytest.approx(cost.estimate_s(0, 400) / 400)


def times_s(num_cached: int, num_new: int) -> float:
    """A step takes a second whatever it computes, and more for each token, for what is cached, and for attention."""
    return 1.0 + 1e-4 * num_cached + 0.01 * num_new + 1e-6 * num_new * (num_cached + num_new / 2)


class _Formula:
    def estimate_s(self, num_cached_tokens: int, num_new_tokens: int, /) -> float:
        return times_s(num_cached_tokens, num_new_tokens)


def measured(num_new: tuple[int, ...], time_s: Callable[[int, int], float] = times_s) -> PrefillCostModel:
    """A profile of a machine, which begins at 32 new tokens (``ragcache profile``)."""
    cached = (0, 128, 2048, 8192)
    return PrefillCostModel(cached, num_new, tuple(tuple(time_s(a, b) for b in num_new) for a in cached))


@pytest.mark.parametrize("name", POLICIES)
def test_a_request_charges_what_it_missed_and_nothing_where_it_missed_nothing(name: str) -> None:
    policy = make_policy(name)
    # of 50 tokens behind 1,000: the fixed second and the reading of what is cached are paid in any case
    saved_s = 50 * 0.01 - 50 * 1e-4 + 1e-6 * 50 * (1000 + 50 / 2)
    expected_s = saved_s if name == "mixture" else times_s(1000, 50)
    assert policy.cost_per_token_s(_Formula(), 1000, 50) == pytest.approx(expected_s / 50)
    assert policy.cost_per_token_s(_Formula(), 1000, 0) == policy.cost_per_token_s(_Formula(), 1000, -1) == 0.0


def test_the_mixture_charges_a_short_miss_about_as_much_as_a_long_one() -> None:
    mixture, pgdsf = MixturePolicy(), PGDSFPolicy()
    short, long = (mixture.cost_per_token_s(_Formula(), 0, n) for n in (16, 1600))
    assert short == pytest.approx(long, rel=0.1)
    assert pgdsf.cost_per_token_s(_Formula(), 0, 16) > 5 * pgdsf.cost_per_token_s(_Formula(), 0, 1600)


@pytest.mark.parametrize("slope_s", [0.0, -1e-3])
def test_measured_times_that_do_not_grow_make_no_document_worthless(slope_s: float) -> None:
    profile = measured((32, 64, 128), lambda _, num_new: 2.0 + slope_s * num_new)
    cost_s = MixturePolicy().cost_per_token_s(profile, 0, 64)
    assert cost_s == pytest.approx(0.01 * (2.0 + slope_s * 96) / 64)
