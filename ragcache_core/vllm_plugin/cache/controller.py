"""The knowledge tree of the engine core, and its requests (the "RAG controller" of RAGCache §4).

It imports no vLLM and reads no clock: the scheduler, the block pool, the host policy and the disk tier, which all run
on the scheduler's thread, call it when a request or a block changes its state.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast

from pydantic import ByteSize

from ragcache_core.policy import PrefillCostModel, make_policy
from ragcache_core.queueing import CacheAwareQueue
from ragcache_core.runtime.tenants import Tenants
from ragcache_core.tree import KnowledgeTree, Location, PathSegment
from ragcache_core.types import DocId, Origin, SegmentKind, Tier
from ragcache_core.vllm_plugin.cache.contents import ChunkHolding, ChunkHoldings, Contents
from ragcache_core.vllm_plugin.cache.document_usage import DocumentUses
from ragcache_core.vllm_plugin.cache.forgetting import Forgetting
from ragcache_core.vllm_plugin.cache.kv_groups import KVGroups
from ragcache_core.vllm_plugin.cache.operator_calls import OperatorCalls, Steps
from ragcache_core.vllm_plugin.cache.pins import Pins
from ragcache_core.vllm_plugin.cache.prefix_publisher import PrefixPublisher
from ragcache_core.vllm_plugin.cache.queued_prefixes import QueuedPrefixes
from ragcache_core.vllm_plugin.cache.recent_requests import RecentRequests, response_id_of
from ragcache_core.vllm_plugin.cache.request_hints import RequestHints
from ragcache_core.vllm_plugin.cache.request_state import Counters, Key, RequestState
from ragcache_core.vllm_plugin.cache.speculations import QueuedSpeculations
from ragcache_core.vllm_plugin.cache.tenant_figures import TenantFigures
from ragcache_core.vllm_plugin.cache.tree_view import tree_view
from ragcache_core.vllm_plugin.chunks.page_layout import digest_of
from ragcache_core.vllm_plugin.settings import PluginSettings
from ragcache_core.wire import RequestMetadata

if TYPE_CHECKING:
    from ragcache_core.stats import ChunkReuseStats
    from ragcache_core.tree import TreeNode
    from ragcache_core.vllm_plugin.chunks.manager.manager import ChunkManager

_LOOKS_AN_AGE = 20
_MAX_ANSWERED = 1024
_STEPS_TO_PLACE = 3  # in which the blocks of an ended answer are freed and placed, with two steps in flight
_LONGEST_PERIOD_S = 60.0


@dataclass(slots=True)
class TierReport:
    """The statistics of a tier that the tree does not have.

    ``block_bytes`` are those of a block with its padding there, ``num_other_blocks`` those that it holds of windows and
    states. ``used_bytes`` returns what all take, where they differ in size.
    """

    capacity_bytes: int
    block_bytes: int
    is_enabled: bool = True
    num_other_blocks: Callable[[], int] = lambda: 0
    used_bytes: Callable[[], int] | None = None

    @property
    def num_blocks(self) -> int:
        """Number of blocks that fit into the tier."""
        return self.capacity_bytes // self.block_bytes


class SharedStore(Protocol):
    """Statistics of a store that several engines share."""

    @property
    def capacity_bytes(self) -> int:
        """Bytes that this model's blocks may take in the store; 0 if unknown."""
        ...

    @property
    def used_bytes(self) -> int:
        """Bytes that this model's blocks take in the store, as far as known."""
        ...

    @property
    def num_evicted_blocks(self) -> int:
        """Blocks of others that this engine has evicted from the store."""
        ...

    @property
    def is_serving(self) -> bool:
        """Whether the store is in use now."""
        ...

    @property
    def num_known_blocks(self) -> int:
        """Blocks that this engine has stored or found in the store."""
        ...


