"""What one engine's cache does in virtual time: the door behind which documents or blocks are kept."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from ragcache_core.errors import ConfigError
from ragcache_core.sim.traces.trace import TracedRequest
from ragcache_core.types import Tier


@dataclass(frozen=True, slots=True)
class Reuse:
    """What a prompt takes from stored chunks, behind its exact prefix.

    Attributes:
        documents: those that are reused, by their places in the prompt.
        first_token: where the first of them begins, or the exact prefix ends; from there on KV is approximate, and
            nobody else's. None: nothing is reused.
        num_host_tokens, num_disk_tokens: read from there, and not computed.
        num_recomputed_tokens: of the reused documents, computed all the same.
    """

    documents: frozenset[int] = frozenset()
    first_token: int | None = None
    num_host_tokens: int = 0
    num_disk_tokens: int = 0
    num_recomputed_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt that are read from chunks."""
        return self.num_host_tokens + self.num_disk_tokens


NO_REUSE = Reuse()


@dataclass(frozen=True, slots=True)
class Served:
    """What a request found, and what was moved for it.

    Attributes:
        tiers: where each document of the prompt lay, in the order in which it shows them; None for a miss.
        num_cached_tokens_by_tier: of the prompt, indexed by :class:`~ragcache_core.types.Tier`; those that always lie
            on the GPU (a system prompt that is not counted against its capacity) included.
        num_new_tokens: of the prompt, to be computed.
        num_loaded_tokens: copied to the GPU from the tiers below, and so waited for.
        num_swapped_out_tokens: copied from the GPU to the host.
        reuse: what is neither cached nor computed, but read from chunks.
        num_shared_tokens: neither cached nor computed, but read from a tier that several engines share.
    """

    tiers: tuple[Tier | None, ...]
    num_cached_tokens_by_tier: tuple[int, int, int]
    num_new_tokens: int
    num_loaded_tokens: int
    num_swapped_out_tokens: int
    reuse: Reuse = NO_REUSE
    num_shared_tokens: int = 0

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompt that are cached exactly."""
        return sum(self.num_cached_tokens_by_tier)


class SimulatedCache(ABC):
    """Tiers of KV, and what becomes of them request by request.

    A request comes with its number in the trace, which is what tells two questions of the same words apart. Its
    documents stand in the order in which the prompt shows them: whoever wants another order than the trace's asks
    :meth:`best_order` first and passes a request that is arranged so.
    """

    @abstractmethod
    def num_cached_tokens(self, request: TracedRequest) -> int:
        """Return how many tokens of the prompt are cached now, in whatever tier; changes nothing."""

    @abstractmethod
    def best_order(self, request: TracedRequest) -> tuple[int, ...]:
        """Return the permutation of the documents with the longest cached prefix; changes nothing.

        Where nothing is gained, the order as it is: the answer of :func:`ragcache_core.ordering.arrange` for
        ``cache_aware``, given all that is cached.
        """

    @abstractmethod
    def serve(self, request: TracedRequest, number: int) -> Served:
        """Return what a request finds, and count it, give up what has to go, and place what it leaves."""

    def warm(self, request: TracedRequest, expected_uses: int) -> None:
        """Place the documents of a prompt before anybody asks for them, to rank as if they had been used so often.

        Raises:
            ConfigError: this cache cannot.
        """
        raise ConfigError("only a cache of whole documents is warmed: choose granularity document")

    def changed_prefixes(self) -> set[tuple[str, ...]] | None:
        """Return the orders of documents after which more or less is cached than at the last call.

        A waiting request whose documents begin with one of them may have another number of cached tokens now. None:
        it is not known, and any request's may have changed.
        """
        return None
