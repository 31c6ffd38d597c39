"""A directory, host memory, and the disk tier that an engine has between them, for tests of that tier."""

from __future__ import annotations

import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import ReqContext, ScheduleEndContext

from ragcache_core.policy import PrefillCostModel
from ragcache_core.tree import check_invariants
from ragcache_core.types import PromptSegment, SegmentKind, Tier
from ragcache_core.vllm_plugin.cache.controller import CacheController
from ragcache_core.vllm_plugin.cache.kv_groups import BlockKey, KVGroups
from ragcache_core.vllm_plugin.disk.manager import DiskTier
from ragcache_core.vllm_plugin.lower.jobs import EndedJob, TierJob
from ragcache_core.vllm_plugin.settings import PluginSettings
from ragcache_core.wire import RequestMetadata

BLOCK = 4
BLOCKS = {"A": 1, "B": 3, "C": 2, "D": 6}
CHUNK_BYTES = 4096
NUM_ROWS = 32
UNTOUCHED = 0xEE


def chain(documents: str) -> list[BlockKey]:
    """Return the chained keys of a prompt, a block for a unit."""
    keys: list[bytes] = []
    for i, name in enumerate(n for d in documents for n in [d] * BLOCKS[d]):
        keys.append(sha256(b"".join([*keys[-1:], f"{i} {name}".encode()])).digest())
    return keys


def payload(key: BlockKey) -> bytes:
    return Random(key).randbytes(CHUNK_BYTES)


def offloading_spec(controller: CacheController, *, emits_events: bool = False) -> Any:
    """Return what a tier reads of the spec that builds it."""
    events = SimpleNamespace(enable_kv_cache_events=emits_events)
    return SimpleNamespace(controller=controller, config=None, kv_events_config=events)


class Scene:
    """A directory, and the tier that an engine has on it; a new one is a new start of the engine."""

    def __init__(self, directory: Path, num_slots: int = 24, groups: KVGroups | None = None, **settings: Any) -> None:
        self.directory = directory
        self.memory = np.full((NUM_ROWS, CHUNK_BYTES), UNTOUCHED, dtype=np.uint8)
        self.controller = CacheController(
            PluginSettings(policy="pgdsf", **settings),
            tokens_per_block=BLOCK,
            prefill_cost=PrefillCostModel.default(),
            groups=groups,
        )
        self.tree = self.controller.tree
        spec = offloading_spec(self.controller, emits_events=True)
        self.tier = DiskTier(spec, memoryview(self.memory), str(directory), num_slots * CHUNK_BYTES)
        self.told: set[bytes] = set()
        """What vLLM's KV events say to be on the disk."""
        self.num_jobs = 0
        self.context = ReqContext("r")

    @property
    def data_file(self) -> Path:
        (path,) = self.directory.glob("*/chunks.data")
        return path

    def announce(self, documents: str) -> list[BlockKey]:
        """Put a request's path into the tree, as one that runs does, and return its keys."""
        keys = chain(documents)
        name = f"{documents} {self.num_jobs}"
        segments, end = [], 0
        for doc in documents:
            segments.append(PromptSegment(SegmentKind.DOCUMENT, end, end + BLOCKS[doc] * BLOCK, doc))
            end += BLOCKS[doc] * BLOCK
        self.controller.on_new_request(name, RequestMetadata(tuple(segments)), keys, end, 0.0)
        self.controller.on_admitted(name, keys, {}, 0.0)
        self.controller.on_finished(name)
        return keys

    def submit_store(self, keys: list[BlockKey]) -> int:
        rows = list(range(len(keys)))
        for row, key in zip(rows, keys, strict=True):
            self.memory[row] = np.frombuffer(payload(key), dtype=np.uint8)
        self.num_jobs += 1
        self.tier.store(TierJob(self.num_jobs, self.context, keys, rows))
        return self.num_jobs

    def store(self, documents: str) -> list[BlockKey]:
        """Write a request's chunks and wait until the disk has them, or has failed."""
        keys = self.announce(documents)
        job_id = self.submit_store(keys)
        self.settle()
        assert [ended.number for ended in self.tier.take_ended()] == [job_id]
        return keys

    def settle(self) -> None:
        """Wait until the disk has done everything that it was asked for."""
        assert self.tier._io.finish_writes(30)
        assert self.tier._io.finish_reads(30)

    def end_step(self) -> None:
        """Do what the manager of tiers does at the end of every step."""
        self.tier.end_step(ScheduleEndContext((), ()))

    def submit_load(self, keys: list[BlockKey], first_row: int = 8) -> int:
        self.memory[:] = UNTOUCHED
        self.num_jobs += 1
        rows = range(first_row, first_row + len(keys))
        self.tier.load(TierJob(self.num_jobs, self.context, keys, rows))
        return self.num_jobs

    def result(self, job_id: int, timeout_s: float = 30.0) -> EndedJob:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            for ended in self.tier.take_ended():
                assert ended.number == job_id
                return ended
            time.sleep(0.002)
        raise AssertionError(f"job {job_id} did not end in {timeout_s} s")

    def load(self, keys: list[BlockKey]) -> set[BlockKey]:
        """Read chunks and return those that came; their bytes are right, and the rows of the others untouched."""
        found = set(self.result(self.submit_load(keys)).loaded)
        for row, key in enumerate(keys, 8):
            expected = payload(key) if key in found else bytes([UNTOUCHED]) * CHUNK_BYTES
            assert self.memory[row].tobytes() == expected
        assert (self.memory[8 + len(keys) :] == UNTOUCHED).all()
        return found

    def hits(self, keys: list[BlockKey]) -> list[BlockKey]:
        """Return the leading keys that a look-up finds."""
        found = []
        for key in keys:
            if not self.tier.find(key, self.context):
                break
            found.append(key)
        return found

    def num_hits(self, documents: str) -> int:
        return len(self.hits(chain(documents)))

    def check(self) -> None:
        check_invariants(self.tree, is_connected=False)
        assert self.tree.tiers[Tier.DISK].in_use == {}, "nothing is being written or read"
        assert self.tree.tiers[Tier.DISK].num_units == len(self.tier._stored)
        assert all(key in self.tier._io._store for key in self.tier._stored)
        self.check_events()

    def check_events(self) -> None:
        """Read what was told; it is what the disk has."""
        for event in self.tier.take_events():
            for key in event.keys:
                assert (key in self.told) == event.removed, "what comes is told once, and so is what leaves"
                (self.told.remove if event.removed else self.told.add)(key)
        assert self.told == set(self.tier._groups.offload_keys(self.tier._stored))

    def close(self) -> None:
        self.tier.shutdown()


Opening = Callable[..., Scene]


def failing(with_: int | Exception) -> Callable[..., None]:
    """Return a function that raises an error, of the system if it is a number."""

    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(with_, "as the test wants it") if isinstance(with_, int) else with_

    return fail
