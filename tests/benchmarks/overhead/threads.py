"""How long an event loop stands still for a thread, beside busy processes: for a new one, and for one that was kept."""

from __future__ import annotations

import multiprocessing
import sys
import threading
import time
from collections.abc import Callable

import numpy as np

from ragcache_core.runtime.kept_threads import KeptThreads

_NUM_CALLS = 200
_PAUSE_S = 0.02


def standstills_ms(run: Callable[[Callable[[], None]], object]) -> tuple[list[float], list[float]]:
    """Return how long ``run`` took to return, and how long until what it was given was called."""
    returned, called = [], []
    for _ in range(_NUM_CALLS):
        is_called = threading.Event()
        began_s = time.perf_counter()
        run(is_called.set)
        returned.append((time.perf_counter() - began_s) * 1000)
        is_called.wait()
        called.append((time.perf_counter() - began_s) * 1000)
        time.sleep(_PAUSE_S)
    return returned, called


def main() -> None:
    """Print both, beside as many busy processes as the argument says."""
    num_busy = int(sys.argv[1]) if len(sys.argv) > 1 else 4
    busy = [multiprocessing.Process(target=_burn, daemon=True) for _ in range(num_busy)]
    for process in busy:
        process.start()
    kept = KeptThreads("kept")
    ways: dict[str, Callable[[Callable[[], None]], object]] = {
        "a new thread": lambda call: threading.Thread(target=call, daemon=True).start(),
        "a kept one": kept.run,
    }
    for name, run in ways.items():
        for what, times in zip(("stands still", "is called after"), standstills_ms(run), strict=True):
            middle, late, latest = np.percentile(times, (50, 95, 100))
            print(f"{name}, {what}: {middle:.2f} ms (median), {late:.2f} (95 %), {latest:.2f} at most")
    for process in busy:
        process.terminate()


def _burn() -> None:
    while True:
        pass


if __name__ == "__main__":
    main()
