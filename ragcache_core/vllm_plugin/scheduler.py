"""The scheduler: vLLM's own, whose GPU blocks are given up in the order of the knowledge tree."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from ragcache_core.errors import ConfigError
from ragcache_core.vllm_plugin.block_pool import TreeBlockPool
from ragcache_core.vllm_plugin.compat import AsyncScheduler, Scheduler

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from ragcache_core.vllm_plugin.controller import CacheController

logger = init_logger(f"vllm.{__name__}")


class _TreeScheduling:
    """What RAGCache adds to either of vLLM's schedulers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._controller: CacheController | None = getattr(self.connector, "controller", None)  # type: ignore[attr-defined]
        if self._controller is None:
            raise ConfigError(
                "RAGCacheScheduler needs a connector of RAGCache: set --kv-transfer-config as Engine.launch and "
                "'ragcache serve' do, or leave --scheduler-cls out"
            )
        if len(self.kv_cache_config.kv_cache_groups) == 1:  # type: ignore[attr-defined]
            TreeBlockPool.take_over(self.kv_cache_manager.block_pool, self._controller)  # type: ignore[attr-defined]
        else:
            logger.warning("This model has several groups of KV caches: its GPU tier keeps vLLM's own LRU order")

    def _update_request_with_output(self, request: Request, new_token_ids: list[int], *args: Any, **kwargs: Any) -> Any:
        if new_token_ids and self._controller is not None:
            self._controller.on_first_token(request.request_id, time.monotonic())
        return super()._update_request_with_output(request, new_token_ids, *args, **kwargs)  # type: ignore[misc]


class SyncTreeScheduler(_TreeScheduling, Scheduler):
    """Where a step waits for the one before: on a CPU."""


class AsyncTreeScheduler(_TreeScheduling, AsyncScheduler):
    """Where the next step is scheduled while one runs: on CUDA."""


def RAGCacheScheduler(*args: Any, **kwargs: Any) -> Scheduler:  # noqa: N802 (vLLM takes it for a class)
    """Return the scheduler for vLLM's setting of ``async_scheduling``; the name to give to ``--scheduler-cls``."""
    vllm_config = kwargs["vllm_config"] if "vllm_config" in kwargs else args[0]
    kind = AsyncTreeScheduler if vllm_config.scheduler_config.async_scheduling else SyncTreeScheduler
    scheduler: Scheduler = kind(*args, **kwargs)
    return scheduler
