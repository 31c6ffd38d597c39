"""The parts of an engine core that is being built by vLLM.

vLLM makes the scheduler, the scheduler a connector, the connector an offloading spec, and the spec the tiers, each from
a part of the configuration. What else they need of one another passes here::

    scheduler   has_room ->
    connector            chunks ->
    spec                         the host tier -> controller
                <------------------------------------------
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from ragcache_core.errors import ConfigError
from ragcache_core.log import logger_of
from ragcache_core.policy import PrefillCostModel
from ragcache_core.runtime.clock import steady_s
from ragcache_core.types import Tier
from ragcache_core.vllm_plugin.cache.controller import CacheController, TierReport
from ragcache_core.vllm_plugin.cache.kv_groups import KVGroups
from ragcache_core.vllm_plugin.compat import kv_bytes_per_block, resolve_kv_cache_block_sizes
from ragcache_core.vllm_plugin.group_specs import read_groups
from ragcache_core.vllm_plugin.other_connectors import extra_config
from ragcache_core.vllm_plugin.release import settings_in_force

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from ragcache_core.vllm_plugin.chunks.manager.manager import ChunkManager
    from ragcache_core.vllm_plugin.settings import PluginSettings

logger = logger_of(__name__)


@dataclass
class BuildContext:
    """The parts of an engine core that exist so far.

    Attributes:
        has_room: returns whether a speculative request would be admitted now; set by RAGCache's scheduler.
        chunks: the stored chunks, with chunk reuse.
        worker_bytes: each worker's bytes of a block in host memory, if pipeline stages differ.
        loads_by_layer: whether requests may load KV layer by layer; set by RAGCache's spec.
        controller: the controller of the scheduler's side, once it exists.
        why_no_order: the reason for missing ``groups``.
    """

    vllm_config: VllmConfig
    kv_cache_config: KVCacheConfig
    has_room: Callable[[], bool] | None = None
    chunks: ChunkManager | None = None
    worker_bytes: int | None = None
    loads_by_layer: bool = False
    controller: CacheController | None = None
    why_no_order: str = ""

    def make_controller(self, host: TierReport | None = None) -> CacheController:
        """Create the controller of an engine, with or without a ``host`` tier.

        Raises:
            ConfigError: of the settings that the engine was started with.
        """
        settings = self.settings
        num_blocks, block_bytes = self.kv_cache_config.num_blocks, kv_bytes_per_block(self.kv_cache_config)
        _, tokens_per_hash = resolve_kv_cache_block_sizes(self.kv_cache_config, self.vllm_config)
        tiers = {Tier.GPU: TierReport(num_blocks * block_bytes, block_bytes)}
        if host is not None:
            tiers[Tier.HOST] = host
        if self.groups is None:
            logger.warning(
                "RC-TREE-OFF: RAGCache does not order this model's %d groups of KV caches: %s. GPU and host memory "
                "keep vLLM's own LRU order, and there is no disk tier",
                len(self.kv_cache_config.kv_cache_groups),
                self.why_no_order,
            )
        groups = self.groups or KVGroups()
        measured = settings.measured_prefill_cost()
        self.controller = CacheController(
            settings,
            tokens_per_block=tokens_per_hash,
            prefill_cost=measured or PrefillCostModel.default(),
            is_profiled=measured is not None,
            tiers=tiers,
            has_room=self.has_room,
            chunks=self.chunks,
            groups=groups,
            now_s=steady_s(),
        )
        return self.controller

    @cached_property
    def settings(self) -> PluginSettings:
        """The settings of the engine.

        Raises:
            ConfigError: a name or a value that this version does not know.
        """
        assert self.vllm_config.kv_transfer_config is not None
        return settings_in_force(extra_config(self.vllm_config.kv_transfer_config))

    @cached_property
    def groups(self) -> KVGroups | None:
        """The model's KV cache groups; ``None`` if the tree cannot follow them, so that vLLM's own order stays."""
        _, tokens_per_hash = resolve_kv_cache_block_sizes(self.kv_cache_config, self.vllm_config)
        try:
            return read_groups(self.kv_cache_config, self.vllm_config, tokens_per_hash)
        except ConfigError as error:
            self.why_no_order = str(error)
            return None


_current: ContextVar[BuildContext | None] = ContextVar("ragcache_build_context", default=None)


@contextmanager
def building(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    *,
    has_room: Callable[[], bool] | None = None,
    chunks: ChunkManager | None = None,
) -> Iterator[BuildContext]:
    """Provide the context in which vLLM builds an engine core, and yield its parts.

    One inside another adds to it: a connector is built by its scheduler.
    """
    context = _current.get() or BuildContext(vllm_config, kv_cache_config)
    if has_room is not None:
        context.has_room = has_room
    if chunks is not None:
        context.chunks = chunks
    token = _current.set(context)
    try:
        yield context
    finally:
        _current.reset(token)


def current_context() -> BuildContext:
    """Return the context of the present build; RAGCache's spec, host policy and disk tier need its own connector."""
    context = _current.get()
    assert context is not None, "RAGCacheSpec works with RAGCacheConnector: set kv_connector to it"
    return context
