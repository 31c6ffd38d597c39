"""What is written to a paged cache is read from it, however the backend packs a block."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import DeviceConfig, ModelConfig, VllmConfig
from vllm.config.vllm import set_current_vllm_config
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl, _get_attn_isa

from ragcache_core.vllm_plugin.chunks.model.paged_kv import KVAccess
from tests.conftest import DEMO_MODEL

_NUM_BLOCKS, _HEADS = 6, 3


def _layer(dtype: torch.dtype, head_dim: int, tokens_per_block: int) -> Any:
    model = ModelConfig(model=str(DEMO_MODEL), dtype="float32")
    with set_current_vllm_config(VllmConfig(model_config=model, device_config=DeviceConfig("cpu"))):
        impl = CPUAttentionBackendImpl(2 * _HEADS, head_dim, head_dim**-0.5, _HEADS, None, None, "auto")
    return SimpleNamespace(
        impl=impl,
        head_size=head_dim,
        num_kv_heads=_HEADS,
        isa=_get_attn_isa(dtype, tokens_per_block, head_dim),
        _k_scale_float=1.0,
        _v_scale_float=1.0,
        kv_cache=torch.zeros((_NUM_BLOCKS, _HEADS, tokens_per_block, 2 * head_dim), dtype=dtype),
    )


@pytest.mark.parametrize("tokens_per_block", [32, 64])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_what_is_written_is_read(dtype: torch.dtype, head_dim: int, tokens_per_block: int) -> None:
    access = KVAccess(_layer(dtype, head_dim, tokens_per_block))
    generator = torch.Generator().manual_seed(3)
    slots = torch.cat([torch.arange(tokens_per_block) + block * tokens_per_block for block in (4, 1)])[
        7 : tokens_per_block + 20
    ]
    keys, values = (torch.randn((len(slots), _HEADS, head_dim), generator=generator).to(dtype) for _ in range(2))
    access.write(keys, values, slots)
    read_keys, read_values = access.read(slots)
    assert torch.equal(read_keys, keys)
    assert torch.equal(read_values, values)
    assert torch.equal(access.read_keys(slots[3:11]), keys[3:11])


def test_a_strided_cache_is_read_as_it_lies() -> None:
    layer = _layer(torch.float32, 64, 32)
    access = KVAccess(layer)
    access._packing = None  # as on a GPU
    layer.kv_cache = torch.arange(_NUM_BLOCKS * 32 * _HEADS * 128.0).view(_NUM_BLOCKS, 32, _HEADS, 128).transpose(1, 2)
    slots = torch.tensor([0, 33, 70])
    keys, values = access.read(slots)
    for row, slot in enumerate(slots.tolist()):
        assert torch.equal(keys[row], layer.kv_cache[slot // 32, :, slot % 32, :64])
        assert torch.equal(values[row], layer.kv_cache[slot // 32, :, slot % 32, 64:])
