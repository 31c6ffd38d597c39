"""Load KV layer by layer with a slow copy stream, and print what came of it as JSON.

``python -m tests.engine.vllm_plugin.layer_load_facts DIRECTORY``: a tiny model is asked by plain vLLM without a prefix
cache, by an engine whose copies are late, and by one whose layers do not wait for them.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any
from unittest import mock

import numpy as np

from ragcache_core.types import Tier
from ragcache_core.vllm_plugin.offload import spec
from ragcache_core.vllm_plugin.offload.copy_scheduler import CopyScheduler
from ragcache_core.vllm_plugin.offload.cpu_worker import CopyingWorker
from ragcache_core.vllm_plugin.offload.layer_loads import LayerLoadWorker
from tests.engine.vllm_plugin.family_facts import Family, differences, in_batches, make, requests

_LATE_S = 0.005
_POISON = 0xFF
"""Such bytes are not a number in each floating-point format."""


class LateEvent:
    """A point in a late stream."""

    def __init__(self) -> None:
        self.passed = Event()
        self.at_s = 0.0

    def wait(self) -> None:
        assert self.passed.wait(timeout=60)

    def is_done(self) -> bool:
        return self.passed.is_set()

    def seconds_since(self, other: Any) -> float:
        return self.at_s - float(other.at_s)

    def set(self) -> None:
        self.at_s = time.perf_counter()
        self.passed.set()


class LateCopies:
    """A stand-in for the copy stream of a GPU: copies run on a thread, each layer late.

    Until then the blocks hold bytes that are no numbers, so that a layer that does not wait computes none.
    """

    def __init__(self, worker: CopyingWorker) -> None:
        self._worker = worker
        self._work: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self.num_copied = 0
        Thread(target=self._run, daemon=True).start()

    def begin(self) -> None:
        """Do nothing: the CPU has computed what was asked before."""

    def copy(self, tensor: int, rows: np.ndarray, blocks: np.ndarray) -> int:
        self._worker._engine[tensor][blocks] = _POISON - 256
        self.num_copied += 1

        def copy_late() -> None:
            time.sleep(_LATE_S)
            self._worker.copy_in(tensor, rows, blocks)

        self._work.put(copy_late)
        return len(blocks) * int(self._worker._engine[tensor].shape[1])

    def record(self) -> LateEvent:
        event = LateEvent()
        self._work.put(event.set)
        return event

    def _run(self) -> None:
        while True:
            self._work.get()()


def _ask(engine: Family, asked: Sequence[Any]) -> list[Any]:
    """Ask one after another, and then in batches."""
    return [*(answer for each in asked for answer in engine.ask([each])), *in_batches(engine, asked)]


def measure(directory: Path) -> dict[str, Any]:
    """Return what came of each engine."""
    model = make("qwen3_moe", directory)
    plain = Family(model, num_blocks=600)
    asked = requests(1, 30)
    expected = _ask(plain, asked)
    block_bytes = plain.block_bytes
    plain.close()
    facts: dict[str, Any] = {}
    for name, waits in (("late", True), ("unawaited", False)):
        with (
            mock.patch.object(spec, "PlainCopies", LateCopies),
            mock.patch.object(LayerLoadWorker, "wait", LayerLoadWorker.wait if waits else lambda *_: None),
            mock.patch.object(
                CopyScheduler, "load_by_layer", autospec=True, side_effect=CopyScheduler.load_by_layer
            ) as begun,
        ):
            engine = Family(model, num_blocks=41, host_bytes=120 * block_bytes)
            connector = engine.scheduler.connector
            answers = _ask(engine, asked)
            different, worst = differences(answers, expected)
            counters = connector.controller.counters
            facts[name] = {
                "different": different,
                "worst": worst,
                "from host": counters.num_tokens_by_tier[Tier.HOST],
                "layer-wise loads": begun.call_count,
                "loads left": connector.copies.num_jobs,
            }
            engine.close()
    return facts


if __name__ == "__main__":
    logging.captureWarnings(True)
    with mock.patch("gc.unfreeze"):
        print(json.dumps(measure(Path(sys.argv[1]))))
