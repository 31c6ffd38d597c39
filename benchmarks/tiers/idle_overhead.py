"""What the tiers cost where they bring nothing: throughput with prompts that never repeat, against plain vLLM's.

Two engines of plain vLLM run beside ours, and all three are started several times: two processes of the same
program differ by a few percent on a CPU, and the difference between the plain ones says what a ratio means.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from zlib import crc32

import numpy as np

from benchmarks.engines import BLOCK_SIZE, TokenTexts, block_bytes, launch
from benchmarks.report import BenchmarkPlan, Figure, Part, percentiles_ms
from benchmarks.token_client import TokenClient
from ragcache_core.bench.prompts import TokenRequest
from ragcache_core.config import CacheConfig
from ragcache_core.profiles.random_model import random_model

_IN_FLIGHT = 16
_TOKENS = range(10, 1000)
"""Ids that stand for text in the demo model and in the benchmark model."""
_GPU_BLOCKS = 2048
_QUIET_S = 1.5
"""Between batches: vLLM's worker spins for a second after its last step, on cores that the other engines need."""
_SIDES = ("plain", "twin", "ours")
_NUM_STARTS = 5
_NUM_BATCHES = 6


@dataclass(frozen=True, slots=True)
class IdleLoad:
    """Prompts of two documents of ``document_tokens`` each, and answers of ``max_tokens``."""

    name: str
    document_tokens: int
    max_tokens: int
    batch: int


LOADS = (IdleLoad("prefill", 360, 2, 48), IdleLoad("decode", 24, 384, 16))
"""All requests of ``decode`` are in flight at once: where clients come late, because two cores are busy, it is that
which would be measured, and in plain vLLM, too, a batch takes up to five times as long then."""
_LOADS_LARGE = (IdleLoad("prefill", 360, 2, 16), IdleLoad("decode", 24, 96, 16))


@dataclass(frozen=True, slots=True)
class EngineStart:
    """Seconds of each batch of one load, by side, between one start of the three engines and the next.

    Batches of one number ran one after another: a machine that is slow for a minute is slow for all three.
    """

    batches_s: Mapping[str, Sequence[float]]

    @property
    def throughput_ratio(self) -> float:
        """The throughput of ours over the mean of the two plain ones, batch by batch; the median of the batches."""
        plain_s = np.sqrt(np.array(self.batches_s["plain"]) * np.array(self.batches_s["twin"]))
        return float(np.median(plain_s / np.array(self.batches_s["ours"])))

    @property
    def twin_ratio(self) -> float:
        """The same of the second plain vLLM over the first: what the ratio is between equals."""
        return float(np.median(np.array(self.batches_s["plain"]) / np.array(self.batches_s["twin"])))


def geometric_mean(ratios: Sequence[float]) -> float:
    """Return the mean of ratios in which a half and a double cancel out."""
    return float(np.exp(np.mean(np.log(ratios))))


def unique_requests(texts: TokenTexts, load: IdleLoad, first: int, count: int) -> list[TokenRequest]:
    """Return requests that share no document; ``first`` is the number of the first one."""
    size = load.document_tokens
    return [
        texts.request([(2 * i, size), (2 * i + 1, size)], "What is it?", max_tokens=load.max_tokens)
        for i in range(first, first + count)
    ]


def random_texts(seed: int, load: int) -> TokenTexts:
    """Return documents of random tokens, others for each load: any model takes them."""
    drawn = np.random.default_rng((seed, load)).integers(_TOKENS.start, _TOKENS.stop, 20_000).tolist()

    def encode(text: str) -> tuple[int, ...]:
        return tuple(_TOKENS[crc32(word.encode()) % len(_TOKENS)] for word in text.split())

    return TokenTexts(tuple(drawn[:8]), tuple(drawn), encode)


def measure_idle(plan: BenchmarkPlan, num_starts: int = _NUM_STARTS, num_batches: int = _NUM_BATCHES) -> Part:
    """Run the default configuration and plain vLLM, twice, side by side, batch by batch in turn."""
    return _measure(plan, plan.model, LOADS, "idle_throughput_ratio", num_starts, num_batches)


def measure_idle_large(plan: BenchmarkPlan) -> Part:
    """Do the same with the benchmark model of 30 million parameters, whose steps take longer."""
    return _measure(plan, str(random_model()), _LOADS_LARGE, "idle_throughput_ratio_30m", _NUM_STARTS, _NUM_BATCHES)


