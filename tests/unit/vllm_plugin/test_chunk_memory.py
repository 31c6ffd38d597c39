"""A worker's chunks: pages in host memory, and the disk below them with everything that can go wrong there."""

from __future__ import annotations

import errno
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ragcache_core.chunk.types import ChunkStatistics, ChunkVariant, chunk_key
from ragcache_core.chunkstore import async_store
from ragcache_core.chunkstore.slotfile import SlotFile
from ragcache_core.errors import CacheLockedError, CacheTierError, ConfigError
from ragcache_core.runtime.environment import STARTED_AGAIN_ENV
from ragcache_core.vllm_plugin.chunks.messages import (
    DropChunks,
    MemoryReport,
    NameChunks,
    ReadChunk,
    ScrubDisk,
    WriteChunk,
)
from ragcache_core.vllm_plugin.chunks.page_layout import (
    LayerShape,
    num_pages_of,
    pack_token_ids,
    part_key,
    read_part_key,
    unpack_statistics,
)
from ragcache_core.vllm_plugin.chunks.storage.disk_store import DiskPlace
from ragcache_core.vllm_plugin.chunks.storage.host_pool import ChunkMemory
from tests.support.waiting import until

T = 5
LAYERS = [LayerShape(3, 7), LayerShape(2, 11)]
NUM_PAGES = 16
PAGE_BYTES = 2 * T * (3 * 7 + 2 * 11) * 4

Opening = Callable[..., ChunkMemory]


@pytest.fixture
def opening(tmp_path: Path) -> Iterator[Opening]:
    opened: list[ChunkMemory] = []

    def open_memory(*, weights: str = "ours", capacity_bytes: int = 1 << 20, is_on_disk: bool = True) -> ChunkMemory:
        place = DiskPlace(tmp_path, {"weights": weights}, capacity_bytes) if is_on_disk else None
        opened.append(
            ChunkMemory(layers=LAYERS, dtype=torch.float32, tokens_per_page=T, num_pages=NUM_PAGES, disk=place)
        )
        return opened[-1]

    yield open_memory
    for memory in opened:
        memory.close()


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


def write(memory: ChunkMemory, pages: tuple[int, ...], num_tokens: int, number: int = 0) -> MemoryReport:
    """Fill pages, have them written, and return the report."""
    fill(memory, pages, num_tokens, seed=number)
    variant, token_ids = chunk(num_tokens, number)
    memory.run([WriteChunk(number, variant, token_ids, pages, frequency=3.0, worth=2.5)])
    memory.drain()
    return memory.take_report()


def read(memory: ChunkMemory, pages: tuple[int, ...], num_tokens: int, number: int = 0) -> MemoryReport:
    """Have a chunk read into pages, and return the report."""
    variant, _ = chunk(num_tokens, number)
    memory.run([ReadChunk(100 + number, variant.key, number, pages)])
    memory.drain()
    return memory.take_report()


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
    assert write(memory, (1, 2, 3), 13).num_done == {0: 1}
    assert read(memory, (9, 5, 7), 13).num_done == {100: 1}
    assert holds(memory, (9, 5, 7), 13)


def test_a_step_does_not_wait_for_the_disk(opening: Opening, gate: threading.Event) -> None:
    memory = opening()
    fill(memory, (1,), 5)
    variant, token_ids = chunk(5)
    memory.run([WriteChunk(0, variant, token_ids, (1,), 1.0, 1.0)])
    assert not memory.take_report()
    gate.set()
    memory.drain()
    assert memory.take_report().num_done == {0: 1}


def test_chunks_are_found_after_a_restart_with_their_tokens_and_statistics(opening: Opening) -> None:
    before = opening()
    write(before, (1, 2, 3), 13, number=4)
    before.close()
    after = opening()
    [stored] = after.stored()
    assert (stored.variant, stored.token_ids) == chunk(13, number=4)
    assert (stored.frequency, stored.worth) == (3.0, 2.5)
    assert read(after, (6, 0, 1), 13, number=4).num_done == {104: 1}
    assert holds(after, (6, 0, 1), 13, seed=4)


def test_the_documents_of_a_chunk_are_found_after_a_restart_and_those_that_it_was_named_later(opening: Opening) -> None:
    before = opening()
    fill(before, (1,), 5)
    variant, token_ids = chunk(5)
    documents = frozenset(f"{number:016x}" for number in range(128))  # as many as a request may have
    before.run([WriteChunk(0, variant, token_ids, (1,), 1.0, 1.0, documents)])
    before.drain()
    before.close()
    again = opening()
    [stored] = again.stored()
    assert stored.documents == documents
    again.run([NameChunks(((variant.key, 0, frozenset({"a", "b"})),))])
    again.close()
    [stored] = opening().stored()
    assert stored.documents == {"a", "b"}


