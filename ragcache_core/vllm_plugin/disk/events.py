"""vLLM's KV events of the disk tier: one per stored and one per removed block."""

from __future__ import annotations

from collections.abc import Iterable

from ragcache_core.vllm_plugin.cache.kv_groups import KVGroups
from ragcache_core.vllm_plugin.compat import Medium, OffloadingEvent


class DiskEvents:
    """Pending events; none are kept unless they are published.

    A chunk is reported when its write begins, as statistics count it, while host memory still has it. Then vLLM knows
    its tokens, and keeps them (about 1 KB a chunk) until the chunk is reported as removed.
    """

    def __init__(self, groups: KVGroups, *, is_published: bool) -> None:
        self._is_published = is_published
        self._groups = groups
        self._told: set[bytes] = set()
        self._events: list[OffloadingEvent] = []

    def __bool__(self) -> bool:
        return bool(self._events)

    def stored(self, names: Iterable[bytes]) -> None:
        """Report blocks that are on the disk, or in flight to it."""
        if self._is_published:
            new = [name for name in names if name not in self._told]
            self._told.update(new)
            self._emit(new, removed=False)

    def removed(self, names: Iterable[bytes]) -> None:
        """Report blocks that are no longer on the disk."""
        if self._is_published:
            gone = [name for name in dict.fromkeys(names) if name in self._told]
            self._told.difference_update(gone)
            self._emit(gone, removed=True)

    def all_removed(self) -> None:
        """Report that the disk is empty."""
        self.removed(list(self._told))

    def take(self) -> list[OffloadingEvent]:
        """Return the new events, each once."""
        events, self._events = self._events, []
        return events

    def _emit(self, names: list[bytes], *, removed: bool) -> None:
        if names:
            keys = self._groups.offload_keys(names)
            self._events.append(OffloadingEvent(keys, Medium.STORAGE, removed, removal_expected=True))
