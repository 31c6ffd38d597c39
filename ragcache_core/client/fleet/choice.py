"""Which replica of a fleet gets a request: the one that has most of its documents cached, unless it is far busier.

Documents that none of them has go by rendezvous hashing of the first one: always to the same replica, and when one is
gone only its documents go elsewhere. None is to have more than 1.25 times its share of the requests that are being
answered (consistent hashing with bounded loads, Mirrokni et al., SODA 2018).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Mapping

_MAX_SHARE = 1.25


def with_room(num_running: Mapping[str, int]) -> list[str]:
    """Return the replicas that may get one more request, of those whose requests in flight are given: one at least."""
    if not num_running:
        return []
    limit = math.ceil(_MAX_SHARE * (sum(num_running.values()) + 1) / len(num_running))
    return [name for name, num in num_running.items() if num < limit]


def choose_replica(candidates: Collection[str], key: str, num_cached_tokens: Callable[[str], int]) -> str:
    """Return the candidate with most of a prompt's documents cached; of those that have none, the one for its ``key``.

    ``num_cached_tokens`` does not count the static prefix: whoever has that would get every new document.
    """
    return max(candidates, key=lambda name: (num_cached_tokens(name), _weight(key, name)))


def _weight(key: str, name: str) -> bytes:
    """Return a number that orders replicas differently for each key (Thaler and Ravishankar, 1998)."""
    return hashlib.blake2b(f"{key}\0{name}".encode(errors="surrogatepass"), digest_size=8).digest()
