"""The rows of host memory: which are free, and which hold bytes of evicted blocks."""

from __future__ import annotations

from collections.abc import Iterable


class HostRows:
    """Allocates and frees rows of host memory.

    Args:
        num_rows: rows that there are, one for each block of KV.
    """

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._free = list(reversed(range(num_rows)))
        self._written: set[int] = set()
        self._kept: set[int] = set()

    @property
    def num_free(self) -> int:
        """Number of free rows."""
        return len(self._free)

    @property
    def num_kept(self) -> int:
        """Number of rows that copies from before a reset still use."""
        return len(self._kept)

    def allocate(self, count: int) -> list[int]:
        """Return ``count`` free rows, which will be written."""
        assert count <= len(self._free)
        rows = self._free[-count:][::-1] if count else []
        del self._free[len(self._free) - count :]
        self._written.update(rows)
        return rows

    def free(self, rows: Iterable[int]) -> None:
        """Free rows."""
        rows = list(rows)
        self._kept.difference_update(rows)
        self._free.extend(rows)

    def take(self, rows: Iterable[int]) -> None:
        """Allocate these free rows, which already have content."""
        taken = set(rows)
        self._free = [row for row in self._free if row not in taken]
        self._written |= taken

    def reset(self, kept: Iterable[int] = ()) -> None:
        """Free all rows except those in use by copies, which are ``kept`` until freed."""
        self._kept = set(kept)
        self._free = [row for row in reversed(range(self._num_rows)) if row not in self._kept]
        self._written |= self._kept

    def mark_all_written(self) -> None:
        """Record that any row may hold bytes of an earlier engine."""
        self._written.update(range(self._num_rows))

    def take_unused(self, used: Iterable[int]) -> set[int]:
        """Return written rows that are neither ``used`` nor kept, each once."""
        unused = self._written.difference(used, self._kept)
        self._written -= unused
        return unused
