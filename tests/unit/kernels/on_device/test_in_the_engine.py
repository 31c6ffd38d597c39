"""The engine's way to the kernels gives what PyTorch does."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from ragcache_core.vllm_plugin.chunks.compute.attention_mass import PromptKeys
from ragcache_core.vllm_plugin.chunks.model.paged_kv import KVAccess
from ragcache_core.vllm_plugin.chunks.model.position_free_kv import UnrotatedKV
from ragcache_core.vllm_plugin.chunks.model.rope import Rope

_BLOCKS, _SIZE, _HEADS, _DIM, _TOKENS = 7, 16, 3, 24, 23


class _Strided(KVAccess):
    """A cache as it lies on a GPU."""

    def __init__(self, device: torch.device) -> None:
        cache = torch.zeros((_BLOCKS, _SIZE, _HEADS, 2 * _DIM), device=device).transpose(1, 2)
        self._attention = SimpleNamespace(kv_cache=cache)
        self._packing = None
        self.head_dim, self.num_kv_heads = _DIM, _HEADS


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("rotary_dim", [_DIM, 10])
def test_keys_are_turned_into_the_cache_and_back(device: torch.device, is_neox: bool, rotary_dim: int) -> None:
    generator = torch.Generator().manual_seed(5)
    angles = torch.rand((64, rotary_dim // 2), generator=generator) * 6
    table = (torch.cat((angles.cos(), angles.sin()), -1) * 1.2).to(device)
    rope = Rope(SimpleNamespace(cos_sin_cache=table, rotary_dim=rotary_dim, is_neox_style=is_neox))
    kv = _Strided(device)
    moved = UnrotatedKV(rope, kv, uses_kernels=True)
    keys, values = (torch.randn((_TOKENS, _HEADS, _DIM), generator=generator).to(device) for _ in range(2))
    positions = torch.arange(31, 31 + _TOKENS, device=device)
    slots = torch.randperm(_BLOCKS * _SIZE, generator=generator)[:_TOKENS].to(device)
    moved.write(keys, values, positions, slots)
    cached_keys, cached_values = kv.read(slots)
    torch.testing.assert_close(cached_keys, rope.rotate(keys, positions))
    torch.testing.assert_close(cached_values, values)
    read_keys, read_values = moved.read(positions, slots)
    torch.testing.assert_close(read_keys, keys)
    torch.testing.assert_close(read_values, values)


def test_warming_up_moves_nothing(device: torch.device) -> None:
    kv = _Strided(device)
    kv.cache.fill_(7.0)
    rope = Rope(
        SimpleNamespace(cos_sin_cache=torch.ones((4, _DIM), device=device), rotary_dim=_DIM, is_neox_style=True)
    )
    UnrotatedKV(rope, kv, uses_kernels=True).warm_up()
    assert bool((kv.cache == 7.0).all())


def test_attention_to_chunks_is_what_pytorch_measures(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(6)
    kv = _Strided(device)
    kv.cache.copy_(torch.randn(kv.cache.shape, generator=generator))
    unrotated = SimpleNamespace(uses_kernels=False, caches=lambda: UnrotatedKV.caches(SimpleNamespace(kv=kv)))
    attention = SimpleNamespace(impl=SimpleNamespace(scale=_DIM**-0.5))
    layer = SimpleNamespace(kv=kv, unrotated=unrotated, attention=attention)
    blocks = torch.tensor([4, 1, 6, 0], device=device)
    slots = (blocks.unsqueeze(1) * _SIZE + torch.arange(_SIZE, device=device)).flatten()
    positions = torch.tensor([3, 17, 18, 40, 41, 52])
    query = torch.randn((len(positions), 2 * _HEADS, _DIM), generator=generator).to(device)
    chunks = [(2, 15), (15, 30), (33, 60)]
    expected = PromptKeys(layer, slots).mass(query, positions, chunks)
    unrotated.uses_kernels = True
    torch.testing.assert_close(PromptKeys(layer, slots).mass(query, positions, chunks), expected)
