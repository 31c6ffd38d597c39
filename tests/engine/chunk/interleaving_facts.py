"""Prints, as JSON, what became of plain requests among approximate ones.

Arrivals, aborts, evictions and preemptions are random.

``python -m tests.engine.chunk.interleaving_facts SEED NUM_ROUNDS DIRECTORY``; the directory is the disks',
and may be another run's. The right answers are those of requests with a salt, which find nothing that is cached.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.engine.chunk.scene import Answer, Scene

ORDERS = [(0, 1, 2), (2, 0, 1), (3, 1, 0, 4), (4, 3), (5, 6, 1, 0), (6, 2, 5)]
BETWEEN = [(7,), (9, 11)]
_MAX_STEPS_BEFORE_ABORT = 6
_PREEMPTION_RATE = 0.04
_TURN = (8, 21, 34)
"""What is asked behind an answer."""

Prompt = tuple[tuple[int, ...], int, tuple[int, ...]]
"""Documents in order, a question, and what stands between the documents."""


def _preempt_all(scheduler: Any) -> int:
    """Have vLLM take back the blocks of all running requests, as it does when it runs out of them; return how many.

    As in its ``reset_prefix_cache``, but what they computed stays in the cache, to be found again.
    """
    num_running = len(scheduler.running)
    while scheduler.running:
        scheduler._preempt_request(scheduler.running.pop(), time.monotonic())
    scheduler.prev_step_scheduled_req_ids.clear()
    return num_running


class Interleaving:
    """Requests of all kinds at an engine, and the worst that became of them."""

    def __init__(self, scene: Scene, seed: int) -> None:
        from ragcache_core.types import Tier

        self.scene = scene
        prompts: list[Prompt] = list(itertools.product(ORDERS, (0, 1), BETWEEN))
        from_disk = {prompt: self._ask(prompt) for prompt in prompts}  # where an engine has left something there
        self.num_disk_tokens = scene.scheduler.connector.controller.counters.num_tokens_by_tier[Tier.DISK]
        self.expected = dict(zip(prompts, self._truths(prompts), strict=True))
        self.counts = dict.fromkeys(["plain", "approximate", "full", "aborted", "preempted"], 0)
        self.worst = max(from_disk[prompt].distance(truth) for prompt, truth in self.expected.items())
        self.worst_full = self.worst_behind = 0.0
        self.num_behind = 0
        self._rng = random.Random(seed)
        self._rng_of_steps = random.Random(seed)  # how many there are depends on the disk; what arrives must not

    def run_round(self, number: int) -> None:
        """Have some requests arrive, abort some and perhaps preempt all, and see the results."""
        from tests.engine.chunk.scene import FULL, NOTHING, PART, WHOLLY

        rng, engine = self._rng, self.scene.llm.llm_engine
        doomed: dict[str, int] = {}
        waiting: dict[str, tuple[Any, Prompt]] = {}
        for i in range(rng.randint(1, 5)):
            reuse = rng.choice([False, False, FULL, WHOLLY, NOTHING, PART])
            prompt = order, question, between = rng.choice(list(self.expected))
            name, num_tokens = f"{number}-{i}", rng.choice([1, 6, 24])
            request = self.scene.request(order, reuse, question=question, between=between, max_tokens=num_tokens)
            engine.add_request(name, *request)
            waiting[name] = (reuse, prompt)
            if rng.random() < 0.2:
                doomed[name] = rng.randint(0, _MAX_STEPS_BEFORE_ABORT)
        approximate = None
        for num_steps in itertools.count():
            if not engine.has_unfinished_requests():
                break
            for name in [name for name, at in doomed.items() if at == num_steps and name in waiting]:
                engine.abort_request([name])
                del waiting[name]
                self.counts["aborted"] += 1
            for name, answer in self._step():
                if name in waiting:
                    approximate = self._note(*waiting.pop(name), answer) or approximate
            if self._rng_of_steps.random() < _PREEMPTION_RATE:
                self.counts["preempted"] += _preempt_all(self.scene.scheduler)
        if approximate is not None:
            self._go_on(*approximate)
        if rng.random() < 0.1:
            self.scene.forget_exact(keeps_host=True)

    def _request(self, prompt: Prompt, answer: tuple[int, ...] = (), salt: str | None = None) -> Any:
        """Return a plain request; with a salt of its own, one that finds nothing that is cached."""
        order, question, between = prompt
        return self.scene.request(
            order, False, question=question, between=between, answer=answer, salt=salt, max_tokens=24
        )

    def _ask(self, prompt: Prompt) -> Answer:
        return self.scene.ask(self._request(prompt))[0]

    def _truths(self, prompts: Sequence[Prompt]) -> Iterator[Answer]:
        """Yield the answers that are computed, a few at a time, which the memory of KV has room for."""
        requests = [self._request(prompt, salt=repr(prompt)) for prompt in prompts]
        for i in range(0, len(requests), 4):
            yield from self.scene.ask(*requests[i : i + 4])

    def _step(self) -> Iterator[tuple[str, Answer]]:
        from tests.engine.chunk.scene import answer_of

        for output in self.scene.llm.llm_engine.step():
            if output.finished:
                yield output.request_id, answer_of(output.outputs[0])

    def _note(self, reuse: Any, prompt: Prompt, answer: Answer) -> tuple[Prompt, Answer] | None:
        """Note what became of a request; return it if it was approximate."""
        from tests.engine.chunk.scene import FULL, WHOLLY

        distance = answer.distance(self.expected[prompt], is_prefix=True)
        if reuse is False:
            self.worst, self.counts["plain"] = max(self.worst, distance), self.counts["plain"] + 1
        elif reuse is FULL or reuse is WHOLLY:
            self.worst_full, self.counts["full"] = max(self.worst_full, distance), self.counts["full"] + 1
        else:
            self.counts["approximate"] += 1
            return prompt, answer
        return None

    def _go_on(self, prompt: Prompt, answer: Answer) -> None:
        """Ask on behind an approximate answer, whose blocks hold approximate KV, plainly."""
        behind = (*answer.tokens, *_TURN)
        plain, truth = self.scene.ask(
            self._request(prompt, behind), self._request(prompt, behind, salt=repr((prompt, behind)))
        )
        self.worst_behind, self.num_behind = max(self.worst_behind, plain.distance(truth)), self.num_behind + 1


def measure(seed: int, num_rounds: int, directory: Path) -> dict[str, Any]:
    """Return the facts."""
    from ragcache_core.types import Tier
    from tests.engine.chunk.scene import Scene

    scene = Scene(
        connector="EagerRAGCacheConnector",
        num_blocks=66,
        host_bytes=24 * 65536,
        max_num_batched_tokens=256,
        cache={"host_bytes": 18 * 65536, "disk_bytes": 4 << 20, "directory": str(directory)},
        disk={"directory": str(directory), "capacity_bytes": 6 << 20},
    )
    num_restored = scene.scheduling.library.num_variants
    asked = Interleaving(scene, seed)
    for number in range(num_rounds):
        asked.run_round(number)
    library, controller = scene.scheduling.library, scene.scheduler.connector.controller
    return {
        "requests": asked.counts,
        "chunks": library.counters.to_dict(),
        "restored": num_restored,
        "tokens from disk at the start": asked.num_disk_tokens,
        "is disk in service": controller.tiers[Tier.DISK].is_enabled,
        "left over": len(scene.scheduling._requests) + (not controller.is_idle),
        "pinned": len(library._pins) + len(library._reservations),
        "held blocks": scene.scheduler.kv_cache_manager.block_pool.num_gpu_blocks
        - 1
        - scene.scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
        "conversations": asked.num_behind,
        "worst plain": asked.worst,
        "worst with everything computed": asked.worst_full,
        "worst behind an approximate answer": asked.worst_behind,
    }


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    seed, num_rounds, directory = sys.argv[1:]
    print(json.dumps(measure(int(seed), int(num_rounds), Path(directory))))
