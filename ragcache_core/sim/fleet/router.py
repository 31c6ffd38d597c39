"""Who gets a request of a simulated fleet: what a ``Fleet`` would choose, or a proxy that knows less."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ragcache_core.ordering import CachedPaths, arrange, longest_cached
from ragcache_core.routing.choice import KnownReplica, choose_order, choose_replica, home_of, with_room
from ragcache_core.routing.index import PathIndex
from ragcache_core.routing.load import AskedPrompt, ReplicaLoad
from ragcache_core.sim.documents import NO_STATIC_PREFIX
from ragcache_core.sim.fleet.other_routers import PowerOfTwo, VllmRouter
from ragcache_core.sim.options import SimulationOptions
from ragcache_core.sim.traces.trace import TracedRequest


class Router:
    """Chooses the replica of each request, and the order of its documents.

    ``joint`` is the choice of a ``Fleet``. Of ``mirror`` the replica is chosen for the order of the search, and by the
    others without knowing what replicas have; a cache-aware order is then the best for that replica, better than one
    through a proxy could be, which does not know who will get it.
    """

    def __init__(self, mirrors: Sequence[CachedPaths], options: SimulationOptions) -> None:
        """``mirrors`` are what is known of each replica's cache, kept up to date by their owner."""
        self.replicas = [KnownReplica(f"replica-{i}", (paths,), ReplicaLoad()) for i, paths in enumerate(mirrors)]
        self._index = PathIndex()
        for paths in itertools.chain(*(replica.caches for replica in self.replicas)):
            for _ in self._index.join(paths):
                pass
        self._options = options
        self._turns = itertools.cycle(self.replicas)
        self._power_of_two = PowerOfTwo(options.seed)
        self._vllm_router = VllmRouter()

    def route(self, request: TracedRequest) -> tuple[KnownReplica, tuple[int, ...]]:
        """Return who gets a request, and the order in which it shows its documents."""
        is_cache_aware = self._options.order == "cache_aware"
        found = arrange(request.doc_ids, self._options.order, None)
        if is_cache_aware and self._options.routing == "joint":
            best = choose_order(self._index, self.replicas, request.doc_ids, prefix=NO_STATIC_PREFIX, keep_first=False)
            order = best or found
            return self._choose(request.in_order(order)), order
        replica = self._choose(request.in_order(found))
        if not is_cache_aware:
            return replica, found
        return replica, longest_cached(replica.caches, request.doc_ids, prefix=NO_STATIC_PREFIX, keep_first=False)[1]

    def _choose(self, request: TracedRequest) -> KnownReplica:
        prompt = self.asked(request)
        match self._options.routing:
            case "round-robin":
                return next(self._turns)
            case "power-of-two":
                return self._power_of_two.choose(self.replicas)
            case "vllm-router":
                return self._vllm_router.choose(self.replicas, prompt)
            case "hash":
                return home_of(self.replicas, prompt.key)
            case "bounded":
                return home_of(with_room(self.replicas), prompt.key)
            case _:
                return choose_replica(self._index, self.replicas, prompt)

    def asked(self, request: TracedRequest) -> AskedPrompt:
        """Return what a client would know of a request's prompt."""
        num_static_tokens = self._options.system_tokens
        ends = [num_static_tokens]
        for num_tokens in request.doc_tokens:
            ends.append(ends[-1] + num_tokens)
        key = request.doc_ids[0] if request.doc_ids else ""
        num_tokens = ends[-1] + request.question_tokens
        return AskedPrompt(request.doc_ids, tuple(ends[1:]), num_static_tokens, num_tokens, NO_STATIC_PREFIX, key)
