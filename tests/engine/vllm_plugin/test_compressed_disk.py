"""The disk tier with compression: whatever is stored, evicted and restarted, bytes are right and capacity is kept."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ragcache_core.types import Tier
from tests.engine.vllm_plugin import disk_scene
from tests.engine.vllm_plugin.disk_scene import NUM_ROWS, Scene, chain

pytest.importorskip("blosc2")

CHUNK_BYTES = 1 << 15


def kv_payload(key: bytes) -> bytes:
    """Return bf16 numbers as KV has them; for every fourth key random bytes, which do not compress."""
    if not key[0] % 4:
        return Random(key).randbytes(CHUNK_BYTES)
    numbers = np.random.default_rng(list(key)).standard_normal(CHUNK_BYTES // 2).astype(np.float32)
    return (numbers.view(np.uint32) >> 16).astype(np.uint16).tobytes()


@pytest.fixture(autouse=True)
def larger_blocks(identity: None) -> Iterator[None]:
    """Blocks of several pages: one of a single page cannot take fewer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk_scene, "CHUNK_BYTES", CHUNK_BYTES)
        patch.setattr(disk_scene, "payload", kv_payload)
        yield


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    num_slots=st.integers(1, 12),
    steps=st.lists(
        st.tuples(st.text("ABCD", min_size=1, max_size=3), st.sampled_from(("store", "load", "off", "lz4", "zstd"))),
        max_size=20,
    ),
)
def test_whatever_happens_bytes_are_right_and_the_capacity_is_kept(
    tmp_path_factory: pytest.TempPathFactory, num_slots: int, steps: list[tuple[str, str]]
) -> None:
    directory = tmp_path_factory.mktemp("disk")
    scene = Scene(directory, num_slots, disk_bytes=1, compression="zstd")
    try:
        for documents, step in steps:
            if step == "store":
                scene.store(documents)
            elif step == "load":
                if hits := scene.hits(chain(documents)[: NUM_ROWS - 8]):
                    assert scene.load(hits) == set(hits), "nothing was damaged"
            else:
                scene.close()
                scene = Scene(directory, num_slots, disk_bytes=1, compression=step)
            scene.check()
            (disk,) = (tier for tier in scene.controller.report()["tiers"] if tier["name"] == "disk")  # type: ignore[union-attr]
            assert disk["capacity_bytes"] == num_slots * CHUNK_BYTES
            assert disk["used_bytes"] <= disk["capacity_bytes"]
    finally:
        scene.close()


def test_more_blocks_fit_than_without_compression(tmp_path_factory: pytest.TempPathFactory) -> None:
    held = {}
    for setting in ("off", "zstd"):
        scene = Scene(tmp_path_factory.mktemp(setting), 8, disk_bytes=1, compression=setting)
        for documents in ("AB", "BA", "C", "DA", "CB", "AD", "BC", "DC"):
            scene.store(documents)
        held[setting] = scene.tree.tiers[Tier.DISK].num_units
        assert scene.controller.counters.num_corrupt_blocks == 0
        scene.close()
    assert held["off"] <= 8 < held["zstd"]
