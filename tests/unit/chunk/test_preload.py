"""Layer-wise preloading: the depth of Eq. 16 is the smallest that waits for nothing, and loading is compared fairly."""

from __future__ import annotations

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
