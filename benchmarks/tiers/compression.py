"""What compression of the disk tier brings at equal bytes, and what it costs.

All engines get the same requests, one after the other, and the same memory and disk. GPU and host hold few documents,
the disk holds a part of them. A warm-up of as many requests as are counted goes before. KV is bf16, as on most GPUs.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.engines import BLOCK_SIZE, TokenTexts, block_bytes, cached_share, launch
from benchmarks.report import BenchmarkPlan, Figure, Part, percentiles_ms
from benchmarks.tiers.hit_share import WORKLOAD, document_requests
from benchmarks.token_client import TokenAnswer, TokenClient
from ragcache_core.config import CacheConfig, CompressionName
from ragcache_core.sim.traces.workload import document_tokens
from ragcache_core.stats import TierStats

_DTYPE = "bfloat16"
_SETTINGS: tuple[CompressionName, ...] = ("off", "auto", "lz4", "int8")
_MAX_MODEL_LEN = 1536
_DISK_SHARE = 0.2
_MEMORY_SHARE = 0.03


@dataclass(frozen=True, slots=True)
class _CompressionRun:
    """The answers of one engine that count, and its disk tier after them."""

    answers: list[TokenAnswer]
    disk: TierStats

    @property
    def disk_tokens(self) -> int:
        return sum(answer.tokens_by_tier["disk"] for answer in self.answers)


def measure_compression(plan: BenchmarkPlan) -> Part:
    """Compare each setting with ``off``."""
    measured = {setting: _measure(plan, setting) for setting in _SETTINGS}
    off = measured["off"]
    served = [
        number
        for number in range(len(off.answers))
        if all(each.answers[number].tokens_by_tier["disk"] > 0 for each in measured.values())
    ]
    off_ttft_s = _ttfts_s(off, served)
    figures: list[Figure] = []
    for setting in _SETTINGS[1:]:
        each = measured[setting]
        ttft_s = _ttfts_s(each, served)
        p50, p99 = percentiles_ms(ttft_s)
        ms, off_ms = (round(1000 * median(times), 2) for times in (ttft_s, off_ttft_s))
        mismatches = sum(a.token_ids != b.token_ids for a, b in zip(each.answers, off.answers, strict=True))
        num_bytes = block_bytes(plan.model, _DTYPE) * each.disk.num_blocks
        cached, off_cached = (round(cached_share(answers), 4) for answers in (each.answers, off.answers))
        figures += [
            Figure(f"compressed_share_{setting}", cached, off_cached, note="of prompt tokens, at equal bytes on disk"),
            Figure(f"compressed_disk_tokens_{setting}", each.disk_tokens, off.disk_tokens, note="hits on disk"),
            Figure(f"compressed_bytes_{setting}", round(each.disk.used_bytes / num_bytes, 3), 1.0, note="of a block"),
            Figure(f"compressed_blocks_{setting}", each.disk.num_blocks, off.disk.num_blocks, note="on disk"),
            Figure(
                f"compressed_ttft_ms_{setting}", ms, off_ms, p50, p99, f"{len(served)} prompts, from disk in each run"
            ),
            Figure(f"compressed_mismatches_{setting}", mismatches, note=f"of {len(each.answers)} answers"),
        ]
    details = {
        "disk": {
            setting: {"used_bytes": each.disk.used_bytes, "capacity_bytes": each.disk.capacity_bytes}
            for setting, each in measured.items()
        }
    }
    return Part(f"{_count(plan)} requests before as many that count", tuple(figures), details)


def _measure(plan: BenchmarkPlan, setting: CompressionName) -> _CompressionRun:
    size, count = block_bytes(plan.model, _DTYPE), _count(plan)
    all_blocks = int(document_tokens(WORKLOAD, plan.seed).sum()) // BLOCK_SIZE
    memory_blocks = max(int(_MEMORY_SHARE * all_blocks), 2 * _MAX_MODEL_LEN // BLOCK_SIZE)
    plan.report(f"compression: starting an engine with {setting}")
    with tempfile.TemporaryDirectory(prefix="ragcache-bench-") as folder:
        cache = CacheConfig(
            kv_cache_bytes=memory_blocks * size,
            block_size=BLOCK_SIZE,
            host_bytes=memory_blocks * size,
            disk_bytes=int(_DISK_SHARE * all_blocks) * size,
            directory=Path(folder),
            compression=setting,
        )
        with launch(plan.model, cache, max_model_len=_MAX_MODEL_LEN, max_num_seqs=2, dtype=_DTYPE) as engine:
            texts = TokenTexts.read(plan.corpus, engine.tokenizer)
            requests = document_requests(texts, WORKLOAD, plan.seed, 2 * count)
            client = TokenClient(engine)
            plan.report(f"compression: asking, with {setting}")
            client.ask_all(requests[:count], in_flight=1)
            answers = client.ask_all(requests[count:], in_flight=1)
            (disk,) = (tier for tier in engine.stats().tiers if tier.name == "disk")
            run = _CompressionRun(answers, disk)
            plan.report(f"compression: {setting}: {cached_share(answers):.4f} cached, {run.disk_tokens} from {disk}")
            return run


def _ttfts_s(measured: _CompressionRun, numbers: list[int]) -> list[float]:
    times = [measured.answers[number].ttft_s for number in numbers]
    return [time_s for time_s in times if time_s is not None]


def _count(plan: BenchmarkPlan) -> int:
    return plan.sized(150, 20)
