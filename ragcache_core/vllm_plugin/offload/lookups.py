"""Look-up of a request's tokens in the tiers: the longest prefix that all KV cache groups can load."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ragcache_core.vllm_plugin.compat import LookupResult

if TYPE_CHECKING:
    from ragcache_core.vllm_plugin.cache.kv_groups import BlockKey
    from ragcache_core.vllm_plugin.compat import ReqContext
    from ragcache_core.vllm_plugin.lower.manager import TierManager
    from ragcache_core.vllm_plugin.offload.copied_requests import CopiedRequest, KeyGroup


class Lookups:
    """Looks requests up in the tiers.

    A hit needs all blocks of a group of full attention, and the last ones of a window or a state::

        full      #  #  #  #  #  #  .         looked up from the front, until one is missing
        window    .  .  .  #  #  #            looked up from the end, until enough follow one another

    Args:
        groups: of the engine.
        manager: of the tiers.
        on_hit: is told of a full-attention block that is found, by its request, its group's number, its index and its
            key; None: nothing is.
    """

    def __init__(
        self,
        groups: Sequence[KeyGroup],
        manager: TierManager,
        on_hit: Callable[[CopiedRequest, int, int, BlockKey], None] | None,
    ) -> None:
        self._groups = groups
        self._manager = manager
        self._on_hit = on_hit
        full = [i for i, group in enumerate(groups) if group.sliding_window_size_in_chunks is None]
        windows = [i for i in range(len(groups)) if i not in full]
        windows.sort(key=lambda i: -(groups[i].sliding_window_size_in_chunks or 0))
        self._windows = tuple(windows)
        self._all = (*full, *windows)
        states = {group.tokens_per_block for group in groups if group.is_handed_over}
        assert len(states) <= 1, "states of different lengths"
        self._state_tokens = next(iter(states), 1)
        """A state is stored at multiples of as many tokens only."""

    def find(self, copied: CopiedRequest) -> int | None:
        """Return how many tokens after those on the GPU can be loaded; ``None``: look up again in the next step."""
        first, most = copied.num_local_tokens, self._most(copied)
        num_found, is_deferred = 0, False
        checked_drafts: set[int] = set()
        left = self._all
        while left:
            has_seen_window, numbers, left = False, left, ()
            for number in numbers:
                group = self._groups[number]
                size = group.tokens_per_block
                most = min(most, len(copied.keys_of(number)) * size)
                if copied.most_loaded is not None:
                    most = most // size * size
                if most - first < size:
                    return 0
                is_draft = group.is_eagle_group and number not in checked_drafts
                found = self._blocks_found(copied, number, most, is_draft=is_draft)
                if found == 0:
                    return 0
                if found is None:
                    is_deferred = True
                else:
                    if is_draft:  # whose last block is computed again
                        found -= 1
                        checked_drafts.add(number)
                    most = min(most, size * (first // size + found))
                if most - first < size:
                    return 0
                if most - first < num_found:
                    if not group.is_eagle_group:
                        checked_drafts.clear()
                    if is_deferred:  # with a shorter hit it may be complete
                        is_deferred, left = False, self._all
                    elif has_seen_window and not left:  # whose window ended elsewhere
                        left = self._windows
                has_seen_window |= group.sliding_window_size_in_chunks is not None
                num_found = most - first
        return None if is_deferred else num_found

    def blocks_of_hit(self, copied: CopiedRequest, num_tokens: int) -> list[BlockKey]:
        """Return the keys that a hit of ``num_tokens`` after those on the GPU loads."""
        keys: list[BlockKey] = []
        end = copied.num_local_tokens + num_tokens
        for number, group in enumerate(self._groups):
            size, num_last = group.tokens_per_block, group.num_loaded_blocks(end)
            needed = copied.keys_of(number)[copied.num_local_tokens // size : -(-end // size)]
            keys += needed if num_last is None else needed[-num_last:]
        return keys

    def _most(self, copied: CopiedRequest) -> int:
        most: int = copied.request.num_tokens
        if copied.most_loaded is not None:
            most = min(most, copied.num_local_tokens + copied.most_loaded)
        if self._windows:  # the last token is computed again: its window has to be there as well
            most = (most - 1) // self._state_tokens * self._state_tokens
        return most

    def _blocks_found(self, copied: CopiedRequest, number: int, most: int, *, is_draft: bool) -> int | None:
        """Return the block counts after which a hit may end in a group; ``None`` if unknown yet.

        Of a draft one block more is looked up, as its last one does not count.
        """
        group, keys = self._groups[number], copied.keys_of(number)
        size = group.tokens_per_block
        num_blocks = min(-(-min(most + size * is_draft, len(keys) * size) // size), len(keys))
        first = copied.num_local_tokens // size
        wanted = keys[first:num_blocks]
        window = group.sliding_window_size_in_chunks
        if window is None:
            return self._leading(copied, number, first, wanted)
        last_window = group.num_loaded_blocks(min(most, (num_blocks - is_draft) * size))
        assert last_window is not None
        return self._last_run(wanted, window + is_draft, last_window + is_draft, copied.context)

    def _leading(self, copied: CopiedRequest, number: int, first: int, keys: Sequence[BlockKey]) -> int | None:
        num_found = self._manager.leading(keys, copied.context)
        if self._on_hit is not None:
            for index, key in enumerate(keys[: num_found or 0], first):
                self._on_hit(copied, number, index, key)
        return num_found

    def _last_run(self, keys: Sequence[BlockKey], num_needed: int, num_at_end: int, context: ReqContext) -> int | None:
        """Return the end of the last run of ``num_needed`` blocks (``num_at_end`` at the end)."""
        is_deferred = is_pending = False
        num_in_run, needed = 0, num_at_end
        for i in range(len(keys) - 1, -1, -1):
            result = self._manager.lookup(keys[i], context)
            if result in (LookupResult.HIT, LookupResult.HIT_PENDING):
                is_pending |= result is LookupResult.HIT_PENDING
                num_in_run += 1
            else:
                is_deferred |= result is LookupResult.RETRY
                num_in_run, is_pending, needed = 0, False, num_needed
            if num_in_run == needed:
                return None if is_deferred or is_pending else i + needed
        return None if is_deferred or is_pending else num_in_run
