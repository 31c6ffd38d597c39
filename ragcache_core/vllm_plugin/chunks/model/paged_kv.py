"""Read and write K and V in vLLM's paged cache, for any backend layout.

A slot is ``block * block_size + offset``, as in vLLM's own slot mappings. Writing is the backend's own
``do_kv_cache_update``. Reading is a strided view, ``[num_blocks, heads, block_size, 2 * head_dim]`` with K before V;
on a CPU a block is packed for the instruction set at hand (keys transposed, or interleaved in pairs), so how is learned
once, from where the backend puts numbers that are known.
"""

from __future__ import annotations

from typing import Any

import torch

_NORMAL = {
    torch.float32: (torch.int32, 0x00800000),
    torch.float16: (torch.int16, 0x0400),
    torch.bfloat16: (torch.int16, 0x0400),
}
"""Integers of a dtype's size, and the first of those whose bits are normal numbers that any copy leaves alone."""


class KVAccess:
    """K and V of one attention layer.

    Args:
        attention: vLLM's layer, whose cache is bound.
    """

    def __init__(self, attention: Any) -> None:
        self._attention = attention
        self.head_dim: int = attention.head_size
        self.num_kv_heads: int = attention.num_kv_heads
        packing = _Packing.of(attention) if self.cache.device.type == "cpu" else None
        self._packing = packing

    @property
    def cache(self) -> torch.Tensor:
        """The paged cache: ``[num_blocks, num_kv_heads, block_size, 2 * head_dim]``."""
        cache: torch.Tensor = self._attention.kv_cache
        return cache

    @property
    def tokens_per_block(self) -> int:
        """Tokens of a block of the backend; a block of vLLM may consist of several."""
        return int(self.cache.shape[2])

    def write(self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        """Write keys and values ``[T, num_kv_heads, head_dim]`` to ``slots`` ``[T]``."""
        self._attention.impl.do_kv_cache_update(
            self._attention, keys.contiguous(), values.contiguous(), self.cache, slots
        )

    def read(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of keys and values of ``slots`` ``[T]``, each ``[T, num_kv_heads, head_dim]``."""
        keys, values = self._halves(slots)
        return keys.contiguous(), values.contiguous()

    def read_keys(self, slots: torch.Tensor) -> torch.Tensor:
        """Return keys ``[T, num_kv_heads, head_dim]`` of ``slots`` ``[T]``."""
        return self._halves(slots, with_values=False)[0]

    def _halves(self, slots: torch.Tensor, *, with_values: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        blocks, offsets = slots // self.tokens_per_block, slots % self.tokens_per_block
        if self._packing is None:
            rows = self.cache[blocks, :, offsets]
            return rows[..., : self.head_dim], rows[..., self.head_dim :]
        distinct, index = torch.unique_consecutive(blocks, return_inverse=True)
        packed = self.cache[distinct]
        keys = self._packing.keys(packed)[index, :, offsets]
        return keys, self._packing.values(packed)[index, :, offsets] if with_values else keys


class _Packing:
    """The position of each element in a backend's block, half keys and half values.

    ``places[n * head_dim + d]`` is where element ``d`` of token ``n`` lies within its half.
    """

    def __init__(self, tokens_per_block: int, head_dim: int, key_places: torch.Tensor, value_places: torch.Tensor):
        self._shape = (tokens_per_block, head_dim)
        self._key_places, self._value_places = key_places, value_places
        plain = torch.arange(tokens_per_block * head_dim)
        self._keys_transposed = bool((key_places == plain.view(head_dim, tokens_per_block).T.flatten()).all())
        self._values_plain = bool((value_places == plain).all())

    @classmethod
    def of(cls, attention: Any) -> _Packing:
        """Return the packing of a layer's backend."""
        num_heads, tokens_per_block, width = attention.kv_cache.shape[1:]
        head_dim, dtype = attention.head_size, attention.kv_cache.dtype
        assert width == 2 * head_dim
        integer, first = _NORMAL[dtype]
        slots = torch.arange(tokens_per_block)
        shape = (tokens_per_block, num_heads, head_dim)

        def lying(numbers: torch.Tensor, half: int) -> torch.Tensor:
            """Return the places of ``numbers`` in a half of a block; the other half has zeros."""
            rows = (numbers + first).to(integer).view(dtype).expand(shape).contiguous()
            pair = (rows, torch.zeros_like(rows)) if half == 0 else (torch.zeros_like(rows), rows)
            block = torch.zeros((1, num_heads, tokens_per_block, width), dtype=dtype)
            attention.impl.do_kv_cache_update(attention, *pair, block, slots)
            return block[0, 0].flatten().chunk(2)[half].contiguous().view(integer).long() - first

        found = []
        for half in (0, 1):
            tokens = lying(torch.arange(tokens_per_block).view(-1, 1, 1), half)
            elements = lying(torch.arange(head_dim).view(1, 1, -1), half)
            places = torch.full((tokens_per_block * head_dim,), -1)
            assert int(tokens.min()) >= 0, "a block of this backend does not hold keys and then values"
            places[tokens * head_dim + elements] = torch.arange(len(places))
            assert int(places.min()) >= 0, "a block of this backend does not hold every element once"
            found.append(places)
        return cls(tokens_per_block, head_dim, *found)

    def keys(self, packed: torch.Tensor) -> torch.Tensor:
        """Return the keys [blocks, heads, tokens_per_block, head_dim] of packed blocks."""
        half = packed.flatten(2)[..., : self._key_places.numel()]
        if self._keys_transposed:
            return half.unflatten(-1, self._shape[::-1]).transpose(-1, -2)
        return half.index_select(-1, self._key_places).unflatten(-1, self._shape)

    def values(self, packed: torch.Tensor) -> torch.Tensor:
        """Return the values [blocks, heads, tokens_per_block, head_dim] of packed blocks."""
        half = packed.flatten(2)[..., self._value_places.numel() :]
        if not self._values_plain:
            half = half.index_select(-1, self._value_places)
        return half.unflatten(-1, self._shape)


def split_blocks(table: torch.Tensor, parts: int) -> torch.Tensor:
    """Return a block table for a backend that divides each block into ``parts``."""
    if parts == 1:
        return table
    offsets = torch.arange(parts, dtype=table.dtype, device=table.device)
    return (table.unsqueeze(-1) * parts + offsets).flatten(1)


def to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy ``values`` from the CPU to a device without synchronisation."""
    if device.type == "cuda":
        values = values.pin_memory()
    return values.to(device, non_blocking=True)
