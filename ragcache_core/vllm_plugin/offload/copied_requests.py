"""The requests whose KV is copied between engine and tiers, and the KV cache groups of their keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from ragcache_core.log import logger_of
from ragcache_core.vllm_plugin.cache.kv_groups import BlockKey, KVGroups
from ragcache_core.vllm_plugin.compat import (
    CacheHitSource,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    Locality,
    MambaSpec,
    Medium,
    ReqContext,
    SlidingWindowSpec,
    TierFilter,
    TierMatcher,
    get_offloading_event_group_spec,
)

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from ragcache_core.vllm_plugin.compat import OffloadingConfig

logger = logger_of(__name__)


@dataclass(frozen=True)
class KeyGroup:
    """A KV cache group whose blocks are copied.

    vLLM's tracker of KV events reads the attributes that have names of vLLM.

    Attributes:
        group_idx: its number in the engine.
        tokens_per_block: of one of its blocks.
        hashes_per_chunk: block hashes of a request for one of its blocks.
        sliding_window_size_in_chunks: blocks before its end that a hit needs at least; None: all.
        is_eagle_group: it has layers of a draft, which may write to a request's last block again.
        is_handed_over: vLLM says in each step which of its blocks hold a state to store.
        kv_event_group_spec: what KV events say of it.
    """

    group_idx: int
    tokens_per_block: int
    hashes_per_chunk: int
    sliding_window_size_in_chunks: int | None
    spec: KVCacheSpec
    is_eagle_group: bool
    is_handed_over: bool
    kv_event_group_spec: Any

    @property
    def tokens_per_chunk(self) -> int:
        """Tokens of a block, which one key names."""
        return self.tokens_per_block

    def num_loaded_blocks(self, num_tokens: int) -> int | None:
        """Return how many of the last blocks a hit of ``num_tokens`` loads; ``None`` for all.

        A window that ends within a block begins a block earlier than one that ends with it.
        """
        num_blocks = self.sliding_window_size_in_chunks
        if num_blocks is not None and isinstance(self.spec, SlidingWindowSpec):
            window = (
                self.spec.sliding_window - 1 + self.spec.extra_retained_tokens + -num_tokens % self.tokens_per_block
            )
            num_blocks = max(num_blocks, -(-window // self.tokens_per_block))
        return num_blocks


def read_key_groups(config: OffloadingConfig, kv_cache_config: KVCacheConfig) -> list[KeyGroup]:
    """Return the groups with copied blocks, in the order in which copies list them."""
    groups = []
    for each in config.groups:
        group = kv_cache_config.kv_cache_groups[each.group_id]
        spec = group.kv_cache_spec
        groups.append(
            KeyGroup(
                each.group_id,
                each.tokens_per_block,
                each.tokens_per_block // config.cache.tokens_per_hash,
                _num_window_blocks(spec, each.tokens_per_block),
                spec,
                group.is_eagle_group,
                isinstance(spec, MambaSpec) and spec.mamba_cache_mode == "align",
                get_offloading_event_group_spec(group),
            )
        )
    return groups


def _num_window_blocks(spec: KVCacheSpec, tokens_per_block: int) -> int | None:
    match spec:
        case SlidingWindowSpec():
            num_tokens = max(spec.sliding_window, spec.sliding_window - 1 + spec.extra_retained_tokens)
        case ChunkedLocalAttentionSpec():
            num_tokens = spec.attention_chunk_size
        case MambaSpec():
            num_tokens = 1
        case _:
            assert isinstance(spec, FullAttentionSpec), f"which blocks a hit of {type(spec).__name__} needs is unknown"
            return None
    return int(-(-num_tokens // tokens_per_block))


class LoadedRun(NamedTuple):
    """Consecutive blocks of a load: the first token of the first one, tokens of a block, and their keys."""

    first_token: int
    block_tokens: int
    keys: Sequence[BlockKey]

    def before(self, end: int) -> LoadedRun:
        """Return the blocks with tokens before ``end``."""
        num_blocks = max(-(-(end - self.first_token) // self.block_tokens), 0)
        return LoadedRun(self.first_token, self.block_tokens, self.keys[:num_blocks])


@dataclass(slots=True, eq=False)
class CopiedRequest:
    """The state of a request's copies, from its arrival until the last one ends.

    Attributes:
        request, context: as vLLM and the tiers know it.
        groups: of the engine.
        key_groups: how their blocks are named.
        num_stored: for each group the blocks that need no store any more.
        retry_tokens: while fewer tokens are computed, nothing is stored, as host memory had no room.
        num_local_tokens: tokens that the GPU had at the last look-up.
        most_loaded, most_stored: tokens that may be loaded and stored; None: all.
        jobs: numbers of its copies that have not ended, without layer-wise loads.
        has_blocks: whether it runs: its block table is its own, and nothing else writes to it.
        last_blocks: its block table when it ended.
        is_ended: whether the tiers know that it ended.
        deferred_since_s: since when its look-up is deferred.
        loaded: the blocks of its load.
        sources: for as many loaded tokens, how many came from which tier.
    """

    request: Request
    context: ReqContext
    groups: Sequence[KeyGroup]
    key_groups: KVGroups = field(default_factory=KVGroups)
    num_stored: list[int] = field(init=False)
    retry_tokens: int = 0
    num_local_tokens: int = 0
    most_loaded: int | None = None
    most_stored: int | None = None
    jobs: set[int] = field(default_factory=set)
    has_blocks: bool = False
    last_blocks: tuple[list[int], ...] = ()
    is_ended: bool = False
    deferred_since_s: float | None = None
    loaded: list[LoadedRun] = field(default_factory=list)
    sources: tuple[int, dict[CacheHitSource, int]] | None = None
    _keys: list[list[BlockKey]] = field(init=False)

    def __post_init__(self) -> None:
        self.num_stored = [0] * len(self.groups)
        self._keys = [[] for _ in self.groups]

    @classmethod
    def of(cls, request: Request, groups: Sequence[KeyGroup], key_groups: KVGroups) -> CopiedRequest:
        """Return the state of a new request, with its copy settings in ``kv_transfer_params``."""
        params = request.kv_transfer_params or {}
        filtered = {} if (tiers := params.get("kv_load_tiers")) is None else {"load_tier_filter": tier_filter(tiers)}
        context = ReqContext(
            req_id=request.request_id,
            kv_transfer_params=request.kv_transfer_params,
            kv_hints=request.kv_hints,
            **filtered,
        )
        limits = {name: _limit(params, name) for name in ("max_load_tokens", "max_offload_tokens") if name in params}
        return cls(
            request,
            context,
            groups,
            key_groups,
            most_loaded=limits.get("max_load_tokens"),
            most_stored=limits.get("max_offload_tokens"),
        )

    def keys_of(self, number: int) -> list[BlockKey]:
        """Return the keys of a group's blocks, for full blocks of the request."""
        group, keys = self.groups[number], self._keys[number]
        every, hashes = group.hashes_per_chunk, self.request.block_hashes
        if (len(keys) + 1) * every <= len(hashes):
            new = hashes[len(keys) * every + every - 1 :: every]
            keys += self.key_groups.keys_of(new, group.group_idx)
        return keys

    def key_at(self, number: int, num_tokens: int) -> BlockKey:
        """Return the key of the block of a group that ends after that many tokens."""
        return self.keys_of(number)[num_tokens // self.groups[number].tokens_per_block - 1]

    def store_at_most(self, num_tokens: int) -> None:
        """Limit stores to the first ``num_tokens``."""
        self.most_stored = num_tokens if self.most_stored is None else min(self.most_stored, num_tokens)

    def wait_for_room(self, num_tokens: int) -> None:
        """Store again when twice as many tokens are left to store, so that all attempts are O(tokens) together."""
        firsts = [
            num_stored * group.tokens_per_block
            for group, num_stored in zip(self.groups, self.num_stored, strict=True)
            if not group.is_handed_over
        ]
        self.retry_tokens = 2 * num_tokens - min(firsts, default=0)

    def forget_keys(self, num_tokens: int) -> None:
        """Drop the keys after the first ``num_tokens``, where the request gets others."""
        for group, keys in zip(self.groups, self._keys, strict=True):
            del keys[num_tokens // group.tokens_per_block :]

    def num_storable(self, number: int, num_tokens: int, num_blocks: int) -> int:
        """Return the number of leading blocks of a group that may be stored when ``num_tokens`` are computed.

        The last block of a draft is left out while the request generates: a rejected token's KV in it is computed
        again. A request that has ended computes nothing any more.
        """
        group, request = self.groups[number], self.request
        num = num_tokens // group.tokens_per_block
        if group.is_eagle_group and num_tokens > request.num_prompt_tokens and not request.is_finished():
            num = max(num - 1, 0)
        return min(num, num_blocks, len(self.keys_of(number)))

    def num_storable_tokens(self, num_computed: int) -> int:
        """Return the number of computed tokens that may be stored."""
        num: int = min(num_computed, self.request.num_tokens)
        return num if self.most_stored is None else min(num, self.most_stored)

    @property
    def has_stored_all(self) -> bool:
        """Whether all storable blocks are stored or in flight."""
        most = self.most_stored
        return most is not None and all(
            group.is_handed_over or num_stored >= most // group.tokens_per_block
            for group, num_stored in zip(self.groups, self.num_stored, strict=True)
        )


def _limit(params: dict[str, Any], name: str) -> int | None:
    value = params[name]
    if type(value) is int and value >= 0:
        return value
    logger.debug("%s is %.80r, not a number of tokens: the limit is ignored", name, value)
    return None


def tier_filter(asked: Any) -> TierFilter:
    """Return the tiers that a request may load from, by its ``kv_load_tiers``; all by default."""
    if not isinstance(asked, list):
        return TierFilter.ALL
    matchers = tuple(_matchers(asked))
    return TierFilter(matchers) if matchers or not asked else TierFilter.ALL


def _matchers(asked: Sequence[Any]) -> Iterator[TierMatcher]:
    for each in asked:
        if isinstance(each, dict):
            try:
                medium, locality = each.get("medium"), each.get("locality")
                yield TierMatcher(
                    None if medium is None else Medium(medium.upper()),
                    None if locality is None else Locality(locality.upper()),
                )
            except (ValueError, AttributeError):
                logger.debug("kv_load_tiers has %.80r, which names no tier: it is ignored", each)
