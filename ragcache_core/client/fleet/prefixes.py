"""What the replicas of a fleet have cached, for orders of documents that suit the one that will get them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from ragcache_core.client.fleet.replicas import ReplicaSet
from ragcache_core.client.ordering.cached_prefixes import KnownPrefixes
from ragcache_core.ordering import CachedPaths
from ragcache_core.routing.choice import choose_order, with_room_for_cached
from ragcache_core.types import DocId


class FleetPrefixes(KnownPrefixes):
    """The mirrors of the replicas that may get the next request: an order is chosen together with its replica."""

    def __init__(self, replicas: ReplicaSet) -> None:
        """The mirrors are the replicas' own, which close them."""
        self._replicas = replicas

    @property
    def is_current(self) -> bool:
        return all(replica.mirror.is_current for replica in self._replicas.ready())

    def order(self, documents: Sequence[DocId], *, prefix: bytes | None, keep_first: bool) -> tuple[int, ...] | None:
        with self._replicas.known() as replicas:
            return choose_order(self._replicas.index, replicas, documents, prefix=prefix, keep_first=keep_first)

    @contextmanager
    def reading(self) -> Iterator[Sequence[CachedPaths] | None]:
        with self._replicas.known() as replicas:
            known = [replica for replica in with_room_for_cached(replicas) if replica.mirrors is not None]
            yield [paths for replica in known for paths in replica.caches] or None

    def refresh(self, timeout_s: float) -> bool:
        ready = self._replicas.ready()
        with ThreadPoolExecutor(len(ready) or 1) as threads:
            return all(threads.map(lambda replica: replica.mirror.refresh(timeout_s), ready))

    def close(self) -> None:
        """Do nothing."""
