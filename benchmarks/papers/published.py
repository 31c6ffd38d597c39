"""What the papers published, as their texts have it: each number with the place where it stands.

Figures 13 to 19 of RAGCache, and all of Cache-Craft's, are plots, and what they show is nowhere written as numbers: of
them there is what the text claims.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class PublishedResult:
    """A number, or the range of several, and its place in the paper; ``high`` is infinite for "more than"."""

    low: float
    high: float
    place: str

    @classmethod
    def exactly(cls, value: float, place: str) -> PublishedResult:
        """Return a single number."""
        return cls(value, value, place)

    @property
    def is_range(self) -> bool:
        """Whether it is of several numbers."""
        return self.low != self.high


HOST_GIB = (8, 16, 32, 64, 128)
POLICIES = ("PGDSF", "GDSF", "LRU", "LFU")

_TABLE_2 = {
    "mmlu": {
        8: (1.38, 1.68, 1.78, 1.81),
        16: (1.32, 1.55, 1.61, 1.63),
        32: (1.23, 1.45, 1.50, 1.49),
        64: (1.06, 1.27, 1.28, 1.29),
        128: (0.83, 0.98, 1.01, 1.03),
    },
    "nq": {
        8: (2.85, 3.35, 3.41, 3.36),
        16: (2.50, 2.89, 2.92, 2.98),
        32: (2.00, 2.09, 2.25, 2.20),
        64: (1.32, 1.47, 1.56, 1.55),
        128: (0.78, 0.92, 0.95, 0.95),
    },
}

MEAN_TTFT_S: Mapping[tuple[str, int, str], PublishedResult] = MappingProxyType(
    {
        (workload, gib, policy): PublishedResult.exactly(value, "Table 2")
        for workload, by_size in _TABLE_2.items()
        for gib, values in by_size.items()
        for policy, value in zip(POLICIES, values, strict=True)
    }
)
"""By workload, GiB of host memory and policy, at 0.8 requests a second."""

SEARCHED_SHARES = (0.125, 0.25, 0.5, 1.0)

_TABLE_3 = {
    "mmlu": ((52.1, 78.5), (59.2, 135.9), (69.7, 243.7), (97.4, 422.3)),
    "nq": ((67.7, 105.8), (72.9, 163.4), (94.2, 282.5), (145.0, 446.1)),
}

UNHIDDEN_SEARCH_MS: Mapping[tuple[str, float], PublishedResult] = MappingProxyType(
    {
        (workload, share): PublishedResult.exactly(row[0], "Table 3")
        for workload, rows in _TABLE_3.items()
        for share, row in zip(SEARCHED_SHARES, rows, strict=True)
    }
)
"""With speculation, by workload and the share of the vectors that is searched."""

SEARCH_MS: Mapping[tuple[str, float], float] = MappingProxyType(
    {
        (workload, share): row[1]
        for workload, rows in _TABLE_3.items()
        for share, row in zip(SEARCHED_SHARES, rows, strict=True)
    }
)
"""Without speculation (Table 3, No DSP): nothing is hidden, so this is how long a search takes."""

SCHEDULING_MS: Mapping[float, PublishedResult] = MappingProxyType(
    {
        rate: PublishedResult.exactly(value, "Table 4")
        for rate, value in ((0.5, 0.880), (1.0, 0.872), (1.5, 0.902), (2.0, 0.906))
    }
)
"""By requests a second, on MMLU with Mistral-7B."""

CLAIMS: Mapping[str, PublishedResult] = MappingProxyType(
    {
        "ttft over vllm": PublishedResult(1.2, 4.0, "§7.1, Figures 13 and 14"),
        "ttft over sglang": PublishedResult(1.1, 3.5, "§7.1, Figures 13 and 14"),
        "throughput over vllm": PublishedResult(1.3, 2.1, "§7.1, Figures 13 and 14"),
        "throughput over sglang": PublishedResult(1.2, 1.8, "§7.1, Figures 13 and 14"),
        "gap of mistral over llama2": PublishedResult(1.0, math.inf, "§7.1"),
        "top-k ttft over vllm": PublishedResult(1.7, 3.1, "§7.2, Figure 15"),
        "top-k ttft over sglang": PublishedResult(1.2, 2.5, "§7.2, Figure 15"),
        "hits over GDSF": PublishedResult(1.02, 1.32, "§7.3, Figure 17"),
        "hits over LRU": PublishedResult(1.06, 1.62, "§7.3, Figure 17"),
        "hits over LFU": PublishedResult(1.06, 1.75, "§7.3, Figure 17"),
        "ttft over policies": PublishedResult(1.05, 1.29, "§7.3, Table 2"),
        "reordering": PublishedResult(1.2, 2.1, "§7.3, Figure 18"),
        "speculation": PublishedResult.exactly(1.6, "§7.3, Figure 19: up to"),
        "unhidden search": PublishedResult(1.5, 4.3, "§7.3, Table 3"),
        "large ttft over vllm": PublishedResult(1.4, 2.1, "§7.2, Figure 16"),
        "large ttft over sglang": PublishedResult(1.2, 2.6, "§7.2, Figure 16"),
        "large ttft": PublishedResult(0.0, 1.4, "§7.2, Figure 16"),
        "vllm serves Mixtral-8x7B": PublishedResult.exactly(2.0, "§7.2, Figure 16"),
        "vllm serves LLaMA2-70B": PublishedResult.exactly(1.5, "§7.2, Figure 16"),
    }
)
"""What the text says of its figures: how many times lower a TTFT is, or how many times higher a rate."""

POLICY_RATE_RPS = 0.8
SEARCH_RATE_RPS = 0.1
REORDERING_RATE_RPS: Mapping[str, float] = MappingProxyType({"mmlu": 2.5, "nq": 1.4})
REORDERING_HOST_GIB = (16, 32, 64, 128)
HOST_7B_GIB = 192
MAX_BATCH = 4
WINDOW = 32
TOP_K = (1, 3, 5)
MEAN_CORPUS_TOKENS = 3_718.0
HOST_LARGE_GIB = 384
MIXTRAL_MAX_BATCH = 8

SSD_LOAD_S = 0.59
"""Cache-Craft §5.3.2: a request's five chunks of Sys-X, LLaMA-3-8B."""
CACHE_CRAFT: Mapping[str, PublishedResult] = MappingProxyType(
    {
        "throughput, none recomputed": PublishedResult.exactly(1.9, "§5.3.1, Figure 22: up to"),
        "throughput, 30 % recomputed": PublishedResult.exactly(1.6, "§5.3.1, Figure 22"),
        "response, none recomputed": PublishedResult.exactly(3.3, "§5.3.1, Figure 22: up to"),
        "response, 30 % recomputed": PublishedResult.exactly(2.1, "§5.3.1, Figure 22"),
        "ttft": PublishedResult.exactly(2.5, "§5.4.1, Figure 23(a)"),
        "p99 ttft": PublishedResult.exactly(3.0, "§5.4.1, Figure 24"),
        "computed": PublishedResult.exactly(0.49, "§5.4.1, Figure 24"),
        "exact prefix": PublishedResult.exactly(0.18, "§5.4.1"),
        "chunks": PublishedResult.exactly(186, "§5.4.1, Figure 25"),
        "versions": PublishedResult.exactly(11, "§5.4.1, Figure 25: up to"),
        "ssd async": PublishedResult.exactly(0.27, "§5.3.2, Figure 29"),
        "ssd layer-wise": PublishedResult.exactly(0.12, "§5.3.2, Figure 29"),
    }
)
"""What Cache-Craft's text says of reuse at any position against prefix caching, on Sys-X with LLaMA-3-8B."""
