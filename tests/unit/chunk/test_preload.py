"""Layer-wise preloading: the depth of Eq. 16 is the smallest that waits for nothing, and loading is compared fairly."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.chunk import preload_depth

LAYERS = st.integers(1, 80)
SECONDS = st.floats(0.001, 10.0)


def waits_s(num_layers: int, depth: int, prefill_s: float, load_s: float) -> float:
    """Play it through: seconds that layers after the first wait for their KV, once ``depth`` layers are loaded."""
    now_s, waited_s = depth * load_s / num_layers, 0.0
    for layer in range(num_layers):
        is_loaded_s = (layer + 1) * load_s / num_layers
        waited_s += max(0.0, is_loaded_s - now_s)
        now_s = max(now_s, is_loaded_s) + prefill_s / num_layers
    return waited_s


def test_the_papers_example_needs_three_of_five_layers() -> None:
    assert preload_depth(5, prefill_s=1.0, load_s=2.0) == 3


@given(LAYERS, SECONDS, SECONDS)
def test_the_depth_is_the_smallest_that_waits_for_nothing(num_layers: int, prefill_s: float, load_s: float) -> None:
    depth = preload_depth(num_layers, prefill_s=prefill_s, load_s=load_s)
    assert 1 <= depth <= num_layers
    assert waits_s(num_layers, depth, prefill_s, load_s) == pytest.approx(0.0, abs=1e-6)
    if depth > 1:
        assert depth - 1 < (num_layers - 1) * (1 - prefill_s / load_s) + 1
        assert waits_s(num_layers, depth - 1, prefill_s, load_s) > 0.0


def test_what_loads_faster_than_it_is_computed_needs_one_layer() -> None:
    assert preload_depth(32, prefill_s=2.0, load_s=1.0) == 1
    assert preload_depth(32, prefill_s=0.0, load_s=0.0) == 1


def test_what_computes_nothing_loads_everything_first() -> None:
    assert preload_depth(32, prefill_s=0.0, load_s=1.0) == 32


@pytest.mark.parametrize("times", [(-1.0, 1.0), (1.0, -1.0), (math.nan, 1.0)])
def test_a_negative_time_is_refused(times: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="no less than 0 s"):
        preload_depth(3, prefill_s=times[0], load_s=times[1])


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="0 layers"):
        preload_depth(0, prefill_s=1.0, load_s=1.0)
