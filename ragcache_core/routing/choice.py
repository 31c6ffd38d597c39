"""Choose the replica of a fleet and the document order of a request with the least, earliest computation.

A replica is worth the tokens of the prompt that it has cached, less the tokens that requests wait for there:
:data:`WAIT_PER_CACHED_TOKEN` of these weigh as much as a cached one. Another copy of a document costs all replicas
memory, and a wait only those that wait. Documents of unanswered requests count as cached, since these come first.

Where nothing is known of what replicas have, and for prompts without documents, requests go by rendezvous hashing
(Thaler and Ravishankar, 1998) of the first document: always to the same replica, and when one is gone only its
documents go elsewhere. None gets more than 1.25 times its share of the requests that are being answered (consistent
hashing with bounded loads, Mirrokni et al., SODA 2018), and a few more where it has what others have not.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any

from ragcache_core.ordering import CachedPaths
from ragcache_core.routing.index import Found, PathIndex
from ragcache_core.routing.load import PromptInfo, ReplicaLoad
from ragcache_core.types import DocId

WAIT_PER_CACHED_TOKEN = 8
_MAX_SHARE = 1.25
_MORE_FOR_CACHED = 4
"""Requests above the load limit that a replica may have for its cached documents: few requests are uneven by chance."""


@dataclass(slots=True, eq=False)
class ReplicaState:
    """A replica's present state: its cached prefixes (``None`` if unknown), and its load."""

    name: str
    mirrors: Sequence[CachedPaths] | None
    load: ReplicaLoad

    @property
    def caches(self) -> Sequence[CachedPaths]:
        """Its cached prefixes, including those of its open requests."""
        return (*(self.mirrors or ()), self.load.expected)

    @property
    def bits(self) -> int:
        """The bit set of :attr:`caches` in the fleet's index."""
        bits = self.load.expected.bit
        for paths in self.mirrors or ():
            bits |= paths.bit
        return bits

    def num_cached_tokens(self, prompt: PromptInfo) -> int:
        """Return the number of document tokens that are cached or expected.

        The static prefix does not count: its holder would get every new document.
        """
        if not prompt.documents:
            return 0
        return max((each.num_document_tokens(prompt.prefix, prompt.documents) for each in self.caches), default=0)


def choose_replica(index: PathIndex, replicas: Collection[ReplicaState], prompt: PromptInfo) -> ReplicaState:
    """Return the replica for a request, of at least one; ``index`` has all their caches."""
    known = below_cached_load_limit(replicas)
    if not prompt.documents or all(replica.mirrors is None for replica in known):
        return rendezvous_replica(below_load_limit(replicas), prompt.key)
    found = _found(index, known, prompt.documents, prefix=prompt.prefix, keep_order=True)
    most = max(worth for worth, _, _ in found)
    return rendezvous_replica([replica for worth, _, replica in found if worth == most], prompt.key)


def choose_order(
    index: PathIndex,
    replicas: Collection[ReplicaState],
    documents: Sequence[DocId],
    *,
    prefix: bytes | None,
    keep_first: bool,
) -> tuple[int, ...] | None:
    """Return the document order for the replica that :func:`choose_replica` then chooses.

    None where nothing is known of what replicas have. See :func:`~ragcache_core.ordering.best_order`.
    """
    known = below_cached_load_limit(replicas)
    if not documents or all(replica.mirrors is None for replica in known):
        return None
    found = _found(index, known, documents, prefix=prefix, keep_first=keep_first)
    most = max(worth for worth, _, _ in found)
    return min(best.order for worth, best, _ in found if worth == most)


def _found(
    index: PathIndex, known: Sequence[ReplicaState], documents: Sequence[DocId], **asked: Any
) -> list[tuple[int, Found, ReplicaState]]:
    """Return each replica's score, and its best cached order."""
    caches = [replica.bits for replica in known]
    every = reduce(or_, caches)
    best = [*index.longest(every, documents, **asked), Found(0, tuple(range(len(documents))), every)]
    found = []
    for bits, replica in zip(caches, known, strict=True):
        for of_it in best:
            if of_it.caches & bits:
                break
        found.append((WAIT_PER_CACHED_TOKEN * of_it.num_tokens - replica.load.num_waiting_tokens, of_it, replica))
    return found


def rendezvous_replica(replicas: Collection[ReplicaState], key: str) -> ReplicaState:
    """Return the replica to which ``key`` hashes, of at least one."""
    return max(replicas, key=lambda replica: _weight(key, replica))


def below_load_limit(replicas: Collection[ReplicaState], num_more: int = 0) -> list[ReplicaState]:
    """Return the replicas below their share of requests and ``num_more``; at least one, if there are any."""
    if not replicas:
        return []
    num_running = sum(replica.load.num_running for replica in replicas)
    limit = math.ceil(_MAX_SHARE * (num_running + 1) / len(replicas)) + num_more
    return [replica for replica in replicas if replica.load.num_running < limit]


def below_cached_load_limit(replicas: Collection[ReplicaState]) -> list[ReplicaState]:
    """Return the replicas that may get a request for their cached tokens; at least one, if there are any."""
    return below_load_limit(replicas, _MORE_FOR_CACHED)


def _weight(key: str, replica: ReplicaState) -> bytes:
    """Return a number that orders replicas differently for each key."""
    return hashlib.blake2b(f"{key}\0{replica.name}".encode(errors="surrogatepass"), digest_size=8).digest()
