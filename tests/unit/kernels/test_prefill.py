"""The model whose T(cached, new) is measured: it continues a prefix exactly, and fits into what memory there is."""

from __future__ import annotations

import torch

from benchmarks.kernels.prefill import Sizes, continues_exactly, measure_prefill
from benchmarks.kernels.timing import Stopwatch

CPU = torch.device("cpu")


def test_behind_a_cached_prefix_the_logits_are_those_of_the_whole_prompt() -> None:
    with torch.inference_mode():
        assert continues_exactly(CPU) < 1e-5


def test_every_point_is_timed() -> None:
    sizes = Sizes(32, 2, 4, 2, 48, 20, torch.float32)
    with torch.inference_mode():
        measured = measure_prefill(Stopwatch(CPU, 3), sizes, (0, 8), (1, 4, 5))
    assert len(measured.seconds) == 2
    assert all(len(row) == 3 and min(row) > 0 for row in measured.seconds)
    assert measured.num_distinct_layers == 2
