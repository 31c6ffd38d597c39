"""S3-FIFO and ARC against plain transcriptions of their papers, and what a tree asks of them besides."""

from __future__ import annotations

import random
import time
from collections import OrderedDict, deque

import pytest

from ragcache_core.policy import ARCPolicy, ReplacementPolicy, S3FIFOPolicy
from ragcache_core.policy.adaptive import TokenQueue
from ragcache_core.tree import KnowledgeTree, PathSegment
from ragcache_core.types import Tier

CAPACITY = 40


def run(policy: ReplacementPolicy, docs: list[str]) -> list[bool]:
    """Return which requests for single documents of one unit and one token hit a tier of ``CAPACITY``."""
    tree = KnowledgeTree(policy)
    hits = []
    for doc in docs:
        (node,) = tree.insert([PathSegment([(doc,)], 1, doc)])
        hits.append(bool(tree.resident_mask(node, Tier.GPU)))
        tree.record_access([node], num_hit_units=int(hits[-1]), cost_per_token_s=1e-3)
        if not hits[-1]:
            if tree.tiers[Tier.GPU].num_units == CAPACITY:
                tree.evict(Tier.GPU)
            tree.add(node, 1, Tier.GPU)
    return hits


def zipf(seed: int, count: int) -> list[str]:
    return [f"d{i}" for i in random.Random(seed).choices(range(500), [1 / (i + 1) for i in range(500)], k=count)]


def arc_of_the_paper(docs: list[str]) -> list[bool]:
    """Figure 4 of Megiddo and Modha (FAST 2003)."""
    t1, t2, b1, b2 = (OrderedDict[str, None]() for _ in range(4))
    p, hits = 0.0, []

    def replace(is_of_b2: bool) -> None:
        if t1 and (len(t1) > p or (is_of_b2 and len(t1) == p)):
            b1[t1.popitem(last=False)[0]] = None
        else:
            b2[t2.popitem(last=False)[0]] = None

    for doc in docs:
        hits.append(doc in t1 or doc in t2)
        if hits[-1]:
            t1.pop(doc, None)
            t2.pop(doc, None)
            t2[doc] = None
        elif doc in b1:
            p = min(p + max(len(b2) / len(b1), 1.0), CAPACITY)
            replace(False)
            del b1[doc]
            t2[doc] = None
        elif doc in b2:
            p = max(p - max(len(b1) / len(b2), 1.0), 0.0)
            replace(True)
            del b2[doc]
            t2[doc] = None
        else:
            if len(t1) + len(b1) == CAPACITY:
                if len(t1) < CAPACITY:
                    b1.popitem(last=False)
                    replace(False)
                else:
                    t1.popitem(last=False)
            elif len(t1) + len(t2) + len(b1) + len(b2) >= CAPACITY:
                if len(t1) + len(t2) + len(b1) + len(b2) == 2 * CAPACITY:
                    b2.popitem(last=False)
                if len(t1) + len(t2) == CAPACITY:
                    replace(False)
            t1[doc] = None
    return hits


def s3fifo_of_the_paper(docs: list[str]) -> list[bool]:
    """Algorithm 1 of Yang et al. (SOSP 2023)."""
    small, main, ghosts = deque[str](), deque[str](), OrderedDict[str, None]()
    uses: dict[str, int] = {}
    hits = []

    def evict_main() -> None:
        while main:
            doc = main.popleft()
            if uses[doc] == 0:
                del uses[doc]
                return
            uses[doc] -= 1
            main.append(doc)

    def evict_small() -> bool:
        while small:
            doc = small.popleft()
            if uses[doc] <= 1:
                del uses[doc]
                ghosts[doc] = None
                if len(ghosts) > 0.9 * CAPACITY:
                    ghosts.popitem(last=False)
                return True
            uses[doc] = 0
            main.append(doc)
        return False

    for doc in docs:
        hits.append(doc in uses)
        if hits[-1]:
            uses[doc] = min(uses[doc] + 1, 3)
            continue
        if len(small) + len(main) == CAPACITY and not (len(small) >= 0.1 * CAPACITY and evict_small()):
            evict_main()
        if doc in ghosts:
            del ghosts[doc]
            main.append(doc)
        else:
            small.append(doc)
        uses[doc] = 0
    return hits


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_arc_hits_what_the_paper_hits(seed: int) -> None:
    docs = zipf(seed, 4_000)
    hits, papers = run(ARCPolicy(), docs), arc_of_the_paper(docs)
    assert sum(papers) > 1_000
    assert sum(a == b for a, b in zip(hits, papers, strict=True)) > 0.98 * len(docs)
    assert sum(hits) == pytest.approx(sum(papers), rel=0.01)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_s3fifo_hits_what_the_paper_hits(seed: int) -> None:
    docs = zipf(seed, 4_000)
    hits, papers = run(S3FIFOPolicy(), docs), s3fifo_of_the_paper(docs)
    assert sum(papers) > 1_000
    assert sum(a == b for a, b in zip(hits, papers, strict=True)) > 0.98 * len(docs)
    assert sum(hits) == pytest.approx(sum(papers), rel=0.01)


@pytest.mark.parametrize("policy", [ARCPolicy, S3FIFOPolicy])
def test_a_node_that_is_split_and_gone_leaves_nothing_behind(policy: type[ReplacementPolicy]) -> None:
    """Tokens that no tier holds would count for a queue for ever, and the other would be emptied instead."""
    it = policy()
    tree = KnowledgeTree(it)
    (whole,) = tree.insert([PathSegment([("a",), ("b",), ("c",)], 30, "abc")])
    tree.record_access([whole], num_hit_units=0, cost_per_token_s=1e-3)
    tree.add(whole, 0b001, Tier.GPU)
    tree.insert([PathSegment([("a",)], 10, "abc"), PathSegment([("x",)], 10, "x")])
    while tree.evict(Tier.GPU):
        pass
    queues = [value for name, value in vars(it).items() if name in ("_small", "_main", "_t1", "_t2")]
    assert [queue.num_tokens for queue in queues] == [0, 0]


def test_the_first_of_a_long_queue_goes_as_fast_as_of_a_short_one() -> None:
    def seconds_each(num: int) -> float:
        queue = TokenQueue()
        for node_id in range(num):
            queue.put(node_id, 1)
        began_s = time.thread_time()
        for node_id in range(num, 2 * num):
            queue.put(node_id, 1)
            queue.shorten(num)
        return (time.thread_time() - began_s) / num

    assert seconds_each(50_000) < 8 * min(seconds_each(2_000) for _ in range(5))
