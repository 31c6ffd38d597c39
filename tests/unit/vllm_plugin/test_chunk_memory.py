"""Chunks: a worker's pages in host memory, and the disk below them with everything that can go wrong there."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ragcache_core.chunk.types import ChunkStatistics, ChunkVariant, chunk_key
from ragcache_core.chunkstore import ChunkStore, async_store
from ragcache_core.chunkstore.slotfile import SlotFile
from ragcache_core.errors import CacheLockedError, CacheTierError, ConfigError
from ragcache_core.vllm_plugin.chunks.manager.entries import StoredChunk
from ragcache_core.vllm_plugin.chunks.page_layout import (
    LayerShape,
    aligned_bytes,
    num_pages_of,
    pack_token_ids,
    part_key,
    read_part_key,
    unpack_statistics,
)
from ragcache_core.vllm_plugin.chunks.storage.disk import ChunkDisk, DiskTransfer
from ragcache_core.vllm_plugin.chunks.storage.host_pool import ChunkMemory
from tests.support.waiting import until

T = 5
LAYERS = [LayerShape(3, 7), LayerShape(2, 11)]
NUM_PAGES = 16
PAGE_BYTES = 2 * T * (3 * 7 + 2 * 11) * 4


class Chunks(ChunkMemory):
    """A worker's pages, with the disk below them."""

    def __init__(self, directory: Path | None, weights: str, capacity_bytes: int) -> None:
        super().__init__(layers=LAYERS, dtype=torch.float32, tokens_per_page=T, num_pages=NUM_PAGES)

        def open_store(holds: str, chunk_bytes: int, num_chunks: int) -> ChunkStore:
            assert directory is not None
            identity = {"weights": weights, "holds": holds}
            capacity = num_chunks * aligned_bytes(chunk_bytes)
            return ChunkStore(directory, identity, chunk_bytes=chunk_bytes, capacity_bytes=capacity)

        try:
            parts = self.place.map()
            assert parts is not None
            self.files = None if directory is None else ChunkDisk(open_store, capacity_bytes, parts, T)
        except Exception:
            super().close()
            raise

    @property
    def disk(self) -> ChunkDisk:
        assert self.files is not None
        return self.files

    def close(self) -> None:
        if self.files is not None:
            self.files.close()
        super().close()


Opening = Callable[..., Chunks]


@pytest.fixture
def opening(tmp_path: Path) -> Iterator[Opening]:
    opened: list[Chunks] = []

    def open_chunks(*, weights: str = "ours", capacity_bytes: int = 1 << 20, is_on_disk: bool = True) -> Chunks:
        opened.append(Chunks(tmp_path if is_on_disk else None, weights, capacity_bytes))
        return opened[-1]

    yield open_chunks
    for chunks in opened:
        chunks.close()


