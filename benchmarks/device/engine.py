"""Kernels on a device, and the copies between its memory and the host's."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.engines import BLOCK_SIZE, block_bytes, has_gpu, launch
from benchmarks.report import BenchmarkPlan, Figure, Part
from benchmarks.tiers.idle_overhead import IdleLoad, random_texts, unique_requests
from benchmarks.token_client import TokenClient
from ragcache_core.config import CacheConfig
from ragcache_core.profiles.random_model import ModelShape, random_model
from ragcache_core.stats import EngineStats

__all__ = ["check_kernels", "has_gpu", "measure_copies"]

_KERNEL_CHECK = Path(__file__).parents[2] / "kernels" / "gpu_check.py"
_COST_MODEL = Path("build") / "gpu-cost-model.json"
_LARGE = ModelShape(hidden_size=2048, num_layers=24, num_heads=16, num_kv_heads=8, intermediate_size=8192)
"""1.5 billion parameters, 96 KiB of KV a token in bfloat16."""
_COPIED = IdleLoad("copies", 1900, 1, 16)
_COPY_GPU_REQUESTS = 20
"""Prompts that the GPU holds: those of a batch are evicted by the next."""


def check_kernels(plan: BenchmarkPlan) -> Part:
    """Run ``kernels/gpu_check.py`` in a process of its own; all that it found is in the details."""
    plan.report("kernels: built, checked and timed")
    with tempfile.TemporaryDirectory(prefix="ragcache-gpu-check-") as folder:
        found_at = Path(folder) / "kernels.json"
        small = [] if has_gpu() else ["--interpret"]
        prefill = ["--skip-prefill"] if plan.is_quick else []
        cost_model = ["--cost-model", str(_COST_MODEL)] if has_gpu() else []
        command = [sys.executable, str(_KERNEL_CHECK), "--output", str(found_at), *cost_model, *small, *prefill]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if not found_at.exists():
            raise RuntimeError(f"{' '.join(command)} ended with {ended.returncode}: {ended.stdout}{ended.stderr}")
        found: dict[str, Any] = json.loads(found_at.read_text(encoding="utf-8"))
    failed = [one for one in found["agreements"] if not one["is_met"]]
    missed = [one for one in found["speeds"] if one["misses_goal"]]
    figures = (
        Figure("kernels_failed", len(failed), 0, note=f"of {len(found['agreements'])} comparisons with PyTorch"),
        Figure("kernels_below_goal", len(missed), 0, note=f"of {len(found['speeds'])} timings"),
    )
    return Part("each kernel ran once", figures, found)


def measure_copies(plan: BenchmarkPlan) -> Part:
    """Have prompts stored in host memory and loaded from there, and hold the rates against the pinned link's.

    Three batches of prompts take turns; the GPU holds one of them, host memory all.
    """
    model = str(random_model(ModelShape() if plan.is_quick else _LARGE))
    dtype = "float32" if plan.is_quick else "bfloat16"
    size = block_bytes(model, dtype)
    blocks = -(-2 * _COPIED.document_tokens // BLOCK_SIZE) + 2
    count = plan.sized(_COPIED.batch, 2)
    cache = CacheConfig(
        kv_cache_bytes=plan.sized(_COPY_GPU_REQUESTS, 3) * blocks * size,
        host_bytes=4 * count * blocks * size,
        block_size=BLOCK_SIZE,
    )
    texts = random_texts(plan.seed, 0)
    with launch(model, cache, dtype=dtype, max_model_len=4096) as engine:
        client = TokenClient(engine)
        for i in range(plan.sized(9, 4)):
            plan.report(f"copies: batch {i + 1}")
            client.ask_all(unique_requests(texts, _COPIED, i % 3 * count, count), in_flight=plan.sized(8, 2))
        moved = {
            way: [client.counter(f"vllm:kv_offload_{way}_{what}_total") for what in ("bytes", "time")]
            for way in ("load", "store")
        }
        stats = engine.stats()
    links = _links()
    figures = [Figure("host_hit_tokens", _host_hits(stats), note="prompt tokens that came from host memory")]
    for way, (num_bytes, seconds) in moved.items():
        rate, link = num_bytes / max(seconds, 1e-9), links[way]
        figures.append(Figure(f"{way}_bytes_per_s", round(rate), round(link), note=f"{num_bytes / 2**20:,.0f} MiB"))
        figures.append(Figure(f"{way}_share_of_link", round(rate / link, 3), 1.0))
    return Part("none: the first store counts", tuple(figures), {"bytes_and_seconds": moved})


def _host_hits(stats: EngineStats) -> int:
    return sum(tier.num_hit_tokens for tier in stats.tiers if tier.name == "host")


def _links() -> dict[str, float]:
    """Return the bytes a second of pinned copies to the device and from it; of plain copies where there is none."""
    import torch

    from benchmarks.kernels.ceilings import measure_ceilings
    from benchmarks.kernels.timing import Stopwatch

    if has_gpu():
        found = measure_ceilings(Stopwatch(torch.device("cuda"), 11))
    else:
        found = measure_ceilings(Stopwatch(torch.device("cpu"), 3), num_bytes=1 << 28, width=64)
    return {"load": found.host_to_device_bytes_per_s, "store": found.device_to_host_bytes_per_s}
