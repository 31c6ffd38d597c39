"""Who gets a request of a simulated fleet: the choice of a ``Fleet``, or each replica in turn."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ragcache_core.ordering import PathChange, arrange, longest_cached
from ragcache_core.routing.choice import ReplicaState, choose_order, choose_replica
from ragcache_core.routing.index import PathIndex
from ragcache_core.routing.load import InFlightRequest, PromptInfo, ReplicaLoad
from ragcache_core.sim.engine import NO_STATIC_PREFIX, SimulatedCache
from ragcache_core.sim.options import SimulationOptions
from ragcache_core.sim.traces.trace import TracedRequest


class Router:
    """Chooses the replica of each request, and the order of its documents.

    ``joint`` chooses both together, as a ``Fleet`` does. Otherwise a cache-aware order is the best for the replica that
    was chosen, better than one through a proxy could be. Turns of a conversation stay at one replica.
    """

    def __init__(self, caches: Sequence[SimulatedCache], options: SimulationOptions) -> None:
        self.replicas = []
        self._index = PathIndex()
        for i, cache in enumerate(caches):
            cache.mirror.set(PathChange(NO_STATIC_PREFIX, (), options.system_tokens))
            self.replicas.append(ReplicaState(f"replica-{i}", (cache.mirror,), ReplicaLoad()))
        for paths in itertools.chain(*(replica.caches for replica in self.replicas)):
            for _ in self._index.join(paths):
                pass
        self._options = options
        self._turns = itertools.cycle(self.replicas)
        self._home: dict[int, ReplicaState] = {}

    def route(self, request: TracedRequest) -> tuple[int, tuple[int, ...]]:
        """Return the replica that gets a request, and the order in which it shows its documents."""
        is_cache_aware = self._options.order == "cache_aware"
        order = arrange(request.doc_ids, self._options.order, None)
        replica = None if request.conversation is None else self._home.get(request.conversation)
        if is_cache_aware and replica is None and self._options.routing == "joint":
            best = choose_order(self._index, self.replicas, request.doc_ids, prefix=NO_STATIC_PREFIX, keep_first=False)
            order = best or order
            replica = self.choose(self._prompt(request.in_order(order)))
        else:
            replica = replica or self.choose(self._prompt(request.in_order(order)))
            if is_cache_aware:
                found = longest_cached(replica.caches, request.doc_ids, prefix=NO_STATIC_PREFIX, keep_first=False)
                order = found[1]
        if request.conversation is not None:
            self._home[request.conversation] = replica
        return self.replicas.index(replica), order

    def send(self, place: int, request: TracedRequest) -> InFlightRequest:
        """Count a request, its documents in the prompt's order, as one that a replica has not answered."""
        replica, prompt = self.replicas[place], self._prompt(request)
        return replica.load.begin(prompt, replica.num_cached_tokens(prompt))

    def choose(self, prompt: PromptInfo) -> ReplicaState:
        """Return the replica that gets a prompt."""
        if self._options.routing == "round-robin":
            return next(self._turns)
        return choose_replica(self._index, self.replicas, prompt)

    def _prompt(self, request: TracedRequest) -> PromptInfo:
        """Return what a client knows of a request's prompt."""
        num_static_tokens = self._options.system_tokens + request.history_tokens
        ends = [num_static_tokens]
        for num_tokens in request.doc_tokens:
            ends.append(ends[-1] + num_tokens)
        key = request.doc_ids[0] if request.doc_ids else ""
        num_tokens = ends[-1] + request.question_tokens
        return PromptInfo(request.doc_ids, tuple(ends[1:]), num_static_tokens, num_tokens, NO_STATIC_PREFIX, key)
