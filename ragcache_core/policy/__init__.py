"""Replacement policies: the order of eviction. A policy sees a node's statistics, never the tree."""

from collections.abc import Callable

from ragcache_core.errors import ConfigError
from ragcache_core.policy.adaptive import ARCPolicy, S3FIFOPolicy
from ragcache_core.policy.base import NodeStats, ReplacementPolicy
from ragcache_core.policy.gdsf import GDSFPolicy, PGDSFPolicy
from ragcache_core.policy.mixture import MixturePolicy
from ragcache_core.policy.prefill_cost import PrefillCost, PrefillCostModel
from ragcache_core.policy.recency import LFUPolicy, LRUPolicy

POLICIES: dict[str, Callable[[PrefillCost], ReplacementPolicy]] = {
    "pgdsf": lambda _: PGDSFPolicy(),
    "gdsf": GDSFPolicy,
    "lru": lambda _: LRUPolicy(),
    "lfu": lambda _: LFUPolicy(),
    "s3fifo": lambda _: S3FIFOPolicy(),
    "arc": lambda _: ARCPolicy(),
    "mixture": lambda _: MixturePolicy(),
}
"""Every policy by the name that configurations use."""


def make_policy(name: str, prefill_cost: PrefillCost | None = None) -> ReplacementPolicy:
    """Return a new policy of that name.

    Raises:
        ConfigError: there is none; the message lists those that there are.
    """
    if name not in POLICIES:
        raise ConfigError(f"policy is {name!r}; choose one of {', '.join(POLICIES)}")
    return POLICIES[name](prefill_cost or PrefillCostModel.default())


__all__ = [
    "POLICIES",
    "ARCPolicy",
    "GDSFPolicy",
    "LFUPolicy",
    "LRUPolicy",
    "MixturePolicy",
    "NodeStats",
    "PGDSFPolicy",
    "PrefillCost",
    "PrefillCostModel",
    "ReplacementPolicy",
    "S3FIFOPolicy",
    "make_policy",
]
