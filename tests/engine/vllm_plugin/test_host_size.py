"""Host memory of the default size holds what the engine's own memory does, as far as it may."""

from __future__ import annotations

import pytest

from ragcache_core.errors import ConfigError
from ragcache_core.types import Tier
from tests.engine.vllm_plugin.storing_scene import host_scheduler

MIB, PAGE = 1 << 20, 4096
"""A block of this scene's KV has 1 KiB, and a page to itself in host memory."""


@pytest.mark.parametrize(
    ("num_blocks", "most_bytes", "num_chunks"),
    [
        (400, None, 256),  # chosen
        (400, 8 * MIB, 400),
        (400, 300 * PAGE, 300),
        (100, 8 * MIB, 256),  # more than the engine holds is no harm
    ],
)
def test_a_default_grows_to_what_the_engine_holds_and_not_beyond_its_limit(
    num_blocks: int, most_bytes: int | None, num_chunks: int
) -> None:
    with host_scheduler(num_blocks, "1MiB", most_host_bytes=most_bytes) as scheduler:
        host = scheduler.connector.tiers.host
        assert host.rows.num_free == num_chunks
        assert host.get_kv_memoryview().shape == (num_chunks, PAGE)
        assert scheduler._controller.tiers[Tier.HOST].capacity_bytes == num_chunks * PAGE


@pytest.mark.parametrize(("host_bytes", "is_little"), [("1MiB", False), ("512KiB", True)])
def test_host_memory_below_half_of_the_engines_is_warned_of(
    host_bytes: str, is_little: bool, plugin_log: pytest.LogCaptureFixture
) -> None:
    with host_scheduler(400, host_bytes):
        assert ("less than half of the" in plugin_log.text and "raise host_bytes" in plugin_log.text) is is_little


def test_a_default_of_host_memory_that_holds_no_block_leaves_the_engine_with_its_own_and_reports_it(
    plugin_log: pytest.LogCaptureFixture,
) -> None:
    with host_scheduler(40, "1KiB", most_host_bytes=1 << 10) as scheduler:
        assert set(scheduler._controller.tiers) == {Tier.GPU}
    assert plugin_log.text.count("RAGCache keeps nothing in host memory: its default size here is 1024, a block") == 1


def test_configured_host_memory_too_small_for_a_block_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"host_bytes is 1024, a block of KV of this model needs 4096: raise"):
        with host_scheduler(40, "1KiB"):
            pass
