"""The engine core's part of recognition: the log of registrations for all API servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ragcache_core.recognition import RegistrationLog


class PersistentRegistrations:
    """Serves the API servers' calls; see :meth:`act`. Used by the engine core's thread."""

    def __init__(self) -> None:
        self._log = RegistrationLog()
        self._points: list[int] | None = None
        self._counts: dict[int, dict[str, int]] = {}
        self._unstored: set[int] = set()

    def act(self, action: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the result of a call, as JSON values and bytes.

        ::

            begin   points, limit, restricted      ->  points          only the first call sets them
            append  entries: [tenant, bytes]       ->  last
            forget  ids                            ->  last
            restrict tenants                       ->  last
            read    reader, after, limit, used, counts, is_stored
                                                   ->  is_reset, changes, last, restricted, counts
            read_by num_readers                    ->  number, is_stored
            entries after, limit                   ->  entries: [tenant, bytes]
        """
        answer: dict[str, Any] = getattr(self, f"_{action}")(**body)
        return answer

    def _begin(self, points: list[int] | None, limit: int = 0, restricted: Sequence[str | None] = ()) -> dict[str, Any]:
        if self._points is None and points is not None:
            self._points = points
            self._log = RegistrationLog(limit)
            self._log.restrict(restricted)
        return {"points": self._points}

    def _append(self, entries: list[tuple[str | None, bytes]]) -> dict[str, Any]:
        for tenant, registration in entries:
            self._log.append(tenant, [registration])
        return {"last": self._log.last}

    def _forget(self, ids: list[str]) -> dict[str, Any]:
        return {"last": self._log.forget(ids)}

    def _restrict(self, tenants: list[str | None]) -> dict[str, Any]:
        self._log.restrict(tenants)
        return {"last": self._log.last}

    def _read(
        self,
        reader: int,
        after: int,
        limit: int,
        used: list[tuple[str | None, str]],
        counts: dict[str, int],
        is_stored: bool,
    ) -> dict[str, Any]:
        if is_stored:
            self._unstored.discard(reader)
        else:
            self._unstored.add(reader)
        for tenant, doc_id in used:
            self._log.note_use(tenant, [doc_id])
        self._counts[reader] = counts
        is_reset, changes = self._log.changes(reader, after, limit)
        total: dict[str, int] = {}
        for each in self._counts.values():
            for name, number in each.items():
                total[name] = total.get(name, 0) + number
        return {
            "is_reset": is_reset,
            "changes": [[each.number, each.tenant, each.doc_id, each.registration] for each in changes],
            "last": self._log.last,
            "restricted": sorted(self._log.restricted, key=str),
            "num_documents": len(self._log),
            "counts": total,
        }

    def _read_by(self, num_readers: int) -> dict[str, Any]:
        return {"number": self._log.min_read(num_readers), "is_stored": not self._unstored}

    def _entries(self, after: int, limit: int) -> dict[str, Any]:
        _, changes = self._log.changes(-1, after, limit)
        return {
            "entries": [[each.tenant, each.registration] for each in changes if each.registration is not None],
            "last": changes[-1].number if changes else after,
            "is_end": len(changes) < limit,
            "restricted": sorted(self._log.restricted, key=str),
        }