def test_nothing_is_left_in_the_files_of_chunks_that_were_deleted_before_a_scrub(
    opening: Opening, tmp_path: Path
) -> None:
    memory = opening()
    for number in range(2):
        write(memory, (1, 2, 3), 13, number)
    marks = [[chunk(13, n)[1], kv(0, 13, seed=n)[1][:5].numpy().tobytes(), chunk(13, n)[0].key] for n in range(2)]
    memory.run([DropChunks(((chunk(13)[0].key, 0, 3),))])
    memory.drain()
    gone, kept = marks
    assert any(mark in _files(tmp_path) for mark in gone), "a slot that is free holds what it held"
    memory.run([ScrubDisk(77)])
    memory.drain()
    assert memory.take_report().num_done == {77: 1}
    files = _files(tmp_path)
    assert [mark in files for mark in (*gone, *kept)] == [False] * 3 + [True] * 3
    assert read(memory, (6, 0, 1), 13, number=1).num_done == {101: 1}
    assert holds(memory, (6, 0, 1), 13, seed=1)


def test_a_disk_that_cannot_be_scrubbed_fails_and_is_out_of_service(
    opening: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = opening()
    write(memory, (1,), 5)

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(SlotFile, "erase", fail)
    memory.run([ScrubDisk(77)])
    memory.drain()
    report = memory.take_report()
    assert report.num_failed == {77: 1}
    assert report.is_disk_down or memory.take_report().is_disk_down


def _files(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


def test_a_store_of_other_weights_is_not_read(opening: Opening) -> None:
    before = opening()
    write(before, (1,), 5)
    before.close()
    other = opening(weights="theirs")
    assert other.stored() == ()
    assert read(other, (1,), 5).num_failed == {100: 1}


def test_an_engine_that_served_before_comes_back_without_a_disk_that_it_can_no_longer_have(
    opening: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    opening()
    monkeypatch.setenv(STARTED_AGAIN_ENV, "1")
    without = opening()
    assert without.stored() == ()
    assert without.take_report().is_disk_down
    assert write(without, (1, 2), 7).num_failed == {0: 1}
    without.run([ScrubDisk(77)])
    assert without.take_report() == MemoryReport(num_failed=Counter({77: 1}))
    assert holds(without, (1, 2), 7)


def test_a_key_that_is_gone_is_refused_and_an_engine_that_served_before_goes_on_without_its_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = DiskPlace(tmp_path, {}, 1 << 20, key_file=tmp_path / "key")

    def open_memory() -> ChunkMemory:
        return ChunkMemory(layers=LAYERS, dtype=torch.float32, tokens_per_page=T, num_pages=NUM_PAGES, disk=place)

    with pytest.raises(ConfigError, match="key cannot be read"):
        open_memory()
    monkeypatch.setenv(STARTED_AGAIN_ENV, "1")
    without = open_memory()
    assert without.take_report().is_disk_down
    without.close()


def test_two_engines_do_not_share_a_store(opening: Opening) -> None:
    opening()
    with pytest.raises(CacheLockedError):
        opening()


@pytest.mark.parametrize("damage", ["flip", "truncate", "lose"])
def test_a_damaged_chunk_is_a_miss_and_counted(opening: Opening, damage: str) -> None:
    before = opening()
    write(before, (1, 2, 3), 13)
    write(before, (4,), 5, number=1)
    assert before._disk is not None
    data = before._disk.path / "chunks.data"
    before.close()
    content = bytearray(data.read_bytes())
    if damage == "flip":
        content[4096 + 3] ^= 1  # the second page of the first chunk
    else:
        del content[4096 if damage == "truncate" else 0 :]
    data.write_bytes(content)
    after = opening()
    known = {stored.variant.number for stored in after.stored()}
    report = read(after, (1, 2, 3), 13)
    assert report.num_failed == {100: 1}
    assert (report.num_corrupt, report.is_disk_down) == (1, False)
    if damage == "flip":
        assert known == {0, 1}, "the checksum is seen when it is read"
        assert read(after, (4,), 5, number=1).num_done == {101: 1}
        assert holds(after, (4,), 5, seed=1)
    else:
        assert known == set()


def test_damaged_statistics_are_a_miss_and_the_pages_are_deleted(opening: Opening, tmp_path: Path) -> None:
    before = opening()
    write(before, (1,), 5)
    before.close()
    for data in tmp_path.glob("*/chunks.data"):
        if "statistics" in (data.parent / "identity.json").read_text():
            data.write_bytes(b"x" * data.stat().st_size)
    after = opening()
    assert after.stored() == ()
    assert after._disk is not None
    assert len(after._disk._pages) == 0


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
            after.stored()
    after.close()
    assert {stored.variant.number for stored in opening().stored()} == {0, 1, 2}


def test_pages_that_a_crash_left_under_a_number_never_become_another_chunk(opening: Opening) -> None:
    memory = opening()
    disk = memory._disk
    assert disk is not None
    write(memory, (1,), 5)
    disk._statistics.delete_many([part_key(chunk(5)[0].key, 0, 0)])  # killed between the two stores
    fill(memory, (2,), 5, seed=7)
    variant, token_ids = chunk(5)
    memory.run([WriteChunk(1, variant, token_ids, (2,), 1.0, 1.0)])
    memory.drain()
    memory.take_report()
    assert read(memory, (3,), 5).num_done == {100: 1}
    assert holds(memory, (3,), 5, seed=7)


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
        report = write(memory, (2,), 5, number=1)
        assert (report.num_failed, report.is_disk_down) == ({1: 1}, False)
    assert holds(memory, (2,), 5, seed=1), "memory is as it was"
    assert read(memory, (3,), 5).num_done == {100: 1}, "what is there is read"
    assert until(lambda: write(memory, (2,), 5, number=2).num_done == {2: 1})


def test_a_disk_that_does_not_answer_is_given_up_and_writes_nothing_afterwards(
    opening: Opening, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate.set()
    memory = opening()
    write(memory, (1,), 5)
    gate.clear()
    monkeypatch.setattr(async_store, "READ_TIMEOUT_S", 0.0)
    fill(memory, (2,), 5, seed=9)
    variant, _ = chunk(5)
    asked = range(100, 105)  # more than there are readers
    memory.run([ReadChunk(command_id, variant.key, 0, (2,)) for command_id in asked])
    reports: list[MemoryReport] = []
    assert until(lambda: reports.append(memory.take_report()) or any(report.num_failed for report in reports))
    failed = next(report for report in reports if report.num_failed)
    assert (set(failed.num_failed), failed.num_corrupt, failed.is_disk_down) == (set(asked), 0, True)
    gate.set()
    memory.drain()
    assert holds(memory, (2,), 5, seed=9)
    assert not memory.take_report()


def test_a_write_that_does_not_end_takes_the_disk_down_and_writes_nothing_of_pages_that_were_given_away(
    opening: Opening, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = opening()
    monkeypatch.setattr(async_store, "_WRITE_TIMEOUT_S", 0.0)
    asked = range(3)
    for number in asked:
        fill(memory, (number,), 5, seed=number)
        memory.run([WriteChunk(number, *chunk(5, number), (number,), frequency=1.0, worth=1.0)])
    reports: list[MemoryReport] = []
    assert until(lambda: reports.append(memory.take_report()) or any(report.num_failed for report in reports))
    failed = next(report for report in reports if report.num_failed)
    assert (set(failed.num_failed), failed.is_disk_down) == (set(asked), True)
    for number in asked:
        fill(memory, (number,), 5, seed=9)
    gate.set()
    memory.close()
    assert not memory.take_report().num_done
    again = opening()
    for stored in again.stored():  # the first, if its pages were read before they were given away
        assert stored.variant.number == 0
        assert read(again, (7,), 5).num_done
        assert holds(again, (7,), 5, seed=0)


def test_a_chunk_whose_pages_were_given_away_before_they_were_read_is_not_written(
    opening: Opening, gate: threading.Event
) -> None:
    memory = opening()
    for number in range(2):
        fill(memory, (number,), 5, seed=number)
        memory.run([WriteChunk(number, *chunk(5, number), (number,), frequency=1.0, worth=1.0)])
    assert memory._under_way[1].abandon(), "the first is being written"
    fill(memory, (1,), 5, seed=9)
    gate.set()
    memory.drain()
    assert memory.take_report().num_done == {0: 1}
    memory.close()
    assert {stored.variant.number for stored in opening().stored()} == {0}


def test_closing_does_not_wait_for_ever_for_a_disk_that_does_not_answer(
    opening: Opening, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = opening()
    fill(memory, (1,), 5)
    variant, token_ids = chunk(5)
    memory.run([WriteChunk(0, variant, token_ids, (1,), 1.0, 1.0)])
    with monkeypatch.context() as hurried:
        hurried.setattr(async_store, "CLOSE_TIMEOUT_S", 0.01)
        memory.close()
    assert not memory.take_report(), "the write has not ended"
    gate.set()
    memory.close()
    assert memory.take_report().num_done == {0: 1}
    [stored] = opening().stored()
    assert (stored.variant, stored.token_ids) == (variant, token_ids)


def test_statistics_of_another_format_are_refused() -> None:
    with pytest.raises(ValueError, match="format"):
        unpack_statistics([b"\7" * 4096])


def test_a_part_is_told_from_other_keys() -> None:
    assert read_part_key(part_key(b"k" * 32, 5, 6)) == (b"k" * 32, 5, 6)
    assert read_part_key(b"something else") is None
