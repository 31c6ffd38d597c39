from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from ragcache_core import CacheConfig
from ragcache_core.client.launch.arguments import cache_arguments
from ragcache_core.runtime.environment import CPU_KV_CACHE_BYTES_ENV
from ragcache_core.vllm_plugin.server.api_server import (
    cpu_defaults,
    keep_freed_memory,
    keep_worker_inside,
    num_front_ends_of,
)

OURS = cache_arguments(CacheConfig(host_bytes="1MiB"), engine_id="e")


def test_blocks_hold_32_tokens_on_a_cpu_by_default() -> None:
    assert cpu_defaults(OURS, {}) == ["--block-size", "32"]
    assert cpu_defaults(cache_arguments(CacheConfig(host_bytes=0), engine_id="e"), {}) == ["--block-size", "32"]
    for said in (["--block-size", "64"], ["--block_size=64"]):
        assert cpu_defaults([*OURS, *said], {}) == []


def test_kv_memory_on_a_cpu_is_what_the_launch_sets_unless_configured() -> None:
    environ = {CPU_KV_CACHE_BYTES_ENV: "5"}
    assert cpu_defaults(["--model", "m"], environ) == ["--kv-cache-memory-bytes", "5"]
    assert cpu_defaults(["--gpu_memory_utilization=0.5"], environ) == []
    assert cpu_defaults(["--model", "m"], {**environ, "VLLM_CPU_KVCACHE_SPACE": "1"}) == []


def test_freed_memory_is_kept_for_the_next_step() -> None:
    environ = {"PATH": "/bin"}
    keep_freed_memory(environ)
    assert environ == {
        "PATH": "/bin",
        "MALLOC_TRIM_THRESHOLD_": "1073741824",
        "MALLOC_MMAP_THRESHOLD_": "33554432",
    }


@pytest.mark.parametrize(
    ("num_free", "binding", "expected"),
    [(64 << 20, None, "0"), (2 << 30, None, None), (2 << 30, "auto", None), (2 << 30, "nobind", "0")],
)
def test_the_worker_has_no_process_of_its_own_where_queues_have_no_room_or_no_thread_is_bound(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, num_free: int, binding: str | None, expected: str | None
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=num_free))
    bound = {} if binding is None else {"VLLM_CPU_OMP_THREADS_BIND": binding}
    environ = dict(bound)
    keep_worker_inside(environ, tmp_path)
    assert environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == expected
    environ = {**bound, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    keep_worker_inside(environ, tmp_path)
    assert environ == {**bound, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}, "the user's choice"


@pytest.mark.parametrize(
    ("arguments", "number"),
    [
        (["server", "--model", "m"], 1),
        (["server", "--api-server-count", "3", "--model", "m"], 3),
        (["server", "--api_server_count=2"], 2),
        (["server", "-asc", "4"], 4),
    ],
)
def test_the_arguments_say_how_many_api_servers_there_are(arguments: list[str], number: int) -> None:
    assert num_front_ends_of(arguments) == number
