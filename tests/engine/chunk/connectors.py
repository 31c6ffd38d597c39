"""The connectors of chunk reuse, which provide a prompt even if nothing of it is saved: a recompute fraction of 1."""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar

import torch

from ragcache_core.vllm_plugin.chunks.compute.scattered_attention import ScatteredRows
from ragcache_core.vllm_plugin.chunks.compute.selective_prefill import PartialPrefill
from ragcache_core.vllm_plugin.chunks.connector import ChunkDocumentConnector, ChunkRAGCacheConnector
from ragcache_core.vllm_plugin.chunks.model.paged_kv import KVAccess
from ragcache_core.vllm_plugin.compat import KVConnectorRole
from ragcache_kernels.scattered_attention import naive_scattered_attention

_LONGER_THAN_ANY = 1 << 30


class EagerDocumentConnector(ChunkDocumentConnector):
    """The GPU tier alone."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            self.scheduling.plans.least_reused_tokens = 0


class ScatteredDocumentConnector(EagerDocumentConnector):
    """The GPU tier alone, and all that is recomputed by the twin of the kernel that does it on CUDA."""

    calls: Counter[str] = Counter()
    prefills: ClassVar[list[PartialPrefill]] = []

    def attach(self, model_runner: Any) -> None:
        super().attach(model_runner)
        prefill, layers = self.execution._prefill, self.execution._layers
        for layer in layers:
            layer.unrotated.caches = lambda kv=layer.kv: _unpacked(kv)  # a CPU packs its blocks, which CUDA does not

        def attention(*args: Any, **kwargs: Any) -> torch.Tensor:
            self.calls["attention"] += 1
            return naive_scattered_attention(*args, **kwargs)

        self.prefills.append(prefill)
        size = prefill._tokens_per_block
        prefill.scattered = ScatteredRows(
            layers, attention, tokens_per_block=size, max_runs=0, least_run_tokens=_LONGER_THAN_ANY
        )


def _unpacked(kv: KVAccess) -> tuple[torch.Tensor, torch.Tensor]:
    """Return copies of the keys and values of a cache, [num_blocks, tokens_per_block, num_kv_heads, head_dim]."""
    size = kv.tokens_per_block
    keys, values = kv.read(torch.arange(len(kv.cache) * size))
    return keys.unflatten(0, (-1, size)), values.unflatten(0, (-1, size))


class EagerRAGCacheConnector(ChunkRAGCacheConnector):
    """GPU and host."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            self.scheduling.plans.least_reused_tokens = 0
