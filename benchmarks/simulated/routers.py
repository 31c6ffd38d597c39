"""How other routers choose a replica, from their published descriptions, in a few lines each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from ragcache_core.ordering import DocPath
from ragcache_core.routing.choice import ReplicaState, below_load_limit, choose_replica, rendezvous_replica
from ragcache_core.routing.load import PromptInfo
from ragcache_core.sim.engine import SimulatedCache
from ragcache_core.sim.options import SimulationOptions
from ragcache_core.sim.simulator import Router

_CACHE_THRESHOLD = 0.3
_BALANCE_ABS_THRESHOLD = 64
_BALANCE_REL_THRESHOLD = 1.5
"""The defaults of vllm-router 0.1.17."""


class VllmRouter:
    """The ``cache_aware`` policy of vllm-router, which is that of SGLang's: a tree of the prompts that it has sent.

    The replica that was last sent the longest prefix of a prompt gets it, if that is more than 0.3; else, and where the
    busiest has more than 64 requests and half as many again as the idlest, the one with the fewest requests. Of several
    with as few that is the one that was sent the fewest tokens; theirs takes the first, which is one for all while
    no request waits. Our tree has documents where theirs has characters, and forgets nothing, as theirs in such runs.
    """

    def __init__(self) -> None:
        self._last: dict[DocPath, ReplicaState] = {}
        self._num_sent = Counter[str]()

    def choose(self, replicas: Sequence[ReplicaState], prompt: PromptInfo) -> ReplicaState:
        """Return the replica that gets a request, and remember it."""
        chosen = min(replicas, key=lambda replica: (replica.load.num_running, self._num_sent[replica.name]))
        most, least = max(replica.load.num_running for replica in replicas), chosen.load.num_running
        if most - least <= _BALANCE_ABS_THRESHOLD or most <= _BALANCE_REL_THRESHOLD * least:
            for num, end in reversed(list(enumerate(prompt.ends, 1))):
                if (last := self._last.get(prompt.documents[:num])) is not None:
                    chosen = last if end > _CACHE_THRESHOLD * prompt.num_tokens else chosen
                    break
        for num in range(1, len(prompt.documents) + 1):
            self._last[prompt.documents[:num]] = chosen
        self._num_sent[chosen.name] += prompt.num_tokens
        return chosen


class PowerOfTwo:
    """The less busy of two replicas drawn at random (Mitzenmacher, 2001), as vllm-router's ``power_of_two``."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def choose(self, replicas: Sequence[ReplicaState]) -> ReplicaState:
        """Return the replica that gets a request."""
        drawn = self._rng.choice(len(replicas), min(2, len(replicas)), replace=False)
        return min((replicas[int(i)] for i in drawn), key=lambda replica: replica.load.num_running)


class OtherRouter(Router):
    """The project's choices and others': ``hash``, ``bounded``, ``power-of-two``, ``vllm-router`` and ``mirror``.

    ``mirror`` is the choice of a ``Fleet`` for the order of the search.
    """

    def __init__(self, caches: Sequence[SimulatedCache], options: SimulationOptions) -> None:
        super().__init__(caches, options)
        self._power_of_two = PowerOfTwo(options.seed)
        self._vllm_router = VllmRouter()

    def choose(self, prompt: PromptInfo) -> ReplicaState:
        match self._options.routing:
            case "power-of-two":
                return self._power_of_two.choose(self.replicas)
            case "vllm-router":
                return self._vllm_router.choose(self.replicas, prompt)
            case "hash":
                return rendezvous_replica(self.replicas, prompt.key)
            case "bounded":
                return rendezvous_replica(below_load_limit(self.replicas), prompt.key)
            case "mirror":
                return choose_replica(self._index, self.replicas, prompt)
            case _:
                return super().choose(prompt)
