"""An offline batch in virtual time: in its own order, in a queue's bounded changes of it, and ordered as a whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.report import BenchmarkPlan, Figure, Part
from benchmarks.simulated import simulate_runs
from benchmarks.simulated.laboratory import LabOptions
from ragcache_core.batch_order import arrange_documents, order_requests
from ragcache_core.sim.sweep import plan as plan_runs
from ragcache_core.sim.traces.trace import Trace, TracedRequest, write_trace
from ragcache_core.sim.traces.workload import WORKLOADS, make_trace

_K = 4
_SHARES = (0.03, 0.10)
_FIRST_SEED, _NUM_SEEDS = 101, 3
_NUM_REQUESTS = 1_500
_SYSTEMS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "own": ("own", {}),
    "queue": ("own", {"queue": "cache-aware"}),
    "batch": ("batch", {}),
    "documents": ("documents", {}),
}
"""What is compared: the trace that runs, and the options of the engine, whose queue may change the order."""


def measure_batches(plan: BenchmarkPlan) -> Part:
    """Compute one batch in several orders, on GPU memory for some of the distinct document tokens."""
    seeds = range(_FIRST_SEED + plan.seed, _FIRST_SEED + plan.seed + plan.sized(_NUM_SEEDS, 1))
    num_requests = plan.sized(_NUM_REQUESTS, 100)
    runs = {}
    with TemporaryDirectory(prefix="ragcache-batches-") as folder:
        for name in ("mmlu", "nq"):
            for seed in seeds:
                trace = make_trace(replace(WORKLOADS[name], documents_per_request=_K), num_requests, seed)
                tokens = sum(dict(zip(trace.docs.tolist(), trace.doc_tokens.tolist(), strict=True)).values())
                paths = _write_orders(trace, Path(folder), f"{name}-{seed}")
                for share in _SHARES:
                    for system, (of, settings) in _SYSTEMS.items():
                        options = LabOptions(gpu_tokens=int(share * tokens), host_tokens=0, **settings)
                        (runs[name, share, system, seed],) = plan_runs([paths[of]], options)
        done = simulate_runs(plan, "batches", list(runs.values()), num_requests * len(runs))
    missed = {at: 1.0 - finished.summary["token_hit_rate"] for at, finished in zip(runs, done, strict=True)}
    figures = []
    for name in ("mmlu", "nq"):
        for share in _SHARES:
            for system in _SYSTEMS:
                ratio = fmean(missed[name, share, system, s] / missed[name, share, "own", s] for s in seeds)
                hits = 1.0 - fmean(missed[name, share, system, s] for s in seeds)
                note = f"hits {hits:.3f} of the document tokens"
                figures.append(Figure(f"batch_{name}_{share:.0%}_{system}", round(ratio, 4), 1.0, note=note))
    return Part(f"none; {num_requests:,} requests, {len(seeds)} seeds", tuple(figures))


def _write_orders(trace: Trace, folder: Path, name: str) -> dict[str, Path]:
    """Write the requests of a trace, which all arrive at once, in three orders; return the files by the orders."""
    requests = [replace(request, arrival_s=0.0) for request in trace]
    length = {doc_id: n for r in requests for doc_id, n in zip(r.doc_ids, r.doc_tokens, strict=True)}
    arranged = arrange_documents([request.doc_ids for request in requests], length)
    moved = [_showing(r, ids, length) for r, ids in zip(requests, arranged, strict=True)]
    orders = {"own": requests, "batch": _ordered(requests), "documents": _ordered(moved)}
    paths = {}
    for order, ordered in orders.items():
        paths[order] = folder / f"{name}-{order}.jsonl"
        write_trace(Trace.from_requests(ordered), paths[order])
    return paths


def _showing(request: TracedRequest, doc_ids: Sequence[str], length: Mapping[str, int]) -> TracedRequest:
    return replace(request, doc_ids=tuple(doc_ids), doc_tokens=tuple(length[doc_id] for doc_id in doc_ids))


def _ordered(requests: Sequence[TracedRequest]) -> list[TracedRequest]:
    return [requests[i] for i in order_requests([request.doc_ids for request in requests])]