def _measure(
    plan: BenchmarkPlan, model: str, loads: Sequence[IdleLoad], name: str, num_starts: int, num_batches: int
) -> Part:
    num_starts, num_batches = plan.sized(num_starts, 1), plan.sized(num_batches, 1)
    starts: dict[str, list[EngineStart]] = {load.name: [] for load in loads}
    num_stored = num_loaded = 0.0
    for i in range(num_starts):
        plan.report(f"idle throughput, start {i + 1} of {num_starts}: starting two plain vLLM and ours")
        with ExitStack() as running:
            clients = {side: _start(running, model, side) for side in np.roll(_SIDES, i).tolist()}
            for j, load in enumerate(loads):
                where = f"start {i + 1} of {num_starts}: {load.name}"
                starts[load.name].append(
                    _time_batches(plan, load, random_texts(plan.seed, j), clients, where, num_batches)
                )
            num_stored += clients["ours"].counter("ragcache_stored_bytes_total")
            num_loaded += clients["ours"].counter("ragcache_loaded_bytes_total")
    ours = [_of_ours(f"{name}_{load.name}", load, starts[load.name]) for load in loads]
    twins = [_of_twin(f"{name}_{load.name}_twin", load, starts[load.name]) for load in loads]
    lowest = [
        Figure(key, min(figure.value for figure in figures), 1.0, note="the lower of the two")
        for key, figures in ((name, ours), (f"{name}_twin", twins))
    ]
    details = {
        "stored_bytes": num_stored,
        "loaded_bytes": num_loaded,
        "batches_s": {load: [dict(start.batches_s) for start in rows] for load, rows in starts.items()},
    }
    return Part("1 batch of each load on each side after each start", (*lowest, *ours, *twins), details)


def _start(running: ExitStack, model: str, side: str) -> TokenClient:
    kv_bytes = _GPU_BLOCKS * block_bytes(model)
    if side == "ours":
        engine = launch(model, CacheConfig(kv_cache_bytes=kv_bytes, block_size=BLOCK_SIZE))
    else:
        engine = launch(model, None, kv_cache_memory_bytes=kv_bytes)
    return TokenClient(running.enter_context(engine))


def _time_batches(
    plan: BenchmarkPlan,
    load: IdleLoad,
    texts: TokenTexts,
    clients: Mapping[str, TokenClient],
    where: str,
    num_batches: int,
) -> EngineStart:
    batches_s: dict[str, list[float]] = {side: [] for side in _SIDES}
    for i in range(-1, num_batches):
        plan.report(f"idle throughput, {where}, batch {i + 1} of {num_batches}")
        requests = unique_requests(texts, load, (i + 1) * load.batch, load.batch)
        for side in np.roll(_SIDES, i).tolist():
            time.sleep(_QUIET_S)
            started_s = time.perf_counter()
            clients[side].ask_all(requests, in_flight=_IN_FLIGHT, is_plain=side != "ours")
            if i >= 0:
                batches_s[side].append(time.perf_counter() - started_s)
    return EngineStart(batches_s)


def _of_ours(key: str, load: IdleLoad, starts: Sequence[EngineStart]) -> Figure:
    return _figure(key, load, starts, "ours", [start.throughput_ratio for start in starts])


def _of_twin(key: str, load: IdleLoad, starts: Sequence[EngineStart]) -> Figure:
    return _figure(key, load, starts, "twin", [start.twin_ratio for start in starts])


def _figure(key: str, load: IdleLoad, starts: Sequence[EngineStart], side: str, ratios: Sequence[float]) -> Figure:
    """Return the mean of the starts' ratios; the note says how far they lay apart."""
    times_ms, plain_ms = (percentiles_ms([t for s in starts for t in s.batches_s[which]]) for which in (side, "plain"))
    note = f"{min(ratios):.3f} to {max(ratios):.3f} in {len(starts)} starts of {len(starts[0].batches_s[side])} "
    note += f"batches of {load.batch} requests, {_IN_FLIGHT} in flight; p50 and p99 of a batch, "
    note += f"plain {plain_ms[0]:.0f} | {plain_ms[1]:.0f} ms"
    return Figure(key, round(geometric_mean(ratios), 4), 1.0, *times_ms, note)
