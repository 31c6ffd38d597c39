"""The shared tier: a store below host memory that engines on several machines use.

An engine loads KV that another one has computed. Engines do not track the store's contents: a request that needs more
than its engine's own tiers hold waits while the store is queried, once. The store decides what it evicts, and when.

All methods run on the scheduler's thread and wait for nothing (:class:`SharedIO`). Any error of the store, or in its
data, is a miss: a chunk is used only if its checksum matches.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import compress, islice, takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from ragcache_core.chunkstore.compression import Compression
from ragcache_core.chunkstore.encryption import load_keys
from ragcache_core.chunkstore.remote import open_remote
from ragcache_core.errors import ConfigError
from ragcache_core.log import logger_of
from ragcache_core.vllm_plugin.cache.forgetting import Forgotten, Freed, why_in_store
from ragcache_core.vllm_plugin.cache.kv_groups import BlockKey
from ragcache_core.vllm_plugin.compat import (
    CacheHitSource,
    Locality,
    ReqContext,
    ScheduleEndContext,
)
from ragcache_core.vllm_plugin.identity import approximate_type, shared_identity
from ragcache_core.vllm_plugin.lower.jobs import EndedJob, LoadTransfer, TierJob
from ragcache_core.vllm_plugin.lower.transfers import TransferTier
from ragcache_core.vllm_plugin.offload.host_tier import is_adapted
from ragcache_core.vllm_plugin.shared.io import LOAD_TIMEOUT_S, NUM_READERS, Inquiry, PutJob, SharedIO
from ragcache_core.vllm_plugin.shared.objects import Objects

if TYPE_CHECKING:
    from ragcache_core.vllm_plugin.cache.request_state import Key
    from ragcache_core.vllm_plugin.offload.spec import RAGCacheSpec

logger = logger_of(__name__)

_SHORTEST_LIMIT_S = 0.2


@dataclass(slots=True)
class _StoreQuery:
    """A request's query to the store, and the blocks that it may load.

    Attributes:
        inquiry: the query.
        first: the index of the first block that its own engine does not have.
        units: the blocks from there on.
        found: names of the chunks to load; None until the store has answered.
        limit_s: how long a load of them may take.
    """

    inquiry: Inquiry
    first: int
    units: Sequence[Key]
    found: set[str] | None = None
    limit_s: float = LOAD_TIMEOUT_S


class SharedTier(TransferTier):
    """A tier below host memory in a store of several engines."""

    source = CacheHitSource.EXTERNAL_UNSPECIFIED
    locality = Locality.REMOTE

    def __init__(
        self,
        spec: RAGCacheSpec,
        host_memory: memoryview,
        url: str,
        ttl_s: float | None = None,
        key_file: str | None = None,
        max_bytes: int | None = None,
        is_read_only: bool = False,
    ) -> None:
        """Start using the store at ``url``, which need not answer yet.

        Args:
            spec: has the controller and the cache namespace.
            host_memory: rows of host memory, ``[num_rows, block_bytes]``.
            url: URL of the store.
            ttl_s: seconds after which the store deletes an object.
            key_file: keys of encrypted objects.
            max_bytes: maximum bytes of this model's objects in the store, from all engines.
            is_read_only: whether nothing is stored or deleted there.

        Raises:
            ConfigError: the store is not usable, the identity of the model's weights is unknown, ``key_file`` has no
                key, or ``max_bytes`` is less than two blocks.
        """
        assert spec.controller is not None
        num_rows, block_bytes = host_memory.shape  # type: ignore[misc]  # typeshed: of any length
        if max_bytes is not None and max_bytes < 2 * block_bytes:
            raise ConfigError(
                f"shared_bytes is {max_bytes:,}, two blocks of KV of this model take {2 * block_bytes:,}: raise it, or "
                "leave shared_bytes out"
            )
        keys = load_keys(None if key_file is None else Path(key_file))
        compression = Compression(
            spec.controller.settings.compression,
            "RAGCache's shared store",
            num_readers=NUM_READERS,
            number_type=approximate_type(spec.config, spec.controller.settings.compression),
        )
        self._objects = Objects(shared_identity(spec.config), block_bytes, keys, compression)
        self.is_read_only = is_read_only
        store = open_remote(url, ttl_s=ttl_s, is_read_only=is_read_only)
        self._io = SharedIO(store, self._objects, host_memory, max_bytes, is_read_only=is_read_only)
        super().__init__(spec.controller, self._io, num_rows, block_bytes)
        self.url = url
        self.undeleted_reason = why_in_store(url)
        self._is_enabled = True
        self._queries: dict[str, _StoreQuery] = {}
        self._computed_s: dict[int, dict[bytes, float]] = {}
        self._counted: tuple[int, ...] = (0, 0, 0, 0, 0)
        self._controller.shared = self
        self._controller.forgetting.add_holder(self)
        logger.info("RAGCache shares KV at %s, under %s", url, self._objects.prefix)

    # A tier below host memory

    def find(self, key: BlockKey, context: ReqContext) -> Sequence[BlockKey] | None:
        if not self._is_used or is_adapted(context) or (place := self._place_of(key, context)) is None:
            return ()
        state, index = place
        query = self._queries.get(context.req_id)
        if query is None:
            units = state.keys[index : state.num_prompt_tokens // self._controller.tokens_per_block]
            query = self._queries[context.req_id] = _StoreQuery(self._ask(units), index, units)
        if query.found is None:
            if not self._io.is_answered(query.inquiry):
                return None
            self._weigh(query, context.req_id)
        assert query.found is not None
        if self._name_of(key) not in query.found:
            return ()
        if self._groups.others or index < query.first:
            return (key,)
        at = index - query.first
        num_found = sum(1 for _ in takewhile(query.found.__contains__, islice(query.inquiry.chain, at, None)))
        return self._run_of(query.units[at : at + num_found])

    def take_ended(self) -> Iterable[EndedJob]:
        ended = super().take_ended()
        self._count()
        return ended

    def end_step(self, context: ScheduleEndContext) -> None:
        super().end_step(context)
        self._count()

    def end_request(self, context: ReqContext) -> None:
        self._queries.pop(context.req_id, None)

    @property
    def has_pending_work(self) -> bool:
        """Whether an engine without requests goes on stepping, to report the work of the threads."""
        return self._io.num_waiting > 0 or self._figures() != self._counted

    def drain(self) -> None:
        """End all uses of host memory; loads and stores in flight are abandoned."""
        self._abandon_loads()
        for store in self._stores.values():
            store.release()

    def shutdown(self) -> None:
        self._abandon_loads()
        self._io.close()

    def clear(self) -> None:
        """Stop using the store until the next start: the model's weights may have changed.

        Its chunks belong to the old weights, and are valid for engines that have them.
        """
        self._is_enabled = False
        self.drain()

    # What the controller reports

    @property
    def is_serving(self) -> bool:
        """Whether the store is in use, and has not failed recently."""
        return self._is_used and not self._io.reads.is_resting

    @property
    def num_known_blocks(self) -> int:
        """Number of blocks that this engine has stored or found there."""
        return self._io.num_known

    @property
    def capacity_bytes(self) -> int:
        """Bytes that this model's blocks may take in the store; 0 without a limit by the engine."""
        return 0 if self._io.quota is None else self._io.quota.max_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of all blocks at the last listing, and of those stored since; without a limit, of known ones."""
        return self.num_known_blocks * self.block_bytes if self._io.quota is None else self._io.quota.used_bytes

    @property
    def num_evicted_blocks(self) -> int:
        """Number of blocks that this engine has deleted to keep the limit."""
        return 0 if self._io.quota is None else self._io.quota.num_deleted

    # A holder of what may be forgotten

    def forget(self, forgotten: Forgotten) -> Freed:
        """Delete all known blocks from the store; from a read-only one, load them no more.

        Another engine, or this one before a restart, may have stored any of them, so all are deleted. Only the deletion
        of expired KV is not retried: it is a miss wherever it is read.
        """
        groups = (self._groups.main, *self._groups.others)
        names = [self._name_of(self._groups.key_of(unit, group)) for unit in forgotten.units for group in groups]
        gone = set(names)
        for query in self._queries.values():
            if query.found is not None:
                query.found -= gone
        if names:
            self._io.delete(names, is_retried=forgotten.is_all or bool(forgotten.doc_ids))
        return Freed()

    def num_pending(self) -> int:
        """Return the number of objects with pending deletion; none in a read-only store, which keeps them."""
        return 0 if self.is_read_only else self._io.num_undeleted

    def deletion_problem(self) -> str | None:
        """Return why the store may keep deleted KV: it cannot delete now, or is only read."""
        if self._io.is_disabled:
            return (
                f"the shared store {self.url} has not deleted what was forgotten, and is used no more: before the next "
                f"start, delete what begins with {self._objects.prefix}"
            )
        if not (num_pending := self._io.num_undeleted) or self._io.can_write:
            return None
        if self.is_read_only:
            return (
                f"the shared store {self.url} is only read, and may have {num_pending} chunks: this engine does not "
                f"load them until its next start; before that, delete what begins with {self._objects.prefix}"
            )
        return (
            f"the shared store {self.url} does not answer, and may have {num_pending} chunks: they are deleted when it "
            f"does, while this engine runs; else delete what begins with {self._objects.prefix}"
        )

    # Inside

    @property
    def _is_used(self) -> bool:
        return self._is_enabled and not self._io.is_disabled

    def _begin_store(self, job: TierJob) -> PutJob | None:
        if not self._is_used:
            return None
        chunks = []
        for key, row in zip(job.keys, job.rows, strict=True):
            at = self._tree.locate(self._groups.unit_of(key))
            if at is not None and key not in self._controller.leaving:
                computed_s = self._tree.now_s if at.node.stored_s is None else at.node.stored_s
                chunks.append((self._name_of(key), row, computed_s))
        new = self._io.unknown(chunks)
        if new and self._io.can_write and self._has_room(len(new)):
            return self._io.put(new)
        self._io.drop(len(new))
        return None

    def _begin_load(self, job: TierJob) -> tuple[LoadTransfer, float]:
        names = [self._name_of(key).encode() for key in job.keys]
        load, self._computed_s[job.number] = self._io.load(names, job.rows)
        query = self._queries.get(job.context.req_id)
        return load, LOAD_TIMEOUT_S if query is None else query.limit_s

    def _finish_load(self, job: TierJob, load: LoadTransfer) -> Sequence[BlockKey]:
        computed_s = self._computed_s.pop(job.number)
        max_age = self._controller.settings.max_age
        oldest_s = None if max_age is None else self._tree.now_s - max_age
        loaded = []
        for key in compress(job.keys, load.found):
            name = self._name_of(key)
            moment_s = computed_s.get(name.encode())
            if oldest_s is not None and (moment_s is None or moment_s < oldest_s):
                self._io.unlearn([name])  # the recomputed chunk replaces it in the store, too
                continue
            loaded.append(key)
            if moment_s is not None and (at := self._tree.locate(self._groups.unit_of(key))) is not None:
                self._tree.make_older(at.node, moment_s)
        query = self._queries.get(job.context.req_id)
        if query is not None and query.found is not None and len(loaded) < len(job.keys):
            query.found -= {self._name_of(key) for key in job.keys} - {self._name_of(key) for key in loaded}
        return loaded

    def _name_of(self, key: BlockKey) -> str:
        return self._objects.name_of(key)

    def _ask(self, units: Sequence[Key]) -> Inquiry:
        """Begin to query which of ``units`` exist."""
        chain, *beside = (
            [*map(self._name_of, self._groups.keys_of(units, group))]
            for group in (self._groups.main, *self._groups.others)
        )
        return self._io.ask(chain, beside)

    def _weigh(self, query: _StoreQuery, request_id: str) -> None:
        """Use the store's answer, unless recomputing is faster than loading."""
        inquiry, state = query.inquiry, self._controller.state_of(request_id)
        found = inquiry.found if inquiry.is_finished else set()
        query.found = {name for name in found if not self._io.is_leaving(name)}
        if not query.found or state is None or not self._controller.is_profiled:
            return
        num_units = sum(name in query.found for name in inquiry.chain)
        pays, saved_s = self._pays(state, query.first, num_units, len(query.found))
        if not pays:
            query.found = set()
        query.limit_s = min(max(saved_s, _SHORTEST_LIMIT_S), LOAD_TIMEOUT_S)

    def _figures(self) -> tuple[int, ...]:
        io = self._io
        return (
            io.num_damaged,
            io.num_dropped,
            io.reads.num_failures + io.writes.num_failures,
            io.num_known,
            io.num_waiting,
        )

    def _count(self) -> None:
        """Add the threads' new counts to the engine's counters."""
        counters, now = self._controller.counters, self._figures()
        if now != self._counted:
            damaged, dropped, failures, _, waiting = (new - old for new, old in zip(now, self._counted, strict=True))
            counters.num_corrupt_blocks += damaged
            counters.num_shared_corrupt_blocks += damaged
            counters.num_dropped_blocks += dropped
            counters.num_shared_dropped_blocks += dropped
            counters.num_shared_failures += failures
            counters.num_shared_pending_blocks += waiting
            self._counted = now
            self._controller.record_change()
