"""A cache of whole documents in tiers: the knowledge tree as the paper's Algorithm 1 runs it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from ragcache_core.ordering import CachedPaths, PathChange, arrange
from ragcache_core.policy import NodeStats, PrefillCost, ReplacementPolicy, make_policy
from ragcache_core.sim.belady import BeladyPolicy, Foreseen
from ragcache_core.sim.chunks import SimulatedChunks
from ragcache_core.sim.engine import NO_REUSE, NO_STATIC_PREFIX, Served
from ragcache_core.sim.options import BELADY, INFINITE, SimulationOptions
from ragcache_core.sim.traces.trace import Trace, TracedRequest
from ragcache_core.tree import KnowledgeTree, PathSegment, TreeNode
from ragcache_core.types import Tier

_UNBOUNDED = 1 << 62
_BUCKETS_PER_DOUBLING = 8


class DocumentCache:
    """Keeps and evicts whole documents (RAGCache §5.1, Algorithm 1, with a disk below the host).

    For a request, in this order:

    1. its path is matched; a hit ends at the first node that is in no tier. alpha = system + hit tokens, beta =
       missed tokens + question;
    2. every node of the path is pinned and counted: a node that was in no tier starts at 0, unless uses are counted
       beyond eviction; its rank is computed for each tier;
    3. from the root down, each node that is not on the GPU is placed there. While it does not fit, the lowest-ranked
       unpinned leaf of the GPU goes (of equal ones the least recently updated), and is put on the host if it is not
       there, where room is made likewise, down to the disk. Nothing further is placed once nothing can go;
    4. the path is unpinned.

    What is on the host stays there when it is loaded, so it is swapped out once. What finds no room below is gone, and
    what stands on it in slower tiers is out of reach until it is computed again. A document that is larger than a tier
    empties it, to the letter, and is not kept there. With the default policy, and no disk below it, the host does not
    take in what is worth less than what would have to go.

    The system prompt is the root: it always lies on the GPU, and takes nothing of its capacity.
    """

    def __init__(self, options: SimulationOptions, cost: PrefillCost, trace: Trace | None = None) -> None:
        """Begin empty.

        With chunk reuse the documents from the first reused one on are counted, but not stored: their KV is
        approximate.

        Args:
            options: of the run.
            cost: of a prefill.
            trace: the future, which the policy ``belady`` needs.
        """
        is_infinite = options.policy == INFINITE
        num_chunk_host, num_chunk_disk = options.chunk_tokens
        gpu_tokens = _UNBOUNDED if is_infinite else options.gpu_tokens
        host_tokens, disk_tokens = options.host_tokens - num_chunk_host, options.disk_tokens - num_chunk_disk
        self._capacities = (gpu_tokens, host_tokens, disk_tokens)
        self._num_tokens = [0, 0, 0]
        self._cost = cost
        self._chunks = None if options.chunk_reuse is None else SimulatedChunks(options, cost)
        self._system_tokens = options.system_tokens
        self._tree = KnowledgeTree(
            _make_policy(options, cost, trace),
            keeps_frequency=options.keeps_frequency,
            moves_down=True,
        )
        self._is_host_selective = self._tree.policy.is_selective and not disk_tokens
        self.mirror = CachedPaths(_UNBOUNDED)
        self._changes: list[PathChange] = []
        self._is_mirrored = options.replicas > 1 or options.order == "cache_aware"
        self._swapped_out_tokens = 0

    @property
    def tree(self) -> KnowledgeTree:
        """The tree, to look at."""
        return self._tree

    def num_tokens(self, tier: Tier) -> int:
        """Return how many tokens lie in ``tier``."""
        return self._num_tokens[tier]

    def num_cached_tokens(self, request: TracedRequest) -> int:
        node, num_tokens = self._tree.root, self._system_tokens
        for key in _keys(request):
            child = node.children.get(key) if node.children else None
            if child is None or self._tier_of(child) is None:
                break
            node = child
            num_tokens += node.num_tokens
        return num_tokens

    def best_order(self, request: TracedRequest) -> tuple[int, ...]:
        self.update_mirror()
        return arrange(request.doc_ids, "cache_aware", self.mirror, prefix=NO_STATIC_PREFIX)

    def update_mirror(self) -> None:
        for change in self._changes:
            self.mirror.set(change)
        self._changes.clear()

    def serve(self, request: TracedRequest, number: int) -> Served:
        tree = self._tree
        path = self._insert(request)
        tiers = self._leading_tiers(path)
        by_tier = [self._system_tokens, 0, 0]
        num_hits = 0
        for node, tier in zip(path, tiers, strict=True):
            if tier is None:
                break
            by_tier[tier] += node.num_tokens
            num_hits += 1
        reuse = NO_REUSE if self._chunks is None else self._chunks.serve(request, sum(by_tier))
        num_new_tokens = sum(request.doc_tokens[num_hits:]) + request.question_tokens - reuse.num_tokens
        cost_s = tree.policy.cost_per_token_s(self._cost, sum(by_tier) + reuse.num_tokens, num_new_tokens)
        if isinstance(tree.policy, BeladyPolicy):
            tree.policy.begin(number)
        tree.pin(path)
        tree.record_access(path, num_hit_units=num_hits, cost_per_token_s=cost_s)
        self._swapped_out_tokens = 0
        self._place(path[: min(reuse.documents, default=len(path))])
        tree.unpin(path)
        return Served(
            tiers=tiers,
            num_cached_tokens_by_tier=(by_tier[0], by_tier[1], by_tier[2]),
            num_new_tokens=num_new_tokens,
            num_loaded_tokens=by_tier[Tier.HOST] + by_tier[Tier.DISK],
            num_swapped_out_tokens=self._swapped_out_tokens,
            reuse=reuse,
        )

    def warm(self, request: TracedRequest, expected_uses: int) -> None:
        tree, path = self._tree, self._insert(request)
        num_hits = sum(tier is not None for tier in self._leading_tiers(path))
        num_cached, num_new = (
            self._system_tokens + sum(request.doc_tokens[:num_hits]),
            sum(request.doc_tokens[num_hits:]),
        )
        cost_s = tree.policy.cost_per_token_s(self._cost, num_cached, num_new)
        tree.pin(path)
        tree.record_prefill(path, num_hit_units=num_hits, cost_per_token_s=cost_s)
        tree.seed(path, expected_uses=expected_uses)
        self._place(path)
        tree.unpin(path)
        if self._chunks is not None:
            self._chunks.warm(request, expected_uses)

    # Algorithm 1

    def _insert(self, request: TracedRequest) -> list[TreeNode]:
        return self._tree.insert(
            PathSegment((key,), num_tokens, doc_id)
            for key, num_tokens, doc_id in zip(_keys(request), request.doc_tokens, request.doc_ids, strict=True)
        )

    def _leading_tiers(self, path: Sequence[TreeNode]) -> tuple[Tier | None, ...]:
        tiers: list[Tier | None] = []
        for node in path:
            tier = self._tier_of(node)
            if tier is None:
                break
            tiers.append(tier)
        return (*tiers, *[None] * (len(path) - len(tiers)))

    def _place(self, path: Sequence[TreeNode]) -> None:
        """Put what is not on the GPU there, from the root down, as far as room can be made."""
        gpu = self._tree.tiers[Tier.GPU]
        for node in path:
            if gpu.resident[node.id]:
                continue
            if not self._make_room(Tier.GPU, node.num_tokens):
                return
            self._add(node, Tier.GPU)

    def _make_room(self, tier: Tier, num_tokens: int, below: float = math.inf) -> bool:
        """Evict what ranks lower than ``below`` while ``num_tokens`` do not fit into ``tier``: do they now?"""
        while self._num_tokens[tier] + num_tokens > self._capacities[tier]:
            node = self._tree.victim(tier)
            if node is None or not self._tree.tiers[tier].score(node, self._tree.num_requests) < below:
                return False
            if tier is not Tier.DISK:
                self._move_down(node, Tier(tier + 1))
            self._tree.evict_node(node, tier)
            self._num_tokens[tier] -= node.num_tokens
            if self._tier_of(node) is None:
                self._note(node, is_cached=False)
        return True

    def _move_down(self, node: TreeNode, tier: Tier) -> None:
        """Put a node into ``tier``, the one below where it is evicted, if it is not there already."""
        state = self._tree.tiers[tier]
        below = (
            state.worth(node, self._tree.num_requests) if tier is Tier.HOST and self._is_host_selective else math.inf
        )
        if state.resident[node.id] or not self._make_room(tier, node.num_tokens, below):
            return
        self._add(node, tier)
        if tier is Tier.HOST:
            self._swapped_out_tokens += node.num_tokens

    def _add(self, node: TreeNode, tier: Tier) -> None:
        is_new = self._tier_of(node) is None
        self._tree.add(node, 1, tier)
        self._num_tokens[tier] += node.num_tokens
        if is_new:
            self._note(node, is_cached=True)

    # Inside

    def _tier_of(self, node: TreeNode) -> Tier | None:
        """Return the fastest tier that holds a node."""
        gpu, host, disk = self._tree.tiers
        if gpu.resident[node.id]:
            return Tier.GPU
        if host.resident[node.id]:
            return Tier.HOST
        return Tier.DISK if disk.resident[node.id] else None

    def _note(self, node: TreeNode, *, is_cached: bool) -> None:
        """Note that a node is cached, or is no longer."""
        if self._is_mirrored:
            num_tokens = self._system_tokens + sum(step.num_tokens for step in node.path()) if is_cached else 0
            self._changes.append(PathChange(NO_STATIC_PREFIX, _documents(node), num_tokens))


_Key = tuple[str | int, ...]


def _keys(request: TracedRequest) -> list[_Key]:
    """Return a key for each document that covers all before it: their ids, and their lengths, since texts may change.

    A document that was split again has another length, and is another node.
    """
    ids, lengths = request.doc_ids, request.doc_tokens
    return [ids[:end] + lengths[:end] for end in range(1, len(ids) + 1)]


def _documents(node: TreeNode) -> tuple[str, ...]:
    key = node.keys[0]
    assert isinstance(key, tuple)
    return key[: len(key) // 2]


class SizedBelady(BeladyPolicy):
    """Evicts what is farthest away, weighed by its size: distance x size, Belady's rule for documents of many sizes.

    A bound in practice: with sizes the optimum is NP-hard. Within sizes that differ by less than 9 % the order is that
    of the distance alone, which time does not change.
    """

    def bucket(self, stats: NodeStats) -> int:
        return round(math.log2(stats.num_tokens) * _BUCKETS_PER_DOUBLING) if stats.num_tokens else 0

    def score(self, stats: NodeStats, rank: float, num_requests: int) -> float:
        return -max(self.next_use(stats) - self._number, 1.0) * stats.num_tokens


def _make_policy(options: SimulationOptions, cost: PrefillCost, trace: Trace | None) -> ReplacementPolicy:
    if options.policy == BELADY:
        assert trace is not None, "the bound needs to know the future"
        return SizedBelady(_foreseen(trace, options))
    return make_policy("lru" if options.policy == INFINITE else options.policy, cost)


def _foreseen(trace: Trace, options: SimulationOptions) -> Iterator[Foreseen]:
    for request in trace:
        shown = request.in_order(arrange(request.doc_ids, options.order, None))
        keys, end, steps = _keys(shown), 0, []
        for key, num_tokens in zip(keys, shown.doc_tokens, strict=True):
            end += num_tokens
            steps.append((key, end))
        yield Foreseen(steps, keys)
