"""Attention of rows at any positions, by the Triton kernel of ``ragcache_kernels`` (Cache-Craft §4).

vLLM's backends treat each run of neighbours as a sequence, which reads all keys before it again. They take no more
sequences than requests may run. The kernel reads a key once for a tile of rows at any positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from ragcache_core.log import logger_of
from ragcache_core.vllm_plugin.chunks.compute.attention_mass import PromptKeys, soft_cap
from ragcache_core.vllm_plugin.chunks.model.attention_layers import AttentionLayer
from ragcache_core.vllm_plugin.chunks.model.paged_kv import split_blocks

if TYPE_CHECKING:
    from ragcache_core.vllm_plugin.chunks.compute.selective_prefill import InFlight

logger = logger_of(__name__)

_LEAST_RUN_TOKENS = 8
"""Where runs are as long as this, a backend that reads the keys once for each is as fast: measured on an H100."""


class ScatteredRows:
    """Replaces the attention of all layers where rows form many short runs.

    Args:
        layers: the model's.
        attention: ``scattered_attention`` of ``ragcache_kernels``, or its reference implementation.
        tokens_per_block: tokens in a block of vLLM's scheduler.
        max_runs: the most runs that vLLM's backends take.
        least_run_tokens: shorter runs than this, on average, are computed here.
    """

    def __init__(
        self,
        layers: Sequence[AttentionLayer],
        attention: Callable[..., torch.Tensor],
        *,
        tokens_per_block: int,
        max_runs: int,
        least_run_tokens: int = _LEAST_RUN_TOKENS,
    ) -> None:
        self._layers = layers
        self._attention = attention
        self._tokens_per_block = tokens_per_block
        self._max_runs = max_runs
        self._least_run_tokens = least_run_tokens

    @classmethod
    def on_gpu(cls, layers: Sequence[AttentionLayer], *, tokens_per_block: int, max_runs: int) -> ScatteredRows | None:
        """Return it where the kernel can stand in for every layer, and compiles; None elsewhere.

        It asks for layers that :func:`warm_up_kernels` has seen.
        """
        if not all(layer.unrotated.uses_kernels and _is_replaceable(layer) for layer in layers):
            return None
        from ragcache_kernels.scattered_attention import scattered_attention

        rows = cls(layers, scattered_attention, tokens_per_block=tokens_per_block, max_runs=max_runs)
        try:
            rows._warm_up()
        except Exception as error:  # Triton's own, and CUDA's: nothing depends on this kernel
            logger.warning(
                "RC-KERNELS-OFF: short runs of recomputed tokens are left to vLLM's own attention: %s", error
            )
            return None
        return rows

    def is_better(self, num_rows: int, num_runs: int) -> bool:
        """Return whether this computes rows in ``num_runs`` runs."""
        return num_runs > self._max_runs or num_rows < self._least_run_tokens * num_runs

    def attend(self, index: int, query: torch.Tensor, output: torch.Tensor, flight: InFlight) -> None:
        """Write the attention of the rows in flight in a layer, whose keys and values are in its cache.

        Args:
            index: the layer.
            query: [num_rows, num_heads, head_dim], rotated.
            output: as ``query``.
            flight: the rows; those of a request stand together, in the order of their positions.
        """
        layer, starts = self._layers[index], flight.starts
        assert starts is not None
        tables = split_blocks(flight.block_ids, self._tokens_per_block // layer.kv.tokens_per_block)
        self._compute(layer, query, output, flight.positions_there, tables, starts)

    def _compute(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        output: torch.Tensor,
        positions: torch.Tensor,
        tables: torch.Tensor,
        starts: torch.Tensor,
    ) -> None:
        caches = layer.unrotated.caches()
        scale = float(layer.attention.impl.scale)
        output.copy_(self._attention(query, positions, *caches, tables, scale, query_starts=starts))

    def _warm_up(self) -> None:
        """Have the kernel compiled: one row, which looks at the first token of the first block."""
        layer = self._layers[0]
        cache = layer.kv.cache
        shape = (1, layer.attention.num_heads, layer.kv.head_dim)
        row = torch.zeros(shape, dtype=cache.dtype, device=cache.device)
        nought = torch.zeros(1, dtype=torch.long, device=cache.device)
        starts = torch.tensor([0, 1], device=cache.device)
        self._compute(layer, row, torch.empty_like(row), nought, nought.view(1, 1).to(torch.int32), starts)


def warm_up_kernels(layers: Sequence[AttentionLayer]) -> None:
    """Have the kernels compiled that layers use; where they cannot be, PyTorch does their work from then on."""
    if not all(layer.unrotated.uses_kernels for layer in layers):
        return
    first = layers[0]
    cache = first.kv.cache
    try:
        first.unrotated.warm_up()
        query = torch.zeros((1, first.attention.num_heads, first.kv.head_dim), dtype=cache.dtype, device=cache.device)
        slots = torch.zeros(1, dtype=torch.long, device=cache.device)
        PromptKeys(first, slots).mass(query, torch.zeros(1, dtype=torch.long), [(0, 1)])
    except Exception as error:  # Triton's own, and CUDA's: nothing depends on these kernels
        logger.warning(
            "RC-KERNELS-OFF: stored KV is moved, and attention measured, without RAGCache's Triton kernels: %s", error
        )
        for layer in layers:
            layer.unrotated.uses_kernels = False


def _is_replaceable(layer: AttentionLayer) -> bool:
    """Return whether a layer's attention is the plain one, of keys that are in the cache before it begins."""
    attention = layer.attention
    updates_cache_in_forward = attention.get_attn_backend().forward_includes_kv_cache_update
    return not updates_cache_in_forward and not soft_cap(layer) and attention.head_size_v == attention.head_size
