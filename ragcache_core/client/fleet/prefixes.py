"""What the replicas of a fleet have cached, for orders of documents that suit the one that will get them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

from ragcache_core.client.fleet.replicas import ReplicaSet
from ragcache_core.client.ordering.cached_prefixes import KnownPrefixes
from ragcache_core.ordering import CachedPaths


class FleetPrefixes(KnownPrefixes):
    """The mirrors of the replicas that may get the next request: an order is chosen together with its replica."""

    def __init__(self, replicas: ReplicaSet) -> None:
        """The mirrors are the replicas' own, which close them."""
        self._replicas = replicas

    @property
    def is_current(self) -> bool:
        return all(replica.engine.integration.cached_prefixes.is_current for replica in self._replicas.ready())

    @contextmanager
    def reading(self) -> Iterator[Sequence[CachedPaths] | None]:
        with ExitStack() as stack:  # always in the same order: each of them takes a lock
            mirrors = [replica.engine.integration.cached_prefixes.reading() for replica in self._replicas.with_room()]
            known = [stack.enter_context(mirror) for mirror in mirrors]
            yield [paths for engines in known for paths in engines or ()] or None

    def refresh(self, timeout_s: float) -> bool:
        ready = self._replicas.ready()
        with ThreadPoolExecutor(len(ready) or 1) as threads:
            return all(
                threads.map(lambda replica: replica.engine.integration.cached_prefixes.refresh(timeout_s), ready)
            )

    def close(self) -> None:
        """Do nothing."""
