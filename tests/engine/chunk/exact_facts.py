"""Prints, as a line of JSON for each engine, how far chunk reuse with everything recomputed is from a prefill.

``python -m tests.engine.chunk.exact_facts MODE ...``; a mode is ``DTYPE[,compiled][,process][,tiers][,scattered]``.
Each engine is a process of its own, because vLLM sets process-wide state: a fork, so that vLLM is imported once.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from importlib import import_module
from typing import Any

from tests.support.forks import print_in_forks

ORDERS = [(2, 0, 1), (1, 3, 0, 4), (0, 1, 2)]
ELSEWHERE = (4, 3, 2, 1, 0)
"""No document follows here what it follows in one of ``ORDERS``, or in ``APART``."""
APART = (0, 2, 3, 1)
BETWEEN = (9, 11)


class Measurement:
    """What is asked of one engine, and the facts that are found.

    Args:
        scene: the engine.
        watches: whether it runs in this process, so that its plans can be seen.
    """

    def __init__(self, scene: Any, *, watches: bool) -> None:
        self.scene = scene
        self.facts: dict[str, Any] = {}
        self.expected: dict[tuple[int, ...], Any] = {}
        self.shares: dict[str, list[float]] = {}
        """By fact, of each request's documents, how much of what was not cached exactly was computed."""
        self._plans: list[Any] = []
        if watches:
            plans, plan = scene.scheduling.plans, scene.scheduling.plans.plan
            plans.plan = lambda *args: (self._plans.append(plan(*args)), self._plans[-1])[1]
        for order in [*ORDERS, APART, (0, 2, 1, 3)]:
            self.expected[order] = scene.ask_one(order)
            scene.forget_exact()
        together = scene.ask(*map(scene.request, ORDERS))
        apart = [self.expected[order] for order in ORDERS]
        self.facts["stock, batched"] = max(a.distance(b) for a, b in zip(together, apart, strict=True))
        scene.forget_exact()

    def store_elsewhere(self) -> None:
        """Have every document stored, behind others than in any order that is asked next, and nothing else cached."""
        from tests.engine.chunk.scene import FULL

        self.scene.forget_everything()
        self.scene.ask_one(ELSEWHERE, FULL)
        self.scene.forget_exact()
        self._plans.clear()

    def ask(self, name: str, *orders: tuple[int, ...], reuse: Any) -> None:
        """Note how far the answers to requests that come at the same time are from a prefill's."""
        answers = self.scene.ask(*(self.scene.request(order, reuse) for order in orders))
        self.facts[name] = max(a.distance(self.expected[order]) for a, order in zip(answers, orders, strict=True))
        self.record_plans(name)

    def record_plans(self, name: str) -> None:
        """Note what was planned since the last time."""
        made = [plan for plan in self._plans if plan is not None]
        if made:
            self.shares[name] = [1 - plan.num_reused_tokens / (plan.end - plan.start) for plan in made]
        self._plans.clear()


