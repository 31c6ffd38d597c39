"""Processor time of all that the tree does for a request: look-up, counts, learning, eviction; beside LRU's tree.

A GPU tier of 100,000 nodes is full, so each request evicts about as much as it adds. The collector of garbage is off,
as an engine freezes what it keeps.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Hashable, Sequence

from benchmarks.papers.ratios import DEFAULT_POLICY
from benchmarks.report import BenchmarkPlan, Figure, Goal, Part, percentiles_ms
from ragcache_core.policy import make_policy
from ragcache_core.tree import KnowledgeTree, PathSegment
from ragcache_core.types import Tier

GOALS = {f"decision_{name}_p99_ms": Goal("<=", 0.5) for name in ("documents", "conversations")}

_NUM_NODES, _NUM_REQUESTS = 100_000, 10_000
_NODE_TOKENS = 64
_NUM_DOCUMENTS = 300_000
_SKEW = 0.3
"""Exponent of the Pareto distribution from which documents are drawn; some come often, most once."""
_NUM_TALKS, _MAX_TURNS = 30_000, 10
"""Conversations that may continue, and turns until one ends; a turn adds two nodes to a path of up to 20."""
_CONTINUED_SHARE = 0.6

_Prompt = list[PathSegment]


def measure_decisions(plan: BenchmarkPlan) -> Part:
    """Time requests for two documents, and turns of conversations, in a full tier."""
    figures = []
    for name, prompts in (("documents", _documents), ("conversations", _conversations)):
        times = {}
        for policy in (DEFAULT_POLICY, "lru"):
            plan.report(f"decisions: {name}, {policy}")
            times[policy] = _serve(plan, policy, prompts(plan.seed), is_conversation=name == "conversations")
        ours, theirs = times[DEFAULT_POLICY], times["lru"]
        (p50, p99), (_, rival_p99) = percentiles_ms(ours), percentiles_ms(theirs)
        note = f"longest {1000 * max(ours):.2f} ms; lru's {1000 * max(theirs):.2f} ms"
        figures.append(Figure(f"decision_{name}_p99_ms", p99, rival_p99, p50, p99, note=note))
    return Part("until the tier is full", tuple(figures))


def _serve(plan: BenchmarkPlan, policy: str, prompt: Callable[[], _Prompt], *, is_conversation: bool) -> list[float]:
    """Return the seconds of each request after the tier is full."""
    num_nodes, num_requests = plan.sized(_NUM_NODES, 500), plan.sized(_NUM_REQUESTS, 200)
    tree = KnowledgeTree(make_policy(policy))
    state = tree.tiers[Tier.GPU]
    times_s: list[float] = []
    gc.collect()
    gc.disable()
    try:
        while len(times_s) < num_requests:
            segments = prompt()
            is_full = state.num_units >= num_nodes
            begin_s = time.thread_time()
            _decide(tree, segments, num_nodes, is_conversation=is_conversation)
            if is_full:
                times_s.append(time.thread_time() - begin_s)
    finally:
        gc.enable()
    return times_s


def _decide(tree: KnowledgeTree, segments: Sequence[PathSegment], capacity: int, *, is_conversation: bool) -> None:
    keys: list[Hashable] = [key for segment in segments for key in segment.keys]
    turn = tree.conversations.on_access(keys, tree.num_requests)
    path = tree.insert(segments)
    tree.record_access(path, num_hit_units=0, cost_per_token_s=1e-4, turn=turn)
    missing = {node: node.full_mask & ~tree.resident_mask(node, Tier.GPU) for node in path}
    num_units = tree.tiers[Tier.GPU].num_units + sum(mask.bit_count() for mask in missing.values())
    tree.pin(path)
    tree.evict_up_to(Tier.GPU, num_units - capacity)
    for node, mask in missing.items():
        tree.add(node, mask, Tier.GPU)
    tree.unpin(path)
    if is_conversation:
        tree.record_answer(keys[-1], turn)


def _documents(seed: int) -> Callable[[], _Prompt]:
    rng = random.Random(seed)

    def draw() -> _Prompt:
        first, second = (int(rng.paretovariate(_SKEW)) % _NUM_DOCUMENTS for _ in range(2))
        return [_segment((first,), first), _segment((first, second), second)]

    return draw


def _conversations(seed: int) -> Callable[[], _Prompt]:
    rng = random.Random(seed)
    talks: list[_Prompt] = []
    number = 0

    def draw() -> _Prompt:
        nonlocal number
        number += 1
        if not talks or rng.random() > _CONTINUED_SHARE:
            if len(talks) == _NUM_TALKS:
                talks.pop(rng.randrange(_NUM_TALKS))
            talks.append([])
        place = rng.randrange(len(talks))
        talk = talks[place]
        talk += [_segment((number, "document"), None if talk else number), _segment((number, "answer"), None)]
        if len(talk) == 2 * _MAX_TURNS:
            talks.pop(place)
        return list(talk)

    return draw


def _segment(key: Hashable, document: int | None) -> PathSegment:
    return PathSegment((key,), _NODE_TOKENS, None if document is None else f"d{document}")
