"""The workers' reports of their KV memory, and their limits.

A block in host memory is a row of a shared region, in which each worker has a part of the same size; the scheduler
knows the first worker's::

    /dev/shm/vllm_offload_<engine id>.mmap    [ stage 0, rank 0 | stage 0, rank 1 | stage 1, rank 0 | ... ]    block 0
                                              [                                                           ]    block 1
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ragcache_core.vllm_plugin.compat import KVConnectorHandshakeMetadata

Rank = tuple[int, int]
"""A worker: its stage of the pipeline, its rank in the stage."""


@dataclass(slots=True)
class WorkerMemory(KVConnectorHandshakeMetadata):
    """A worker's handshake: the bytes of a block in its KV memory, and its mapped region."""

    block_bytes: int
    region: tuple[str, int, int] | None


def why_uneven(block_bytes: Sequence[int]) -> str | None:
    """Return why stages with ``block_bytes`` cannot share rows, with a hint; ``None`` if they can."""
    if not block_bytes or max(block_bytes) <= block_bytes[0]:
        return None
    return (
        f"a block of KV takes {', '.join(map(str, block_bytes))} bytes on the workers, and each has the "
        f"{block_bytes[0]} of the first in host memory: give the first pipeline stage at least as many layers as any "
        "other, drafts' included (VLLM_PP_LAYER_PARTITION), or leave pipeline_parallel_size out"
    )


def why_apart(workers: Mapping[Rank, WorkerMemory], region: tuple[str, int, int] | None) -> str | None:
    """Return why workers' host memory cannot be read at ``region``; ``None`` if it can."""
    apart = [rank for rank, worker in workers.items() if worker.region != region]
    if not apart:
        return None
    named = ", ".join(f"stage {stage} rank {rank}" for stage, rank in apart[:4])
    return (
        f"{len(apart)} of {len(workers)} workers have host memory of their own, on another host or in another "
        f"container ({named}{', ...' if len(apart) > 4 else ''}): keep all workers of an engine on one host, or leave "
        "disk_bytes out"
    )
