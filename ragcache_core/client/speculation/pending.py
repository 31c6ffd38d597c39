"""Which speculations a real request may join, and which of them it gets."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ragcache_core.client.speculation.speculation import Speculation

_MAX_KEPT = 64
"""Whole answers that nobody asked for (again): so many are kept."""


class Claims:
    """SpeculationManager that nobody has joined yet, by what they ask, the oldest first. Thread-safe.

    True while there are any.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_key: dict[bytes, list[Speculation]] = {}

    def __bool__(self) -> bool:
        return bool(self._by_key)

    def add(self, speculation: Speculation) -> None:
        """Let a real request join ``speculation``."""
        with self._lock:
            self._by_key.setdefault(speculation.key, []).append(speculation)

    def take(self, key: bytes, scope: object | None) -> Speculation | None:
        """Return the oldest that asks this and did not fail, claimed for ``scope``. Nobody gets it again.

        The scope's own go first, then nobody's; another scope's goes only to a request in nobody's name.
        """
        with self._lock:
            while (speculation := self._oldest(key, scope)) is not None:
                self._drop(speculation)
                if not speculation.is_failed and not speculation.is_cancelled:
                    speculation.claim(scope)
                    return speculation
        return None

    def drop(self, speculation: Speculation) -> bool:
        """Let nobody join ``speculation``; return whether nobody has."""
        with self._lock:
            self._drop(speculation)
            return not speculation.is_promised

    def keep(self, speculation: Speculation) -> bool:
        """Return whether the whole answer of ``speculation`` may still be asked for; of too many the oldest goes."""
        with self._lock:
            if speculation not in self._by_key.get(speculation.key, ()):
                return False
            ended = [s for waiting in self._by_key.values() for s in waiting if s.is_done]
            for oldest in sorted(ended, key=lambda s: s.sent_s)[: max(0, len(ended) + 1 - _MAX_KEPT)]:
                self._drop(oldest)
        return True

    def clear(self) -> None:
        """Let nobody join any."""
        with self._lock:
            self._by_key.clear()

    def _oldest(self, key: bytes, scope: object | None) -> Speculation | None:
        waiting = self._by_key.get(key, ())
        own = (s for s in waiting if s.scope is scope)
        return next(own, next((s for s in waiting if scope is None or s.scope is None), None))

    def _drop(self, speculation: Speculation) -> None:
        waiting = self._by_key.get(speculation.key, [])
        if speculation in waiting:
            waiting.remove(speculation)
            if not waiting:
                del self._by_key[speculation.key]
