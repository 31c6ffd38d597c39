"""Small stores for the tests of this room."""

from __future__ import annotations

import mmap
import os
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from ragcache_core.chunkstore import ChunkNote, ChunkStore, ChunkWrite

CHUNK_BYTES = 8192
IDENTITY = {"model": "demo", "weights": "5f3a", "dtype": "float32", "block_size": 16}

Opening = Callable[..., ChunkStore]


def payload(key: bytes, num_bytes: int = CHUNK_BYTES) -> bytes:
    """Return the bytes of a chunk: random, and always the same for a key."""
    return random.Random(key).randbytes(num_bytes)


def writes(keys: Iterable[bytes], num_bytes: int = CHUNK_BYTES) -> list[ChunkWrite]:
    """Return chunks, each the child of the one before."""
    chunks: list[ChunkWrite] = []
    for position, key in enumerate(keys):
        parent = chunks[-1].key if chunks else None
        chunks.append(ChunkWrite(key, payload(key, num_bytes), ChunkNote(parent, "doc", position, 1.0, 0.5)))
    return chunks


def read(store: ChunkStore, key: bytes) -> bytes | None:
    """Return the bytes of a chunk, or None for a miss."""
    target = aligned(store.chunk_bytes)
    return bytes(target) if store.read(key, target) else None


def aligned(num_bytes: int, offset: int = 0) -> memoryview:
    """Return memory that begins that many bytes after a page does."""
    return memoryview(mmap.mmap(-1, num_bytes + offset))[offset:]


def keys(num_keys: int, first: int = 0) -> list[bytes]:
    return [b"key %d" % i for i in range(first, first + num_keys)]


def unlink_failing_after(num_files: int, error: BaseException) -> Callable[..., None]:
    """Return an ``os.unlink`` that fails in a namespace that is deleted, after that many files."""
    unlink, unlinked = os.unlink, list[str]()

    def unlink_some(path: str, *, dir_fd: int | None = None) -> None:
        if dir_fd is not None and len(unlinked) == num_files:
            raise error
        unlink(path, dir_fd=dir_fd)
        if dir_fd is not None:
            unlinked.append(path)

    return unlink_some


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture(params=[True, False], ids=["direct", "buffered"])
def direct(request: pytest.FixtureRequest, tmp_path: Path) -> bool:
    if request.param:
        try:
            os.close(os.open(tmp_path / "probe", os.O_RDWR | os.O_CREAT | os.O_DIRECT))
        except OSError:
            pytest.skip(f"the file system of {tmp_path} has no O_DIRECT")
    return bool(request.param)


@pytest.fixture
def opening(folder: Path, direct: bool) -> Iterator[Opening]:
    """A function that opens the store of this test, with 16 slots; what is left open is closed."""
    with ExitStack() as opened:

        def open_store(num_slots: int = 16, **settings: Any) -> ChunkStore:
            chunk_bytes = settings.pop("chunk_bytes", CHUNK_BYTES)
            slot_bytes = -(-chunk_bytes // 4096) * 4096
            arguments = {"capacity_bytes": num_slots * slot_bytes, "direct": direct, **settings}
            return opened.enter_context(ChunkStore(folder, IDENTITY, chunk_bytes=chunk_bytes, **arguments))

        yield open_store


@pytest.fixture
def store(opening: Opening) -> ChunkStore:
    return opening()
