"""Attention to chunks: Eq. 3, 4 and 14 of Cache-Craft against the whole matrix of weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ragcache_core.vllm_plugin.chunks.compute import attention_mass
from ragcache_core.vllm_plugin.chunks.compute.attention_mass import PromptKeys, measured_layers
from ragcache_core.vllm_plugin.chunks.compute.capture import ChunkCapture, figures_of
from ragcache_core.vllm_plugin.chunks.messages import Capture

_HEADS, _GROUP, _DIM, _KEYS = 2, 3, 8, 29
_CHUNKS = [(3, 11), (11, 17), (20, 29)]


def _layer(keys: torch.Tensor, soft_cap: float = 0.0) -> Any:
    return SimpleNamespace(
        kv=SimpleNamespace(read_keys=lambda slots: keys[slots]),
        unrotated=SimpleNamespace(uses_kernels=False),
        attention=SimpleNamespace(impl=SimpleNamespace(scale=_DIM**-0.5, logits_soft_cap=soft_cap)),
    )


def _expected(query: torch.Tensor, positions: torch.Tensor, keys: torch.Tensor, soft_cap: float) -> torch.Tensor:
    expected = torch.zeros((len(query), len(_CHUNKS)))
    for row, position in enumerate(positions.tolist()):
        for head in range(_HEADS * _GROUP):
            scores = keys[: position + 1, head // _GROUP] @ query[row, head] * _DIM**-0.5
            if soft_cap:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            weights = scores.softmax(0)
            weights[position] = 0.0  # its own
            for column, (start, end) in enumerate(_CHUNKS):
                expected[row, column] += weights[start:end].sum() / (_HEADS * _GROUP)
    return expected


@pytest.mark.parametrize("soft_cap", [0.0, 1.5])
@pytest.mark.parametrize("max_scores", [1 << 24, 7])
def test_mass_is_the_sum_of_the_weights(soft_cap: float, max_scores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_mass, "_MAX_SCORES", max_scores)
    generator = torch.Generator().manual_seed(1)
    keys = torch.randn((_KEYS, _HEADS, _DIM), generator=generator)
    positions = torch.tensor([4, 10, 12, 21, 28])
    query = torch.randn((len(positions), _HEADS * _GROUP, _DIM), generator=generator)
    mass = PromptKeys(_layer(keys, soft_cap), torch.arange(_KEYS)).mass(query, positions, _CHUNKS)
    torch.testing.assert_close(mass, _expected(query, positions, keys, soft_cap))


def test_a_capture_in_two_steps_measures_the_attention_of_each_token() -> None:
    generator = torch.Generator().manual_seed(2)
    start, end = 11, _KEYS
    keys, query = (torch.randn((_KEYS, heads, _DIM), generator=generator) for heads in (_HEADS, _HEADS * _GROUP))
    places, own = torch.arange(start, end), [(3, 11), *((place, place + 1) for place in range(start, end))]
    weights = PromptKeys(_layer(keys), torch.arange(_KEYS)).mass(query[start:], places, own)
    layer, kept = _layer(keys), []
    layer.unrotated.read = lambda positions, slots: (keys[slots], keys[slots])
    memory = SimpleNamespace(write=lambda *args: kept.append(args))
    capture = Capture(("r", b"", 0), start, end, ((3, 11),), (0,))
    chunks = ChunkCapture([layer], memory)
    for first, last in ((start - 2, start + 7), (start + 7, end)):
        chunks.measure(0, [capture], query[first:last], torch.arange(first, last), torch.arange(last))
    mass = chunks.keep(capture, torch.arange(_KEYS))
    assert mass is not None
    assert kept
    found = figures_of(capture, mass)
    assert found.token_inter == pytest.approx(weights[:, 0].tolist())
    assert found.inter == pytest.approx((float(weights[:, 0].sum()),))
    assert found.intra == pytest.approx(float(weights[:, 1:].sum()))


@pytest.mark.parametrize(
    ("num_layers", "expected"), [(1, (0,)), (4, (0, 1, 2, 3)), (32, (2, 6, 10, 14, 18, 22, 26, 30))]
)
def test_of_many_layers_eight_are_measured_evenly_spread(num_layers: int, expected: tuple[int, ...]) -> None:
    assert measured_layers(num_layers) == expected
