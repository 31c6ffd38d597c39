"""Cache-Craft's Figures 25 and 29: the versions that a store of chunks holds, and the wait for their loads."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from statistics import fmean

from benchmarks.papers.figure import PaperFigure, Row
from benchmarks.papers.published import CACHE_CRAFT, SSD_LOAD_S
from benchmarks.papers.runs import FIRST_SEED, PaperRuns
from benchmarks.simulated.chunk_versions import EvictionRule, Replayed, StoreOptions, replay
from ragcache_core.chunk import preload_depth
from ragcache_core.reports.page import Table
from ragcache_core.sim.testbeds import load_testbed
from ragcache_core.sim.traces.workload import WORKLOADS, Workload, make_trace

_NUM_REQUESTS = 2_000
_CAPACITY_TOKENS = 500_000
"""100 chunks of 1,000 tokens in 5 versions (Cache-Craft §5.1.2)."""
_SMALL_TOKENS = 131_072
_UNLIMITED = 64
_NUM_VARIANTS = (1, 2, 5, 11)
_NUM_RUNNING = 32
_SYS_X = WORKLOADS["sysx"]
_WORKLOADS: Mapping[str, Workload] = {
    "Sys-X": _SYS_X,
    "Sys-X, popularity drifts": replace(_SYS_X, drift_every=400, repeat_share=0.25),
    "Natural Questions, five documents": replace(WORKLOADS["nq"], documents_per_request=5),
}
_RULES: Mapping[EvictionRule, str] = {
    "versions": "versions by the policy (ours)",
    "f_r": "versions by f_r (Cache-Craft)",
    "chunks": "chunks by the policy, f_r within one",
}
_CACHE_CRAFT = StoreOptions(
    _CAPACITY_TOKENS, max_variants=_UNLIMITED, eviction="f_r", selection="cache_craft", stores_all=True
)

_NUM_LAYERS = 32
_CPU_LOAD_S, _QUEUE_S = 0.03, 0.32
_PREFILL_S = SSD_LOAD_S * (1 - (24 - 1) / (_NUM_LAYERS - 1))
"""0.152: what 24 of 32 layers ahead imply by Eq. 16, as the paper does not give it."""
_PROMPT_TOKENS, _RECOMPUTED = 3_300, 0.3


def figure_25(runs: PaperRuns) -> PaperFigure:
    """Return the versions in a store after Sys-X, and what its size, M and eviction make of the computed tokens."""
    paper = [_replayed(runs, _SYS_X, _CACHE_CRAFT, seed) for seed in _seeds(runs)]
    ours = [_replayed(runs, _SYS_X, StoreOptions(_CAPACITY_TOKENS), seed) for seed in _seeds(runs)]
    rows = [
        Row.of_seeds("chunks in the store at the end", [len(one.variants) for one in paper], CACHE_CRAFT["chunks"]),
        Row.of_seeds("versions of the chunk with most", [one.variants[0] for one in paper], CACHE_CRAFT["versions"]),
        Row.of_seeds("chunks, ours", [len(one.variants) for one in ours], CACHE_CRAFT["chunks"], is_ragcache=True),
        Row.of_seeds("versions, ours", [one.variants[0] for one in ours], CACHE_CRAFT["versions"], is_ragcache=True),
        Row.of_seeds(
            f"reused tokens of a version that another of {_NUM_RUNNING} running requests reads too, ours",
            [one.num_shared / max(one.num_injected, 1) for one in ours],
            None,
        ),
    ]
    return PaperFigure(
        "Cache-Craft, Figure 25",
        "versions of chunks in the store",
        f"the workload sysx, {_NUM_REQUESTS:,} requests, the first quarter warm-up; {_CAPACITY_TOKENS:,} tokens of "
        "chunks, as 100 chunks of 1,000 tokens in 5 versions have. The store, its plans and its eviction are the "
        "product's; what a chunk attends to is drawn, with the paper's shares. The first rows follow the paper: the "
        "token selection cache_craft, a version for each new prefix, eviction by f_r, no limit of versions per chunk. "
        "Ours: whole_chunks, versions of chunks that were computed wholly, 5 at most.",
        rows,
        ("the paper gives neither the length of its trace nor the sizes of its chunks, and the trace is not public",),
        "ragcache stats, of a running engine",
        [_histogram(paper, ours), _by_variants(runs), _by_rule(runs)],
    )


def figure_29(runs: PaperRuns) -> PaperFigure:
    """Return what loads of chunks add to a prefill: started at its turn, while queued, and layer by layer."""
    del runs
    ssd = {way: added_s(way, load_s=SSD_LOAD_S, prefill_s=_PREFILL_S, queue_s=_QUEUE_S) for way in _WAYS}
    # For exponential waits: E[max(0, load - wait)] in 10,000 quantiles, where the paper takes the mean wait for all.
    waits = [_QUEUE_S * wait for wait in _exponential_quantiles(10_000)]
    drawn = {
        way: fmean(added_s(way, load_s=SSD_LOAD_S, prefill_s=_PREFILL_S, queue_s=wait) for wait in waits)
        for way in ("async", "layer-wise")
    }
    rows = [
        Row(f"SSD, {way}", ssd[way], ssd[way], CACHE_CRAFT[f"ssd {way}"], "s") for way in ("async", "layer-wise")
    ] + [
        Row(f"SSD, {way}, exponential waits", one, one, CACHE_CRAFT[f"ssd {way}"], "s", is_ragcache=True)
        for way, one in drawn.items()
    ]
    testbed = load_testbed("h100-llama3-8b")
    gib = _PROMPT_TOKENS / testbed.tokens_per_gib
    prefill_s = testbed.cost.estimate_s(_PROMPT_TOKENS, round(_RECOMPUTED * _PROMPT_TOKENS))
    loads = {
        "the paper's CPU": (_CPU_LOAD_S, _PREFILL_S),
        "the paper's SSD": (SSD_LOAD_S, _PREFILL_S),
        "H100, host memory": (gib / testbed.host_gib_per_s, prefill_s),
        "H100, a disk of 2 GiB/s": (gib / testbed.disk_gib_per_s, prefill_s),
    }
    queued = [("sync", 0.0), ("layer-wise", 0.0), ("async", _QUEUE_S), ("layer-wise", _QUEUE_S)]
    cells = []
    for name, (load_s, spent_s) in loads.items():
        depth = preload_depth(_NUM_LAYERS, prefill_s=spent_s, load_s=load_s)
        added = (added_s(way, load_s=load_s, prefill_s=spent_s, queue_s=queue_s) for way, queue_s in queued)
        cells.append([name, f"{load_s:.3f}", f"{spent_s:.3f}", str(depth), *(f"{one:.3f}" for one in added)])
    heads = ("", "load s", "prefill s", "layers ahead (Eq. 16)", "sync", "layer-wise, no queue", "async", "layer-wise")
    return PaperFigure(
        "Cache-Craft, Figure 29",
        "what loads add to a prefill",
        f"Algorithm 2 layer by layer, {_NUM_LAYERS} layers; loads of {_CPU_LOAD_S} and {SSD_LOAD_S} s and a wait of "
        f"{_QUEUE_S} s in the queue, as the paper has them; a prefill of {_PREFILL_S:.3f} s, which its 24 layers ahead "
        f"imply. H100: {_PROMPT_TOKENS:,} tokens, {_RECOMPUTED:.0%} recomputed, measured prefill and link; the disk is "
        "assumed. No load is measured here. Our engine loads host memory layer by layer, and begins to read its disk "
        "when the request arrives, whole chunks: async for SSD, layer-wise for CPU.",
        rows,
        ("the paper subtracts one mean wait from every load; where waits vary, short ones hide less of it",),
        "make bench-tiers ONLY=disk-ttft",
        [Table("Seconds that loads add", heads, cells)],
    )


_WAYS = ("sync", "async", "layer-wise")


def added_s(way: str, *, load_s: float, prefill_s: float, queue_s: float) -> float:
    """Return the seconds from a request's turn to the end of its prefill, less the prefill (Algorithm 2).

    Args:
        way: ``sync`` begins to load at the request's turn, the others when it arrives; ``layer-wise`` computes the
            first layer once Eq. 16's layers are there, the others once all are.
        load_s: of all layers.
        prefill_s: of all layers.
        queue_s: between its arrival and its turn.
    """
    begun_s = 0.0 if way == "sync" else -queue_s
    layer_s, compute_s = load_s / _NUM_LAYERS, prefill_s / _NUM_LAYERS
    ahead = preload_depth(_NUM_LAYERS, prefill_s=prefill_s, load_s=load_s) if way == "layer-wise" else _NUM_LAYERS
    now_s = max(0.0, begun_s + ahead * layer_s)
    for layer in range(1, _NUM_LAYERS + 1):
        now_s = max(now_s, begun_s + layer * layer_s) + compute_s
    return max(0.0, now_s - prefill_s)


def _exponential_quantiles(count: int) -> Iterator[float]:
    return (-math.log(1 - (number + 0.5) / count) for number in range(count))


def _seeds(runs: PaperRuns) -> range:
    return range(FIRST_SEED, FIRST_SEED + runs.num_seeds)


def _replayed(runs: PaperRuns, workload: Workload, options: StoreOptions, seed: int) -> Replayed:
    return _replay(workload, runs.num_requests or _NUM_REQUESTS, options, seed)


@cache
def _replay(workload: Workload, num_requests: int, options: StoreOptions, seed: int) -> Replayed:
    trace = make_trace(workload, num_requests, seed)
    return replay(trace, options, seed=seed, warm_up=num_requests // 4, num_running=_NUM_RUNNING)


def _computed(runs: PaperRuns, workload: Workload, options: StoreOptions) -> str:
    found = [_replayed(runs, workload, options, seed) for seed in _seeds(runs)]
    return f"{fmean(one.num_computed / one.num_tokens for one in found):.3f}"


def _histogram(paper: list[Replayed], ours: list[Replayed]) -> Table:
    most = max(one.variants[0] for one in (*paper, *ours))
    cells = [
        [name, *(f"{fmean(one.variants.count(count) for one in found):.0f}" for count in range(1, most + 1))]
        for name, found in (("as the paper", paper), ("ours", ours))
    ]
    return Table("Chunks with this many versions", ("", *map(str, range(1, most + 1))), cells)


def _by_variants(runs: PaperRuns) -> Table:
    cells = [
        [f"{capacity:,} tokens", *(
            _computed(runs, _SYS_X, StoreOptions(capacity, max_variants=count)) for count in _NUM_VARIANTS
        )]
        for capacity in (_SMALL_TOKENS, _CAPACITY_TOKENS)
    ]  # fmt: skip
    heads = ("", *(f"max_variants {count}" for count in _NUM_VARIANTS))
    return Table("Computed share of the documents' tokens, Sys-X, by versions per chunk", heads, cells)


def _by_rule(runs: PaperRuns) -> Table:
    cells = [
        [f"{name}, {capacity:,} tokens", *(
            _computed(runs, workload, StoreOptions(capacity, eviction=rule)) for rule in _RULES
        )]
        for (name, workload), capacity in itertools.product(_WORKLOADS.items(), (_SMALL_TOKENS, _CAPACITY_TOKENS))
    ]  # fmt: skip
    cells += [
        [f"Sys-X, cache_craft, {capacity:,} tokens", *(
            _computed(runs, _SYS_X, StoreOptions(capacity, eviction=rule, selection="cache_craft")) for rule in _RULES
        )]
        for capacity in (_SMALL_TOKENS, _CAPACITY_TOKENS)
    ]  # fmt: skip
    return Table("Computed share of the documents' tokens, by what is evicted", ("", *_RULES.values()), cells)
