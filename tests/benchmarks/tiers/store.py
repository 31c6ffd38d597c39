"""What the disk tier's store costs and is worth: killed writers, and a start with a million chunks."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from ragcache_core.chunkstore import ChunkNote, ChunkStore, ChunkWrite
from ragcache_core.chunkstore.regrowing import regrow
from ragcache_core.policy import make_policy
from ragcache_core.tree import KnowledgeTree
from ragcache_core.types import Tier
from tests.benchmarks.report import Figure, Part, Plan
from tests.benchmarks.tiers.crash_points import run_killpoints

_IDENTITY = {"model": "bench-tiers"}
_CHUNK_BYTES = 64  # what a payload holds does not matter to the index; a slot takes a page all the same
_CHUNKS_PER_DOCUMENT = 8
_BATCH = 8_000
_BLOCK_TOKENS = 16
_NUM_STARTS = 3


def measure_killpoints(plan: Plan) -> Part:
    """Kill writers of a store at any instant, and look for what they had acknowledged."""
    num_points = plan.sized(1_000, 5)
    plan.report(f"killpoints: {num_points:,} writers killed")
    with tempfile.TemporaryDirectory(prefix="ragcache-bench-") as folder:
        result = run_killpoints(Path(folder), num_points, plan.seed)
    note = f"{result.num_in_flight} of them in the middle of a change: {result.num_shrinking} opened the store with "
    note += f"less room, {result.num_clearing} emptied it"
    figures = (
        Figure("killpoints", result.num_points, note=note),
        Figure("killpoint_lost", result.num_lost, note="chunks that were acknowledged and gone"),
        Figure("killpoint_wrong", result.num_wrong, note="chunks with other bytes, or back from deletion"),
    )
    return Part("none", figures)


def measure_index(plan: Plan) -> Part:
    """Open a store of a million chunks, and grow the tree from it as the disk tier does."""
    num_chunks = plan.sized(1_000_000, 8_000)
    with tempfile.TemporaryDirectory(prefix="ragcache-bench-") as folder:
        path = Path(folder)
        with _open(path, num_chunks) as store:
            fill(store, num_chunks, plan)
        open_s: list[float] = []
        restore_s: list[float] = []
        for start in range(_NUM_STARTS):
            plan.report(f"index: start {start + 1}")
            started_s = time.perf_counter()
            with _open(path, num_chunks) as store:
                open_s.append(time.perf_counter() - started_s)
                started_s = time.perf_counter()
                num_restored = restore(store)
                restore_s.append(time.perf_counter() - started_s)
                assert num_restored == num_chunks, (num_restored, num_chunks)
    note = f"{num_chunks:,} chunks, median of {_NUM_STARTS} starts, file in the page cache"
    figures = (
        Figure("index_open_s", round(sorted(open_s)[_NUM_STARTS // 2], 3), note=note),
        Figure("tree_restore_s", round(sorted(restore_s)[_NUM_STARTS // 2], 3), note="the tree grown from it"),
    )
    return Part("none", figures, {"open_s": open_s, "restore_s": restore_s})


def fill(store: ChunkStore, num_chunks: int, plan: Plan) -> None:
    """Write ``num_chunks`` chunks of documents of eight chunks each."""
    payload = bytes(_CHUNK_BYTES)
    for first in range(0, num_chunks, _BATCH):
        plan.report(f"index: writing, {first:,} of {num_chunks:,}")
        numbers = range(first, min(first + _BATCH, num_chunks))
        store.write_many([ChunkWrite(_key(n), payload, _note(n)) for n in numbers])


def restore(store: ChunkStore) -> int:
    """Grow a tree from what the store holds, as the engine does, and return how many chunks found their place."""
    tree = KnowledgeTree(make_policy("tournament"), shadow_tokens=_BLOCK_TOKENS * store.num_slots)
    found, _ = regrow(tree, store.entries(), Tier.DISK, _BLOCK_TOKENS)
    return len(found)


def _open(path: Path, num_chunks: int) -> ChunkStore:
    return ChunkStore(path, _IDENTITY, chunk_bytes=_CHUNK_BYTES, capacity_bytes=num_chunks * 4096)


def _key(number: int) -> bytes:
    return b"%032d" % number


def _note(number: int) -> ChunkNote:
    document, position = divmod(number, _CHUNKS_PER_DOCUMENT)
    parent = _key(number - 1) if position else None
    return ChunkNote(parent, f"document-{document}", position, frequency=float(1 + document % 7), cost=1e-4)
