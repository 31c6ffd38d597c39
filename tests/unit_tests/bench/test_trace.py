"""Streams of retrievals have the statistics they promise, and hit rates come out as a cache's must."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import islice

from ragcache_core.bench.tiers_policy import RunLength, recommended, token_hit_rate
from ragcache_core.bench.trace import RetrievalTrace, TraceOptions

SMALL = TraceOptions(num_documents=2_000, skew=1.3, shift=2.0)


def requests(options: TraceOptions, seed: int, count: int) -> list[tuple[int, ...]]:
    return list(islice(RetrievalTrace(options, seed).requests(), count))


def test_a_seed_gives_the_same_stream_and_another_seed_another() -> None:
    assert requests(SMALL, 3, 200) == requests(SMALL, 3, 200)
    assert requests(SMALL, 3, 200) != requests(SMALL, 4, 200)


def test_a_request_retrieves_different_documents_that_lie_near_each_other() -> None:
    for first, second in requests(SMALL, 0, 500):
        assert 1 <= min((first - second) % 2_000, (second - first) % 2_000) <= 8


def test_few_documents_get_most_requests() -> None:
    counts = Counter(first for first, _ in requests(SMALL, 0, 5_000))
    top = sum(count for _, count in counts.most_common(60))  # 3 % of all
    assert 0.5 < top / 5_000 < 0.95


def test_drift_changes_what_is_popular() -> None:
    drifting = replace(SMALL, drifts=True, num_drifting=1_000, drift_every=1_000)
    stream = requests(drifting, 0, 12_000)
    early, late = (Counter(f for f, _ in part).most_common(1)[0][0] for part in (stream[:1_000], stream[-1_000:]))
    still = requests(SMALL, 0, 12_000)
    same = [Counter(f for f, _ in part).most_common(1)[0][0] for part in (still[:1_000], still[-1_000:])]
    assert early != late
    assert same[0] == same[1]


def test_document_lengths_keep_to_their_bounds_and_mean() -> None:
    lengths = RetrievalTrace(SMALL, 0).num_tokens
    assert min(lengths) >= 64
    assert max(lengths) <= 16_384
    assert 1_700 < sum(lengths) / len(lengths) < 2_100


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