class CacheController:
    """Updates the tree and the :class:`RequestState` of each request with the engine core's events, and counts them.

    Args:
        settings: the engine's settings.
        tokens_per_block: tokens per block key.
        prefill_cost: cost model of a prefill.
        is_profiled: whether it was measured.
        tiers: GPU and host; :meth:`add_tier` adds a disk when its store is open.
        has_room: returns whether a speculative request would be admitted now; by default never.
        chunks: the stored chunks, with chunk reuse.
        groups: the model's KV cache groups; one by default.
        now_s: the present time, as for :meth:`tick`.

    Attributes:
        is_profiled: whether the seconds of a prefill were measured.
        queue: real requests in vLLM's scheduler, by ``request_id``.
        last_step: begin and end of the engine's last step.
        forgetting: deletes documents from all holders of KV.
        pins: documents that are evicted last.
        hints: what requests say of the KV that they leave.
        contents: lists the cached documents.
        shared: the shared store, if there is one.
        operator_calls: runs calls over much of the tree, in slices.
        leaving: keys of deleted blocks in host memory that are still being copied.
    """

    def __init__(
        self,
        settings: PluginSettings,
        *,
        tokens_per_block: int,
        prefill_cost: PrefillCostModel,
        is_profiled: bool = False,
        tiers: Mapping[Tier, TierReport] | None = None,
        has_room: Callable[[], bool] | None = None,
        chunks: ChunkManager | None = None,
        groups: KVGroups | None = None,
        now_s: float = 0.0,
    ) -> None:
        self.settings = settings
        self.groups = groups or KVGroups()
        self.tokens_per_block = tokens_per_block
        host = None if tiers is None else tiers.get(Tier.HOST)
        num_host_units = 0 if host is None else host.num_blocks // self.groups.blocks_per_unit
        self.tree = KnowledgeTree(
            make_policy(settings.policy, prefill_cost),
            ghost_size=settings.ghost_size,
            keeps_frequency=settings.keeps_frequency,
            replicated_units=int(settings.replicated_share * num_host_units),
        )
        self.tree.now_s = now_s
        self._next_expiry_s = -math.inf
        if chunks is not None:
            chunks.now_s = now_s
        self.paths = PrefixPublisher(
            self.tree,
            tokens_per_block,
            chunks=dict if chunks is None else chunks.stored,
            is_own=lambda node: self.tenants.is_everybodys(node.owner),
        )
        self.counters = Counters()
        self.has_room = has_room or (lambda: False)
        self.last_step = 0.0, 0.0
        self.tiers = dict(tiers or {})
        self.shared: SharedStore | None = None
        self._chunks = chunks
        self.speculations = QueuedSpeculations()
        is_cache_aware = settings.queue == "cache_aware"
        self.is_queue_ordered = is_cache_aware or settings.speculates
        self._queued = QueuedPrefixes(self.tree, follows_changes=self.is_queue_ordered)
        self.queue: CacheAwareQueue[Any] = CacheAwareQueue(
            lambda request: self.order_priority(request.request_id),
            window=settings.queue_window if is_cache_aware else 0,
        )
        self._prefill_cost = prefill_cost
        self.is_profiled = is_profiled
        self._requests: dict[str, RequestState] = {}
        self._without_token: set[str] = set()
        self._num_pending_prefills = 0
        self._pending_prefill_s = 0.0
        self._finished: dict[str, dict[str, object]] = {}
        self._new_answers: deque[list[Key]] = deque([[] for _ in range(_STEPS_TO_PLACE)])
        self._is_dirty = True
        self.retrieved: dict[Key, tuple[float, float]] = {}
        self.document_uses = DocumentUses(self.tree, lambda owner: self.tenants.is_everybodys(owner))
        self._recent = RecentRequests()
        self._answered: OrderedDict[str, tuple[Key, int]] = OrderedDict()
        tenants = None if settings.tenants is None else Tenants.from_toml(settings.tenants)
        self.tenants = TenantFigures(self.tree, tokens_per_block, tenants)
        self._divide_tiers()
        self.leaving: dict[bytes, None] = {}
        self.operator_calls = OperatorCalls()
        most_pinned = partial(self._most_units, settings.pinned_share)
        self.pins = Pins(self.tree, most_pinned, self._shown, self.tenants.tenant_of)
        most_retained = partial(self._most_units, settings.retained_share)
        self.hints = RequestHints(
            self.tree, most_retained, self.tenants.tenant_of, settings.max_retain_s, self.counters
        )
        self.forgetting = Forgetting(self.tree, self._requests, tokens_per_block, self.pins, self.hints)
        self.contents = Contents(self.tree, self._block_bytes_by_tier, self._chunk_holdings, self.pins.doc_ids)

    def add_tier(self, tier: Tier, report: TierReport) -> None:
        """Include a tier in reports from now on; ``is_enabled`` of its report may change."""
        self.tiers[tier] = report
        self._divide_tiers()

    def _divide_tiers(self) -> None:
        """Give every tenant and collection its share of each tier.

        Raises:
            ConfigError: a quota is more than a tier holds.
        """
        for tier, report in self.tiers.items() if self.tenants else ():
            self.tenants.divide(tier, report, self.groups.blocks_per_unit)

    def remove_tier(self, tier: Tier) -> None:
        """Remove a tier from reports and tree."""
        self.tiers.pop(tier, None)
        self.tree.clear_tier(tier)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block on the GPU."""
        return self.tiers[Tier.GPU].block_bytes

    def on_step(self, began_s: float, ended_s: float) -> None:
        """Record start and end of the engine's last step."""
        self.last_step = began_s, ended_s
        for key in self._new_answers.popleft():
            self.tree.release(key)
        self._new_answers.append([])
        self.paths.drop_unread()
        self.tenants.drop_unread()

    def tick(self, now_s: float) -> None:
        """Set the time, in monotonic seconds since 1970, and delete expired KV.

        That is looked for now and then, and so what would be too old before the next time goes now.
        """
        self.tree.now_s = now_s
        self.hints.tick()
        if self._chunks is not None:
            self._chunks.now_s = now_s
        if (max_age := self.settings.max_age) is None or now_s < self._next_expiry_s:
            return
        period_s = min(max_age / _LOOKS_AN_AGE, _LONGEST_PERIOD_S)
        self._next_expiry_s = now_s + period_s
        oldest_s = now_s + period_s - max_age
        if old := self.tree.older_than(oldest_s):
            self.record_change()
            self._insert_answers()
            self.forgetting.forget_nodes(old)
        if self._chunks is not None and self._chunks.expire(oldest_s):
            self.forgetting.forget_approximate()

    def _block_bytes_by_tier(self) -> dict[Tier, int]:
        return {tier: report.block_bytes for tier, report in self.tiers.items()}

    def _most_units(self, share: float, tenant: str | None) -> int:
        """Return how many units are a share of the smallest tier: what is protected never fills one.

        It is a share of the tenant's part; None has the part without a tenant.
        """
        return min(
            int(share * self.tenants.num_units_of(tenant, tier, self._num_units(report)))
            for tier, report in self.tiers.items()
            if report.is_enabled
        )

    def _num_units(self, report: TierReport) -> int:
        return report.num_blocks // self.groups.blocks_per_unit

    def _shown(self, num_units: int) -> str:
        return ByteSize(num_units * self.groups.blocks_per_unit * self.block_bytes).human_readable()

    def _chunk_holdings(self) -> ChunkHoldings:
        held = {} if self._chunks is None else self._chunks.holdings()

        def holding_of(doc_id: DocId) -> ChunkHolding | None:
            if not held or (mine := held.get(digest_of(doc_id))) is None:
                return None
            num_variants, num_pages, num_disk_pages = mine
            return ChunkHolding(num_variants, num_pages * self.block_bytes, num_disk_pages * self.block_bytes)

        return holding_of

    # A request's life

    def on_ignored_metadata(self) -> bool:
        """Count a request whose metadata contradicts its prompt, and return whether it is the first."""
        self.counters.num_ignored_metadata += 1
        return self.counters.num_ignored_metadata == 1

    def on_new_request(
        self,
        request_id: str,
        metadata: RequestMetadata,
        keys: Sequence[Key],
        num_prompt_tokens: int,
        now_s: float,
        *,
        is_salted: bool = False,
        tenant: str | None = None,
        is_audit: bool = False,
    ) -> None:
        """Add a request's prefix to the tree, and keep it there until :meth:`on_finished`.

        Documents of one that ``is_salted`` are in no report, those of a ``tenant``'s in his alone. One that
        ``is_audit`` is the engine's own: its blocks are cached, and all else is as without it.
        """
        assert request_id not in self._requests
        prompt_keys = keys[: num_prompt_tokens // self.tokens_per_block]
        turn = self.tree.conversations.turn_of(prompt_keys)
        state = RequestState(
            request_id, num_prompt_tokens, now_s, metadata, keys, is_salted, tenant, turn=turn, is_audit=is_audit
        )
        self._requests[request_id] = state
        state.segments = self._path_segments(state, keys)
        path = self.tree.insert(state.segments)
        if is_salted:
            self._make_private(path)
        if path:
            state.retained = cast("Key", path[-1].keys[-1])
            self.tree.retain(state.retained)
        if not is_audit:
            self.speculations.on_new_request(state)
        if not (state.is_speculative or is_audit):
            self._queued.add(state)
        self.hints.on_new_request(state)
        state.prefill_s = self._prefill_s(state, self._queued.num_cached_tokens(state))
        self._count_pending(state, 1)

    def paths_of(self, tenant: str | None) -> PrefixPublisher:
        """Return the publisher of cached prefixes of a tenant's documents; ``None``: of documents without a tenant."""
        return self.paths if tenant is None else self.tenants.paths(tenant)

    def request_ids(self) -> list[str]:
        """Return the ids of the requests in the engine."""
        return list(self._requests)

    def state_of(self, request_id: str) -> RequestState | None:
        """Return the state of a request in the engine."""
        return self._requests.get(request_id)

    def on_looked_up(self, request_id: str, num_local_tokens: int) -> None:
        """Record the number of a request's prompt tokens in the GPU KV cache, before its admission."""
        self._requests[request_id].num_local_tokens = num_local_tokens

    def on_admitted(
        self, request_id: str, keys: Sequence[Key], num_tokens_by_tier: Mapping[Origin, int], now_s: float
    ) -> None:
        """Count a request's access, as it gets its blocks for the first time (RAGCache Algorithm 1).

        ``num_tokens_by_tier`` are those that were found below the GPU; see :meth:`on_looked_up`.
        """
        state = self._requests.get(request_id)
        if state is None:
            return
        self._queued.remove(state)
        num_local, state.num_local_tokens = state.num_local_tokens, 0
        if state.admitted_s is not None:
            self._on_resumed(state, now_s)
            return
        state.admitted_s = now_s
        if state.is_audit:
            return
        self._without_token.add(request_id)
        self.speculations.on_admitted(state)
        self.record_change()
        for origin, num_tokens in {Origin.GPU: num_local, **num_tokens_by_tier}.items():
            state.num_tokens_by_tier[origin] = num_tokens
            self.counters.num_tokens_by_tier[origin] += num_tokens
        self.tenants.on_admitted(state)
        expected_s, state.prefill_s = state.prefill_s, self._prefill_s(state, state.num_cached_tokens)
        self._pending_prefill_s += state.is_pending * (state.prefill_s - expected_s)
        if not state.is_speculative or state.metadata.expected_uses:
            self._count_access(state, keys)

    def on_preempted(self, request_id: str, now_s: float) -> None:
        """Record that a request was preempted; a speculative one is paused."""
        state = self._requests.get(request_id)
        if state is not None and state.is_speculative:
            state.preempted_s = now_s

    def _on_resumed(self, state: RequestState, now_s: float) -> None:
        if state.preempted_s is not None:
            state.paused_s += now_s - state.preempted_s
            state.preempted_s = None
            self.speculations.on_admitted(state)

    def on_tokens(self, indices: Mapping[str, int], tokens: Sequence[Sequence[int]], now_s: float) -> None:
        """Record the requests with their first token in a step; O(admitted requests without a token).

        Args:
            indices: the place of each request of the step in ``tokens``.
            tokens: what was sampled, by place; empty where a prompt is not finished.
            now_s: the moment of the step's end.
        """
        if self._without_token:
            places = ((name, indices.get(name)) for name in self._without_token)
            for request_id in [name for name, at in places if at is not None and tokens[at]]:
                self.on_first_token(request_id, now_s)

    def on_first_token(self, request_id: str, now_s: float) -> None:
        """Record the time of a request's first token; later calls change nothing."""
        self._without_token.discard(request_id)
        state = self._requests.get(request_id)
        if state is not None and state.first_token_s is None:
            self._count_pending(state, -1)
            state.first_token_s = now_s

    def confirm(self, speculation: str, tenant: str | None = None) -> list[str]:
        """Make a speculation's requests real, and return the ids of those in the engine.

        The documents of a speculation count as used from now on, and so does the request, unless it only prefilled
        for one that comes by itself.
        """
        self.record_change()
        confirmed = self.speculations.confirm(speculation, self._requests.values(), tenant)
        for state in confirmed.alive:
            self._count_pending(state, 1)
        for state in (*confirmed.alive, *confirmed.ended):
            if state.admitted_s is not None:
                self._count_access(state, state.keys)
        for state in confirmed.ended:
            self._note_answer(state)
            self._follow_hints(state)
        return [state.request_id for state in confirmed.alive]

    def on_waiting(self, request_id: str) -> None:
        """Watch the prefix of a confirmed request that is queued, whether it was admitted before or not."""
        self._queued.add(self._requests[request_id])

    def on_speculated(self, request_id: str, num_tokens: int) -> None:
        """Count prompt tokens that are computed for a speculative request."""
        self.record_change()
        self.speculations.on_computed(self._requests[request_id], num_tokens)

    def is_speculative(self, request_id: str) -> bool:
        """Return whether a request is speculative and not confirmed."""
        state = self._requests.get(request_id)
        return state is not None and state.is_speculative

    def order_priority(self, request_id: str) -> float:
        """Return a queued request's scheduling priority from its cached tokens; the highest is admitted first."""
        state = self._requests.get(request_id)
        return 0.0 if state is None else self._queued.priority(state)

    def take_touched(self) -> set[str]:
        """Return the queued requests whose :meth:`order_priority` may have changed since the last call."""
        return self._queued.take_touched()

    def last_known(self, keys: Sequence[Key]) -> Key | None:
        """Return the last block of a prompt that is in the tree."""
        return next((key for key in reversed(keys) if self.tree.locate(key) is not None), None)

    def leading_blocks(self, last: Key | None) -> tuple[int, int, int]:
        """Return the number of leading blocks of a prompt that the GPU has, GPU or host, and any tier.

        ``last`` is the last that the tree knows of it.
        """
        at = None if last is None else self.tree.locate(last)
        if at is None:
            return 0, 0, 0
        gpu, fast, anywhere = (
            min(self.tree.num_leading_units(at.node, tiers), at.node.start + at.unit + 1)
            for tiers in ((Tier.GPU,), (Tier.GPU, Tier.HOST), tuple(Tier))
        )
        return gpu, fast, anywhere

    def saved_s(self, state: RequestState, first_block: int, num_blocks: int) -> float:
        """Return the seconds that a prefill saves with ``num_blocks`` cached from ``first_block`` on."""
        first, last = first_block * self.tokens_per_block, (first_block + num_blocks) * self.tokens_per_block
        whole_s = self._prefill_cost.estimate_s(first, max(state.num_prompt_tokens - first, 1))
        return whole_s - self._prefill_cost.estimate_s(last, max(state.num_prompt_tokens - last, 1))

    @property
    def num_pending_prefills(self) -> int:
        """Number of real requests without a first token."""
        return self._num_pending_prefills

    @property
    def pending_prefill_s(self) -> float:
        """Seconds of their prefills, one after the other, with their cached tokens."""
        return self._pending_prefill_s

    def _count_pending(self, state: RequestState, count: int) -> None:
        """Count a request as pending or no longer pending."""
        if state.is_pending:
            self._num_pending_prefills += count
            self._pending_prefill_s += count * state.prefill_s
            if self._num_pending_prefills == 0:
                self._pending_prefill_s = 0.0  # without what rounding has left

    def prefill_s(self, request_id: str, num_cached_tokens: int) -> float:
        """Return the expected seconds of a request's prefill; 0 for an unknown request."""
        state = self._requests.get(request_id)
        return 0.0 if state is None else self._prefill_s(state, num_cached_tokens)

    def _prefill_s(self, state: RequestState, num_cached_tokens: int) -> float:
        return self._prefill_cost.estimate_s(num_cached_tokens, state.num_prompt_tokens - num_cached_tokens)

    def on_loaded(self, request_id: str, num_bytes: int) -> None:
        """Count bytes copied into the GPU KV cache for a request."""
        self.record_change()
        self.counters.num_loaded_bytes += num_bytes
        if (state := self._requests.get(request_id)) is not None:
            state.num_loaded_bytes += num_bytes

    def on_stored(self, request_id: str, num_bytes: int) -> None:
        """Count bytes copied out of the GPU KV cache for a request, finished or not."""
        self.record_change()
        self.counters.num_stored_bytes += num_bytes
        if (state := self._requests.get(request_id)) is not None:
            state.num_stored_bytes += num_bytes

    def on_chunks_reused(self, request_id: str, reuse: ChunkReuseStats) -> None:
        """Record the chunk reuse of a request, before it is finished."""
        if (state := self._requests.get(request_id)) is not None:
            state.chunk_reuse = reuse
            if self._chunks is not None:
                self._chunks.counters.count(reuse)

    def on_load_ended(self, request_id: str, now_s: float) -> None:
        """Record when the loads of a request from lower tiers ended."""
        if (state := self._requests.get(request_id)) is not None:
            state.loaded_s = now_s

    def on_approximated(self, request_id: str, first_block: int, keys: Sequence[Key]) -> None:
        """Separate a request's blocks from ``first_block`` on, as their KV is approximate.

        Requests with the same chunk-reuse settings hit those of its prompt by ``keys``; without keys none does.
        """
        state = self._requests[request_id]
        is_forgotten = state.first_private is not None and not state.apart
        state.first_private = first_block
        self._release_apart(state)
        state.apart = () if is_forgotten else keys[: state.num_prompt_tokens // self.tokens_per_block]
        if state.apart and (path := self.tree.insert(self._path_segments(state, state.apart))):
            if first_block < len(state.apart):
                self.forgetting.on_approximated(state.apart[first_block])
            state.retained_apart = cast("Key", path[-1].keys[-1])
            self.tree.retain(state.retained_apart)

    def is_on_gpu(self, key: Key) -> bool:
        """Return whether a block is in the GPU KV cache."""
        return self.tree.is_resident(key, Tier.GPU)

    def _count_apart(self, state: RequestState) -> None:
        """Count a use of the approximate blocks of an ended request, with the cost of their computation."""
        path = None if state.retained_apart is None else self.tree.retained_path(state.retained_apart)
        if path is None or not state.apart or state.first_private is None or state.admitted_s is None:
            return
        first = state.first_private * self.tokens_per_block
        num_tokens = max(state.num_prompt_tokens - first, 1)
        num_computed = 0 if state.chunk_reuse is None else state.chunk_reuse.num_computed_tokens
        self.tree.record_apart(
            [node for node in path if node.start >= state.first_private],
            num_hit_units=state.num_tokens_by_tier[Origin.GPU] // self.tokens_per_block,
            cost_per_token_s=self._prefill_cost.estimate_s(first, num_computed) / num_tokens,
        )

    def _release_apart(self, state: RequestState) -> None:
        if state.retained_apart is not None:
            self.tree.release(state.retained_apart)
            state.retained_apart = None

    def on_finished(self, request_id: str, now_s: float | None = None) -> dict[str, object] | None:
        """Remove a request, release its prefix, and return its statistics; ``None`` for an unknown request.

        One that ended at a time ``now_s`` is among the :meth:`recent_requests`.
        """
        self.insert_answer(request_id)
        state = self._requests.pop(request_id, None)
        if state is None:
            return None
        self._without_token.discard(request_id)
        self.record_change()
        self._queued.remove(state)
        self._count_pending(state, -1)
        self.speculations.on_finished(state)
        if not (state.is_speculative or state.is_audit):
            self._note_answer(state)
            self._follow_hints(state)
        if state.retained is not None:
            self.tree.release(state.retained)
            state.retained = None
        self._count_apart(state)
        self._release_apart(state)
        if state.is_audit:
            return None
        if now_s is not None:
            self._recent.add(state, now_s)
        self._finished[request_id] = state.to_dict()
        return self._finished[request_id]

    def _follow_hints(self, state: RequestState) -> None:
        """Retain or demote what a request leaves that others may use."""
        hints = state.metadata.hints
        is_followed = hints.is_retained or hints.end_s is not None
        if not is_followed or state.admitted_s is None or state.has_forgotten:
            return
        if (end := self.last_known(state.keys[: state.first_private])) is not None:
            self.hints.on_ended(state, end, state.num_cached_tokens // self.tokens_per_block)

    def forget(self, doc_ids: Set[DocId]) -> dict[str, object]:
        """Delete documents from all tiers, with dependent KV; see :class:`Forgetting`."""
        self.record_change()
        self._insert_answers()
        receipt = self.forgetting.forget(doc_ids)
        self.speculations.forget(doc_ids)
        self.document_uses.forget(doc_ids)
        self._recent.forget(doc_ids)
        self.tenants.forget(doc_ids)
        self.retrieved = {key: worth for key, worth in self.retrieved.items() if self.tree.locate(key) is not None}
        return receipt

    def forget_all(self) -> dict[str, object]:
        """Delete everything in all tiers, as :meth:`forget` does."""
        self.record_change()
        self._insert_answers()
        receipt = self.forgetting.forget_all()
        self.speculations.forget(None)
        self.document_uses.clear()
        self._recent.forget_all()
        self.tenants.forget_all()
        self.retrieved.clear()
        return receipt

    def pin(self, doc_ids: Collection[DocId], *, dry_run: bool = False) -> Steps:
        """Pin documents, or only check which could be; see :class:`~ragcache_core.stats.PinReceipt`.

        Raises:
            ConfigError: they are too much.
        """
        changed = yield from (self.pins.check(doc_ids) if dry_run else self.pins.pin(doc_ids))
        return self._pin_receipt(doc_ids, changed)

    def unpin(self, doc_ids: Collection[DocId]) -> Steps:
        """Unpin documents."""
        changed = yield from self.pins.unpin(doc_ids)
        return self._pin_receipt(doc_ids, changed)

    def _pin_receipt(self, doc_ids: Collection[DocId], changed: Set[DocId]) -> dict[str, Any]:
        unit_bytes = self.groups.blocks_per_unit * self.block_bytes
        return {
            "changed": [doc_id for doc_id in doc_ids if doc_id in changed],
            "unknown": [doc_id for doc_id in doc_ids if doc_id not in changed],
            "num_pinned": len(self.pins.doc_ids),
            "num_bytes": self.pins.num_units * unit_bytes,
            "limit_bytes": self._most_units(self.settings.pinned_share, None) * unit_bytes,
        }

    def ends_on_disk(
        self, doc_ids: Collection[DocId], is_own: Callable[[str | None], bool] = lambda _: True
    ) -> Generator[int, None, tuple[list[Key], list[DocId]]]:
        """Find paths of some owners to documents with a part on disk alone, in slices.

        Returns:
            The last unit of each path, the path with the highest priority first; and the documents that no tier holds.
        """
        gpu, host, disk = (state.resident for state in self.tree.tiers)
        below: dict[int, TreeNode] = {}
        unknown: list[DocId] = []
        for doc_id in doc_ids:
            is_known = False
            for node in tuple(self.tree.nodes_of(doc_id)):
                is_public = self.tree.contains(node) and not node.is_private and is_own(node.owner)
                if is_public and node.stored_s is not None:
                    is_known = True
                    if disk[node.id] & ~(gpu[node.id] | host[node.id]):
                        below[node.id] = node
                yield 1
            if not is_known:
                unknown.append(doc_id)
        inner: set[int] = set()
        for node in below.values():
            path = node.path()
            inner.update(step.id for step in path[:-1])
            yield len(path)
        ends = [node for node in below.values() if node.id not in inner and self.tree.contains(node)]
        ends.sort(key=lambda node: -node.frequency * node.avg_cost_s * node.num_tokens)
        return [cast("Key", node.keys[-1]) for node in ends], unknown

    def keys_to(self, end: Key) -> list[Key]:
        """Return the blocks of the prefix that ends in a block; empty if it is gone."""
        if (location := self.tree.locate(end)) is None:
            return []
        path = location.node.path()
        return [cast("Key", key) for step in path for key in step.keys][: location.node.start + location.unit + 1]

    def take_retrieved(self) -> dict[Key, tuple[float, float]]:
        """Return frequency and cost of the documents retrieved since the last call, by their first block."""
        retrieved, self.retrieved = self.retrieved, {}
        return retrieved

    def take_finished(self) -> dict[str, dict[str, object]]:
        """Return the statistics of the requests that ended since the last call, by request id."""
        finished, self._finished = self._finished, {}
        return finished

    def num_storable_tokens(self, request_id: str) -> int | None:
        """Return the number of a request's tokens to store below the GPU; ``None`` for all, including its answer.

        That is the end of its last kept document; without any, its prompt; all of it where its conversation is likely
        to go on, or its KV is retained; and nothing where it is demoted. No more than the host tier holds: what does
        not fit into it as a whole, vLLM does not store at all.
        """
        state = self._requests[request_id]
        state.is_answer_stored = False
        documents = [s for s in state.metadata.segments if s.kind is SegmentKind.DOCUMENT]
        kept = documents[: self.settings.max_cached_documents]
        hints = state.metadata.hints
        if hints.demote:
            return 0
        goes_on = hints.is_retained or self.tree.returning.is_likely(state.turn)
        if len(kept) == len(documents) and goes_on:
            state.is_answer_stored = True
            limits = []
        else:
            limits = [kept[-1].end if kept else state.num_prompt_tokens]
        if (host := self.tiers.get(Tier.HOST)) is not None:
            limits.append(host.num_blocks // self.groups.blocks_per_unit * self.tokens_per_block)
        return min(limits, default=None)

    # Blocks

    def defers_answer(self, state: RequestState, num_cached_blocks: int) -> bool:
        """Return whether a block after ``num_cached_blocks`` enters the tree only when it becomes free.

        A block in use cannot be evicted, and no request needs an answer before it is complete. Each block
        enters the tree as soon as it is full where lower tiers store answers, or the tree has windows and states.
        """
        is_answer = num_cached_blocks >= state.num_prompt_tokens // self.tokens_per_block
        return is_answer and not state.is_answer_stored and state.first_private is None and not self.groups.others

    def insert_answer(self, request_id: str) -> None:
        """Add the full blocks of a request's answer to the tree, before they become free."""
        state = self._requests.get(request_id)
        if state is not None and state.num_answer_end_blocks:
            end, state.num_answer_end_blocks = state.num_answer_end_blocks, 0
            if state.first_private is None:
                self.locate_block(state.keys, end - 1, request_id)
                self.tree.retain(state.keys[end - 1])
                self._new_answers[-1].append(state.keys[end - 1])

    def _insert_answers(self) -> None:
        for request_id in self._requests:
            self.insert_answer(request_id)

    def locate_block(self, keys: Sequence[Key], index: int, request_id: str = "") -> Location:
        """Return the location of block ``index`` of a request in the tree; an unknown block is added.

        Unknown blocks are those of answers, where the first one may hold documents as well, and of prompts whose nodes
        were dropped.
        """
        if (location := self.tree.locate(keys[index])) is not None:
            return location
        first = index
        while first > 0 and self.tree.locate(keys[first - 1]) is None:
            first -= 1
        after = keys[first - 1] if first else None
        state = self._requests.get(request_id)
        if state is not None and state.tail_ids and first == state.num_prompt_tokens // self.tokens_per_block:
            self.tree.attach(after, keys[first], self.tokens_per_block, None, state.tail_ids, state.tenant)
            first, after = first + 1, keys[first]
        num_tokens = (index + 1 - first) * self.tokens_per_block
        if first <= index:
            self.tree.extend(after, keys[first : index + 1], num_tokens, None if state is None else state.tenant)
        location = self.tree.locate(keys[index])
        assert location is not None
        if state is not None and state.is_salted:
            self._make_private(location.node.path())
        return location

    # Reporting

    @property
    def is_idle(self) -> bool:
        """Whether no request is in the engine."""
        return not self._requests

    @property
    def has_news(self) -> bool:
        """Whether there are unreported ended requests or admitted speculations."""
        return bool(self._finished or self.speculations.has_waited)

    def record_change(self) -> None:
        """Make the next :meth:`take_report` return one."""
        self._is_dirty = True

    def take_report(self) -> dict[str, object] | None:
        """Return a report if anything has changed since the last one, without the most used documents."""
        if not self._is_dirty:
            return None
        self._is_dirty = False
        return self.report(has_documents=False)

    def report(self, *, has_documents: bool = True) -> dict[str, object]:
        """Return the body of the engine's stats route; see ``client/stats/cache_stats.py``.

        With ``has_documents`` it takes O(documents), without O(tiers and tenants).
        """
        return {
            "policy": self.settings.policy,
            "num_nodes": len(self.tree),
            **self.counters.to_dict(),
            **self.speculations.to_dict(),
            "num_retained_tokens": self.hints.num_retained_units * self.tokens_per_block,
            "num_reordered_requests": self.queue.num_reordered,
            "max_overtaken": self.queue.max_overtaken,
            "tiers": [*(self._tier_report(*tier) for tier in sorted(self.tiers.items())), *self._shared_report()],
            **({"hottest_documents": self.document_uses.hottest()} if has_documents else {}),
            **({} if self._chunks is None else {"chunks": self._chunks.report()}),
            **(self._shares_report(has_documents=has_documents) if self.tenants else {}),
        }

    def _shares_report(self, *, has_documents: bool) -> dict[str, object]:
        return {
            "tenants": self.tenants.report(self.tiers, self.groups.blocks_per_unit, has_documents=has_documents),
            "collections": self.tenants.report_collections(self.tiers, self.groups.blocks_per_unit),
        }

    def tree_view(self, limit: int) -> Steps:
        """Return the most used nodes of the tree, in slices; see :func:`tree_view`."""
        return tree_view(self.tree, {tier: report.block_bytes for tier, report in sorted(self.tiers.items())}, limit)

    def recent_requests(self, limit: int, now_s: float) -> dict[str, object]:
        """Return the latest requests, and how many are in the engine; see :class:`RecentRequests`."""
        here = [state for state in self._requests.values() if not state.is_audit]
        return {
            "num_queued": sum(state.admitted_s is None for state in here),
            "num_running": sum(state.admitted_s is not None for state in here),
            "requests": self._recent.newest(reversed(here), limit, now_s),
        }

    def _tier_report(self, tier: Tier, report: TierReport) -> dict[str, object]:
        state, counters, on_disk = self.tree.tiers[tier], self.counters, tier is Tier.DISK
        num_blocks = state.num_units + report.num_other_blocks()
        return {
            "name": tier.label,
            "capacity_bytes": report.capacity_bytes,
            "used_bytes": num_blocks * report.block_bytes if report.used_bytes is None else report.used_bytes(),
            "num_blocks": num_blocks,
            "num_evicted_blocks": state.num_evicted_units,
            "num_hit_tokens": counters.num_tokens_by_tier[tier],
            "is_enabled": report.is_enabled,
            "num_corrupt_blocks": (counters.num_corrupt_blocks - counters.num_shared_corrupt_blocks) * on_disk,
            "num_dropped_blocks": (counters.num_dropped_blocks - counters.num_shared_dropped_blocks) * on_disk,
        }

    def _shared_report(self) -> Iterator[dict[str, object]]:
        """Yield the report of a shared store."""
        if self.shared is None:
            return
        yield {
            "name": Origin.SHARED.label,
            "capacity_bytes": self.shared.capacity_bytes,
            "used_bytes": self.shared.used_bytes,
            "num_blocks": self.shared.num_known_blocks,
            "num_evicted_blocks": self.shared.num_evicted_blocks,
            "num_hit_tokens": self.counters.num_tokens_by_tier[Origin.SHARED],
            "is_enabled": self.shared.is_serving,
            "num_corrupt_blocks": self.counters.num_shared_corrupt_blocks,
            "num_dropped_blocks": self.counters.num_shared_dropped_blocks,
        }

    def _count_access(self, state: RequestState, keys: Sequence[Key]) -> None:
        num_cached = state.num_cached_tokens
        num_missed = max(state.num_prompt_tokens - num_cached, 0)
        path = self.tree.retained_path(state.retained)
        if path is None:
            path = self.tree.insert(state.segments)
        num_hit_units = num_cached // self.tokens_per_block
        cost_s = self.tree.policy.cost_per_token_s(self._prefill_cost, num_cached, num_missed)
        if state.metadata.is_prefill:
            self.tree.record_prefill(path, num_hit_units=num_hit_units, cost_per_token_s=cost_s)
            self.tree.seed(path, expected_uses=state.metadata.expected_uses)
            return
        self.counters.count(state)
        self.tenants.on_request(state)
        prompt_keys = keys[: state.num_prompt_tokens // self.tokens_per_block]
        state.turn = self.tree.conversations.on_access(prompt_keys, self.tree.num_requests)
        self.counters.num_followup_turns += state.turn > 1
        self.hints.on_access(prompt_keys)
        self.tree.record_access(path, num_hit_units=num_hit_units, cost_per_token_s=cost_s, turn=state.turn)
        has_disk = (disk := self.tiers.get(Tier.DISK)) is not None and disk.is_enabled
        labels = {segment.doc_id: segment.label for segment in state.metadata.segments if segment.doc_id is not None}
        if self.pins.doc_ids:
            self.pins.on_used(path)
        if labels and not state.is_salted and not state.has_forgotten:
            uses = self.document_uses if state.tenant is None else self.tenants.document_uses(state.tenant)
            uses.count(labels, state.segments)
        if has_disk:
            for node in path:
                if node.doc_id is not None:  # one unit per node is enough: a restored tree takes the highest
                    self.retrieved[cast("Key", node.keys[0])] = (float(node.frequency), node.avg_cost_s)

    def _note_answer(self, state: RequestState) -> None:
        first = state.num_prompt_tokens // self.tokens_per_block
        is_shared = state.first_private is None or first < state.first_private
        if state.admitted_s is not None and not state.metadata.is_prefill and is_shared and len(state.keys) > first:
            self.tree.record_answer(state.keys[first], state.turn, state.metadata.hints.tool)
            self._answered[response_id_of(state.request_id)] = state.keys[first], state.turn
            if len(self._answered) > _MAX_ANSWERED:
                self._answered.popitem(last=False)

    def on_called(self, response_id: str, tool: str) -> bool:
        """Record the tool that an answer calls, by the id of its response; return whether that is among the latest."""
        answer = self._answered.pop(response_id, None)
        if answer is not None:
            self.tree.record_answer(*answer, tool)
        return answer is not None

    def _path_segments(self, state: RequestState, keys: Sequence[Key]) -> list[PathSegment]:
        """Return a prompt's segments as runs of blocks; a block in two segments belongs to the later one.

        A document that ends in the block in which it begins is no run, but named with the one that has its block.
        """
        size = self.tokens_per_block
        num_keys = min(len(keys), state.num_prompt_tokens // size)
        path, first, num_documents = [], 0, 0
        limit = self.settings.max_cached_documents
        short: frozenset[DocId] = frozenset()
        for segment in state.metadata.segments:
            last = min(segment.end // size, num_keys)
            is_document = segment.kind is SegmentKind.DOCUMENT
            num_documents += is_document
            is_transient = limit is not None and num_documents > limit
            if last > first:
                doc_id = segment.doc_id if is_document else None
                owner = self.tenants.owner_of(state.tenant, doc_id)
                path.append(PathSegment(keys[first:last], (last - first) * size, doc_id, is_transient, short, owner))
                first, short = last, frozenset()
            elif is_document and segment.doc_id is not None:
                short |= {segment.doc_id}
        state.tail_ids = short
        return path

    def _make_private(self, path: Iterable[TreeNode]) -> None:
        for node in path:
            self.tree.make_private(node)
