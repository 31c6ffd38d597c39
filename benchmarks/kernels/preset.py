"""The prefill profile and the link's rate as a file that ``ragcache simulate --cost-model FILE`` reads.

The format is that of ``ragcache profile`` with the simulator's keys beside it; a test of ``ragcache_core`` loads it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Preset:
    """A model on this machine: ``seconds[i][j]`` for ``cached_tokens[i]`` and ``new_tokens[j]``.

    ``measured_at``: in ISO 8601. ``spread``: how far a point's times lie apart, as a share of their median; the median
    of the points.
    """

    model: str
    hardware: str
    measured_at: str
    software: str
    dtype: str
    num_repeats: int
    spread: float
    cached_tokens: Sequence[int]
    new_tokens: Sequence[int]
    seconds: Sequence[Sequence[float]]
    kv_bytes_per_token: int
    host_bytes_per_s: float

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data."""
        return {
            "kind": "ragcache profile",
            "format": 1,
            "model": self.model,
            "hardware": self.hardware,
            "measured_at": self.measured_at,
            "vllm_version": f"none ({self.software})",
            "dtype": self.dtype,
            "num_repeats": self.num_repeats,
            "spread": self.spread,
            "cost_model": {
                "format": 1,
                "cached_tokens": list(self.cached_tokens),
                "new_tokens": list(self.new_tokens),
                "seconds": [list(row) for row in self.seconds],
            },
            "tokens_per_gib": GIB // self.kv_bytes_per_token,
            "host_gib_per_s": self.host_bytes_per_s / GIB,
        }


def write_json(data: object, path: Path) -> None:
    """Write ``data`` to ``path`` and make its folder; what was there before stays whole until it is replaced.

    Raises:
        OSError: the disk is full, or the folder cannot be written to.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        temporary.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
