"""What it takes to forget documents: the pass over the tree on the scheduler's thread, and the erasure on the disk.

Usage: python -m tests.benchmarks.tiers.forgetting [--documents N] [--chunks N] [--directory DIR]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from ragcache_core.chunkstore import ChunkNote, ChunkStore, ChunkWrite
from ragcache_core.policy import PrefillCostModel
from ragcache_core.types import PromptSegment, SegmentKind, Tier
from ragcache_core.vllm_plugin.cache.controller import CacheController
from ragcache_core.vllm_plugin.settings import PluginSettings
from ragcache_core.wire import RequestMetadata

BLOCK, BLOCKS = 16, 8
CHUNK_BYTES = 64 << 10


def controller_with(num_documents: int) -> CacheController:
    """Return a tree of prompts of two documents of 8 blocks each, all of it on GPU and host."""
    it = CacheController(
        PluginSettings(policy="pgdsf"),
        tokens_per_block=BLOCK,
        shadow_blocks=8,
        prefill_cost=PrefillCostModel.default(),
    )
    for number in range(num_documents // 2):
        keys = [b"%d %d" % (number, unit) for unit in range(2 * BLOCKS)]
        ends = (BLOCKS * BLOCK, 2 * BLOCKS * BLOCK)
        names = (f"{number}a", f"{number}b")
        segments = tuple(
            PromptSegment(SegmentKind.DOCUMENT, start, end, name)
            for start, end, name in zip((0, ends[0]), ends, names, strict=True)
        )
        it.on_new_request("r", RequestMetadata(segments), keys, ends[1], 0.0)
        it.on_admitted("r", keys, {}, 0.0)
        it.on_finished("r")
        for tier in (Tier.GPU, Tier.HOST):
            for key in keys:
                at = it.tree.locate(key)
                assert at is not None
                it.tree.add(at.node, 1 << at.unit, tier)
    return it


def took_ms(call: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    call()
    return 1000 * (time.perf_counter() - began_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=20_000)
    parser.add_argument("--chunks", type=int, default=16_000)
    parser.add_argument("--directory", type=Path)
    given = parser.parse_args()
    it = controller_with(given.documents)
    one = statistics.median(took_ms(partial(it.forget, {f"{number}a"})) for number in range(20))
    many = took_ms(lambda: it.forget({f"{number}a" for number in range(100, 1100)}))
    print(f"tree of {given.documents} documents: {one:.1f} ms for 1, {many:.1f} ms for 1,000")
    with tempfile.TemporaryDirectory(dir=given.directory) as folder:
        with ChunkStore(
            folder, {"model": "m"}, chunk_bytes=CHUNK_BYTES, capacity_bytes=given.chunks * CHUNK_BYTES
        ) as store:
            keys = [b"%032d" % number for number in range(given.chunks)]
            payload = bytes(CHUNK_BYTES)
            for first in range(0, len(keys), 64):
                store.write_many([ChunkWrite(k, payload, ChunkNote(None, "d", 0)) for k in keys[first : first + 64]])
            for num_chunks in (8, 800, 8000):
                gone, keys = keys[:num_chunks], keys[num_chunks:]
                ms = took_ms(partial(store.erase, gone))
                print(f"store of {given.chunks} chunks of 64 KiB: {ms:.0f} ms to erase {num_chunks}")


if __name__ == "__main__":
    main()
