"""vLLM's tiering offload unchanged, also without a GPU: a baseline for RAGCache."""

from __future__ import annotations

from vllm.platforms import current_platform

from ragcache_core.vllm_plugin.compat import (
    CanonicalKVCaches,
    OffloadingConfig,
    OffloadingWorker,
    TieringOffloadingSpec,
)
from ragcache_core.vllm_plugin.offload.cpu_worker import copying_worker


class VLLMSpec(TieringOffloadingSpec):
    """Builds vLLM's own tiers, with RAGCache's transfer worker where vLLM has none."""

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        self._copying_worker: OffloadingWorker | None = None

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if current_platform.is_cuda_alike() or current_platform.is_xpu():
            return super().get_worker(kv_caches)
        if self._copying_worker is None:
            self._copying_worker = copying_worker(self, kv_caches)
        return self._copying_worker
