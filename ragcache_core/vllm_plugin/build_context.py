"""What a connector and the tiers below it tell each other while vLLM builds them.

vLLM makes a connector, the connector an offloading spec, and the spec the tiers, each from a part of the
configuration. What else they need of one another passes here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from ragcache_core.vllm_plugin.cache.controller import CacheController


@dataclass(slots=True)
class Building:
    """An engine's connector that is being built; the spec puts the controller here, on the scheduler's side."""

    vllm_config: VllmConfig
    kv_cache_config: KVCacheConfig
    controller: CacheController | None = None


_current: ContextVar[Building | None] = ContextVar("ragcache_building", default=None)


@contextmanager
def building(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> Iterator[Building]:
    """Let what is built inside find :func:`current_building`."""
    made = Building(vllm_config, kv_cache_config)
    token = _current.set(made)
    try:
        yield made
    finally:
        _current.reset(token)


def current_building() -> Building:
    """Return what is being built; the spec and the disk tier of RAGCache work with its own connector only."""
    made = _current.get()
    assert made is not None, "RAGCacheSpec works with RAGCacheConnector: set kv_connector to it"
    return made
