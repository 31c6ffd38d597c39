"""Batches go side by side, and no slot is given twice."""

from __future__ import annotations

import os
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.chunkstore import ChunkStore
from ragcache_core.chunkstore.slotfile import SlotMap

from .conftest import CHUNK_BYTES, aligned, keys, writes


@given(st.integers(1, 40), st.lists(st.tuples(st.integers(1, 9), st.randoms(use_true_random=False)), max_size=40))
def test_every_reserved_slot_was_free(num_slots: int, batches: list[tuple[int, object]]) -> None:
    slots = SlotMap(num_slots)
    taken: list[int] = []
    for count, rng in batches:
        if count > slots.num_free:
            rng.shuffle(taken)  # type: ignore[attr-defined]
            slots.release(taken[: len(taken) // 2])
            del taken[: len(taken) // 2]
        count = min(count, slots.num_free)
        new = slots.reserve(count)
        assert len(set(new)) == count
        assert not set(new) & set(taken)
        assert all(a < b for a, b in pairwise(new))
        assert all(0 <= slot < num_slots for slot in new)
        taken += new
        assert slots.num_free == num_slots - len(taken)


def test_a_batch_is_one_system_call_and_so_is_reading_it(store: ChunkStore, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def counting(real: object) -> object:
        def call(descriptor: int, buffers: list[memoryview], offset: int) -> int:
            calls.append(sum(len(b) for b in buffers))
            return int(real(descriptor, buffers, offset))  # type: ignore[operator]

        return call

    monkeypatch.setattr(os, "pwritev", counting(os.pwritev))
    monkeypatch.setattr(os, "preadv", counting(os.preadv))
    store.write_many(writes(keys(8)))
    targets = [aligned(CHUNK_BYTES) for _ in range(8)]
    assert all(store.read_many(list(zip(keys(8), targets, strict=True))))
    assert calls == [8 * CHUNK_BYTES, 8 * CHUNK_BYTES]
