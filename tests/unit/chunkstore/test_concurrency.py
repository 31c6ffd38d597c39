"""One thread changes the store while others read: every byte they get is of the chunk they asked for."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from ragcache_core.chunkstore import ChunkStore

from .conftest import CHUNK_BYTES, aligned, keys, payload, read, writes


def run_together(*tasks: Callable[[], None]) -> None:
    """Run tasks in threads and raise what any of them raised."""
    failures: list[BaseException] = []

    def guarded(task: Callable[[], None]) -> None:
        try:
            task()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(task,)) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def test_readers_beside_a_writer_get_their_chunk_or_a_miss(store: ChunkStore) -> None:
    everything = {key: payload(key) for key in keys(24)}
    chunk_of = {write.key: write for write in writes(keys(24))}
    stable = keys(4)
    store.write_many([chunk_of[key] for key in stable])
    done = threading.Event()
    num_hits = [0, 0, 0]

    def change() -> None:
        rng = random.Random(1)
        try:
            num_rounds = 0
            while not done.is_set() and (num_rounds < 150 or min(num_hits) < 20):
                num_rounds += 1
                here = [key for key in everything if key in store and key not in stable]
                store.delete_many(rng.sample(here, len(here) // 2))
                away = [key for key in everything if key not in store]
                new = rng.sample(away, min(len(away), store.num_free_slots))
                assert store.write_many([chunk_of[key] for key in new]) == new
        finally:
            done.set()

    def reader(number: int) -> Callable[[], None]:
        def look() -> None:
            rng = random.Random(number)
            targets = [aligned(CHUNK_BYTES) for _ in range(4)]
            try:
                while not done.is_set():
                    wanted = [rng.choice(stable), *rng.choices(list(everything), k=3)]
                    found = store.read_many(list(zip(wanted, targets, strict=True)))
                    assert found[0]
                    for key, target, is_found in zip(wanted, targets, found, strict=True):
                        assert not is_found or target == everything[key]
                        num_hits[number] += is_found and key not in stable
            finally:
                done.set()

        return look

    run_together(change, *(reader(number) for number in range(3)))
    assert store.stats.num_damaged == 0  # a slot that was reused meanwhile is not damage


def in_the_middle_of_reading(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Do something once, after a reader has looked up the slot and before it reads it."""
    real = os.preadv
    waiting = [act]

    def call(*arguments: Any) -> int:
        if waiting:
            waiting.pop()()
        return real(*arguments)

    monkeypatch.setattr(os, "preadv", call)


def test_a_chunk_that_moved_to_another_slot_meanwhile_is_found_there(
    store: ChunkStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.write_many(writes(keys(15)))

    def move() -> None:
        store.delete_many([b"key 7"])
        store.write_many(writes([b"new", b"key 7"]))

    in_the_middle_of_reading(monkeypatch, move)
    assert read(store, b"key 7") == payload(b"key 7")
    assert read(store, b"new") == payload(b"new")


def test_clearing_meanwhile_is_a_miss(store: ChunkStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.write_many(writes(keys(4)))
    in_the_middle_of_reading(monkeypatch, store.clear)
    assert read(store, b"key 2") is None
    assert store.stats.num_damaged == 0


def test_closing_waits_for_reads_in_flight(store: ChunkStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.write_many(writes(keys(4)))
    is_reading, may_read = threading.Event(), threading.Event()
    found: list[bytes | None] = []

    def wait() -> None:
        is_reading.set()
        assert may_read.wait(20)

    in_the_middle_of_reading(monkeypatch, wait)
    reader = threading.Thread(target=lambda: found.append(read(store, b"key 1")))
    reader.start()
    assert is_reading.wait(60)
    closer = threading.Thread(target=store.close)
    closer.start()
    while not store._readers.is_closed:
        time.sleep(0.001)
    assert read(store, b"key 2") is None
    closer.join(0.3)  # time to do what it must not do yet
    assert closer.is_alive()
    may_read.set()
    reader.join()
    closer.join()
    assert found == [payload(b"key 1")]


def test_a_payload_that_changes_while_it_is_written_is_a_miss(
    store: ChunkStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwritev
    (write,) = writes([b"k"])
    source = aligned(CHUNK_BYTES)
    source[:] = payload(b"k")

    def changing(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        buffers[0][100:104] = b"\xff\xfe\xfd\xfc"
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "pwritev", changing)
    store.write_many([type(write)(write.key, source, write.note)])
    assert read(store, b"k") is None
    assert store.stats.num_damaged == 1


def test_a_slot_that_was_reused_meanwhile_is_a_miss(store: ChunkStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.write_many(writes(keys(16)))

    def reuse() -> None:
        store.delete_many([b"key 7"])
        store.write_many(writes([b"new"]))

    in_the_middle_of_reading(monkeypatch, reuse)
    assert read(store, b"key 7") is None
    assert store.stats.num_damaged == 0
    assert read(store, b"new") == payload(b"new")
