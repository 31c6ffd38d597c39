"""Hit rates come out as a cache's must, and the policy that is recommended is a safe one."""

from __future__ import annotations

from ragcache_core.sim.traces.workload import Workload
from tests.benchmarks.tiers.policies import RunLength, recommended, token_hit_rate
from tests.benchmarks.tiers.tree import DecisionLoad

SMALL = Workload(num_documents=2_000, skew=1.3, shift=2.0)


def test_a_larger_cache_serves_more_and_none_serves_nothing() -> None:
    rates = [
        token_hit_rate("lru", SMALL, 0, RunLength(cache_tokens, 1_000, 200)) for cache_tokens in (1, 65_536, 1 << 30)
    ]
    assert rates[0] == 0.0
    assert 0.0 < rates[1] < rates[2] < 1.0


def test_a_policy_that_loses_under_drift_is_not_recommended() -> None:
    rates = {
        "stationary": {"pgdsf": [0.50], "lfu": [0.60], "tournament": [0.55]},
        "drifting": {"pgdsf": [0.50], "lfu": [0.45], "tournament": [0.505]},
    }
    assert recommended(rates) == "tournament"
    rates["drifting"]["lfu"] = [0.495]  # 1 % behind PGDSF: allowed
    assert recommended(rates) == "lfu"


def test_a_tree_is_full_when_its_decisions_are_timed() -> None:
    load = DecisionLoad("pgdsf", num_nodes=200, blocks_per_node=2, seed=0)
    load.fill()
    times = load.measure(100)
    assert len(times.seconds) == len(times.cpu_seconds) == 100
    assert 0.0 < times.hit_share < 1.0
    assert times.num_nodes > 100
