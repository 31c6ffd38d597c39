"""Launches the engines that are compared, and reads the processor time of their processes."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Literal

from benchmarks.token_client import TokenClient
from ragcache_core.client import Engine
from ragcache_core.client.launch.settings import VLLMOffload
from ragcache_core.config import CacheConfig
from ragcache_core.memory import has_gpu
from ragcache_core.profiles.random_model import ModelShape, random_model
from ragcache_core.runtime.hangs import read_engine_use

EngineName = Literal["vllm", "vllm-control", "vllm-offload", "ragcache-gpu", "ragcache-host"]
ENGINES: tuple[EngineName, ...] = ("vllm", "vllm-control", "vllm-offload", "ragcache-gpu", "ragcache-host")

PROMPT_BYTES = 1 << 20
# 4,096 tokens of the model below: 2 x 32 numbers of 4 bytes a token.
_NUM_GPU_PROMPTS = 32
_BLOCK_TOKENS = 32
_MAX_TOKENS = 4096
# One layer: the figures are about the processes around the model.
_SHAPE = ModelShape(
    hidden_size=64, num_layers=1, num_heads=2, num_kv_heads=1, intermediate_size=128, vocab_size=1024, max_tokens=8192
)
# Of a GPU that all engines share: each has its own size of KV.
_GPU_SHARE = 0.1
_ENV = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
# Linux's number of the clock that counts all threads of a process: CPUCLOCK_SCHED of <linux/posix-timers.h>.
_PROCESS_CLOCK = 2


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """Seconds of processor time since the processes began.

    Attributes:
        api_server: the process that takes HTTP requests.
        engine_core: the process of the scheduler, which on a CPU and on one GPU runs the model as well.
    """

    api_server: float
    engine_core: float

    def __sub__(self, other: CpuTimes) -> CpuTimes:
        return CpuTimes(self.api_server - other.api_server, self.engine_core - other.engine_core)


class MeasuredEngine:
    """A running engine with a client, and the processor time of its two processes."""

    def __init__(self, name: EngineName, engine: Engine) -> None:
        self.sends_documents = name.startswith("ragcache")
        self.client = TokenClient(engine)
        assert engine.pid is not None
        self._server_pid = engine.pid
        self._core_pid = _core_pid(engine.pid)

    def cpu_times(self) -> CpuTimes:
        """Return the processor time of both processes until now, exact to microseconds."""
        return CpuTimes(process_time_s(self._server_pid), process_time_s(self._core_pid))


def launch_engine(name: EngineName, num_host_prompts: int) -> Engine:
    """Return an engine that is ready.

    Args:
        name: which engine.
        num_host_prompts: prompts of 4,096 tokens that the host tier holds. The GPU KV cache holds 32.
    """
    kv_bytes = _NUM_GPU_PROMPTS * PROMPT_BYTES
    host_bytes = num_host_prompts * PROMPT_BYTES
    arguments: dict[str, Any] = {"kv_cache_memory_bytes": kv_bytes, "block_size": _BLOCK_TOKENS}
    if has_gpu():
        arguments["gpu_memory_utilization"] = _GPU_SHARE
    cache: CacheConfig | VLLMOffload | None = None
    if name == "vllm-offload":
        cache = VLLMOffload(host_bytes)
    elif name.startswith("ragcache"):
        del arguments["kv_cache_memory_bytes"], arguments["block_size"]
        cache = CacheConfig(
            kv_cache_bytes=kv_bytes, host_bytes=0 if name == "ragcache-gpu" else host_bytes, block_size=_BLOCK_TOKENS
        )
    launched: Engine = Engine.launch(
        str(random_model(_SHAPE)),
        cache=cache,
        dtype="float32",
        enforce_eager=True,
        max_model_len=_MAX_TOKENS,
        max_num_batched_tokens=_MAX_TOKENS,
        max_restarts=0,
        progress=False,
        env=_ENV,
        **arguments,
    )
    return launched


def _core_pid(server_pid: int) -> int:
    cores = [pid for pid, use in read_engine_use(server_pid).items() if "EngineCore" in use.title]
    if len(cores) != 1:
        raise RuntimeError(f"the server with process {server_pid} has {len(cores)} processes of an engine core, not 1")
    return cores[0]


def process_time_s(pid: int) -> float:
    """Return the processor time of a process with all its threads, exact to microseconds."""
    return time.clock_gettime((~pid << 3) | _PROCESS_CLOCK)
