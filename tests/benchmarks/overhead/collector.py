"""How long Python's collector stops an engine core whose knowledge tree grows: ``python -m ...overhead.collector``."""

from __future__ import annotations

import gc
import sys
import time
from hashlib import sha256

from ragcache_core.memory import collect_rarely, freeze_survivors
from ragcache_core.policy import make_policy
from ragcache_core.tree import KnowledgeTree, PathSegment

_BLOCKS, _BLOCK_TOKENS = 8, 16


def longest_stop_ms(num_nodes: int, *, freezes: bool) -> float:
    """Return the longest collection, in the thread's time, while a tree grows to ``num_nodes`` documents."""
    stops_ms: list[float] = []
    began_s = 0.0

    def listen(phase: str, info: dict[str, int]) -> None:
        nonlocal began_s
        if phase == "start":
            began_s = time.thread_time()
        else:
            stops_ms.append((time.thread_time() - began_s) * 1000)

    num_tokens = num_nodes * _BLOCKS * _BLOCK_TOKENS
    tree = KnowledgeTree(make_policy("tournament"), ghost_size=num_nodes, shadow_tokens=num_tokens)
    gc.collect()
    gc.freeze()  # as vLLM does when its engine has started
    gc.callbacks.append(listen)
    try:
        for number in range(num_nodes):
            keys = [sha256(f"{number} {block}".encode()).digest() for block in range(_BLOCKS)]
            path = tree.insert([PathSegment(keys, _BLOCKS * _BLOCK_TOKENS, f"document {number}")])
            tree.record_access(path, num_hit_units=0, cost_per_token_s=1e-3)
            if freezes:
                freeze_survivors()
    finally:
        gc.callbacks.remove(listen)
        gc.unfreeze()
    return max(stops_ms, default=0.0)


def main() -> None:
    """Print the longest collection with and without freezing, for as many nodes as the argument says."""
    num_nodes = int(sys.argv[1]) if len(sys.argv) > 1 else 150_000
    collect_rarely()
    for freezes in (False, True):
        stop_ms = longest_stop_ms(num_nodes, freezes=freezes)
        print(f"{num_nodes:,} nodes, {'frozen now and then' if freezes else 'as they are'}: {stop_ms:.1f} ms")


if __name__ == "__main__":
    main()
