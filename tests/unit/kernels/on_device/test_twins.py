"""Each kernel agrees with its twin: prime sizes, all dtypes, MHA, GQA and MQA, both kinds of pairs."""

from __future__ import annotations

import pytest
import torch

from benchmarks.kernels.agreement import COMPARISONS
from benchmarks.kernels.cases import TOLERANCE, Shape, make_case

SHAPES = [
    Shape(3, 3, 16, 29),
    Shape(4, 2, 22, 31, rotary_dim=10, is_neox=False, rotary_scale=1.3),
    Shape(10, 2, 32, 37, rotary_scale=1.2, dtype=torch.float16),
    Shape(8, 1, 24, 31, block_size=32, rotary_dim=8, dtype=torch.bfloat16),
    Shape(2, 2, 17, 23, rotary_dim=14, is_neox=False, dtype=torch.bfloat16),
]


@pytest.mark.parametrize("operation", COMPARISONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_kernel_agrees_with_its_reference(operation: str, shape: Shape, device: torch.device) -> None:
    assert COMPARISONS[operation](make_case(shape, device)) <= TOLERANCE[shape.dtype]
