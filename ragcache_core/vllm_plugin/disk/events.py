"""What the disk tier tells in vLLM's KV events: each chunk that comes, and each that leaves, once."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ragcache_core.vllm_plugin.compat import Medium, OffloadingEvent, OffloadKey


class DiskEvents:
    """Events that vLLM has not taken yet; none are kept where nobody publishes them.

    A chunk is told when it begins to be written, as statistics count it, while host memory still has it: then vLLM
    knows its tokens, and keeps them (about 1 KB a chunk) until it is told that the chunk is gone.
    """

    def __init__(self, is_published: bool, key_of_name: Callable[[bytes], bytes]) -> None:
        self._is_published = is_published
        self._key_of_name = key_of_name
        self._told: set[bytes] = set()
        self._events: list[OffloadingEvent] = []

    def __bool__(self) -> bool:
        return bool(self._events)

    def stored(self, names: Iterable[bytes]) -> None:
        """Tell that chunks are on the disk, or on their way there."""
        if self._is_published:
            new = [name for name in names if name not in self._told]
            self._told.update(new)
            self._tell(new, removed=False)

    def removed(self, names: Iterable[bytes]) -> None:
        """Tell that chunks are not, or no longer, on the disk."""
        if self._is_published:
            gone = [name for name in dict.fromkeys(names) if name in self._told]
            self._told.difference_update(gone)
            self._tell(gone, removed=True)

    def all_removed(self) -> None:
        """Tell that the disk holds nothing."""
        self.removed(list(self._told))

    def take(self) -> list[OffloadingEvent]:
        """Return, once, what there is to tell."""
        events, self._events = self._events, []
        return events

    def _tell(self, names: list[bytes], *, removed: bool) -> None:
        if names:
            keys = [OffloadKey(self._key_of_name(name)) for name in names]
            self._events.append(OffloadingEvent(keys, Medium.STORAGE, removed, removal_expected=True))
