"""Which replica of a fleet gets a request, and in which order it shows its documents: least is computed, and soonest.

A replica is worth the tokens of the prompt that it has cached, less the tokens that requests wait for there, of which
:data:`WAIT_PER_CACHED_TOKEN` weigh as much as a cached one: another copy of a document costs all replicas memory, and a
wait only those that wait. What a replica was asked and has not answered counts as cached, since that comes first.

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

from ragcache_core.ordering import CachedPaths, longest_in_each
from ragcache_core.routing.load import AskedPrompt, ReplicaLoad
from ragcache_core.types import DocId

WAIT_PER_CACHED_TOKEN = 8
_MAX_SHARE = 1.25
_MORE_FOR_CACHED = 4
"""Requests beyond that which a replica may have for what it has cached: of few requests, chance gives one so many."""


@dataclass(frozen=True, slots=True, eq=False)
class KnownReplica:
    """A replica as it is known now: what it has cached, which is None where that is not known, and its load."""

    name: str
    mirrors: Sequence[CachedPaths] | None
    load: ReplicaLoad

    @property
    def caches(self) -> Sequence[CachedPaths]:
        """What it has cached, and what it will have when it has done what it was asked."""
        return (*(self.mirrors or ()), self.load.expected) if len(self.load.expected) else self.mirrors or ()

    def num_cached_tokens(self, prompt: AskedPrompt) -> int:
        """Return how many tokens of the documents are cached or expected.

        The static prefix does not count: whoever has that would get every new document.
        """
        if not prompt.documents:
            return 0
        return max((each.num_document_tokens(prompt.prefix, prompt.documents) for each in self.caches), default=0)


def choose_replica(replicas: Collection[KnownReplica], prompt: AskedPrompt) -> KnownReplica:
    """Return who gets a request, of the replicas that take any: one at least."""
    known = with_room_for_cached(replicas)
    if not prompt.documents or all(replica.mirrors is None for replica in known):
        return home_of(with_room(replicas), prompt.key)
    found = longest_in_each(
        [replica.caches for replica in known], prompt.documents, prefix=prompt.prefix, keep_first=False, keep_order=True
    )
    worth = [_worth(replica, num_tokens) for replica, (num_tokens, _) in zip(known, found, strict=True)]
    most = max(worth)
    return home_of([replica for replica, each in zip(known, worth, strict=True) if each == most], prompt.key)


def choose_order(
    replicas: Collection[KnownReplica], documents: Sequence[DocId], *, prefix: bytes | None, keep_first: bool
) -> tuple[int, ...] | None:
    """Return the order of documents that suits the replica which :func:`choose_replica` then chooses for it.

    None where nothing is known of what replicas have. See :func:`~ragcache_core.ordering.best_order`.
    """
    known = with_room_for_cached(replicas)
    if not documents or all(replica.mirrors is None for replica in known):
        return None
    best_worth, best = -math.inf, tuple(range(len(documents)))
    caches = [replica.caches for replica in known]
    found = longest_in_each(caches, documents, prefix=prefix, keep_first=keep_first)
    for replica, (num_tokens, order) in zip(known, found, strict=True):
        worth = _worth(replica, num_tokens)
        if worth > best_worth or (worth == best_worth and order < best):
            best_worth, best = worth, order
    return best


def home_of(replicas: Collection[KnownReplica], key: str) -> KnownReplica:
    """Return the replica to which ``key`` hashes, of these: one at least."""
    return max(replicas, key=lambda replica: _weight(key, replica))


def with_room(replicas: Collection[KnownReplica], num_more: int = 0) -> list[KnownReplica]:
    """Return those with less than their share of the requests, and ``num_more``: one at least, if there are any."""
    if not replicas:
        return []
    num_running = sum(replica.load.num_running for replica in replicas)
    limit = math.ceil(_MAX_SHARE * (num_running + 1) / len(replicas)) + num_more
    return [replica for replica in replicas if replica.load.num_running < limit]


def with_room_for_cached(replicas: Collection[KnownReplica]) -> list[KnownReplica]:
    """Return those that may get a request for what they have cached: one at least, if there are any."""
    return with_room(replicas, _MORE_FOR_CACHED)


def _worth(replica: KnownReplica, num_cached_tokens: int) -> int:
    return WAIT_PER_CACHED_TOKEN * num_cached_tokens - replica.load.num_waiting_tokens


def _weight(key: str, replica: KnownReplica) -> bytes:
    """Return a number that orders replicas differently for each key."""
    return hashlib.blake2b(f"{key}\0{replica.name}".encode(errors="surrogatepass"), digest_size=8).digest()
