"""The versions of chunks that a trace leaves in the product's own store, with drawn attention: no model runs.

The store, its eviction and the plans are the product's. What a chunk attends to is drawn: the share of its attention
that leaves it, once for each chunk, and how this divides among the chunks before it, once for each pair. Exact prefixes
on the GPU are left out, so every request asks the store alone.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from random import Random
from typing import Literal, cast

from ragcache_core.chunk.recompute import losses, plan_reuse
from ragcache_core.chunk.scores import LEAST_LOST
from ragcache_core.chunk.selection import make_selection
from ragcache_core.chunk.types import ChunkKey, ChunkSpan, ChunkStatistics, ChunkVariant, ReusePlan, context_behind
from ragcache_core.policy import PrefillCostModel, make_policy
from ragcache_core.sim.traces.trace import Trace, TracedRequest
from ragcache_core.tree import KnowledgeTree, PathSegment, TreeNode
from ragcache_core.types import DEFAULT_ALPHA, SelectionName, Tier
from ragcache_core.vllm_plugin.chunks.manager.entries import StoredVariants, Variant
from ragcache_core.vllm_plugin.chunks.manager.eviction import ChunkEviction, VersionKey
from ragcache_core.vllm_plugin.chunks.manager.manager import ChunkManager
from ragcache_core.vllm_plugin.chunks.manager.residency import ChunkResidency

PAGE_TOKENS = 16
_MEDIAN_OUTWARD, _SPREAD = 0.29, 1.2
"""Of a chunk's attention, how much leaves it: logit-normal, so that 23 % of the chunks send out more than half, and
inner attention is twice the outer one on average (Cache-Craft §6: 23 %, 2.18)."""


EvictionRule = Literal["versions", "chunks", "f_r"]
"""``versions``: the lowest version by the tiers' policy, as the product does; ``chunks``: the lowest chunk by that
policy, of it the version with the lowest f_r; ``f_r``: the version with the lowest f_r of all (Cache-Craft §3.3)."""


class _ReuseEviction(ChunkEviction):
    """Evicts the version with the lowest f_r of all chunks, of equals the oldest."""

    stock: ChunkResidency

    def lowest(self, tier: Tier) -> VersionKey:
        return self._least(tier, self.stock.chunks.values())

    def _least(self, tier: Tier, chunks: Iterable[StoredVariants]) -> VersionKey:
        idle = [each.variant for chunk in chunks for each in chunk.stored.values() if each.num_idle_pages(tier)]
        least = min(idle, key=lambda variant: (self.stock.variants.reuse(variant), variant.number))
        return least.key, least.statistics.context


class _ChunkEviction(_ReuseEviction):
    """Ranks chunks by the policy, and evicts the version with the lowest f_r of the lowest one. Host memory alone."""

    def place(self, stored: Variant) -> None:
        variants = self.stock.chunks[stored.variant.key].stored.values()
        node, tier = self._node_of(stored.variant), Tier.HOST
        if any(each.num_idle_pages(tier) for each in variants):
            self._tree.release_units(node, 1, tier)
        else:
            self._tree.acquire_units(node, 1, tier)
        if any(each.is_in(tier) for each in variants):
            self._tree.add(node, 1, tier)
        else:
            self._leave(node, tier)

    def lowest(self, tier: Tier) -> VersionKey:
        node = self._tree.victim(tier)
        assert node is not None
        return self._least(tier, [self.stock.chunks[cast("ChunkKey", node.keys[0])]])

    def record_eviction(self, variant: ChunkVariant, tier: Tier) -> None:
        if sum(each.is_in(tier) for each in self.stock.chunks[variant.key].stored.values()) == 1:
            super().record_eviction(variant, tier)

    def _node(self, version: VersionKey, num_tokens: int) -> TreeNode:
        return self._tree.insert([PathSegment((version[0],), num_tokens, version[0].hex())])[0]


_RULES: Mapping[EvictionRule, type[ChunkEviction]] = {
    "versions": ChunkEviction,
    "chunks": _ChunkEviction,
    "f_r": _ReuseEviction,
}


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """A store of chunks and its rules.

    Attributes:
        capacity_tokens: of all versions.
        max_variants: of a chunk (M).
        stores_all: store a chunk behind each new prefix, mended or not, as Cache-Craft does; we store what is computed
            wholly.
    """

    capacity_tokens: int
    max_variants: int = 5
    eviction: EvictionRule = "versions"
    selection: SelectionName = "whole_chunks"
    stores_all: bool = False

    @property
    def alpha(self) -> float:
        """Eq. 12's factor."""
        return DEFAULT_ALPHA[self.selection]


@dataclass(slots=True)
class Replayed:
    """What a trace came to, after its warm-up.

    Attributes:
        num_tokens: of the documents; ``num_computed`` of them were computed.
        variants: the number of versions of each chunk at the end, descending.
        num_injected: tokens of stored versions that requests read; ``num_shared`` of them are of a version that one of
            the requests before it, which run at the same time, reads too.
    """

    num_tokens: int = 0
    num_computed: int = 0
    num_evicted: int = 0
    num_injected: int = 0
    num_shared: int = 0
    variants: list[int] = field(default_factory=list)


