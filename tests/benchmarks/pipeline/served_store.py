"""What it costs the time to the first token that a store is searched over HTTP, in another process on this machine.

The ordinary case is the same chain over the same store, opened here: both see the same kind of questions in turn, each
about documents that no cache holds. The search is as fast as it is, so that nothing hides what the way costs.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import fmean, median

from ragcache_core.retrieval import DocumentStore, RemoteStore
from tests.benchmarks.pipeline.overlap import ask_in_turn, chain, launch_engine, vars_of
from tests.benchmarks.report import Figure, Part, Plan, percentiles_ms
from tests.benchmarks.searches import DocumentTexts, SlowedSearch, Vectors, make_store

_WORDS = 330


def measure_served_store(plan: Plan) -> Part:
    """Ask a store here and the same store behind ``ragcache serve-store``, in turn."""
    num_queries, num_documents = plan.sized(60, 3), plan.sized(2_000, 300)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ragcache-bench-"))) / "store"
        vectors = Vectors.draw(num_documents, 2 * num_queries + 4, plan.seed)
        plan.report("served store: making it")
        make_store(folder, DocumentTexts(plan.corpus, _WORDS), vectors, 1.0).close()
        here = stack.enter_context(DocumentStore.open(folder, read_only=True))
        there = stack.enter_context(RemoteStore(stack.enter_context(serving(folder))))
        engine = stack.enter_context(launch_engine(plan))
        queries = {f"Number {i}: who keeps it?": query for i, query in enumerate(vectors.queries)}
        chains = tuple(chain(engine, SlowedSearch(store, queries, 0.0), speculate=True) for store in (here, there))
        plan.report("served store: asking")
        local, served = asyncio.run(ask_in_turn((chains[0], chains[1]), list(queries)))
    p50, p99 = percentiles_ms([a.ttft_s for a in served])
    base50, _ = percentiles_ms([a.ttft_s for a in local])
    search_ms = [1000 * median(a.search_s for a in asked) for asked in (local, served)]
    ratio = fmean(a.ttft_s for a in served) / fmean(a.ttft_s for a in local)
    note = f"TTFT p50 of the store itself {base50:.0f} ms"
    figures = (
        Figure("served_ttft_ratio", round(ratio, 3), 1.0, p50, p99, note),
        Figure("served_search_ms", round(search_ms[1], 2), round(search_ms[0], 2), note="p50, as the chain sees it"),
    )
    details = {"local": [vars_of(a) for a in local], "served": [vars_of(a) for a in served]}
    return Part("2 questions on each side", figures, details)


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """Serve a store in a process of its own; give its address."""
    command = [sys.executable, "-c", "from ragcache_core.cli import main; main()", "serve-store", str(folder)]
    process = subprocess.Popen([*command, "--port", "0", "--json"], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["url"]
    finally:
        process.terminate()
        process.wait()
