"""How long the choice of an order takes while the engine works."""

from __future__ import annotations

import asyncio
import threading
import time
from itertools import count

import numpy as np

from tests.benchmarks.pipeline.overlap import ask, chain, launch_engine
from tests.benchmarks.report import Figure, Part, Plan, percentiles_ms
from tests.benchmarks.searches import DocumentTexts, UnsettledSearch

_WORDS = 150


def measure_arranging(plan: Plan) -> Part:
    """Time the order of five documents while steps of the engine run one after the other."""
    texts = DocumentTexts(plan.corpus, _WORDS)
    rng = np.random.default_rng(plan.seed)
    with launch_engine(plan) as engine:
        answering = chain(engine, UnsettledSearch(texts, 400, 0.0), speculate=False)
        stop = threading.Event()

        def keep_busy(first: int) -> None:
            for i in count(first, 2):
                if stop.is_set():
                    return
                asyncio.run(ask(answering, f"Number {i}: who keeps it?"))

        busy = [threading.Thread(target=keep_busy, args=(i,), name=f"bench-busy-{i}") for i in range(2)]
        plan.report("order: filling the engine")
        for thread in busy:
            thread.start()
        try:
            time.sleep(plan.sized(10, 3))  # until the engine has cached orders to choose among
            times, num_reordered = [], 0
            for _ in range(plan.sized(2_000, 100)):
                documents = [texts.document(int(n)) for n in rng.integers(400, size=5)]
                began_s = time.perf_counter()
                arrangement = engine.arrange_documents(documents, "cache_aware")
                times.append(time.perf_counter() - began_s)
                num_reordered += arrangement.is_reordered
                time.sleep(0.002)  # what came of the last order may arrive before the next is timed
        finally:
            stop.set()
            for thread in busy:
                thread.join()
    p50, p99 = percentiles_ms(times)
    note = f"{num_reordered} of {len(times)} reordered"
    return Part("none", (Figure("arrange_p99_ms", p99, p50_ms=p50, p99_ms=p99, note=note),))