def replay(trace: Trace, options: StoreOptions, *, seed: int, warm_up: int = 0, num_running: int = 32) -> Replayed:
    """Return what the requests of a trace, one after the other, compute and leave in a store."""
    replayed = Replayed()
    store = _ReplayedStore(options, seed)
    running: deque[frozenset[int]] = deque(maxlen=num_running - 1)
    for number, request in enumerate(trace):
        plan = store.serve(request)
        num_tokens = sum(request.doc_tokens)
        read = {} if plan is None else {chunk.variant.number: plan.num_kept(chunk) for chunk in plan.read}
        if number >= warm_up:
            held = frozenset().union(*running)
            replayed.num_tokens += num_tokens
            replayed.num_computed += num_tokens if plan is None else len(plan.recomputed)
            replayed.num_injected += sum(read.values())
            replayed.num_shared += sum(num_kept for variant, num_kept in read.items() if variant in held)
        running.append(frozenset(read))
    replayed.num_evicted = store.library.counters.num_evicted_chunks
    replayed.variants = store.num_variants()
    return replayed


class _ReplayedStore:
    def __init__(self, options: StoreOptions, seed: int) -> None:
        cost = PrefillCostModel.default()
        ranks = _RULES[options.eviction](KnowledgeTree(make_policy("mixture", cost)), cost)
        self._options = options
        self._attention = _DrawnAttention(seed)
        self.library = ChunkManager(
            ranks,
            num_pages=options.capacity_tokens // PAGE_TOKENS,
            tokens_per_page=PAGE_TOKENS,
            max_variants=options.max_variants,
        )
        if isinstance(ranks, _ReuseEviction):
            ranks.stock = self.library._stock

    def num_variants(self) -> list[int]:
        """Return the number of versions of each chunk, descending."""
        stored = self.library.stored().items()
        found = self.library.find({key: _token_ids(key, num_tokens) for key, num_tokens in stored})
        return sorted(map(len, found.values()), reverse=True)

    def serve(self, request: TracedRequest) -> ReusePlan | None:
        """Return the plan of a request; None if it reuses nothing. What it computes is stored."""
        options = self._options
        spans = _spans(request)
        stored = self.library.find({span.key: _token_ids(span.key, span.num_tokens) for span in spans})
        end = spans[-1].end
        plan: ReusePlan | None = plan_reuse(
            spans, stored, start=0, end=end, selection=make_selection(options.selection), alpha=options.alpha
        )
        assert plan is not None
        if not plan.num_reused_tokens or not self.library.pin([chunk.variant for chunk in plan.read], "r"):
            plan = None
        read = () if plan is None else plan.read
        for chunk in read:
            self.library.record_use(chunk.variant, chunk.overhead)
        lost = losses(spans, [0.0] * len(spans), 0, plan)
        is_read = {chunk.span for chunk in read}
        for number, span in enumerate(spans):
            if options.stores_all or span not in is_read:
                self._store(spans[: number + 1], lost)
        self.library.release("r")
        return plan

    def _store(self, spans: Sequence[ChunkSpan], lost: Sequence[float]) -> None:
        span, before = spans[-1], spans[:-1]
        inherits = max(lost[: len(before)], default=0.0)
        token_ids = _token_ids(span.key, span.num_tokens)
        reservation = self.library.reserve(span.key, token_ids, span.context, "r", inherits=inherits)
        if reservation is None:
            return
        inter, intra = self._attention.of(spans)
        off = math.fsum(mass * share for mass, share in zip(inter, lost, strict=False)) / span.num_tokens
        statistics = ChunkStatistics(
            tuple(each.key for each in before),
            tuple(each.num_tokens for each in before),
            inter,
            intra,
            _equal(span.num_tokens),
            inherited=min(1.0, max(off, LEAST_LOST if any(lost[: len(before)]) else 0.0)),
            context=span.context,
        )
        self.library.commit(reservation, statistics)


class _DrawnAttention:
    """What chunks attend to, the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._outward: dict[ChunkKey, float] = {}

    def of(self, spans: Sequence[ChunkSpan]) -> tuple[tuple[float, ...], float]:
        """Return the attention of the last of ``spans`` to those before it, and to its own tokens."""
        span, before = spans[-1], spans[:-1]
        if not before:
            return (), float(span.num_tokens)
        outward = self._outward.get(span.key)
        if outward is None:
            middle = math.log(_MEDIAN_OUTWARD / (1 - _MEDIAN_OUTWARD))
            drawn = middle + _SPREAD * Random(self._name(span.key)).gauss(0.0, 1.0)
            outward = self._outward[span.key] = 1 / (1 + math.exp(-drawn))
        weights = [
            each.num_tokens * Random(self._name(span.key + each.key)).lognormvariate(0.0, 1.0) / (len(before) - place)
            for place, each in enumerate(before)
        ]
        total = math.fsum(weights)
        inter = tuple(span.num_tokens * outward * weight / total for weight in weights)
        return inter, span.num_tokens * (1 - outward)

    def _name(self, key: bytes) -> bytes:
        return self._seed.to_bytes(8, "big") + key


def _spans(request: TracedRequest) -> list[ChunkSpan]:
    spans: list[ChunkSpan] = []
    place, context = 0, b"static"
    for doc_id, num_tokens in zip(request.doc_ids, request.doc_tokens, strict=True):
        if spans:
            context = context_behind(spans[-1])
        spans.append(ChunkSpan(place, place + num_tokens, sha256(doc_id.encode()).digest(), context))
        place += num_tokens
    return spans


@cache
def _token_ids(key: ChunkKey, num_tokens: int) -> Sequence[int]:
    return (key[0],) * num_tokens


@cache
def _equal(num_tokens: int) -> tuple[float, ...]:
    return (1.0,) * num_tokens
