"""What a source that nobody knows yet costs a busy engine if its stages are always wrong: counted, without an engine.

An engine that is a queue answers one request after the other, in 50 ms each. Searches of 200 ms arrive at 95 % of what
it can serve, each stage of which names other documents. The baseline trusts every stage for good, as Algorithm 2 does.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from statistics import fmean
from typing import Any

from ragcache_core.client.pipeline.run import run_pipeline
from ragcache_core.client.speculation.client import EngineLoad
from ragcache_core.speculation import SettlingHistory
from ragcache_core.types import Document, RetrievalUpdate
from tests.benchmarks.report import Figure, Part, Plan
from tests.benchmarks.searches import CUTS
from tests.unit.client.pipeline_scene import ScriptedSpeculator, Sent

_SERVICE_S, _SEARCH_S, _LOAD = 0.05, 0.2, 0.95
_LOAD_S = 0.004
_MAX_PREFILL_BS = 4


def measure_first_searches(plan: Plan) -> Part:
    """Ask with a new history and with none, and count what is sent ahead for nothing."""
    count, runs = plan.sized(120, 10), plan.sized(6, 1)

    async def both() -> list[list[int]]:
        sides: tuple[Callable[[], SettlingHistory | None], ...] = (SettlingHistory, lambda: None)
        return [list(await asyncio.gather(*(_run(new(), count, seed) for seed in range(runs)))) for new in sides]

    plan.report("first searches")
    ours, trusting = asyncio.run(both())
    note = f"of {count} questions, means of {runs} runs: {', '.join(map(str, ours))}"
    figure = Figure("unknown_source_starts", round(fmean(ours), 2), round(fmean(trusting), 2), note=note)
    return Part("20 requests", (figure,), {"ours": ours, "trusting": trusting})


class _Queue:
    """An engine that answers one request after the other."""

    def __init__(self, speculator: ScriptedSpeculator) -> None:
        self._speculator = speculator
        self._num_waiting = 0
        self._serving = asyncio.Lock()

    async def acan_speculate(self) -> bool:
        return True

    async def apending_prefills(self) -> EngineLoad | None:
        await asyncio.sleep(_LOAD_S)  # the way there and back
        has_room = self._num_waiting == 0 and len(self._speculator.alive()) < _MAX_PREFILL_BS
        return EngineLoad(self._num_waiting, _MAX_PREFILL_BS, has_room)

    async def serve(self) -> None:
        self._num_waiting += 1
        async with self._serving:
            await asyncio.sleep(_SERVICE_S)  # a prefill
        self._num_waiting -= 1


async def _run(history: SettlingHistory | None, count: int, seed: int) -> int:
    rng, speculator = random.Random(seed), ScriptedSpeculator()
    engine: Any = _Queue(speculator)

    async def ask() -> None:
        await run_pipeline(_unsettled(rng), engine, speculator, history=history)
        await engine.serve()

    async with asyncio.TaskGroup() as tasks:
        for i in range(20 + count):
            await asyncio.sleep(rng.expovariate(_LOAD / _SERVICE_S))  # arrivals of an open loop
            tasks.create_task(engine.serve() if i < 20 else ask())
    sent: Sequence[Sent] = speculator.sent
    return len(sent)


async def _unsettled(rng: random.Random) -> AsyncGenerator[RetrievalUpdate, None]:
    began_s = time.perf_counter()
    for stage, cut in enumerate(CUTS):
        await asyncio.sleep(max(0.0, began_s + cut * _SEARCH_S - time.perf_counter()))  # the search
        documents = tuple(Document(f"{rng.random()}", "text") for _ in range(2))
        yield RetrievalUpdate(documents, (0.0, 1.0), stage, is_final=cut == CUTS[-1])