def kv(layer: int, num_tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (num_tokens, LAYERS[layer].num_kv_heads, LAYERS[layer].head_dim)
    generator = torch.Generator().manual_seed(1000 * seed + layer)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def fill(memory: ChunkMemory, pages: tuple[int, ...], num_tokens: int, seed: int = 0) -> None:
    for layer in range(len(LAYERS)):
        memory.write(pages, layer, *kv(layer, num_tokens, seed))


def lying(memory: ChunkMemory, pages: Sequence[int], layer: int, num_tokens: int) -> list[torch.Tensor]:
    """Return the keys and the values of the first tokens in pages."""
    pieces = memory.pieces(pages, layer, 0, num_tokens)
    return [torch.cat(half) for half in zip(*pieces, strict=True)]


def holds(memory: ChunkMemory, pages: tuple[int, ...], num_tokens: int, seed: int = 0) -> bool:
    pairs = [(lying(memory, pages, layer, num_tokens), kv(layer, num_tokens, seed)) for layer in range(len(LAYERS))]
    return all(torch.equal(a, b) for got, expected in pairs for a, b in zip(got, expected, strict=True))


def chunk(num_tokens: int, number: int = 0) -> tuple[ChunkVariant, bytes]:
    ids = list(range(number * 1000, number * 1000 + num_tokens))
    masses = tuple(0.5 / (i + 3) for i in range(num_tokens))
    statistics = ChunkStatistics((b"\1" * 32, b"\2" * 32), (17, 4), (0.1, 1 / 3), 0.7, masses, context=b"\3" * 32)
    return ChunkVariant(chunk_key(ids), number, num_tokens, statistics), pack_token_ids(ids)


def noted(num_tokens: int, number: int = 0, documents: frozenset[str] = frozenset()) -> StoredChunk:
    return StoredChunk(*chunk(num_tokens, number), frequency=3.0, worth=2.5, documents=documents)


def write(memory: Chunks, pages: tuple[int, ...], num_tokens: int, number: int = 0) -> DiskTransfer:
    """Fill pages, have them written, and return the transfer, which has ended."""
    fill(memory, pages, num_tokens, seed=number)
    return ended(memory, memory.disk.write(noted(num_tokens, number), pages))


def read(memory: Chunks, pages: tuple[int, ...], num_tokens: int, number: int = 0) -> DiskTransfer:
    """Have a chunk read into pages, and return the transfer, which has ended."""
    return ended(memory, memory.disk.read(chunk(num_tokens, number)[0], pages))


def ended(memory: Chunks, transfer: DiskTransfer) -> DiskTransfer:
    memory.disk.drain()
    assert transfer.has_ended
    return transfer


@pytest.mark.parametrize("pages", [(3, 4, 5), (9, 2, 11), (7, 8, 1), (5, 4, 3)])
def test_what_is_written_to_pages_is_read_from_them(opening: Opening, pages: tuple[int, ...]) -> None:
    memory = opening(is_on_disk=False)
    fill(memory, pages, 13)
    assert holds(memory, pages, 13)


@settings(max_examples=60, deadline=None)
@given(st.permutations(range(8)), st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_tokens_may_arrive_in_parts_of_any_length(pages: list[int], lengths: list[int]) -> None:
    memory = ChunkMemory(layers=LAYERS, dtype=torch.float32, tokens_per_page=T, num_pages=8)
    num_tokens = min(sum(lengths), 8 * T)
    k, v = kv(0, num_tokens)
    start = 0
    for length in lengths:
        end = min(start + length, num_tokens)
        if end > start:
            memory.write(pages, 0, k[start:end], v[start:end], offset=start)
        start = end
    needed = pages[: num_pages_of(num_tokens, T)]
    got = lying(memory, needed, 0, num_tokens)
    memory.close()
    assert torch.equal(got[0], k)
    assert torch.equal(got[1], v)


def test_a_chunk_goes_to_disk_and_comes_back_into_other_pages(opening: Opening) -> None:
    memory = opening()
    assert write(memory, (1, 2, 3), 13).is_done
    assert read(memory, (9, 5, 7), 13).is_done
    assert holds(memory, (9, 5, 7), 13)


def test_a_step_does_not_wait_for_the_disk(opening: Opening, gate: threading.Event) -> None:
    memory = opening()
    fill(memory, (1,), 5)
    transfer = memory.disk.write(noted(5), (1,))
    assert not transfer.has_ended
    gate.set()
    assert ended(memory, transfer).is_done


def test_chunks_are_found_after_a_restart_with_their_tokens_and_statistics(opening: Opening) -> None:
    before = opening()
    write(before, (1, 2, 3), 13, number=4)
    before.close()
    after = opening()
    [stored] = after.disk.stored()
    assert (stored.variant, stored.token_ids) == chunk(13, number=4)
    assert (stored.frequency, stored.worth) == (3.0, 2.5)
    assert read(after, (6, 0, 1), 13, number=4).is_done
    assert holds(after, (6, 0, 1), 13, seed=4)


def test_the_documents_of_a_chunk_are_found_after_a_restart_and_those_that_it_was_named_later(opening: Opening) -> None:
    before = opening()
    fill(before, (1,), 5)
    documents = frozenset(f"{number:016x}" for number in range(128))  # as many as a request may have
    ended(before, before.disk.write(noted(5, documents=documents), (1,)))
    before.close()
    again = opening()
    [stored] = again.disk.stored()
    assert stored.documents == documents
    again.disk.rename([(stored.variant, frozenset({"a", "b"}))])
    again.disk.note([(stored.variant, 7.0, 8.5)])
    again.close()
    [stored] = opening().disk.stored()
    assert (stored.documents, stored.frequency, stored.worth) == ({"a", "b"}, 7.0, 8.5)


def test_nothing_is_left_in_the_files_of_chunks_that_were_deleted_before_a_scrub(
    opening: Opening, tmp_path: Path
) -> None:
    memory = opening()
    for number in range(2):
        write(memory, (1, 2, 3), 13, number)
    marks = [[chunk(13, n)[1], kv(0, 13, seed=n)[1][:5].numpy().tobytes(), chunk(13, n)[0].key] for n in range(2)]
    memory.disk.drop(chunk(13)[0])
    memory.disk.drain()
    gone, kept = marks
    assert any(mark in _files(tmp_path) for mark in gone), "a slot that is free holds what it held"
    assert ended(memory, memory.disk.scrub()).is_done
    files = _files(tmp_path)
    assert [mark in files for mark in (*gone, *kept)] == [False] * 3 + [True] * 3
    assert read(memory, (6, 0, 1), 13, number=1).is_done
    assert holds(memory, (6, 0, 1), 13, seed=1)


def test_a_disk_that_cannot_be_scrubbed_fails_and_is_out_of_service(
    opening: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = opening()
    write(memory, (1,), 5)

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(SlotFile, "erase", fail)
    assert not ended(memory, memory.disk.scrub()).is_done
    assert memory.disk.is_down


def _files(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


def test_a_store_of_other_weights_is_not_read(opening: Opening) -> None:
    before = opening()
    write(before, (1,), 5)
    before.close()
    other = opening(weights="theirs")
    assert other.disk.stored() == []
    assert not read(other, (1,), 5).is_done


def test_a_share_of_the_disk_that_holds_no_page_is_refused(opening: Opening) -> None:
    with pytest.raises(ConfigError, match=f"takes {PAGE_BYTES} bytes, the disk's share for them is 4095: raise"):
        opening(capacity_bytes=4095)


def test_pages_are_mapped_where_they_are_and_nowhere_else(opening: Opening) -> None:
    place = opening(is_on_disk=False).place
    assert place.map() is not None
    for other in (replace(place, name="another"), replace(place, file=10_000), replace(place, pid=0)):
        assert other.map() is None


def test_two_engines_do_not_share_a_store(opening: Opening) -> None:
    opening()
    with pytest.raises(CacheLockedError):
        opening()


@pytest.mark.parametrize("damage", ["flip", "truncate", "lose"])
def test_a_damaged_chunk_is_a_miss_and_counted(opening: Opening, damage: str) -> None:
    before = opening()
    write(before, (1, 2, 3), 13)
    write(before, (4,), 5, number=1)
    data = before.disk._pages.path / "chunks.data"
    before.close()
    content = bytearray(data.read_bytes())
    if damage == "flip":
        content[4096 + 3] ^= 1  # the second page of the first chunk
    else:
        del content[4096 if damage == "truncate" else 0 :]
    data.write_bytes(content)
    after = opening()
    known = {stored.variant.number for stored in after.disk.stored()}
    assert not read(after, (1, 2, 3), 13).is_done
    assert not after.disk.is_down
    if damage == "flip":
        assert known == {0, 1}, "the checksum is seen when it is read"
        assert read(after, (4,), 5, number=1).is_done
        assert holds(after, (4,), 5, seed=1)
    else:
        assert known == set()


def test_damaged_statistics_are_a_miss_and_the_pages_are_deleted(opening: Opening) -> None:
    before = opening()
    write(before, (1,), 5)
    data = before.disk._statistics.path / "chunks.data"
    before.close()
    data.write_bytes(b"x" * data.stat().st_size)
    after = opening()
    assert after.disk.stored() == []
    assert len(after.disk._pages) == 0


def test_chunks_that_cannot_be_read_at_a_start_are_not_deleted_for_it(
    opening: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = opening()
    for number in range(3):
        write(before, (number + 1,), 5, number=number)
    before.close()

    def fail(self: SlotFile, *args: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    after = opening()
    with monkeypatch.context() as patched:
        patched.setattr(SlotFile, "read", fail)
        with pytest.raises(CacheTierError, match="none of the 3 chunks in .* can be read: see to that disk"):
            after.disk.stored()
    after.close()
    assert {stored.variant.number for stored in opening().disk.stored()} == {0, 1, 2}


def test_pages_that_a_crash_left_are_deleted_at_a_start_and_never_become_another_chunk(opening: Opening) -> None:
    memory = opening()
    disk = memory.disk
    write(memory, (1,), 5)
    write(memory, (1,), 5, number=1)
    disk._statistics.delete_many([part_key(chunk(5, number)[0].key, number, 0) for number in range(2)])  # killed before
    fill(memory, (2,), 5, seed=7)
    assert ended(memory, disk.write(noted(5), (2,))).is_done
    assert read(memory, (3,), 5).is_done
    assert holds(memory, (3,), 5, seed=7)
    assert len(disk._pages) == 2
    assert [stored.variant.number for stored in disk.stored()] == [0]
    assert len(disk._pages) == 1


def test_a_full_file_system_costs_what_is_written_meanwhile_and_is_tried_again(
    opening: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_store, "REST_S", 0.2)
    memory = opening()
    write(memory, (1,), 5)

    def no_space(self: SlotFile, *args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(SlotFile, "write", no_space)
        assert not write(memory, (2,), 5, number=1).is_done
        assert not memory.disk.is_down
    assert holds(memory, (2,), 5, seed=1), "memory is as it was"
    assert read(memory, (3,), 5).is_done, "what is there is read"
    assert until(lambda: write(memory, (2,), 5, number=2).is_done)


def test_a_hanging_disk_is_disabled_and_writes_nothing_afterwards(
    opening: Opening, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate.set()
    memory = opening()
    write(memory, (1,), 5)
    gate.clear()
    monkeypatch.setattr(async_store, "READ_TIMEOUT_S", 0.0)
    fill(memory, (2,), 5, seed=9)
    asked = [memory.disk.read(chunk(5)[0], (2,)) for _ in range(5)]  # more than there are readers
    assert until(lambda: memory.disk.is_down)
    assert all(transfer.abandon() for transfer in asked)
    gate.set()
    memory.disk.drain()
    assert holds(memory, (2,), 5, seed=9)
    assert not any(transfer.is_done for transfer in asked)


def test_a_write_that_does_not_end_takes_the_disk_down_and_writes_nothing_of_pages_that_were_given_away(
    opening: Opening, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = opening()
    monkeypatch.setattr(async_store, "_WRITE_TIMEOUT_S", 0.0)
    asked = []
    for number in range(3):
        fill(memory, (number,), 5, seed=number)
        asked.append(memory.disk.write(noted(5, number), (number,)))
    assert until(lambda: memory.disk.is_down)
    assert all(transfer.abandon() for transfer in asked)
    for number in range(3):
        fill(memory, (number,), 5, seed=9)
    gate.set()
    memory.close()
    assert not any(transfer.is_done for transfer in asked)
    again = opening()
    for stored in again.disk.stored():  # the first, if its pages were read before they were given away
        assert stored.variant.number == 0
        assert read(again, (7,), 5).is_done
        assert holds(again, (7,), 5, seed=0)


def test_a_chunk_whose_pages_were_given_away_before_they_were_read_is_not_written(
    opening: Opening, gate: threading.Event
) -> None:
    memory = opening()
    first, second = [
        (fill(memory, (number,), 5, seed=number), memory.disk.write(noted(5, number), (number,)))[1]
        for number in range(2)
    ]
    assert second.abandon(), "the first is being written"
    fill(memory, (1,), 5, seed=9)
    gate.set()
    assert ended(memory, first).is_done
    assert not second.is_done
    memory.close()
    assert {stored.variant.number for stored in opening().disk.stored()} == {0}


def test_closing_does_not_wait_for_ever_for_a_disk_that_does_not_answer(
    opening: Opening, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = opening()
    fill(memory, (1,), 5)
    transfer = memory.disk.write(noted(5), (1,))
    with monkeypatch.context() as hurried:
        hurried.setattr(async_store, "CLOSE_TIMEOUT_S", 0.01)
        memory.close()
    assert not transfer.has_ended
    gate.set()
    memory.close()
    assert transfer.is_done
    [stored] = opening().disk.stored()
    assert (stored.variant, stored.token_ids) == chunk(5)


def test_statistics_of_another_format_are_refused() -> None:
    with pytest.raises(ValueError, match="format"):
        unpack_statistics([b"\7" * 4096])


def test_a_part_is_distinguished_from_other_keys() -> None:
    assert read_part_key(part_key(b"k" * 32, 5, 6)) == (b"k" * 32, 5, 6)
    assert read_part_key(b"something else") is None
