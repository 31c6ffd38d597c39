"""Access K without RoPE, and V, in a layer's paged cache.

On CUDA the Triton kernels of ``ragcache_kernels`` do it in one pass, where Triton is installed; elsewhere PyTorch does.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from ragcache_core.vllm_plugin.chunks.model.paged_kv import KVAccess
from ragcache_core.vllm_plugin.chunks.model.rope import Rope

if TYPE_CHECKING:
    from ragcache_kernels.rotary import RotaryTable


class UnrotatedKV:
    """One layer's cache, with keys that are rotated on read and write.

    Args:
        rope: the rotation.
        kv: the layer's cache.
        uses_kernels: whether Triton's kernels do it; None: on CUDA, where there are any.
    """

    def __init__(self, rope: Rope, kv: KVAccess, *, uses_kernels: bool | None = None) -> None:
        self.rope = rope
        self.kv = kv
        if uses_kernels is None:
            uses_kernels = kv.cache.device.type == "cuda" and _has_kernels()
        self.uses_kernels = uses_kernels

    def warm_up(self) -> None:
        """Compile the kernels, which takes seconds, before any step."""
        cache, nowhere = self.kv.cache, torch.tensor([-1], device=self.kv.cache.device)
        row = torch.zeros((1, self.kv.num_kv_heads, self.kv.head_dim), dtype=cache.dtype, device=cache.device)
        self.write(row, row, nowhere + 1, nowhere)
        self.read(nowhere + 1, nowhere)

    def write(self, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
        """Write keys, rotated to ``positions`` [T], and values, [T, num_kv_heads, head_dim] each, to ``slots`` [T]."""
        if not self.uses_kernels:
            self.kv.write(self.rope.rotate(keys, positions), values, slots)
            return
        from ragcache_kernels.rotate_into_cache import rotate_into_cache

        rows = torch.arange(len(positions), device=positions.device)
        rotate_into_cache(keys, values, rows, positions, slots, self._table(), *self.caches())

    def read(self, positions: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys without RoPE of ``positions``, and values, of ``slots`` [T]: [T, num_kv_heads, head_dim] each."""
        if not self.uses_kernels:
            keys, values = self.kv.read(slots)
            return self.rope.unrotate(keys, positions), values
        from ragcache_kernels.unrotate_from_cache import unrotate_from_cache

        cache = self.kv.cache
        keys, values = (
            torch.empty((len(slots), self.kv.num_kv_heads, self.kv.head_dim), dtype=cache.dtype, device=cache.device)
            for _ in range(2)
        )
        rows = torch.arange(len(positions), device=positions.device)
        key_cache, value_cache = self.caches()
        unrotate_from_cache(key_cache, value_cache, slots, positions, self._table(), keys, values, rows)
        return keys, values

    def _table(self) -> RotaryTable:
        from ragcache_kernels.rotary import RotaryTable

        return RotaryTable(self.rope.table, self.rope.is_neox)

    def caches(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values as [num_blocks, tokens_per_block, num_kv_heads, head_dim]; views."""
        cache, head_dim = self.kv.cache.transpose(1, 2), self.kv.head_dim
        return cache[..., :head_dim], cache[..., head_dim:]


def _has_kernels() -> bool:
    return find_spec("triton") is not None and find_spec("ragcache_kernels") is not None
