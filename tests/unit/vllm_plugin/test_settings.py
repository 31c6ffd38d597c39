"""What the plugin reads from the connector's configuration."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from ragcache_core.client.launch.arguments import cache_arguments
from ragcache_core.config import CacheConfig
from ragcache_core.policy import PrefillCostModel
from ragcache_core.vllm_plugin.settings import PluginSettings


def test_what_a_launch_sends_is_what_the_plugin_reads(tmp_path: Path) -> None:
    config = CacheConfig(
        policy="lfu",
        max_cached_documents=3,
        replicated_share=0.25,
        host_bytes="1MiB",
        queue="fifo",
        queue_window=5,
        max_prefill_bs=2,
    )
    arguments = cache_arguments(config, engine_id="ragcache-1-2-ab", profile=tmp_path / "profile.json")
    transfer = json.loads(arguments[arguments.index("--kv-transfer-config") + 1])
    assert PluginSettings.from_extra_config(transfer["kv_connector_extra_config"]) == PluginSettings(
        policy="lfu",
        host_bytes=1 << 20,
        replicated_share=0.25,
        max_cached_documents=3,
        profile=tmp_path / "profile.json",
        queue="fifo",
        queue_window=5,
        max_prefill_bs=2,
    )


def test_the_cost_of_a_prefill_is_the_default_until_it_is_measured(tmp_path: Path) -> None:
    assert PluginSettings().prefill_cost() == PrefillCostModel.default()
    assert PluginSettings().measured_prefill_cost() is None


@pytest.mark.parametrize("content", [None, b"", b"{", b"\xff\xfe", b"[]", b'{"format": 99}'])
def test_a_damaged_profile_is_logged_and_the_default_serves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes | None
) -> None:
    path = tmp_path / "profile.json"
    if content is not None:
        path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert PluginSettings(profile=path).prefill_cost() == PrefillCostModel.default()
    assert "by default" in caplog.text
