"""The host tier's policy: vLLM's offload keeps the chunks, the knowledge tree says which of them goes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ragcache_core.tree import ANYBODY, EvictedUnit, Location, admit, admit_within_quotas, by_node
from ragcache_core.types import Tier
from ragcache_core.vllm_plugin.build_context import current_context
from ragcache_core.vllm_plugin.cache.forgetting import Forgotten, Freed
from ragcache_core.vllm_plugin.cache.kv_groups import OtherBlocks, group_of, offload_key, unit_of
from ragcache_core.vllm_plugin.compat import (
    CachePolicy,
    ChunkStatus,
    CPUPrimaryTierOffloadingManager,
    LookupResult,
    OffloadingEvent,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
)
from ragcache_core.vllm_plugin.offload.compat import discard_idle

if TYPE_CHECKING:
    from ragcache_core.tree import TreeNode
    from ragcache_core.vllm_plugin.cache.request_state import Key
    from ragcache_core.vllm_plugin.offload.host_index import HostIndex


ADAPTED = "ragcache_adapted"
"""Marks, in its ``kv_transfer_params``, a request whose KV an adapter (LoRA) computes."""
_MAX_FLEETING = 100_000
"""Keys of adapters that are remembered, besides those that are here."""


def is_adapted(req_context: ReqContext) -> bool:
    """Return whether an adapter computes a request's KV, which therefore must not outlive the engine.

    A key names the adapter but not its weights, and another start may have others under the same name.
    """
    return bool((req_context.kv_transfer_params or {}).get(ADAPTED))


@dataclass(slots=True, eq=False)
class _Lookup:
    """What a waiting request was promised when it was looked up, and how much of that is still on its way."""

    num_local_tokens: int
    promised: set[OffloadKey] = field(default_factory=set)
    num_awaited: int = 0


class TreeCachePolicy(CachePolicy):
    """Chunks of host memory by key; a chunk is one block of KV.

    The tree knows the chunks of full attention. Those of other groups go with them, or before (:class:`OtherBlocks`).

    Chunks that a transfer uses are held, and so are those that a waiting request was promised in this look-up: a
    request that is longer than the tier would otherwise promote its chunks from disk at the cost of one another, read
    everything and reuse nothing.
    """

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        controller = current_context().controller
        assert controller is not None
        self.controller = controller
        self.groups = controller.groups
        self.is_selective = False
        self.num_other_chunks = 0
        self.journal: HostIndex | None = None
        self._capacity = cache_capacity
        self._chunks: dict[OffloadKey, ChunkStatus] = {}
        self._written: set[int] = set()
        self._lookups: dict[str, _Lookup] = {}
        self._num_promises: Counter[OffloadKey] = Counter()
        self._awaited: dict[OffloadKey, list[_Lookup]] = {}
        self._looking_up: _Lookup | None = None
        self._unknown: dict[OffloadKey, None] = {}
        self._fleeting: dict[OffloadKey, None] = {}
        self._max_fleeting = _MAX_FLEETING + cache_capacity
        self._chosen: list[EvictedUnit] = []
        self._arriving: list[Location] | None = None
        self._settling: list[Location] | None = None
        self._others: OtherBlocks[OffloadKey] = OtherBlocks(self.groups, controller.tree, Tier.HOST)

    def keep_journal(self, journal: HostIndex) -> None:
        """Write into ``journal`` what comes and is evicted from now on, and close it in the end."""
        self.journal = journal

    # Forgetting

    def keys_of(self, unit: Key) -> list[OffloadKey]:
        """Return the chunks that are here of a unit, one for each group."""
        keys = [OffloadKey(offload_key(unit, group)) for group in (self.groups.main, *self.groups.others)]
        return [key for key in keys if key in self._chunks]

    def keys(self) -> list[OffloadKey]:
        """Return all chunks that are here."""
        return list(self._chunks)

    def peek(self, key: OffloadKey) -> ChunkStatus | None:
        """Return a chunk that is here, and promise it to nobody."""
        return self._chunks.get(key)

    def ready_keys(self) -> list[OffloadKey]:
        """Return the chunks that are here, and not on their way."""
        return [key for key, chunk in self._chunks.items() if chunk.is_ready]

    def note_leftovers(self) -> None:
        """Take note that an engine before may have left something in any chunk."""
        self._written.update(range(self._capacity))

    def take_unused(self) -> set[int]:
        """Return, once, the numbers of chunks that were used and hold nothing now."""
        unused = self._written - {chunk.chunk_id for chunk in self._chunks.values()}
        self._written -= unused
        return unused

    def note_names(self) -> None:
        """Have the journal note the documents of chunks that were named after they had come here."""
        tree, journal = self.controller.tree, self.journal
        if journal is None or not tree.renamed:
            return
        nodes = [node for node in tree.nodes() if node.id in tree.renamed]
        tree.renamed.clear()
        for key in [key for node in nodes for unit in node.keys for key in self.keys_of(cast("Key", unit))]:
            if self._chunks[key].is_ready and key not in self._fleeting:
                journal.unseal(self._chunks[key].chunk_id)
                journal.seal(self._chunks[key].chunk_id, self.groups.chunk_name(key), self.groups.note_of(tree, key))

    # Admission

    def admit(self, keys: Collection[OffloadKey]) -> list[OffloadKey]:
        """Return which of the ``keys`` offered are here or worth their room.

        Of other groups that is what a hit may need. What has to go for them is chosen, and goes with the :meth:`evict`
        that follows.
        """
        self._chosen = []
        num_free = self._capacity - len(self._chunks)
        offered = [key for key in keys if key in self._chunks or self._is_needed(key)] if self.groups.others else keys
        if len(offered) <= num_free or not self.is_selective:
            return list(offered)
        new = [key for key in offered if key not in self._chunks]
        sizes: Counter[Key] = Counter(map(unit_of, new))
        main = [unit_of(key) for key in new if self.groups.is_main(key)]
        units = list(dict.fromkeys([*main, *sizes]))  # a state is offered alone, its unit before or after
        num_spare = len(self._spare(set(offered), len(self._chunks)))
        has_others = self._others.has_groups
        admission = admit(
            self.controller.tree,
            Tier.HOST,
            units,
            num_free + num_spare,
            self.controller.tree.shielded(map(unit_of, offered)),
            offered_size=(lambda unit: sizes[cast("Key", unit)]) if has_others else None,
            evicted_size=self._others.size_of if has_others else None,
        )
        self._chosen = admission.evicted
        admitted = set(units[: admission.num_admitted])
        return [key for key in offered if key in self._chunks or unit_of(key) in admitted]

    @contextmanager
    def inserting(self) -> Iterator[None]:
        """Tell the tree of what is inserted meanwhile at the end, node by node: it knows of none of it before."""
        arriving: list[Location] = []
        self._arriving = arriving
        try:
            yield
        finally:
            self._arriving = None
            for node, units in by_node(arriving):
                self._add(node, units)

    @contextmanager
    def settling(self) -> Iterator[None]:
        """Tell the tree of what is let go meanwhile at the end, node by node; until then it is held."""
        settling: list[Location] = []
        self._settling = settling
        try:
            yield
        finally:
            self._settling = None
            for node, units in by_node(settling):
                self.controller.tree.let_go(node, units, Tier.HOST)

    # Promises to waiting requests

    def begin_lookup(self, request_id: str, num_local_tokens: int) -> None:
        """Promise what is looked up from now on to a request, instead of what it was promised before.

        ``num_local_tokens`` are those before it, which the GPU holds.
        """
        self.forget_promises(request_id)
        self._looking_up = self._lookups[request_id] = _Lookup(num_local_tokens)

    def end_lookup(self) -> None:
        """End :meth:`begin_lookup`."""
        self._looking_up = None

    def is_looked_up(self, request_id: str) -> bool:
        """Return whether a request has been looked up, and is promised what was found."""
        return request_id in self._lookups

    def is_awaited(self, request_id: str, num_local_tokens: int) -> bool:
        """Return whether to look a request up again says the same: what it was promised has not all arrived yet."""
        lookup = self._lookups.get(request_id)
        return lookup is not None and lookup.num_awaited > 0 and lookup.num_local_tokens == num_local_tokens

    def forget_promises(self, request_id: str) -> None:
        """Let go what a request was promised: it has been loaded, or is not wanted any more."""
        if (lookup := self._lookups.pop(request_id, None)) is None:
            return
        for key in lookup.promised:
            if lookup in (waiting := self._awaited.get(key, [])):
                waiting.remove(lookup)
            self._num_promises[key] -= 1
            if not self._num_promises[key]:
                del self._num_promises[key]
                self._let_go(key)

    # vLLM's CachePolicy

    def get(self, key: OffloadKey) -> ChunkStatus | None:
        chunk = self._chunks.get(key)
        if chunk is not None and self._looking_up is not None:
            self._promise(key, chunk)
        return chunk

    def insert(self, key: OffloadKey, chunk: ChunkStatus, *extra: Any) -> None:
        self._chunks[key] = chunk  # from 0.33 on vLLM says for which request
        self._written.add(chunk.chunk_id)
        is_main = self.groups.is_main(key)
        self.num_other_chunks += not is_main
        if (location := self._locate(key)) is None:
            self._unknown[key] = None
        elif not is_main:
            pass  # it is the tier's once nobody uses it
        elif self._arriving is not None:
            self._arriving.append(location)
        else:
            self._add(location.node, 1 << location.unit)
        if self._looking_up is not None:
            self._promise(key, chunk)

    def remove(self, key: OffloadKey) -> None:
        self._give_up(key)
        self._withdraw(key)

    def touch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """Do nothing: the tree counts accesses once a request."""

    def on_store_miss(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """Take note of what must not outlive the engine.

        vLLM says so once for a request, which may store a chunk much later, and after others stored and lost it: what
        is an adapter's stays noted when it goes.
        """
        if is_adapted(req_context):
            for key in keys:
                self._note_fleeting(key)
            surplus = len(self._fleeting) - self._max_fleeting
            for key in list(islice(self._fleeting, max(surplus, 0))):
                del self._fleeting[key]
                if key in self._chunks:
                    self._note_fleeting(key)

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[OffloadKey]],
        insertion_only_keys: set[OffloadKey],
        reused_keys: set[OffloadKey],
        req_context: ReqContext,
    ) -> None:
        self.forget_promises(req_context.req_id)

    def evict(self, n: int, protected: set[OffloadKey]) -> list[tuple[OffloadKey, ChunkStatus]] | None:
        chosen, self._chosen = self._chosen, []
        num_chosen = sum(self._others.size_of(unit.key) for unit in chosen)
        spare = self._spare(protected, max(n - num_chosen, 0))
        units: list[EvictedUnit] | None = chosen
        if n > num_chosen + len(spare):
            assert not chosen, "what was admitted has room"
            tree, shielded = self.controller.tree, self.controller.tree.shielded(map(unit_of, protected))
            size_of = self._others.size_of if self._others else None
            owners = (at.node.owner for key in protected if (at := self._locate(key)) is not None)
            units = tree.evict(Tier.HOST, n - len(spare), shielded, size_of=size_of, for_owner=next(owners, ANYBODY))
        if units is None:  # perhaps there are windows and states whose units have to stay
            loose = list(
                islice((key for key in self._others if key not in protected and key not in spare), n - len(spare))
            )
            if n > len(spare) + len(loose):
                return None
            units, spare = [], spare + loose
        keys = list(spare)
        for unit in units:
            key = cast("Key", unit.key)
            keys += [OffloadKey(self.groups.offload_key(key)), *self._others.of_unit(key)]
        for key in keys:
            self._unknown.pop(key, None)
        return [(key, self._give_up(key)) for key in dict.fromkeys(keys)]

    def clear(self) -> None:
        """Forget everything, and whatever comes after must not outlive the engine: its weights may have changed."""
        for key in list(self._chunks):
            self._give_up(key)
        self._unknown.clear()
        self._others.clear()
        self._lookups.clear()
        self._num_promises.clear()
        self._awaited.clear()
        self._fleeting.clear()
        if self.journal is not None:
            self.journal.close()
            self.journal = None
        self.controller.tree.clear_tier(Tier.HOST)

    def mark_evictable(self, key: OffloadKey) -> None:
        self._settle(key)
        if self.journal is not None and key not in self._fleeting and self._locate(key) is not None:
            note = self.groups.note_of(self.controller.tree, key)
            self.journal.seal(self._chunks[key].chunk_id, self.groups.chunk_name(key), note)
        if key not in self._num_promises:
            self._let_go(key)

    def mark_non_evictable(self, key: OffloadKey) -> None:
        if not self.groups.is_main(key):
            self._others.discard(key)
        elif (location := self._locate(key)) is not None:
            self.controller.tree.hold(location.node, 1 << location.unit, Tier.HOST)

    # Inside

    def _add(self, node: TreeNode, units: int) -> None:
        self.controller.tree.hold(node, units, Tier.HOST)
        self.controller.tree.add(node, units, Tier.HOST)

    def _note_fleeting(self, key: OffloadKey) -> None:
        self._fleeting.pop(key, None)  # it comes last again
        self._fleeting[key] = None

    def _is_idle(self, key: OffloadKey) -> bool:
        return self._chunks[key].ref_cnt == 0 and key not in self._num_promises

    def _spare(self, kept: Collection[OffloadKey], num_chunks: int) -> list[OffloadKey]:
        """Return up to ``num_chunks`` that no tree is asked for, without those ``kept``: unknown, or of no use."""
        unknown = (key for key in self._unknown if self._is_idle(key))
        return list(islice((key for key in chain(unknown, self._others.useless()) if key not in kept), num_chunks))

    def _is_needed(self, key: OffloadKey) -> bool:
        """Return whether a hit may need a chunk, as far as is known of its group."""
        if self.groups.is_main(key) or self._locate(key) is None:
            return True
        group = group_of(key)
        return self.groups.is_worth_keeping(
            self.controller.tree, group, unit_of(key), lambda unit: self._has(unit, group)
        )

    def _has(self, unit: Key, group: int) -> bool:
        return OffloadKey(offload_key(unit, group)) in self._chunks

    def _give_up(self, key: OffloadKey) -> ChunkStatus:
        chunk = self._chunks.pop(key)
        self._settle(key)
        if not self.groups.is_main(key):
            self.num_other_chunks -= 1
            self._others.discard(key)
        if self.journal is not None:
            self.journal.unseal(chunk.chunk_id)
        return chunk

    def _promise(self, key: OffloadKey, chunk: ChunkStatus) -> None:
        lookup = self._looking_up
        assert lookup is not None
        if key not in lookup.promised:
            lookup.promised.add(key)
            self._num_promises[key] += 1
            self.mark_non_evictable(key)
            if not chunk.is_ready:
                self._awaited.setdefault(key, []).append(lookup)
                lookup.num_awaited += 1

    def _settle(self, key: OffloadKey) -> None:
        """Take note that a chunk has arrived, or will not."""
        for lookup in self._awaited.pop(key, ()):
            lookup.num_awaited -= 1

    def _let_go(self, key: OffloadKey) -> None:
        chunk, location = self._chunks.get(key), self._locate(key)
        if chunk is None or chunk.ref_cnt or location is None:
            return
        if not self.groups.is_main(key):
            group = group_of(key)
            self._others.add(key, group, unit_of(key), lambda unit: self._has(unit, group))
        elif self._settling is not None:
            self._settling.append(location)
        else:
            self.controller.tree.let_go(location.node, 1 << location.unit, Tier.HOST)

    def _withdraw(self, key: OffloadKey) -> None:
        self._unknown.pop(key, None)
        if not self.groups.is_main(key):
            return
        self._others.lose_unit(unit_of(key))
        if (location := self._locate(key)) is not None:
            self.controller.tree.let_go(location.node, 1 << location.unit, Tier.HOST)
            self.controller.tree.remove(location.node, 1 << location.unit, Tier.HOST)

    def _locate(self, key: OffloadKey) -> Location | None:
        return self.controller.tree.locate(unit_of(key))


class TreeHostTier(CPUPrimaryTierOffloadingManager):
    """vLLM's host tier, which can be told to forget documents; takes over one that is built.

    A chunk that is forgotten while it is copied is found no more, and goes when nothing holds it. What has gone is
    overwritten: host memory outlives the engine.
    """

    _policy: TreeCachePolicy

    @classmethod
    def take_over(cls, tier: CPUPrimaryTierOffloadingManager) -> None:
        """Make ``tier`` one of this class, before its first request."""
        tier.__class__ = cls
        assert isinstance(tier, cls)
        tier.prepare_write = tier._prepare_write  # vLLM bound its own when it was built
        tier._policy.controller.forgetting.add_holder(tier)

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        shares = self._policy.controller.tree.tiers[Tier.HOST].shares
        offered = self._within_quotas(keys) if shares.quotas else keys
        output: PrepareStoreOutput | None = super().prepare_store(offered, req_context)
        return output

    def _prepare_write(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        """Make room for what comes from a tier below; None, which is a miss, where a quota leaves none."""
        shares = self._policy.controller.tree.tiers[Tier.HOST].shares
        if shares.quotas and len(self._within_quotas(keys)) < len(keys):
            return None
        output: PrepareStoreOutput | None = super().prepare_store(keys, req_context)
        return output

    def _within_quotas(self, keys: Collection[OffloadKey]) -> list[OffloadKey]:
        """Return which of the ``keys`` of a request may be stored, giving up others of the same owners for them."""
        policy, tree = self._policy, self._policy.controller.tree
        new = [key for key in keys if policy.peek(key) is None and policy.groups.is_main(key)]
        shielded = tree.shielded(map(unit_of, keys))
        num_admitted, evicted = admit_within_quotas(tree, Tier.HOST, [*map(unit_of, new)], shielded)
        for unit in evicted:
            for key in policy.keys_of(cast("Key", unit.key)):
                if (chunk := policy.peek(key)) is not None and not chunk.ref_cnt:
                    discard_idle(self, key, chunk)
        left_out = {unit_of(key) for key in new[num_admitted:]}
        return [key for key in keys if unit_of(key) not in left_out]

    def reset_cache(self) -> None:
        keys = self._policy.ready_keys()
        super().reset_cache()
        if self.events is not None and keys:  # vLLM tells nothing of it
            self.events.append(OffloadingEvent(keys, self.medium, removed=True))

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        return LookupResult.MISS if key in self._policy.controller.leaving else super().lookup(key, req_context)

    def forget(self, forgotten: Forgotten) -> Freed:
        """Give chunks up, or let no look-up find those that are being copied."""
        keys = [key for unit in forgotten.units for key in self._policy.keys_of(unit)]
        if forgotten.is_all:
            keys = self._policy.keys()
        self._policy.controller.leaving.update(dict.fromkeys(keys))
        self._give_up_idle()
        self._overwrite(self._policy.take_unused())
        num_bytes = len(keys) * self._policy.controller.tiers[Tier.HOST].block_bytes
        return Freed({Tier.HOST: len(keys)}, {Tier.HOST: num_bytes})

    def num_left(self) -> int:
        """Give up what is copied no more, and return how many chunks of what was forgotten are still here."""
        leaving = self._policy.controller.leaving
        if leaving and self._give_up_idle():
            self._overwrite(self._policy.take_unused())
        journal = self._policy.journal
        return len(leaving) + (0 if journal is None else journal.num_scrubs)

    def why_left(self) -> None:
        """Return None: copies end."""

    def _give_up_idle(self) -> int:
        """Give up what is forgotten and held by nobody; return how many chunks."""
        num_gone = 0
        leaving = self._policy.controller.leaving
        for key in map(OffloadKey, list(leaving)):
            chunk = self._policy.get(key)
            if chunk is None or not chunk.ref_cnt:
                del leaving[key]
            if chunk is not None and not chunk.ref_cnt:
                discard_idle(self, key, chunk)
                num_gone += 1
        return num_gone

    def _overwrite(self, chunk_ids: Collection[int]) -> None:
        view = self.get_kv_memoryview()
        rows = np.frombuffer(view, np.uint8).reshape(view.shape)
        for chunk_id in chunk_ids:
            rows[chunk_id] = 0
        if self._policy.journal is not None:
            self._policy.journal.scrub()


class SelectiveHostTier(TreeHostTier):
    """A host tier that stores what its policy admits and passes over the rest.

    vLLM would otherwise make room for all that is computed, or, where the policy gives nothing up, ask again in every
    step.
    """

    @classmethod
    def take_over(cls, tier: CPUPrimaryTierOffloadingManager, *, is_selective: bool = True) -> None:
        """Make ``tier`` one of this class, before its first request.

        One that is not ``is_selective`` passes over only what no hit will need; so does that of a model with several
        groups, where what was chosen to go need not go in the end.
        """
        super().take_over(tier)
        assert isinstance(tier, cls)
        tier._policy.is_selective = is_selective and not tier._policy.groups.others

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        offered = self._policy.admit(keys)
        with self._policy.inserting():
            output: PrepareStoreOutput | None = super().prepare_store(offered, req_context)
        return output

    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        with self._policy.settling():
            super().complete_store(keys, req_context, success)
