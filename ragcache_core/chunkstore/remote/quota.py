"""A byte limit for a prefix of a shared store, which all its writers keep together.

No engine knows what others write. So a writer lists the store, deletes what was used longest ago, and may then write a
64th of the limit before it lists again. What is written bounds the cost of lists, and an idle engine makes none. A list
leaves a 32nd of the limit free for what other writers may still write, and for what a server takes in addition to the
bytes of an object. So two writers keep the limit, and each further one exceeds it by a 64th at most.
"""

from __future__ import annotations

from collections.abc import Callable

from ragcache_core.chunkstore.remote import RemoteStore, StoredObject

_ALLOWED_PART = 64
_RESERVE_PART = 32
_DELETED_AT_ONCE = 1000


class StoreQuota:
    """Admits writes to a store, and frees space for them. Not thread-safe; raises the store's errors.

    Args:
        store: the store.
        prefix: of the objects' names.
        max_bytes: they may take.
        on_deleted: is called with the names of deleted objects.

    Attributes:
        max_bytes: the limit.
        used_bytes: what the objects took when they were listed, with this writer's later ones.
        num_deleted: objects that this writer has deleted.
    """

    def __init__(
        self, store: RemoteStore, prefix: str, max_bytes: int, on_deleted: Callable[[list[str]], object]
    ) -> None:
        self._store = store
        self._prefix = prefix
        self._on_deleted = on_deleted
        self._allowed_bytes = 0
        self.max_bytes = max_bytes
        self.used_bytes = 0
        self.num_deleted = 0

    @property
    def most_at_once(self) -> int:
        """Maximum bytes of a write that needs at most one listing."""
        return self.max_bytes // _ALLOWED_PART

    def admit(self, num_bytes: int, must_end: Callable[[], bool]) -> bool:
        """Return whether ``num_bytes`` may be written now; ``False`` once ``must_end()`` is true."""
        if num_bytes > self.max_bytes:
            return False
        if num_bytes > self._allowed_bytes and not self._make_space(num_bytes, must_end):
            return False
        self._allowed_bytes -= num_bytes
        self.used_bytes += num_bytes
        return True

    def _make_space(self, num_bytes: int, must_end: Callable[[], bool]) -> bool:
        self._allowed_bytes = 0  # where it fails, nothing is known
        listed: dict[str, StoredObject] = {}
        pages = self._store.list_objects(self._prefix)
        while not must_end():
            if (page := next(pages, None)) is None:
                break
            listed.update((each.name, each) for each in page)
        else:
            return False
        self.used_bytes = sum(each.num_bytes for each in listed.values())
        wanted_bytes = max(self.most_at_once, num_bytes)
        reserve = self.max_bytes // _RESERVE_PART
        if self.used_bytes + wanted_bytes > self.max_bytes - reserve:
            num_over = self.used_bytes + wanted_bytes - (self.max_bytes - 2 * reserve)
            self._delete(sorted(listed.values(), key=lambda each: each.used_s), num_over)
        self._allowed_bytes = min(wanted_bytes, max(self.max_bytes - self.used_bytes, 0))
        return num_bytes <= self._allowed_bytes

    def _delete(self, objects: list[StoredObject], num_bytes: int) -> None:
        """Delete leading objects until ``num_bytes`` are free."""
        leaving: list[StoredObject] = []
        for each in objects:
            if num_bytes <= 0:
                break
            leaving.append(each)
            num_bytes -= each.num_bytes
        for start in range(0, len(leaving), _DELETED_AT_ONCE):
            part = leaving[start : start + _DELETED_AT_ONCE]
            names = [each.name for each in part]
            self._store.delete(names)
            self._on_deleted(names)
            self.num_deleted += len(names)
            self.used_bytes -= sum(each.num_bytes for each in part)
