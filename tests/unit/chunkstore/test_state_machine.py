"""Whatever is done to a store, it holds what a dict would hold."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ragcache_core.chunkstore import ChunkEntry, ChunkNote, ChunkStore, ChunkWrite
from ragcache_core.errors import CacheCapacityError, CacheWriteError

from .conftest import IDENTITY, payload, read

KEYS = [b"key %d" % i for i in range(30)]
key_lists = st.lists(st.sampled_from(KEYS), max_size=10)


class StoreMachine(RuleBasedStateMachine):
    """The store against a plain model."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.model: dict[bytes, ChunkEntry] = {}
        self.num_slots = 16

    @initialize(chunk_bytes=st.sampled_from([100, 4096, 5000, 8192]), direct=st.booleans())
    def open(self, chunk_bytes: int, direct: bool) -> None:
        self.chunk_bytes, self.direct = chunk_bytes, direct
        self._open()

    def _open(self) -> None:
        slot_bytes = -(-self.chunk_bytes // 4096) * 4096
        self.store = ChunkStore(
            Path(self.folder.name),
            IDENTITY,
            chunk_bytes=self.chunk_bytes,
            capacity_bytes=self.num_slots * slot_bytes,
            direct=self.direct,
        )

    def _chunks(self, keys: list[bytes]) -> list[ChunkWrite]:
        return [
            ChunkWrite(key, payload(key, self.chunk_bytes), ChunkNote(KEYS[0], "doc", KEYS.index(key), 1.0, 1.0))
            for key in keys
        ]

    @rule(keys=key_lists)
    def write(self, keys: list[bytes]) -> None:
        new = [key for key in dict.fromkeys(keys) if key not in self.model]
        if len(self.model) + len(new) > self.num_slots:
            with pytest.raises(CacheCapacityError):
                self.store.write_many(self._chunks(keys))
            return
        assert self.store.write_many(self._chunks(keys)) == new
        self.model.update({key: ChunkEntry(key, KEYS[0], "doc", KEYS.index(key), 1.0, 1.0) for key in new})

    @rule(keys=key_lists)
    def fail_to_write(self, keys: list[bytes]) -> None:
        new = [key for key in dict.fromkeys(keys) if key not in self.model]
        if not new or len(self.model) + len(new) > self.num_slots:
            return
        real = os.pwritev

        def failing(descriptor: int, buffers: list[memoryview], offset: int) -> int:
            real(descriptor, buffers, offset)
            raise OSError(errno.ENOSPC, "No space left on device")

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(os, "pwritev", failing)
            with pytest.raises(CacheWriteError):
                self.store.write_many(self._chunks(keys))

    @rule(keys=key_lists)
    def delete(self, keys: list[bytes]) -> None:
        gone = {key for key in keys if key in self.model}
        assert self.store.delete_many(keys) == len(gone)
        for key in gone:
            del self.model[key]

    @rule(keys=key_lists)
    def erase(self, keys: list[bytes]) -> None:
        gone = {key for key in keys if key in self.model}
        assert self.store.erase(keys) == len(gone)
        for key in gone:
            del self.model[key]

    @rule(keys=key_lists, name=st.sampled_from([None, "another", "a third"]))
    def rename(self, keys: list[bytes], name: str | None) -> None:
        here = {key for key in keys if key in self.model}
        assert self.store.rename((key, name) for key in set(keys)) == len(here)
        for key in here:
            self.model[key] = self.model[key]._replace(doc_id=name)

    @rule(keys=key_lists, frequency=st.floats(0, 1e6), cost=st.floats(0, 1e6))
    def update(self, keys: list[bytes], frequency: float, cost: float) -> None:
        here = {key for key in keys if key in self.model}
        assert self.store.update_notes((key, frequency, cost) for key in set(keys)) == len(here)
        for key in here:
            self.model[key] = self.model[key]._replace(frequency=frequency, cost=cost)

    @rule(keys=key_lists)
    def read_many(self, keys: list[bytes]) -> None:
        targets = [bytearray(self.chunk_bytes) for _ in keys]
        found = self.store.read_many(list(zip(keys, targets, strict=True)))
        assert found == [key in self.model for key in keys]
        for key, target, is_found in zip(keys, targets, found, strict=True):
            assert not is_found or target == payload(key, self.chunk_bytes)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def damage(self, data: Any) -> None:
        key = data.draw(st.sampled_from(sorted(self.model)))
        slot = self.store._residents.slot_of(key)
        assert slot is not None
        with (self.store.path / "chunks.data").open("r+b") as file:
            file.seek(slot * self.store.slot_bytes + data.draw(st.integers(0, self.chunk_bytes - 8)))
            file.write(b"\0damage\0")
        assert read(self.store, key) is None
        del self.model[key]

    @rule()
    def clear(self) -> None:
        self.store.clear()
        self.model.clear()

    @rule(num_slots=st.integers(4, 20))
    def reopen(self, num_slots: int) -> None:
        self.store.close()
        self.num_slots = num_slots
        self._open()
        for entry in sorted(self.model.values(), key=lambda entry: entry.position)[num_slots:]:
            del self.model[entry.key]

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        if not hasattr(self, "store"):
            return
        assert list(self.store.entries()) == sorted(self.model.values(), key=lambda entry: entry.position)
        assert self.store.num_free_slots == self.num_slots - len(self.model)
        assert all(read(self.store, key) == payload(key, self.chunk_bytes) for key in self.model)
        assert (self.store.path / "chunks.data").stat().st_size <= self.num_slots * self.store.slot_bytes

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
        self.folder.cleanup()


StoreMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
TestStoreMachine = StoreMachine.TestCase
