"""Time to first token of prompts that lie on disk alone, against computing prompts of the same length.

An engine computes the prompts and ends; the next one on its directory has them on disk and nowhere else. Some requests
are sent at once, each about a document of its own: first ones whose documents are on disk, then as many new ones, and
so on by turns.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.engines import BLOCK_SIZE, TokenTexts, block_bytes, launch
from benchmarks.report import BenchmarkPlan, Figure, Part, percentiles_ms
from benchmarks.token_client import TokenAnswer, TokenClient
from ragcache_core.bench.prompts import TokenRequest
from ragcache_core.client import Engine
from ragcache_core.config import CacheConfig

_WAITING = (1, 8, 32)
_DOCUMENT_TOKENS = 1400
_MAX_MODEL_LEN = 1536
_MAX_SEQS = 8
_GPU_DOCUMENTS, _HOST_DOCUMENTS = 16, 32
_WRITTEN_WITHIN_S = 60.0
_QUIET_S = 1.0


@dataclass(slots=True)
class _Rounds:
    """Times of one number of concurrent requests: mean seconds of each round, and of each request on disk."""

    disk_s: list[float] = field(default_factory=list)
    new_s: list[float] = field(default_factory=list)
    each_disk_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    num_disk_tokens: int = 0
    num_mismatches: int = 0


def measure_disk_ttft(plan: BenchmarkPlan, waiting: Sequence[int] = _WAITING) -> Part:
    """Measure each number of concurrent requests."""
    num_rounds = {num_waiting: plan.sized(max(24 // num_waiting, 4), 1) for num_waiting in waiting}
    num_stored = 1 + sum(num_waiting * rounds for num_waiting, rounds in num_rounds.items())
    document_bytes = _MAX_MODEL_LEN // BLOCK_SIZE * block_bytes(plan.model)
    measured = {num_waiting: _Rounds() for num_waiting in waiting}
    with tempfile.TemporaryDirectory(prefix="ragcache-bench-") as folder:
        settings: dict[str, Any] = {
            "kv_cache_bytes": _GPU_DOCUMENTS * document_bytes,
            "block_size": BLOCK_SIZE,
            "host_bytes": _HOST_DOCUMENTS * document_bytes,
            "disk_bytes": 2 * (num_stored + 1) * document_bytes,
            "directory": Path(folder),
        }
        plan.report(f"disk-ttft: computing {num_stored} prompts")
        with _launch(plan, CacheConfig(**settings)) as engine:
            texts = TokenTexts.read(plan.corpus, engine.tokenizer)
            stored = [_request(texts, number) for number in range(num_stored)]
            new = [_request(texts, number) for number in range(num_stored, 2 * num_stored)]
            computed = TokenClient(engine).ask_all(stored, in_flight=2)
            _wait_for_disk(engine, computed)
        with _launch(plan, CacheConfig(**settings)) as engine:
            client = TokenClient(engine)
            for request in (stored[0], new[0]):
                client.ask(request)
            at = 1
            for num_waiting in waiting:
                for turn in range(num_rounds[num_waiting]):
                    plan.report(f"disk-ttft: {num_waiting} at once, round {turn + 1} of {num_rounds[num_waiting]}")
                    asked = slice(at, at + num_waiting)
                    _add(measured[num_waiting], _ask(client, stored[asked]), _ask(client, new[asked]), computed[asked])
                    at += num_waiting
    figures = [figure for num_waiting in waiting for figure in _figures(num_waiting, measured[num_waiting])]
    figures.append(Figure("disk_ttft_mismatches", sum(each.num_mismatches for each in measured.values())))
    details = {
        f"{name}_s_{num_waiting}": values
        for num_waiting, rounds in measured.items()
        for name, values in (("disk", rounds.disk_s), ("new", rounds.new_s))
    }
    return Part("a prompt of each kind", tuple(figures), details)


def _request(texts: TokenTexts, number: int) -> TokenRequest:
    return texts.request([(number, _DOCUMENT_TOKENS)], "Who founded it?", max_tokens=1)


def _launch(plan: BenchmarkPlan, cache: CacheConfig) -> Engine:
    return launch(plan.model, cache, max_model_len=_MAX_MODEL_LEN, max_num_seqs=_MAX_SEQS)


def _wait_for_disk(engine: Engine, computed: Sequence[TokenAnswer]) -> None:
    """Wait until the disk has every whole block of what was computed.

    Raises:
        RuntimeError: it has not in a minute.
    """
    num_blocks = sum(answer.num_prompt_tokens // BLOCK_SIZE for answer in computed) - len(computed)
    ends_s = time.monotonic() + _WRITTEN_WITHIN_S
    while (num_written := {tier.name: tier.num_blocks for tier in engine.stats().tiers}["disk"]) < num_blocks:
        if time.monotonic() > ends_s:
            raise RuntimeError(f"the disk has {num_written} of {num_blocks} blocks after {_WRITTEN_WITHIN_S:g} s")
        time.sleep(0.1)


def _ask(client: TokenClient, requests: Sequence[TokenRequest]) -> list[TokenAnswer]:
    time.sleep(_QUIET_S)  # vLLM's worker spins for a while after its last step
    return client.ask_all(requests, in_flight=len(requests))


def _add(
    rounds: _Rounds, disk: Sequence[TokenAnswer], new: Sequence[TokenAnswer], computed: Sequence[TokenAnswer]
) -> None:
    rounds.disk_s.append(fmean(map(_ttft_s, disk)))
    rounds.new_s.append(fmean(map(_ttft_s, new)))
    rounds.each_disk_s += map(_ttft_s, disk)
    rounds.num_tokens += sum(answer.num_prompt_tokens for answer in disk)
    rounds.num_disk_tokens += sum(answer.tokens_by_tier["disk"] for answer in disk)
    rounds.num_mismatches += sum(a.token_ids != b.token_ids for a, b in zip(disk, computed, strict=True))


def _ttft_s(answer: TokenAnswer) -> float:
    assert answer.ttft_s is not None
    return answer.ttft_s


def _figures(num_waiting: int, rounds: _Rounds) -> tuple[Figure, Figure]:
    p50, p99 = percentiles_ms(rounds.each_disk_s)
    disk_ms, new_ms = (round(median(times_s) * 1000, 2) for times_s in (rounds.disk_s, rounds.new_s))
    share = rounds.num_disk_tokens / rounds.num_tokens
    ratios = [disk_s / new_s for disk_s, new_s in zip(rounds.disk_s, rounds.new_s, strict=True)]
    note = f"{len(ratios)} rounds, {share:.0%} of the tokens from disk"
    return (
        Figure(f"disk_ttft_ms_{num_waiting}", disk_ms, new_ms, p50, p99, note),
        Figure(f"disk_ttft_ratio_{num_waiting}", round(median(ratios), 3), 1.0, note="against computing, by rounds"),
    )
