"""The host tier, and a model of sets that says what it must be like."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import sha256

from vllm.v1.kv_offload.base import LookupResult, ReqContext

from ragcache_core.policy import PrefillCostModel
from ragcache_core.tree import check_invariants
from ragcache_core.types import PromptSegment, SegmentKind, Tier
from ragcache_core.vllm_plugin.cache.controller import CacheController, TierReport
from ragcache_core.vllm_plugin.cache.kv_groups import BlockKey
from ragcache_core.vllm_plugin.offload.host_tier import HostTier
from ragcache_core.vllm_plugin.settings import PluginSettings
from ragcache_core.wire import RequestMetadata

BLOCK = 4
BLOCKS = {"A": 1, "B": 3, "C": 2, "D": 6}


def chain(documents: str, question: int = 0) -> list[bytes]:
    """Return the chained keys of a prompt, a block for a unit."""
    keys: list[bytes] = []
    for i, name in enumerate([n for d in documents for n in [d] * BLOCKS[d]] + ["?"] * question):
        keys.append(sha256(b"".join([*keys[-1:], f"{i} {name}".encode()])).digest())
    return keys


class PromptKeys(list[BlockKey]):
    """The keys of a prompt, which a tier of a test finds in its context."""


@dataclass
class Asker:
    """A request, as the offloading knows it."""

    context: ReqContext
    keys: list[BlockKey]
    is_known: bool = True


@dataclass
class Host:
    """The host tier of ``num_chunks`` rows, and what a model expects of it.

    One that ``is_selective`` stores the first of what is offered to it, and perhaps not all.
    """

    num_chunks: int
    policy_name: str = "pgdsf"
    is_selective: bool = False
    writing: set[BlockKey] = field(default_factory=set)
    refs: dict[BlockKey, int] = field(default_factory=dict)
    promised: dict[str, set[BlockKey]] = field(default_factory=dict)
    awaited: dict[str, set[BlockKey]] = field(default_factory=dict)
    unknown: set[BlockKey] = field(default_factory=set)
    before: dict[BlockKey, BlockKey | None] = field(default_factory=dict)
    num_requests: int = 0

    def __post_init__(self) -> None:
        self.controller = CacheController(
            PluginSettings(policy=self.policy_name, ghost_size=2),
            tokens_per_block=BLOCK,
            prefill_cost=PrefillCostModel.default(),
            tiers={Tier.HOST: TierReport(self.num_chunks, 1)},
        )
        self.tier = HostTier(self.num_chunks, self.controller, is_selective=self.is_selective)
        self.tree = self.controller.tree

    @property
    def resident(self) -> set[BlockKey]:
        return self.writing | set(self.refs)

    def ask(self, documents: str, question: int = 0, *, is_known: bool = True) -> Asker:
        self.num_requests += 1
        name = f"r{self.num_requests}"
        keys = chain(documents, question) if is_known else [name.encode() + k for k in chain(documents, question)]
        self.before.update(zip(keys, [None, *keys], strict=False))
        context = ReqContext(name)
        context.set_state(PromptKeys(keys))
        if is_known:
            segments, end = [], 0
            for doc in documents:
                segments.append(PromptSegment(SegmentKind.DOCUMENT, end, end + BLOCKS[doc] * BLOCK, doc))
                end += BLOCKS[doc] * BLOCK
            if question:
                segments.append(PromptSegment(SegmentKind.QUESTION, end, end + question * BLOCK))
                end += question * BLOCK
            self.controller.on_new_request(name, RequestMetadata(tuple(segments)), keys, end, 0.0)
            self.controller.on_admitted(name, keys, {}, 0.0)
        self.tier.on_new_request(context)
        return Asker(context, keys, is_known)

    def can_evict(self, keys: list[BlockKey]) -> int:
        """Return how many chunks may go for ``keys``: idle ones below which nothing is held, promised or needed."""
        kept = self.writing | {key for key, count in self.refs.items() if count} | set(keys)
        kept |= {key for promised in self.promised.values() for key in promised}
        located = [key for key in keys if self.tree.locate(key) is not None]
        if located and (first := self.before[min(located, key=self.depth)]) is not None:
            kept.add(first)
        kept &= self.resident
        for key in [*kept]:
            if key not in self.unknown:
                kept.update(self.ancestors(key))
        return len(self.resident - kept)

    def depth(self, key: BlockKey) -> int:
        return len(self.ancestors(key))

    def ancestors(self, key: BlockKey) -> set[BlockKey]:
        found = set()
        parent = self.before[key]
        while parent is not None:
            found.add(parent)
            parent = self.before[parent]
        return found

    def prepare_store(self, asker: Asker, keys: list[BlockKey]) -> list[BlockKey] | None:
        """Store, check what came of it, and return the keys that have to be written."""
        new = [key for key in keys if key not in self.resident]
        num_free = self.num_chunks - len(self.resident)
        num_missing = len(new) - num_free
        num_evictable = self.can_evict(keys)
        chunks_before = self.tier.contents()
        num_evicted = self.tree.tiers[Tier.HOST].num_evicted_units
        is_reserved = self.tier.promises.is_looking_up
        output = self.tier.prepare_store(keys, asker.context)
        if output is None:
            assert num_evictable < num_missing, "there was room"
            assert self.tier.contents() == chunks_before
            assert self.tree.tiers[Tier.HOST].num_evicted_units == num_evicted
            return None
        if self.is_selective:
            assert len(output.keys_to_store) >= min(num_free, len(new)), "what is free is for everybody"
            new = new[: len(output.keys_to_store)]
            num_missing = len(new) - num_free
        assert output.keys_to_store == new
        evicted = chunks_before.keys() - self.tier.contents().keys()
        assert len(evicted) == max(num_missing, 0)
        for key in evicted:
            assert self.refs.pop(key) == 0, "a chunk in use was evicted"
            assert not any(key in promised for promised in self.promised.values()), "a promise was broken"
            assert key not in keys
            self.unknown.discard(key)
        self.writing.update(new)
        self.unknown.update(key for key in new if self.tree.locate(key) is None)
        if is_reserved:
            self.promised[asker.context.req_id].update(keys)
        return new

    def complete_store(self, asker: Asker, keys: list[BlockKey], success: bool) -> None:
        self.tier.complete_store(keys, asker.context, success)
        self.writing.difference_update(keys)
        for awaited in self.awaited.values():
            awaited.difference_update(keys)
        if success:
            self.refs.update(dict.fromkeys(keys, 0))
        else:
            self.unknown.difference_update(keys)

    def look_up(self, asker: Asker, *, promotes: int = 0) -> list[BlockKey]:
        """Look a request's chunks up as the connector does, promoting some that are missing; return those ready."""
        name = asker.context.req_id
        self.tier.begin_lookup(name, 0)
        self.promised[name] = set()
        ready, is_prefix = [], True
        for key in asker.keys:
            found = self.tier.lookup(key, asker.context)
            expected = LookupResult.HIT_PENDING if key in self.writing else LookupResult.MISS
            assert found == (LookupResult.HIT if key in self.refs else expected)
            if found is LookupResult.MISS:
                if not promotes or self.prepare_store(asker, [key]) is None:
                    break
                promotes -= 1
            else:
                self.promised[name].add(key)
            is_prefix &= found is LookupResult.HIT
            if is_prefix:
                ready.append(key)
        num_leading = next((i for i, key in enumerate(asker.keys) if key not in self.resident), len(asker.keys))
        are_written = self.writing.isdisjoint(asker.keys[:num_leading])
        assert self.tier.leading(asker.keys) == (num_leading, are_written)
        self.tier.end_lookup()
        self.awaited[name] = self.promised[name] & self.writing
        return ready

    def forget(self, asker: Asker) -> None:
        self.tier.drop_promises(asker.context.req_id)
        self.promised.pop(asker.context.req_id, None)
        self.awaited.pop(asker.context.req_id, None)

    def prepare_load(self, asker: Asker, keys: list[BlockKey]) -> None:
        self.tier.prepare_load(keys, asker.context)
        for key in keys:
            self.refs[key] += 1

    def complete_load(self, asker: Asker, keys: list[BlockKey]) -> None:
        self.tier.complete_load(keys, asker.context)
        for key in keys:
            self.refs[key] -= 1

    def finish(self, asker: Asker) -> None:
        self.tier.on_request_finished(asker.context)
        self.forget(asker)
        self.controller.on_finished(asker.context.req_id)

    def check(self) -> None:
        check_invariants(self.tree, is_connected=False)
        num_reads = {key: self.tier._num_reads[row] for key, row in self.tier.contents().items()}
        assert set(num_reads) == self.resident
        assert {key for key, count in num_reads.items() if count < 0} == self.writing
        assert {key: count for key, count in num_reads.items() if count >= 0} == self.refs
        for name, awaited in self.awaited.items():
            assert self.tier.promises.is_looked_up(name)
            assert self.tier.promises.is_awaited(name, 0) == bool(awaited)
            assert not self.tier.promises.is_awaited(name, BLOCK), "the GPU has more of it than before"
        chunk_ids = [*self.tier.contents().values()]
        assert len(set(chunk_ids)) == len(chunk_ids) <= self.num_chunks
        assert all(0 <= chunk_id < self.num_chunks for chunk_id in chunk_ids)
        assert self.tier.rows.num_free == self.num_chunks - len(num_reads)
        assert (self.tier._num_read, self.tier._num_written) == (sum(map(bool, self.refs.values())), len(self.writing))
        state = self.tree.tiers[Tier.HOST]
        units = {key: (n.id, i) for n in self.tree.nodes() for i, key in enumerate(n.keys)}
        resident = {key for key, (node, i) in units.items() if state.resident[node] >> i & 1}
        assert resident == self.resident - self.unknown
        held = {key for key, (node, i) in units.items() if state.in_use.get(node, 0) >> i & 1}
        busy = self.writing | {key for key, count in self.refs.items() if count}
        busy |= {key for promised in self.promised.values() for key in promised}
        busy &= self.resident
        assert busy - self.unknown <= held <= busy
