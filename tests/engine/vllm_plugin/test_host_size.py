"""Host memory whose size nobody chose holds what the engine's own memory does, as far as it may."""

from __future__ import annotations

import pytest

from ragcache_core.types import Tier
from tests.engine.vllm_plugin.storing_scene import host_scheduler

MIB, PAGE = 1 << 20, 4096
"""A block of this scene's KV has 1 KiB, and a page to itself in host memory."""


@pytest.mark.parametrize(
    ("num_blocks", "most_bytes", "num_chunks"),
    [
        (400, None, 256),  # somebody chose
        (400, 8 * MIB, 400),
        (400, 300 * PAGE, 300),
        (100, 8 * MIB, 256),  # more than the engine holds is no harm
    ],
)
def test_a_default_grows_to_what_the_engine_holds_and_not_beyond_its_limit(
    num_blocks: int, most_bytes: int | None, num_chunks: int
) -> None:
    with host_scheduler(num_blocks, "1MiB", most_host_bytes=most_bytes) as scheduler:
        host = scheduler.connector.scheduler.manager.primary_tier
        assert host._get_num_free_chunks() == num_chunks
        assert host.get_kv_memoryview().shape == (num_chunks, PAGE)
        assert scheduler._controller.tiers[Tier.HOST].capacity_bytes == num_chunks * PAGE
        shadows = {shadow.capacity_tokens for shadow in scheduler._controller.tree.shadows}
        assert shadows == {max(num_blocks, num_chunks) * 16}, "as large as the larger of the two"


@pytest.mark.parametrize(("host_bytes", "is_little"), [("1MiB", False), ("512KiB", True)])
def test_host_memory_below_half_of_the_engines_is_warned_of(
    host_bytes: str, is_little: bool, plugin_log: pytest.LogCaptureFixture
) -> None:
    with host_scheduler(400, host_bytes):
        assert ("less than half of the" in plugin_log.text and "raise host_bytes" in plugin_log.text) is is_little
