"""The model whose T(cached, new) is measured: it continues a prefix exactly, and fits into what memory there is."""

from __future__ import annotations

import pytest
import torch

from ragcache_kernels.check import prefill
from ragcache_kernels.check.prefill import CACHED_TOKENS, NEW_TOKENS, Sizes, continues_exactly, measure_prefill
from ragcache_kernels.check.timing import Stopwatch

CPU = torch.device("cpu")
GIB = 1 << 30


def test_behind_a_cached_prefix_the_logits_are_those_of_the_whole_prompt() -> None:
    with torch.inference_mode():
        assert continues_exactly(CPU) < 1e-5


@pytest.mark.parametrize(
    ("free_gib", "num_lengths", "num_distinct"),
    [(80, 5, 32), (16, 5, 12), (9, 4, 1)],
)
def test_where_memory_is_short_layers_share_weights_and_long_prefixes_are_left_out(
    free_gib: int, num_lengths: int, num_distinct: int
) -> None:
    cached, distinct = prefill._fitting(Sizes(), CACHED_TOKENS, NEW_TOKENS, free_gib * GIB)
    assert (len(cached), distinct) == (num_lengths, num_distinct)


def test_every_point_is_timed() -> None:
    sizes = Sizes(32, 2, 4, 2, 48, 20, torch.float32)
    with torch.inference_mode():
        measured = measure_prefill(Stopwatch(CPU, 3), sizes, (0, 8), (1, 4, 5))
    assert len(measured.seconds) == 2
    assert all(len(row) == 3 and min(row) > 0 for row in measured.seconds)
    assert measured.num_distinct_layers == 2
