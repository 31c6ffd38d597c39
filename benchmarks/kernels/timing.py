"""How long something takes on a device: CUDA graphs and events, with a cold cache."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

_FLUSHED_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Timing:
    """The median of some repetitions, how far they lie apart as a share of it, and whether it was a CUDA graph."""

    median_s: float
    spread: float
    is_replayed: bool = False


class Stopwatch:
    """Times calls on one device; on a CPU by the clock, to try the check itself there."""

    def __init__(self, device: torch.device, num_repeats: int = 11) -> None:
        self.device = device
        self.num_repeats = num_repeats
        self._is_cuda = device.type == "cuda"
        # Written before each repetition: no timed call then finds its data in the L2 cache.
        self._flushed = torch.empty(_FLUSHED_BYTES if self._is_cuda else 1, dtype=torch.uint8, device=device)

    def time(self, call: Callable[[], object], *, can_be_captured: bool = True) -> Timing:
        """Return the device's time for ``call``, replayed as a CUDA graph: launching it costs nothing.

        ``can_be_captured``: whether it never waits for the device. If it does, or cannot be captured for another
        reason, it is called directly.
        """
        for _ in range(3 if self._is_cuda else 1):
            call()
        self._wait()
        replay: Callable[[], Any] = call
        graph = self._captured(call) if self._is_cuda and can_be_captured else None
        if graph is not None:
            replay = graph.replay
        times = [self._once(replay) for _ in range(self.num_repeats)]
        median = statistics.median(times)
        return Timing(median, (max(times) - min(times)) / median if median else 0.0, graph is not None)

    def _once(self, call: Callable[[], object]) -> float:
        if not self._is_cuda:
            began_s = time.perf_counter()
            call()
            return time.perf_counter() - began_s
        self._flushed.zero_()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000

    def _wait(self) -> None:
        if self._is_cuda:
            torch.cuda.synchronize()

    def _captured(self, call: Callable[[], object]) -> Any:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                call()
        except RuntimeError:
            graph = None
        self._wait()
        return graph
