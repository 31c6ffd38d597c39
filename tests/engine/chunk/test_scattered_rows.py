"""When the kernel for rows that stand anywhere takes over, and what it is given."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ragcache_core.vllm_plugin.chunks.compute.scattered_attention import ScatteredRows, warm_up_kernels
from ragcache_core.vllm_plugin.chunks.compute.selective_prefill import InFlight, Rows
from ragcache_kernels.scattered_attention import naive_scattered_attention

_BLOCKS, _SIZE, _KV_HEADS, _GROUP, _DIM = 12, 4, 2, 3, 8


def _layer(cache: torch.Tensor, **attention: Any) -> Any:
    backend = SimpleNamespace(forward_includes_kv_cache_update=attention.pop("updates_cache_in_forward", False))
    impl = SimpleNamespace(scale=_DIM**-0.5, logits_soft_cap=attention.pop("soft_cap", 0.0))
    rows = cache.transpose(1, 2)
    return SimpleNamespace(
        kv=SimpleNamespace(cache=cache, tokens_per_block=_SIZE, head_dim=_DIM),
        unrotated=SimpleNamespace(uses_kernels=True, caches=lambda: (rows[..., :_DIM], rows[..., _DIM:])),
        attention=SimpleNamespace(
            impl=impl,
            num_heads=_KV_HEADS * _GROUP,
            head_size=_DIM,
            head_size_v=attention.pop("head_size_v", _DIM),
            get_attn_backend=lambda: backend,
        ),
    )


@pytest.fixture
def cache() -> torch.Tensor:
    return torch.randn((_BLOCKS, _KV_HEADS, _SIZE, 2 * _DIM), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(
    ("num_rows", "num_runs", "is_better"),
    [(80, 10, False), (79, 10, True), (1, 1, True), (5000, 1, False), (16_000, 101, True), (16_000, 100, False)],
)
def test_it_takes_over_where_runs_are_short_or_too_many_for_a_backend(
    num_rows: int, num_runs: int, is_better: bool, cache: torch.Tensor
) -> None:
    rows = ScatteredRows([_layer(cache)], naive_scattered_attention, tokens_per_block=8, max_runs=100)
    assert rows.is_better(num_rows, num_runs) is is_better


def test_each_row_attends_to_its_own_requests_keys_up_to_itself(cache: torch.Tensor) -> None:
    """Two requests; a block of the scheduler is two of the backend."""
    rows = ScatteredRows([_layer(cache)], naive_scattered_attention, tokens_per_block=2 * _SIZE, max_runs=100)
    flight: Any = SimpleNamespace(
        block_ids=torch.tensor([[2, 0], [5, 4]], dtype=torch.int32),
        positions_there=torch.tensor([1, 6, 3, 9, 13]),
        starts=torch.tensor([0, 2, 5]),
    )
    query = torch.randn((5, _KV_HEADS * _GROUP, _DIM), generator=torch.Generator().manual_seed(4))
    output = torch.empty_like(query)
    rows.attend(0, query, output, flight)
    for row, (request, position) in enumerate([(0, 1), (0, 6), (1, 3), (1, 9), (1, 13)]):
        slots = [int(flight.block_ids[request, at // 8]) * 8 + at % 8 for at in range(position + 1)]
        seen = torch.stack([cache[slot // _SIZE, :, slot % _SIZE] for slot in slots])
        keys, values = seen[..., :_DIM].repeat_interleave(_GROUP, 1), seen[..., _DIM:].repeat_interleave(_GROUP, 1)
        weights = (torch.einsum("hd,khd->hk", query[row], keys) * _DIM**-0.5).softmax(-1)
        torch.testing.assert_close(output[row], torch.einsum("hk,khd->hd", weights, values))


def test_a_kernel_that_does_not_compile_is_left_out_with_a_warning(
    cache: torch.Tensor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr("ragcache_kernels.scattered_attention.scattered_attention", broken)
    with caplog.at_level(logging.WARNING):
        assert ScatteredRows.on_gpu([_layer(cache)], tokens_per_block=_SIZE, max_runs=9) is None
    assert "no such instruction" in caplog.text


def test_where_a_kernel_does_not_compile_pytorch_does_its_work_with_a_warning(
    cache: torch.Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> None:
        raise RuntimeError("no such instruction")

    layers = [_layer(cache), _layer(cache)]
    layers[0].unrotated.warm_up = broken
    with caplog.at_level(logging.WARNING):
        warm_up_kernels(layers)
    assert "no such instruction" in caplog.text
    assert not any(layer.unrotated.uses_kernels for layer in layers)
    assert ScatteredRows.on_gpu(layers, tokens_per_block=_SIZE, max_runs=9) is None


def test_the_rows_of_a_request_stand_together_while_others_leave() -> None:
    cpu = torch.device("cpu")
    blocks, three = torch.tensor([2, 0], dtype=torch.int32), torch.tensor([4, 5, 9])
    flight = InFlight([Rows(blocks, three, three), Rows(blocks, three[:2], three[:2]), Rows(blocks, three, three)], cpu)
    assert [flight.positions[flight.rows_of(number)].tolist() for number in range(3)] == [[4, 5, 9], [4, 5], [4, 5, 9]]
    kept = torch.tensor([True, False, True, False, False, False, True, True])
    flight.keep(kept, kept.nonzero().flatten())
    assert [flight.positions[flight.rows_of(number)].tolist() for number in range(3)] == [[4, 9], [], [5, 9]]
    assert flight.index.tolist() == [0, 2, 6, 7]
    assert flight.positions_there.tolist() == flight.positions.tolist()
    assert flight.first_rows().tolist() == [0, 2, 2, 4]
