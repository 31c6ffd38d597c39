"""Prints, as JSON, what became of plain requests among approximate ones.

Arrivals, aborts, evictions and preemptions are random.

``python -m tests.integration_tests.chunk.interleaving_facts SEED NUM_ROUNDS DIRECTORY``; the directory is the disk's,
and may be another run's.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

ORDERS = [(0, 1, 2), (2, 0, 1), (3, 1, 0, 4), (4, 3), (5, 6, 1, 0), (6, 2, 5)]
BETWEEN = [(7,), (9, 11)]
_MAX_STEPS_BEFORE_ABORT = 6
_PREEMPTION_RATE = 0.04


def _preempt_all(scheduler: Any) -> int:
    """Have vLLM take back the blocks of all running requests, as it does when it runs out of them; return how many.

    As in its ``reset_prefix_cache``, but what they computed stays in the cache, to be found again.
    """
    num_running = len(scheduler.running)
    while scheduler.running:
        scheduler._preempt_request(scheduler.running.pop(), time.monotonic())
    scheduler.prev_step_scheduled_req_ids.clear()
    return num_running


def measure(seed: int, num_rounds: int, directory: Path) -> dict[str, Any]:
    """Return the facts."""
    from tests.integration_tests.chunk.scene import FULL, NOTHING, PART, WHOLLY, Scene, answer_of

    scene = Scene(
        connector="EagerRAGCacheConnector",
        num_blocks=66,
        host_bytes=24 * 65536,
        max_num_batched_tokens=256,
        chunks={"host_bytes": 18 * 65536, "disk_bytes": 4 << 20, "directory": str(directory)},
    )
    rng = random.Random(seed)
    num_restored = scene.scheduling.library.num_variants
    asked = list(itertools.product(ORDERS, (0, 1), BETWEEN))
    expected = {}
    for order, question, between in asked:
        truth = scene.ask_one(order, False, question=question, between=between, max_tokens=24)
        expected[order, question, between] = truth
        scene.forget_exact()
    engine = scene.llm.llm_engine
    counts = {"plain": 0, "approximate": 0, "full": 0, "aborted": 0, "preempted": 0}
    worst = worst_full = 0.0
    for number in range(num_rounds):
        doomed: dict[str, int] = {}
        waiting: dict[str, tuple[Any, Any]] = {}
        for i in range(rng.randint(1, 5)):
            reuse = rng.choice([False, False, FULL, WHOLLY, NOTHING, PART])
            order, question, between = rng.choice(asked)
            name = f"{number}-{i}"
            num_tokens = rng.choice([1, 6, 24])
            prompt, sampling = scene.request(order, reuse, question=question, between=between, max_tokens=num_tokens)
            engine.add_request(name, prompt, sampling)
            waiting[name] = (reuse, expected[order, question, between])
            if rng.random() < 0.2:
                doomed[name] = rng.randint(0, _MAX_STEPS_BEFORE_ABORT)
        num_steps = 0
        while engine.has_unfinished_requests():
            for name in [name for name, at in doomed.items() if at == num_steps and name in waiting]:
                engine.abort_request([name])
                del waiting[name]
                counts["aborted"] += 1
            for output in engine.step():
                if output.finished and output.request_id in waiting:
                    reuse, truth = waiting.pop(output.request_id)
                    distance = answer_of(output.outputs[0]).distance(truth, is_prefix=True)
                    if reuse is False:
                        worst, counts["plain"] = max(worst, distance), counts["plain"] + 1
                    elif reuse is FULL or reuse is WHOLLY:
                        worst_full, counts["full"] = max(worst_full, distance), counts["full"] + 1
                    else:
                        counts["approximate"] += 1
            num_steps += 1
            if rng.random() < _PREEMPTION_RATE:
                counts["preempted"] += _preempt_all(scene.scheduler)
        if rng.random() < 0.1:
            scene.forget_exact()
    library = scene.scheduling.library
    return {
        "worst plain": worst,
        "worst with everything computed": worst_full,
        "requests": counts,
        "chunks": library.counters.to_dict(),
        "restored": num_restored,
        "left over": len(scene.scheduling._requests) + len(scene.scheduler.connector.controller.private_from),
        "pinned": len(library._pins) + len(library._reservations),
        "held blocks": scene.scheduler.kv_cache_manager.block_pool.num_gpu_blocks
        - 1
        - scene.scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
    }


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    seed, num_rounds, directory = sys.argv[1:]
    print(json.dumps(measure(int(seed), int(num_rounds), Path(directory))))
