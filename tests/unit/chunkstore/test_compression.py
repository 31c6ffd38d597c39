"""Compressed chunks: exact, readable with every setting, never more than the capacity, and a miss where damaged."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ragcache_core import config
from ragcache_core.chunkstore import ChunkStore, ChunkWrite, compression
from ragcache_core.chunkstore.compression import Compression, Packing, PackingSpeed, choose, pack, unpack
from ragcache_core.chunkstore.encryption import Keys
from ragcache_core.chunkstore.quantization import NUMBER_TYPES, NumberType, dequantise, quantise
from ragcache_core.errors import CacheCapacityError, CacheDirectoryError, ConfigError
from tests.unit.chunkstore.conftest import Opening, aligned, keys, payload, read

pytest.importorskip("blosc2")

CHUNK_BYTES = 1 << 16
EXTENTS_BYTES = 16384
"""What the file system may have of a small file beside its data."""
NAMES = ("lz4", "zstd")
SECRETS = Keys((bytes(32),))


def kv(key: bytes, num_bytes: int = CHUNK_BYTES) -> bytes:
    """Return bf16 numbers of about one size, as KV has them; always the same for a key."""
    numbers = np.random.default_rng(list(key)).standard_normal(num_bytes // 2).astype(np.float32)
    return (numbers.view(np.uint32) >> 16).astype(np.uint16).tobytes()


def kv_writes(names: list[bytes]) -> list[ChunkWrite]:
    return [ChunkWrite(name, kv(name)) for name in names]


def packed_store(
    opening: Opening, num_slots: int = 16, setting: config.CompressionName = "zstd", **more: object
) -> ChunkStore:
    return opening(num_slots, chunk_bytes=CHUNK_BYTES, compression=Compression(setting, "The test's store"), **more)


def frames(name: str, key: bytes) -> list[bytes]:
    """Return the frames that a chunk may have been packed to."""
    return [pack(Packing(name, item_bytes), kv(key)).tobytes() for item_bytes in (1, 2, 4)]


def space(store: ChunkStore) -> int:
    """Return what the file of slots takes on the disk."""
    return (store.path / "chunks.data").stat().st_blocks * 512


def hide_blosc2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "find_spec", lambda name: None)
    monkeypatch.setattr(compression, "find_spec", lambda name: None)


@given(data=st.binary(min_size=1, max_size=5000), name=st.sampled_from(NAMES), item_bytes=st.sampled_from((1, 2, 4)))
def test_any_bytes_come_back_as_they_were(data: bytes, name: str, item_bytes: int) -> None:
    target = bytearray(len(data))
    assert unpack(pack(Packing(name, item_bytes), data), memoryview(target))
    assert target == data


@given(data=st.binary(max_size=300), num_bytes=st.integers(1, 300))
def test_bytes_that_are_no_frame_are_not_unpacked(data: bytes, num_bytes: int) -> None:
    assert not unpack(data, memoryview(bytearray(num_bytes)))


@pytest.mark.parametrize("name", NAMES)
def test_a_frame_that_is_cut_or_of_another_size_is_not_unpacked(name: str) -> None:
    frame = pack(Packing(name, 2), kv(b"key"))
    for num_bytes in (CHUNK_BYTES - 1, CHUNK_BYTES + 1):
        assert not unpack(frame, memoryview(bytearray(num_bytes)))
    for end in (0, 10, len(frame) // 2, len(frame) - 1):
        assert not unpack(frame[:end], memoryview(bytearray(CHUNK_BYTES)))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("secret_keys", [None, SECRETS], ids=["plain", "encrypted"])
def test_kv_takes_less_space_and_comes_back_after_a_restart(
    opening: Opening, name: str, secret_keys: Keys | None
) -> None:
    names = keys(16)
    with packed_store(opening, setting=name, keys=secret_keys) as store:  # type: ignore[arg-type]
        assert store.write_many(kv_writes(names)) == names
        assert all(read(store, each) == kv(each) for each in names)
        assert store.stats.used_bytes < 0.9 * 16 * CHUNK_BYTES
        assert space(store) <= store.stats.used_bytes + EXTENTS_BYTES
        stored = (store.path / "chunks.data").read_bytes()
        assert any(frame in stored for frame in frames(name, names[0])) == (secret_keys is None)
    with packed_store(opening, setting=name, keys=secret_keys) as store:  # type: ignore[arg-type]
        assert all(read(store, each) == kv(each) for each in names)
        assert store.stats.num_damaged == 0


NUMBERS = {"float32": np.float32, "float16": np.float16}


def as_floats(data: bytes, number_type: NumberType) -> np.ndarray:
    if number_type == "bfloat16":
        return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(data, NUMBERS[number_type]).astype(np.float32)


@pytest.mark.parametrize("number_type", NUMBER_TYPES)
@given(data=st.binary(min_size=512, max_size=512), exponent=st.integers(-30, 15))
def test_eight_bits_keep_each_number_within_a_step_of_the_largest_of_its_64(
    number_type: NumberType, data: bytes, exponent: int
) -> None:
    floats = np.frombuffer(data, np.int8).astype(np.float32) * np.float32(2.0) ** (exponent - 7)
    if number_type == "bfloat16":
        payload = (floats.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    else:
        payload = floats.astype(NUMBERS[number_type]).tobytes()
    quantised = quantise(payload, number_type)
    assert quantised is not None
    target = bytearray(len(payload))
    assert dequantise(quantised, memoryview(target))
    before, after = as_floats(payload, number_type), as_floats(bytes(target), number_type)
    largest = np.abs(before).reshape(-1, 64).max(axis=1).repeat(64)
    # Half a step, the rounding of scale and result, and numbers below the smallest scale of a float16.
    assert (np.abs(after - before) <= largest * (1 / 254 + 1 / 200) + 127 * 2.0**-24).all()


@given(largest=st.floats(1.0, 65504.0, width=16), sign=st.sampled_from((-1, 1)))
@example(65504.0, 1)
def test_eight_bits_of_finite_float16_numbers_are_finite(largest: float, sign: int) -> None:
    numbers = np.linspace(0.0, sign * largest, 64).astype(np.float16)
    quantised = quantise(numbers.tobytes(), "float16")
    assert quantised is not None
    target = bytearray(numbers.nbytes)
    assert dequantise(quantised, memoryview(target))
    assert np.isfinite(np.frombuffer(target, np.float16)).all()


@pytest.mark.parametrize("number", [np.nan, np.inf, 3e38])
def test_a_chunk_that_eight_bits_cannot_hold_comes_back_exactly(number: float) -> None:
    chunk = np.zeros(CHUNK_BYTES // 4, np.float32)
    chunk[5] = number
    target = bytearray(CHUNK_BYTES)
    assert unpack(pack(Packing("int8", 1, "float32"), chunk), memoryview(target))
    assert target == chunk.tobytes()
    odd = np.arange(63, dtype=np.float32)
    target = bytearray(odd.nbytes)
    assert unpack(pack(Packing("int8", 1, "float32"), odd), memoryview(target))
    assert target == odd.tobytes()


def test_a_quantised_chunk_of_another_form_is_no_chunk() -> None:
    quantised = quantise(kv(b"key"), "bfloat16")
    assert quantised is not None
    for data in (b"", quantised[:-1], quantised + b"\x00", quantised[:-1] + b"\x07", quantised[:-1] + b"\x00"):
        assert not dequantise(data, memoryview(bytearray(CHUNK_BYTES)))
    assert not dequantise(quantised, memoryview(bytearray(CHUNK_BYTES * 2)))


def test_random_bytes_are_stored_as_they_are(opening: Opening) -> None:
    store = packed_store(opening)
    store.write_many([ChunkWrite(b"key", payload(b"key", CHUNK_BYTES))])
    assert read(store, b"key") == payload(b"key", CHUNK_BYTES)
    assert store.stats.used_bytes == CHUNK_BYTES


def test_chunks_of_both_kinds_are_read_with_every_setting(opening: Opening) -> None:
    raw, zstd, lz4, mixed = keys(4), keys(4, 4), keys(4, 8), keys(2, 12)
    with opening(chunk_bytes=CHUNK_BYTES) as store:
        store.write_many(kv_writes(raw))
    for setting, names in (("zstd", zstd), ("lz4", lz4)):
        with packed_store(opening, setting=setting) as store:
            store.write_many(kv_writes(names))
    with packed_store(opening, setting="off") as store:
        store.write_many(kv_writes(mixed))
        everything = [*raw, *zstd, *lz4, *mixed]
        targets = [(name, aligned(CHUNK_BYTES)) for name in everything]
        assert all(store.read_many(targets))
        assert all(bytes(target) == kv(name) for name, target in targets)
        assert store.stats.num_damaged == 0


def test_more_chunks_fit_and_the_file_never_exceeds_the_capacity(opening: Opening) -> None:
    store, stored = packed_store(opening, num_slots=8), list[bytes]()
    for number in range(60):
        (name,) = keys(1, number)
        while (num_over := store.num_over(len(stored), 1)) > 0:
            assert store.delete_many(stored[:num_over]) == num_over
            del stored[:num_over]
        assert store.write_many(kv_writes([name])) == [name]
        stored.append(name)
        assert store.capacity_bytes == 8 * CHUNK_BYTES
        assert space(store) <= store.capacity_bytes + EXTENTS_BYTES
    assert len(store) > 8
    assert all(read(store, name) == kv(name) for name in stored)


def test_numbers_of_eight_bits_take_less_than_half_and_come_back_the_same_after_a_restart(opening: Opening) -> None:
    def int8_store() -> ChunkStore:
        packing = Compression("int8", "The test's store", number_type="float32")
        return opening(8, chunk_bytes=CHUNK_BYTES, compression=packing)

    names = keys(20)
    chunks = {name: np.random.default_rng(list(name)).standard_normal(CHUNK_BYTES // 4, np.float32) for name in names}
    with int8_store() as store:
        assert store.write_many([ChunkWrite(name, chunks[name].tobytes()) for name in names]) == names
        assert store.stats.used_bytes <= 8 * CHUNK_BYTES
        before = {name: read(store, name) for name in names}
    with int8_store() as store:
        for name in names:
            assert (data := read(store, name)) == before[name]
            assert data is not None
            assert 0.0 < np.abs(np.frombuffer(data, np.float32) - chunks[name]).max() < 0.05


@pytest.mark.parametrize("setting", [None, "off", "auto", "zstd"])
def test_a_store_of_exact_chunks_serves_no_numbers_of_eight_bits(
    opening: Opening, setting: config.CompressionName | None
) -> None:
    packing = Compression("int8", "The test's store", number_type="bfloat16")
    with opening(8, chunk_bytes=CHUNK_BYTES, compression=packing) as store:
        store.write_many(kv_writes(keys(1)))
        assert read(store, keys(1)[0]) not in (None, kv(keys(1)[0]))
    exact = None if setting is None else Compression(setting, "The test's store")
    with opening(8, chunk_bytes=CHUNK_BYTES, compression=exact) as store:
        assert read(store, keys(1)[0]) is None
        store.write_many(kv_writes(keys(1)))
        assert read(store, keys(1)[0]) == kv(keys(1)[0])


def test_a_write_without_enough_bytes_is_refused_as_a_whole(opening: Opening) -> None:
    store = packed_store(opening, num_slots=4)
    store.write_many(kv_writes(keys(4)))
    random = [ChunkWrite(name, payload(name, CHUNK_BYTES)) for name in keys(4, 4)]
    with pytest.raises(CacheCapacityError, match="are free: delete some chunks first"):
        store.write_many(random)
    assert len(store) == 4
    assert space(store) <= 4 * CHUNK_BYTES + EXTENTS_BYTES
    assert store.num_over(4, 4) > 0, "chunks that do not compress need more evictions from now on"


@pytest.mark.parametrize("setting", ["zstd", "off"])
def test_less_capacity_than_before_evicts_by_size(opening: Opening, setting: config.CompressionName) -> None:
    with packed_store(opening, num_slots=16) as store:
        store.write_many(kv_writes(keys(20)))
    store = packed_store(opening, num_slots=8, setting=setting)
    kept = [name for name in keys(20) if name in store]
    assert 0 < store.stats.used_bytes <= 8 * CHUNK_BYTES
    assert 8 <= len(kept) < 20
    assert all(read(store, name) == kv(name) for name in kept)


def test_space_of_a_start_without_compression_is_given_back(opening: Opening) -> None:
    with opening(num_slots=8, chunk_bytes=CHUNK_BYTES) as store:
        store.write_many(kv_writes(keys(8)))
        store.delete_many(keys(8)[:6])  # leaves their bytes in the file
    store = packed_store(opening, num_slots=8)
    store.write_many(kv_writes(keys(8, 8)))
    assert space(store) <= 8 * CHUNK_BYTES + EXTENTS_BYTES
    assert all(read(store, name) == kv(name) for name in [*keys(8)[6:], *keys(8, 8)])


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: flip(folder / "chunks.data", 100),
        lambda folder: os.truncate(folder / "chunks.data", 4096),
        lambda folder: _set(folder, "length = length - 1"),
        lambda folder: _set(folder, "length = 65536"),
        lambda folder: _set(folder, "length = length + 0.5"),
        lambda folder: _set(folder, "codec = 'raw'"),
        lambda folder: _set(folder, "codec = 'brotli'"),
        lambda folder: _set(folder, "checksum = checksum + 1"),
    ],
    ids=["bit", "cut", "shorter", "longer", "fraction", "raw", "unknown", "checksum"],
)
@pytest.mark.parametrize("secret_keys", [None, SECRETS], ids=["plain", "encrypted"])
def test_a_damaged_compressed_chunk_is_a_miss(
    opening: Opening, damage: Callable[[Path], None], secret_keys: Keys | None
) -> None:
    with packed_store(opening, keys=secret_keys) as store:
        store.write_many(kv_writes(keys(1)))
    damage(store.path)
    store = packed_store(opening, keys=secret_keys)
    assert read(store, keys(1)[0]) is None
    assert store.stats.num_damaged + store.stats.num_missing == 1
    store.write_many(kv_writes(keys(1)))
    assert read(store, keys(1)[0]) == kv(keys(1)[0])


def _set(folder: Path, what: str) -> None:
    with sqlite3.connect(folder / "index.sqlite") as connection:
        connection.execute(f"UPDATE chunks SET {what}")
    connection.close()


def test_an_erased_compressed_chunk_leaves_no_byte(opening: Opening) -> None:
    store = packed_store(opening)
    store.write_many(kv_writes(keys(3)))
    assert any(frame in (store.path / "chunks.data").read_bytes() for frame in frames("zstd", keys(1)[0]))
    assert store.erase(keys(1)) == 1
    assert not any(frame in (store.path / "chunks.data").read_bytes() for frame in frames("zstd", keys(1)[0]))
    assert read(store, keys(3)[2]) == kv(keys(3)[2])


def test_without_the_package_a_method_is_refused_and_auto_is_off(
    opening: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide_blosc2(monkeypatch)
    with pytest.raises(ConfigError, match=r"compression is 'zstd'.*pip install 'ragcache\[compression\]'"):
        Compression("zstd", "The test's store")
    with packed_store(opening, setting="auto") as store:
        store.write_many(kv_writes(keys(16)))
        assert store.stats.used_bytes == 16 * CHUNK_BYTES
    with pytest.raises(ConfigError, match="blosc2 is not installed"):
        config.CacheConfig(compression="zstd", host_bytes=1 << 20, disk_bytes=1 << 20).resolved()


def test_a_package_that_cannot_be_imported_is_as_none(opening: Opening, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise ImportError("its library is missing")

    monkeypatch.setattr(compression, "_library", broken)
    with pytest.raises(ConfigError, match="blosc2 cannot be imported: its library is missing"):
        Compression("lz4", "The test's store")
    with packed_store(opening, setting="auto") as store:
        store.write_many(kv_writes(keys(16)))
        assert store.stats.used_bytes == 16 * CHUNK_BYTES


def test_without_the_package_a_compressed_directory_is_refused_and_kept(
    opening: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    with packed_store(opening) as store:
        store.write_many(kv_writes(keys(20)))
    with monkeypatch.context() as hidden:
        hide_blosc2(hidden)
        for setting in ("auto", "off"):
            with pytest.raises(CacheDirectoryError, match=r"blosc2 is not installed: pip install 'ragcache\[compress"):
                packed_store(opening, num_slots=4, setting=setting)  # type: ignore[arg-type]
    store = packed_store(opening)
    assert all(read(store, name) == kv(name) for name in keys(20))


def test_a_file_system_that_takes_no_space_back_has_no_compression(
    opening: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ragcache_core.chunkstore.slotfile import SlotFile

    monkeypatch.setattr(SlotFile, "can_free", lambda self: False)
    store = packed_store(opening)
    store.write_many(kv_writes(keys(16)))
    assert store.stats.used_bytes == 16 * CHUNK_BYTES == store.capacity_bytes
    with pytest.raises(CacheCapacityError):
        store.write_many(kv_writes(keys(1, 16)))


LZ4 = PackingSpeed(Packing("lz4", 2), 0.72, 1.8e9)
ZSTD = PackingSpeed(Packing("zstd", 2), 0.64, 1.2e9)
NOISE = PackingSpeed(Packing("zstd", 2), 0.99, 1.2e9)


@pytest.mark.parametrize(
    ("speeds", "link_bytes_per_s", "num_cores", "expected"),
    [
        ([LZ4, ZSTD], 0.1e9, 1, "zstd"),  # a network: fewer bytes are faster
        ([LZ4, ZSTD], 1.2e9, 1, "lz4"),  # zstd would take 1.64 times as long
        ([LZ4, ZSTD], 3e9, 1, None),  # a fast disk and a slow core
        ([LZ4, ZSTD], 3e9, 4, "zstd"),
        ([NOISE], 0.1e9, 4, None),
    ],
)
def test_auto_keeps_the_fewest_bytes_that_load_in_time(
    speeds: list[PackingSpeed], link_bytes_per_s: float, num_cores: int, expected: str | None
) -> None:
    chosen = choose(speeds, link_bytes_per_s, num_cores)
    assert (None if chosen is None else chosen.method.name) == expected


@pytest.mark.parametrize(("seconds", "is_smaller"), [(1.0, True), (1e-6, False)], ids=["slow disk", "fast disk"])
def test_auto_compresses_when_it_knows_the_speed_of_the_tier(seconds: float, is_smaller: bool) -> None:
    auto = Compression("auto", "The test's store")
    chunk = memoryview(kv(b"key"))
    assert auto.pack([chunk]) == [chunk], "the speed is not known yet"
    auto.record_write(16 << 20, seconds)
    assert (len(auto.pack([chunk])[0]) < len(chunk)) == is_smaller


def test_a_random_state_of_chunks_is_what_was_written(opening: Opening) -> None:
    """Writes, deletions, restarts with other settings, and refused writes end in what a dictionary says."""
    rng, expected = np.random.default_rng(3), dict[bytes, bytes]()
    store = packed_store(opening, num_slots=6)
    for number in range(80):
        (name,) = keys(1, int(rng.integers(20)))
        kind = rng.random()
        if kind < 0.55:
            data = kv(name + bytes([number])) if rng.random() < 0.6 else payload(name + bytes([number]), CHUNK_BYTES)
            try:
                if store.write_many([ChunkWrite(name, data)], packs=bool(rng.random() < 0.8)):
                    expected[name] = data
            except CacheCapacityError:
                (gone,) = list(expected)[:1]
                store.delete_many([gone])
                del expected[gone]
        elif kind < 0.8:
            assert store.delete_many([name]) == (name in expected)
            expected.pop(name, None)
        else:
            store.close()
            setting = ("off", "lz4", "zstd")[int(rng.integers(3))]
            store = packed_store(opening, num_slots=6, setting=setting)  # type: ignore[arg-type]
            expected = {key: data for key, data in expected.items() if key in store}
        assert len(store) == len(expected)
        assert all(read(store, key) == data for key, data in expected.items())
        assert store.stats.used_bytes <= 6 * CHUNK_BYTES
    assert store.stats.num_damaged == 0
