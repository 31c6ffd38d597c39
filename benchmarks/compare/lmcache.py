"""LMCache in a comparison: vLLM with LMCache's connector and LMCache's own server, which has the tiers.

It needs ``pip install lmcache``. The engine's processor time does not include that of LMCache's server.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

from ragcache_core.bench.engines import Baseline, Setup
from ragcache_core.client import Engine
from ragcache_core.client.launch.process import free_port
from ragcache_core.client.launch.vllm_offload import VLLMOffload
from ragcache_core.errors import ConfigError, EngineStartError
from ragcache_core.runtime.sessions import kill_session

CHUNK_TOKENS = 256
"""Tokens of an LMCache chunk by default; the scale of lengths applies to it too."""
_READY_TIMEOUT_S = 90.0
_CLOSING_S = 15.0
_QUIET = {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1", "DO_NOT_TRACK": "1"}
_SET_PARENT_DEATH_SIGNAL = 1


@dataclass(frozen=True, slots=True)
class LMCacheOffload(VLLMOffload):
    """What ``Engine.launch(cache=...)`` runs: vLLM with LMCache's connector to a server at ``port``."""

    port: int = 0

    def transfer_config(self, engine_id: str) -> dict[str, object]:
        return {
            "kv_connector": "LMCacheMPConnector",
            "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "engine_id": engine_id,
            "kv_connector_extra_config": {"lmcache.mp.host": "tcp://localhost", "lmcache.mp.port": self.port},
        }


@dataclass(frozen=True, slots=True)
class LMCacheBaseline(Baseline):
    """vLLM with LMCache."""

    @property
    def uses_host(self) -> bool:
        return True

    @contextmanager
    def opened(self, setup: Setup, host_bytes: int, folder: Path) -> Iterator[Engine]:
        num_blocks = max(1, round(CHUNK_TOKENS * setup.scale / setup.block_size))
        with (
            lmcache_server(host_bytes, num_blocks * setup.block_size, folder, setup.disk_bytes) as offload,
            self.launch(setup, host_bytes, folder, offload) as engine,
        ):
            yield engine


LMCACHE = LMCacheBaseline("lmcache", "vLLM with LMCache and its server")


@contextmanager
def lmcache_server(host_bytes: int, chunk_tokens: int, folder: Path, disk_bytes: int = 0) -> Iterator[LMCacheOffload]:
    """Run LMCache's server while the context is open, and yield the offloading of an engine that uses it.

    Args:
        host_bytes: of its tier in host memory.
        chunk_tokens: of an LMCache chunk, a multiple of the engine's block size.
        folder: for its log, and for its tier on disk.
        disk_bytes: of its tier on disk; 0 is no such tier.

    Raises:
        ConfigError: LMCache is not installed here.
        EngineStartError: its server ends, or is not ready in time.
    """
    beside = Path(sys.executable).parent / "lmcache"
    program = str(beside) if beside.exists() else shutil.which("lmcache")
    if program is None:
        raise ConfigError("lmcache is not installed: pip install lmcache, or leave it out of --compare")
    port, http_port, metrics_port = (free_port("127.0.0.1") for _ in range(3))
    arguments = [
        *("--port", port, "--http-port", http_port, "--prometheus-port", metrics_port),
        *("--chunk-size", chunk_tokens, "--l1-size-gb", host_bytes / 2**30, "--no-l1-use-lazy"),
        *("--eviction-policy", "LRU", "--supported-transfer-mode", "auto"),  # of devices and of processors
        *("--shm-name", f"ragcache-lmcache-{os.getpid()}-{port}"),
    ]
    if disk_bytes:
        tier = {"type": "fs_native", "base_path": str(folder), "max_capacity_gb": disk_bytes / 2**30}
        arguments += ["--l2-adapter", json.dumps(tier | {"eviction": {"eviction_policy": "LRU"}})]
    log_path = folder.with_name(f"{folder.name}-lmcache.log")
    with ExitStack() as stack:
        log = stack.enter_context(log_path.open("wb"))
        stack.callback(log_path.unlink)
        server = subprocess.Popen(
            [program, "server", *map(str, arguments)],
            stdout=log,
            stderr=log,
            env={**os.environ, **_QUIET},
            preexec_fn=_end_with_parent,
            start_new_session=True,  # Ctrl-C is for the engine first
        )
        stack.callback(_close, server)
        _wait_until_ready(server, f"http://127.0.0.1:{http_port}/healthcheck", log_path)
        yield LMCacheOffload(host_bytes, port=port)


def _end_with_parent() -> None:
    """Have the kernel end the server after the death of its parent, also by ``kill -9``."""
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)


def _wait_until_ready(server: subprocess.Popen[bytes], url: str, log_path: Path) -> None:
    ends_s = time.monotonic() + _READY_TIMEOUT_S
    while time.monotonic() < ends_s and server.poll() is None:
        try:
            httpx.get(url, timeout=2.0, trust_env=False)
        except httpx.HTTPError:
            time.sleep(0.25)
        else:
            return
    said = log_path.read_text(errors="replace")[-1_000:]
    raise EngineStartError(f"LMCache's server is not ready (exit status {server.poll()}): {said}")


def _close(server: subprocess.Popen[bytes]) -> None:
    server.terminate()
    with suppress(subprocess.TimeoutExpired):
        server.wait(_CLOSING_S)
    kill_session(server.pid)  # with its children
    server.wait()
