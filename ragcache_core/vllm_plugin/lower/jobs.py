"""Copies of blocks between host memory and a lower tier."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ragcache_core.chunkstore import Transfer

if TYPE_CHECKING:
    from ragcache_core.vllm_plugin.cache.kv_groups import BlockKey
    from ragcache_core.vllm_plugin.compat import ReqContext


@dataclass(frozen=True, slots=True)
class TierJob:
    """Blocks to copy between host memory and a lower tier.

    Attributes:
        number: which job it is, of all tiers.
        context: the request whose blocks they are.
        keys: the blocks, in the order of their prefix.
        rows: their rows of host memory, which are kept until the job has ended.
    """

    number: int
    context: ReqContext
    keys: Sequence[BlockKey]
    rows: Sequence[int]


@dataclass(frozen=True, slots=True)
class EndedJob:
    """A job that no longer uses host memory; ``loaded`` are the loaded blocks."""

    number: int
    loaded: Sequence[BlockKey] = ()


class StoreTransfer(Transfer):
    """Blocks whose host memory is held until they are copied or abandoned.

    Args:
        num_blocks: how many rows are held.
        timeout_s: after this time the blocks that are not copied are dropped.
    """

    def __init__(self, num_blocks: int, timeout_s: float) -> None:
        super().__init__()
        self.num_blocks = num_blocks
        self.ends_s = self.submitted_s + timeout_s

    @property
    def has_ended(self) -> bool:
        """Whether the rows of host memory are free."""
        return self.is_finished or self.is_abandoned

    @property
    def remaining_s(self) -> float:
        """Seconds until its release."""
        return max(self.ends_s - time.monotonic(), 0.0)

    def release(self) -> None:
        """Free its rows soon; blocks not copied at once are dropped."""
        self.abandon()


class LoadPart(Transfer):
    """The blocks of a load that a reader reads together, by their names in the tier."""

    def __init__(self, names: list[bytes], rows: list[int]) -> None:
        super().__init__()
        self.names = names
        self.rows = rows
        self.found = [False] * len(names)


class LoadTransfer:
    """Blocks in flight into host memory, read in parts of ``part_size`` by several readers."""

    def __init__(self, names: Sequence[bytes], rows: Sequence[int], part_size: int) -> None:
        starts = range(0, len(names), part_size)
        self.parts = [LoadPart(list(names[at : at + part_size]), list(rows[at : at + part_size])) for at in starts]
        self.submitted_s = time.monotonic()

    @property
    def found(self) -> list[bool]:
        """Whether each block was read, in order of the names."""
        return [is_found for part in self.parts for is_found in part.found]

    @property
    def is_begun(self) -> bool:
        """Whether a reader has begun a part."""
        return any(part.progressed_s is not None for part in self.parts)

    @property
    def has_ended(self) -> bool:
        """Whether each part was read or abandoned."""
        return all(part.is_finished or part.is_abandoned for part in self.parts)

    def abandon(self) -> None:
        """Abandon parts that are not read; nothing is written to host memory from now on."""
        for part in self.parts:
            part.abandon()
