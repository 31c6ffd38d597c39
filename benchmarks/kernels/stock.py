"""vLLM's own kernels for the same work, if vLLM is installed: imported by name, as it is optional here."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.kernels.cases import KernelCase


@dataclass(frozen=True, slots=True)
class Stock:
    """vLLM's operations: rotary embedding, write into the cache, attention over runs as sequences."""

    operations: Any
    attention: Callable[..., torch.Tensor]
    attention_version: int

    def rotate_into_cache(
        self, case: KernelCase, stored: tuple[torch.Tensor, torch.Tensor], rows: torch.Tensor, slots: torch.Tensor
    ) -> Callable[[], Any]:
        """Return a gather, a rotation to positions 0, 1, ... and a write, in four of PyTorch's and vLLM's kernels."""
        positions = torch.arange(len(rows), device=rows.device)
        one = torch.ones((), dtype=torch.float32, device=rows.device)
        caches, table, head_dim = (case.key_cache, case.value_cache), case.table, case.shape.head_dim

        def call() -> None:
            keys, values = (each.index_select(0, rows) for each in stored)
            flat = keys.view(len(rows), -1)
            self.operations.rotary_embedding(positions, flat, None, head_dim, table.cos_sin, table.is_neox)
            self.operations.reshape_and_cache_flash(keys, values, *caches, slots, "auto", one, one)

        return call

    def scattered_attention(self, case: KernelCase, query: torch.Tensor, positions: torch.Tensor) -> Callable[[], Any]:
        """Return attention in which each run of neighbours is a sequence of its own."""
        begins = torch.ones(len(positions), dtype=torch.bool, device=positions.device)
        begins[1:] = positions[1:] != positions[:-1] + 1
        first = begins.nonzero().flatten()
        starts = torch.cat((first, first.new_tensor([len(positions)]))).to(torch.int32)
        lengths = (positions[starts[1:].long() - 1] + 1).to(torch.int32)
        tables = case.block_table[None].expand(len(lengths), -1).contiguous()
        longest_query, longest = int((starts[1:] - starts[:-1]).max()), int(lengths.max())
        out = torch.empty_like(query)

        def call() -> torch.Tensor:
            return self.attention(
                q=query,
                k=case.key_cache,
                v=case.value_cache,
                out=out,
                max_seqlen_q=longest_query,
                cu_seqlens_q=starts,
                max_seqlen_k=longest,
                seqused_k=lengths,
                softmax_scale=case.shape.head_dim**-0.5,
                causal=True,
                block_table=tables,
                fa_version=self.attention_version,
            )

        return call


def find_stock() -> tuple[Stock | None, str]:
    """Return vLLM's kernels, or None and why they are unavailable."""
    if importlib.util.find_spec("vllm") is None:
        return None, "vLLM is not installed"
    try:
        operations = importlib.import_module("vllm._custom_ops")
        attention = importlib.import_module("vllm.vllm_flash_attn").flash_attn_varlen_func
        version = importlib.import_module("vllm.v1.attention.backends.fa_utils").get_flash_attn_version()
    except Exception as error:  # another build of vLLM, or one for another device
        return None, f"vLLM's kernels cannot be had: {type(error).__name__}: {error}"
    return (Stock(operations, attention, version), "") if version else (None, "vLLM has no FlashAttention here")
