"""The rows of host memory: which are free, and which hold bytes of what is no longer cached."""

from __future__ import annotations

from collections.abc import Iterable


class HostRows:
    """Gives out rows of host memory and takes them back.

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
        """Rows that can be given out."""
        return len(self._free)

    @property
    def num_kept(self) -> int:
        """Rows that copies from before a reset still use."""
        return len(self._kept)

    def allocate(self, count: int) -> list[int]:
        """Return ``count`` free rows, which are written from now on."""
        assert count <= len(self._free)
        rows = self._free[-count:][::-1] if count else []
        del self._free[len(self._free) - count :]
        self._written.update(rows)
        return rows

    def free(self, rows: Iterable[int]) -> None:
        """Take rows back."""
        rows = list(rows)
        self._kept.difference_update(rows)
        self._free.extend(rows)

    def take(self, rows: Iterable[int]) -> None:
        """Take these free rows, which hold bytes already."""
        taken = set(rows)
        self._free = [row for row in self._free if row not in taken]
        self._written |= taken

    def reset(self, kept: Iterable[int] = ()) -> None:
        """Make all rows free except those that copies still use, which are ``kept`` until they are freed."""
        self._kept = set(kept)
        self._free = [row for row in reversed(range(self._num_rows)) if row not in self._kept]
        self._written |= self._kept

    def mark_all_written(self) -> None:
        """Record that any row may hold bytes of an engine before."""
        self._written.update(range(self._num_rows))

    def take_unused(self, used: Iterable[int]) -> set[int]:
        """Return the rows that were written and are neither ``used`` nor kept; each is returned once."""
        unused = self._written.difference(used, self._kept)
        self._written -= unused
        return unused