def measure(dtype: str, *, is_compiled: bool, has_own_process: bool, connector: str) -> dict[str, Any]:
    """Return the facts."""
    from tests.engine.chunk import connectors
    from tests.engine.chunk.scene import FULL, NOTHING, PART, Scene

    scene = Scene(dtype=dtype, is_compiled=is_compiled, connector=connector)
    found = Measurement(scene, watches=not has_own_process)
    facts = found.facts

    found.ask("capturing", ORDERS[2], reuse=FULL)
    found.store_elsewhere()
    found.ask("alone", ORDERS[0], reuse=FULL)
    facts["plain after it"] = scene.ask_one(ORDERS[0]).distance(found.expected[ORDERS[0]])
    scene.forget_exact()
    found.ask("stored behind the same chunks", ORDERS[0], reuse=NOTHING)
    scene.forget_exact()
    expected = scene.ask_one(ORDERS[0], between=BETWEEN)
    scene.forget_exact()
    for name in ("behind other text between the same chunks", "behind the same text between them"):
        facts[name] = scene.ask_one(ORDERS[0], FULL, between=BETWEEN).distance(expected)
        found.record_plans(name)
        scene.forget_exact()

    found.store_elsewhere()
    found.ask("batched", *ORDERS, reuse=FULL)
    facts["plain after them"] = scene.ask_one(ORDERS[1]).distance(found.expected[ORDERS[1]])
    found.store_elsewhere()
    scene.ask_one(ORDERS[1][:2])
    found.ask("behind a prefix hit", ORDERS[1], reuse=FULL)

    for name in ("plain after an approximate one", "and where only the GPU has forgotten"):
        found.store_elsewhere()
        found.ask("approximate", APART, reuse=PART)
        if "GPU" in name:
            scene.forget_exact(keeps_host=True)
        facts[name] = scene.ask_one(APART).distance(found.expected[APART])
    scene.forget_exact()
    for name, spans in {"overlapping": [(40, 101), (90, 180)], "outside": [(40, 101), (200, 4000)]}.items():
        lying = scene.ask_one(ORDERS[1], NOTHING, spans=spans)
        facts[f"spans that lie, {name}"] = lying.distance(found.expected[ORDERS[1]])
        scene.forget_exact()
    if not has_own_process:
        if "RAGCache" in connector:
            facts |= _behind_host_memory(found)
        scene.scheduling._max_step_tokens = 50
        found.store_elsewhere()
        found.ask("sliced", ORDERS[1], reuse=FULL)
        found.store_elsewhere()
        found.ask("sliced and batched", *ORDERS, reuse=FULL)
        facts["left over"] = len(scene.scheduling._requests)
        facts["captured"] = scene.scheduling.library.counters.num_captured_chunks
        facts["reused"] = scene.scheduling.library.counters.num_reused_chunks
        scattered = connectors.ScatteredDocumentConnector
        facts["scattered"] = scattered.calls["attention"]
        if scattered.prefills:
            facts["scattered, in part"] = _in_part(scene, *scattered.prefills)
    return {**facts, "computed": found.shares}


def _in_part(scene: Any, prefill: Any) -> float:
    """Return how far selected tokens by the attention of scattered rows are from the same ones by vLLM's own."""
    from tests.engine.chunk.scene import PART

    order = (4, 2, 3, 1)
    scene.ask_one(order, PART)  # from now on the same documents are stored
    answers = []
    for scattered in (prefill.scattered, None):
        prefill.scattered = scattered
        scene.forget_exact()
        answers.append(scene.ask_one(order, PART))
    return float(answers[0].distance(answers[1]))


def _behind_host_memory(found: Measurement) -> dict[str, Any]:
    """Return what becomes of prompts whose beginning comes from host memory, before chunks are reused."""
    from ragcache_core.types import Tier
    from tests.engine.chunk.scene import FULL, NOTHING

    scene, order = found.scene, (0, 2, 1, 3)
    facts: dict[str, Any] = {}
    for name, reuse in {"computed": FULL, "reused": NOTHING}.items():
        if reuse is FULL:
            found.store_elsewhere()
        scene.forget_exact()
        scene.ask_one((0, 5))
        for number in range(6):  # a store is on its way until the steps after it
            scene.ask_one((7,), question=number)
        scene.forget_exact(keeps_host=True)
        counters = scene.scheduler.connector.controller.counters
        num_before = counters.num_tokens_by_tier[Tier.HOST]
        facts[f"{name} behind host memory"] = scene.ask_one(order, reuse).distance(found.expected[order])
        facts[f"tokens from host memory, {name}"] = counters.num_tokens_by_tier[Tier.HOST] - num_before
    return facts


def _facts(mode: str) -> dict[str, Any]:
    dtype, *how = mode.split(",")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1" if "process" in how else "0"
    connector = "EagerRAGCacheConnector" if "tiers" in how else "EagerDocumentConnector"
    connector = "ScatteredDocumentConnector" if "scattered" in how else connector
    return measure(dtype, is_compiled="compiled" in how, has_own_process="process" in how, connector=connector)


if __name__ == "__main__":
    import_module("tests.engine.chunk.scene")  # and vLLM
    print_in_forks([partial(_facts, mode) for mode in sys.argv[1:]])
