"""Prints, as JSON, how far chunk reuse with everything recomputed is from a prefill; one engine a process.

``python -m tests.integration_tests.chunk.exact_facts DTYPE [compiled] [process] [tiers] [scattered]``
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

ORDERS = [(2, 0, 1), (1, 3, 0, 4), (0, 1, 2)]


def measure(dtype: str, *, is_compiled: bool, has_own_process: bool, connector: str) -> dict[str, Any]:
    """Return the facts."""
    from tests.integration_tests.chunk import connectors
    from tests.integration_tests.chunk.scene import FULL, NOTHING, PART, Scene

    scene = Scene(dtype=dtype, is_compiled=is_compiled, connector=connector)
    facts: dict[str, Any] = {}
    expected = {}
    for order in ORDERS:
        expected[order] = scene.ask_one(order)
        scene.forget_exact()
    facts["capturing"] = scene.ask_one((0, 1, 2), FULL).distance(expected[0, 1, 2])
    scene.forget_exact()
    facts["alone"] = scene.ask_one((2, 0, 1), FULL).distance(expected[2, 0, 1])
    facts["plain after it"] = scene.ask_one((2, 0, 1)).distance(expected[2, 0, 1])
    scene.forget_exact()
    facts["with a new chunk"] = scene.ask_one((1, 3, 0, 4), FULL).distance(expected[1, 3, 0, 4])
    scene.forget_exact()
    together = scene.ask(*(scene.request(order, FULL) for order in ORDERS), scene.request(ORDERS[1]))
    facts["batched"] = max(a.distance(expected[o]) for a, o in zip(together, [*ORDERS, ORDERS[1]], strict=True))
    facts["behind a prefix hit"] = scene.ask_one((1, 3, 0, 4), FULL).distance(expected[1, 3, 0, 4])
    scene.forget_exact()
    facts["stored behind the same chunks"] = scene.ask_one((2, 0, 1), NOTHING).distance(expected[2, 0, 1])
    facts["approximate"] = scene.ask_one((4, 2, 3, 1), PART).distance(scene.ask_one((4, 2, 3, 1)))
    scene.forget_exact()
    between = (9, 11)
    expected_between = scene.ask_one((2, 0, 1), between=between)
    scene.forget_exact()
    for name in ("behind other text between the same chunks", "behind the same text between them"):
        facts[name] = scene.ask_one((2, 0, 1), FULL, between=between).distance(expected_between)
        scene.forget_exact()
    for name, spans in {"overlapping": [(40, 101), (90, 180)], "outside": [(40, 101), (200, 4000)]}.items():
        lying = scene.ask_one((1, 3, 0, 4), NOTHING, spans=spans)
        facts[f"spans that lie, {name}"] = lying.distance(expected[1, 3, 0, 4])
        scene.forget_exact()
    facts["plain after an approximate one"] = scene.ask_one((1, 3, 0, 4)).distance(expected[1, 3, 0, 4])
    if not has_own_process:
        if "RAGCache" in connector:
            facts |= _behind_host_memory(scene)
        scene.forget_exact()
        scene.scheduling._max_step_tokens = 50
        facts["sliced"] = scene.ask_one((1, 3, 0, 4), FULL).distance(expected[1, 3, 0, 4])
        scene.forget_exact()
        together = scene.ask(*(scene.request(order, FULL) for order in ORDERS))
        facts["sliced and batched"] = max(a.distance(expected[o]) for a, o in zip(together, ORDERS, strict=True))
        facts["left over"] = len(scene.scheduling._requests)
        facts["captured"] = scene.scheduling.library.counters.num_captured_chunks
        facts["reused"] = scene.scheduling.library.counters.num_reused_chunks
        scattered = connectors.ScatteredDocumentConnector
        facts["scattered"] = scattered.calls["attention"]
        if scattered.prefills:
            facts["scattered, in part"] = _in_part(scene, *scattered.prefills)
    return facts


def _in_part(scene: Any, prefill: Any) -> float:
    """Return how far selected tokens by the attention of scattered rows are from the same ones by vLLM's own."""
    from tests.integration_tests.chunk.scene import PART

    order = (4, 2, 3, 1)
    scene.ask_one(order, PART)  # from now on the same documents are stored
    answers = []
    for scattered in (prefill.scattered, None):
        prefill.scattered = scattered
        scene.forget_exact()
        answers.append(scene.ask_one(order, PART))
    return float(answers[0].distance(answers[1]))


def _behind_host_memory(scene: Any) -> dict[str, Any]:
    """Return what becomes of prompts whose beginning comes from host memory, before chunks are reused."""
    from ragcache_core.types import Tier
    from tests.integration_tests.chunk.scene import FULL, NOTHING

    scene.forget_exact()
    expected = scene.ask_one((0, 2, 1, 3))
    facts: dict[str, Any] = {}
    for name, reuse in {"computed": FULL, "reused": NOTHING}.items():
        scene.forget_exact()
        scene.ask_one((0, 5))
        for number in range(6):  # a store is on its way until the steps after it
            scene.ask_one((7,), question=number)
        scene.forget_exact(keeps_host=True)
        counters = scene.scheduler.connector.controller.counters
        num_before = counters.num_tokens_by_tier[Tier.HOST]
        facts[f"{name} behind host memory"] = scene.ask_one((0, 2, 1, 3), reuse).distance(expected)
        facts[f"tokens from host memory, {name}"] = counters.num_tokens_by_tier[Tier.HOST] - num_before
    return facts


if __name__ == "__main__":
    dtype, *how = sys.argv[1:]
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1" if "process" in how else "0"
    connector = "EagerRAGCacheConnector" if "tiers" in how else "EagerDocumentConnector"
    connector = "ScatteredDocumentConnector" if "scattered" in how else connector
    facts = measure(dtype, is_compiled="compiled" in how, has_own_process="process" in how, connector=connector)
    print(json.dumps(facts))
