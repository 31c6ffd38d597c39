"""Compressed objects of the shared store: exact, mixed with raw ones, and a miss where they cannot be read."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragcache_core.chunkstore import compression
from ragcache_core.chunkstore.compression import Compression
from ragcache_core.chunkstore.encryption import Keys
from ragcache_core.config import CompressionName
from ragcache_core.vllm_plugin.shared import objects as shared_objects
from ragcache_core.vllm_plugin.shared.objects import Objects

pytest.importorskip("blosc2")

CHUNK_BYTES = 1 << 15
SECRETS = Keys((bytes(32),))


def opened(setting: CompressionName | None, keys: Keys | None = None, chunk_bytes: int = CHUNK_BYTES) -> Objects:
    packing = None if setting is None else Compression(setting, "The test's store")
    return Objects({"model": "demo"}, chunk_bytes, keys, packing)


def kv(seed: int = 0) -> bytes:
    """Return bf16 numbers of about one size, as KV has them."""
    numbers = np.random.default_rng(seed).standard_normal(CHUNK_BYTES // 2).astype(np.float32)
    return (numbers.view(np.uint32) >> 16).astype(np.uint16).tobytes()


def payload(objects: Objects, name: str, data: bytes) -> bytes | None:
    found = objects.unpack(name, data)
    return None if found is None else found[0].tobytes()


@pytest.mark.parametrize("setting", ["lz4", "zstd"])
@pytest.mark.parametrize("keys", [None, SECRETS], ids=["plain", "encrypted"])
def test_engines_with_any_setting_read_a_compressed_object(setting: CompressionName, keys: Keys | None) -> None:
    data = opened(setting, keys).pack("name", kv(), 5.0)
    assert len(data) < 0.9 * CHUNK_BYTES
    for reader in (None, "off", "auto", "lz4", "zstd"):
        row, computed_s = opened(reader, keys).unpack("name", data) or (np.zeros(0), 0.0)  # type: ignore[arg-type]
        assert (row.tobytes(), computed_s) == (kv(), 5.0)
    raw = opened("off", keys).pack("name", kv(1), 5.0)
    assert payload(opened(setting, keys), "name", raw) == kv(1)


def test_an_engine_with_exact_kv_takes_no_object_of_eight_bits() -> None:
    approximate = Objects({"model": "demo"}, CHUNK_BYTES, None, Compression("int8", "", number_type="bfloat16"))
    data = approximate.pack("name", kv(), 5.0)
    assert payload(approximate, "name", data) not in (None, kv())
    for reader in (None, "off", "auto", "zstd"):
        assert payload(opened(reader), "name", data) is None  # type: ignore[arg-type]


@settings(max_examples=50)
@given(data=st.binary(min_size=300, max_size=300), turned=st.integers(0, 350), bit=st.integers(0, 7))
def test_any_bytes_come_back_and_a_turned_bit_is_a_miss(data: bytes, turned: int, bit: int) -> None:
    objects = opened("zstd", chunk_bytes=300)
    packed = bytearray(objects.pack("name", data, 5.0))
    assert payload(objects, "name", bytes(packed)) == data
    packed[turned % len(packed)] ^= 1 << bit
    assert payload(objects, "name", bytes(packed)) is None


def test_a_cut_object_and_one_whose_record_lies_are_misses() -> None:
    objects = opened("zstd")
    packed = objects.pack("name", kv(), 5.0)
    for size in (0, 20, 100, len(packed) // 2, len(packed) - 1):
        assert objects.unpack("name", packed[:size]) is None
    frame, length = packed[: -16 - 18], len(packed) - 16 - 18
    for record, body in (
        ((5.0, length, 0, 3), frame),
        ((5.0, length, 2, 3), frame),
        ((5.0, CHUNK_BYTES, 1, 3), frame),
        ((5.0, length - 1, 1, 3), frame[:-1]),
        ((5.0, 64, 1, 3), bytes(64)),
    ):
        lie = body + struct.pack("<dQBB", *record)
        assert objects.unpack("name", lie + shared_objects._digest("name", lie, 3)) is None


def test_without_the_package_a_compressed_object_is_a_miss_which_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    data = opened("zstd").pack("name", kv(), 5.0)
    monkeypatch.setattr(compression, "find_spec", lambda name: None)
    without = opened("auto")
    with caplog.at_level("WARNING", logger="ragcache"):
        for _ in range(3):
            with pytest.raises(shared_objects.MissingCodecError):
                without.unpack("name", data)
    assert caplog.text.count("RC-SHARED-COMPRESSED") == 1
    damaged = data[:-20] + bytes([data[-20] ^ 1]) + data[-19:]
    assert without.unpack("name", damaged) is None
    assert payload(without, "name", without.pack("name", kv(), 5.0)) == kv()
