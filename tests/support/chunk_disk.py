"""A disk of chunks that does what it was asked to when a test says so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ragcache_core.chunk.types import ChunkVariant
from ragcache_core.vllm_plugin.chunks.manager.entries import StoredChunk
from ragcache_core.vllm_plugin.chunks.storage.disk import DiskTransfer


class Write(NamedTuple):
    transfer: DiskTransfer
    chunk: StoredChunk
    pages: tuple[int, ...]


class Read(NamedTuple):
    transfer: DiskTransfer
    variant: ChunkVariant
    pages: tuple[int, ...]


class Drop(NamedTuple):
    variant: ChunkVariant


class Scrub(NamedTuple):
    transfer: DiskTransfer


class Names(NamedTuple):
    names: tuple[tuple[ChunkVariant, frozenset[str]], ...]


Call = Write | Read | Drop | Scrub | Names


class FakeDisk:
    """Stands in for ``ChunkDisk``; holds nothing but what is ``found`` on it."""

    def __init__(self, num_pages: int, found: Sequence[StoredChunk] = ()) -> None:
        self.num_pages = num_pages
        self.found = list(found)
        self.is_down = False
        self.calls: list[Call] = []

    def stored(self) -> list[StoredChunk]:
        return self.found

    def write(self, chunk: StoredChunk, pages: tuple[int, ...]) -> DiskTransfer:
        self.calls.append(Write(DiskTransfer(), chunk, pages))
        return self.calls[-1].transfer

    def read(self, variant: ChunkVariant, pages: tuple[int, ...]) -> DiskTransfer:
        self.calls.append(Read(DiskTransfer(), variant, pages))
        return self.calls[-1].transfer

    def scrub(self) -> DiskTransfer:
        self.calls.append(Scrub(DiskTransfer()))
        return self.calls[-1].transfer

    def drop(self, variant: ChunkVariant) -> None:
        self.calls.append(Drop(variant))

    def rename(self, names: Sequence[tuple[ChunkVariant, frozenset[str]]]) -> None:
        self.calls.append(Names(tuple(names)))

    def note(self, uses: Sequence[tuple[ChunkVariant, float, float]]) -> None:
        """Note nothing."""

    def take_calls(self) -> list[Call]:
        """Return what it was asked to do since the last call."""
        calls, self.calls = self.calls, []
        return calls
