"""Which speculations a real request may join, and which of them it gets."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ragcache_core.client.speculation.speculation import Speculation

_MAX_KEPT = 64
"""How many finished answers are kept for requests that may join them (again)."""


class Claims:
    """Speculations that no request has joined yet, by what they ask, the oldest first. Thread-safe.

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
        """Return the oldest speculation with this key that did not fail, claimed for ``scope``. It is returned once.

        The scope's own are joined first, then those without a scope; another scope's only by a request without one.
        """
        with self._lock:
            while (speculation := self._oldest(key, scope)) is not None:
                self._drop(speculation)
                if not speculation.is_failed and not speculation.is_cancelled:
                    speculation.claim(scope)
                    return speculation
        return None

    def drop(self, speculation: Speculation) -> bool:
        """Make ``speculation`` impossible to join; return whether none has joined it."""
        with self._lock:
            self._drop(speculation)
            return not speculation.is_promised

    def keep(self, speculation: Speculation) -> bool:
        """Return whether the whole answer of ``speculation`` may still be joined; of too many the oldest is dropped."""
        with self._lock:
            if speculation not in self._by_key.get(speculation.key, ()):
                return False
            ended = [s for waiting in self._by_key.values() for s in waiting if s.is_done]
            for oldest in sorted(ended, key=lambda s: s.sent_s)[: max(0, len(ended) + 1 - _MAX_KEPT)]:
                self._drop(oldest)
        return True

    def clear(self) -> None:
        """Make every speculation impossible to join."""
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
