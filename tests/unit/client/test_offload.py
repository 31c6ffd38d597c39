"""vLLM's own offloading as a launch has it: its scheduler, its policies, nothing of ours but the copying worker."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ragcache_core.client.launch.arguments import cache_arguments, server_environment
from ragcache_core.client.launch.settings import VLLMOffload


def transfer_config(offload: VLLMOffload) -> dict[str, Any]:
    flag, config = cache_arguments(offload, engine_id="ragcache-1")
    assert flag == "--kv-transfer-config"
    return dict(json.loads(config))


@pytest.mark.parametrize("eviction", ["lru", "arc"])
def test_vllm_evicts_by_its_own_policy_and_its_own_scheduler_runs(eviction: Any) -> None:
    config = transfer_config(VLLMOffload(1 << 26, eviction))
    assert config["kv_connector"] == "OffloadingConnector"
    assert config["engine_id"] == "ragcache-1"
    assert config["kv_load_failure_policy"] == "recompute"
    assert config["kv_connector_extra_config"] == {
        "cpu_bytes_to_use": 1 << 26,
        "eviction_policy": eviction,
        "spec_name": "VLLMSpec",
        "spec_module_path": "ragcache_core.vllm_plugin.offload.vllm_spec",
    }


def test_the_file_tier_uses_the_configured_folder(tmp_path: Path) -> None:
    extra = transfer_config(VLLMOffload(1 << 26, "lru", tmp_path))["kv_connector_extra_config"]
    assert extra["secondary_tiers"] == [{"type": "fs", "root_dir": str(tmp_path)}]


def test_it_has_as_many_cores_as_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_CPU_NUM_OF_RESERVED_CPU", raising=False)
    environment = server_environment("key", VLLMOffload(1 << 26), None, engine_id="ragcache-1")
    assert environment["VLLM_CPU_NUM_OF_RESERVED_CPU"] == "1"
