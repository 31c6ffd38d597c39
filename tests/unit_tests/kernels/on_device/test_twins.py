"""Each kernel agrees with its twin: prime sizes, all dtypes, MHA, GQA and MQA, both kinds of pairs."""

from __future__ import annotations

import pytest
import torch

from ragcache_kernels.check.agreement import COMPARISONS
from ragcache_kernels.check.cases import TOLERANCE, Shape, make_case

SHAPES = [
    Shape(5, 5, 16, 37),
    Shape(6, 3, 22, 41, rotary_dim=10, is_neox=False, rotary_scale=1.3),
    Shape(14, 2, 32, 43, rotary_scale=1.2, dtype=torch.float16),
    Shape(8, 1, 24, 31, block_size=32, rotary_dim=8, dtype=torch.bfloat16),
    Shape(3, 3, 17, 29, rotary_dim=14, is_neox=False, dtype=torch.bfloat16),
]


@pytest.mark.parametrize("operation", COMPARISONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_kernel_agrees_with_its_twin(operation: str, shape: Shape, device: torch.device) -> None:
    assert COMPARISONS[operation](make_case(shape, device)) <= TOLERANCE[shape.dtype]
