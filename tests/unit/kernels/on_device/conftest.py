"""Where the kernels run, and cases of prime sizes."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks.kernels.cases import KernelCase, Shape, make_case


@pytest.fixture
def device() -> torch.device:
    return torch.device(os.environ["RAGCACHE_KERNELS_ON"])


@pytest.fixture
def make(device: torch.device) -> Callable[..., KernelCase]:
    """A case of 23 tokens in float32, two heads of keys with two of queries each; whatever is named is different."""

    def made(**changes: Any) -> KernelCase:
        return make_case(
            Shape(**{"num_heads": 4, "num_kv_heads": 2, "head_dim": 22, "num_keys": 23, **changes}), device
        )

    return made
