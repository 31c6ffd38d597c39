"""One launch of several servers of a model, a data-parallel rank each: what each gets of the machine; all or none."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ByteSize

from ragcache_core.client.launch.arguments import number_of, vllm_arguments
from ragcache_core.client.launch.launch import LaunchedServer
from ragcache_core.client.launch.process import check_port_free, free_port, is_stream
from ragcache_core.client.launch.settings import LaunchSettings, VLLMOffload
from ragcache_core.config import CacheConfig
from ragcache_core.errors import ConfigError, EngineClosedError, EngineStartError
from ragcache_core.memory import has_gpu, num_nvidia_gpus, read_memory

_HEALTH_CHECK_INTERVAL_S = 0.1
_MAX_RANKS = 64
_DEVICES_ENV = "CUDA_VISIBLE_DEVICES"
_CORES_ENV = "VLLM_CPU_OMP_THREADS_BIND"
_WORKERS = ("--tensor-parallel-size", "-tp"), ("--pipeline-parallel-size", "-pp")
_TOGETHER = ("data_parallel", "enable_expert_parallel")
"""Settings of vLLM's own data parallelism, whose ranks are one engine's."""


def launch_ranks(
    start: Callable[[LaunchSettings], LaunchedServer], settings: LaunchSettings, size: int
) -> list[LaunchedServer]:
    """Return ``size`` servers that are ready; they may ``start`` at the same time.

    Raises:
        ConfigError: the machine has not that many parts.
        EngineStartError: one could not start, and so none does; it says which, and why.
        EngineClosedError: the launch was given up.
    """
    ranks = plan_ranks(size, settings)
    cancelled = settings.cancel or threading.Event()
    cancels = [threading.Event() for _ in ranks]  # which each server keeps: set, it is not started again
    with ThreadPoolExecutor(len(ranks), thread_name_prefix="ragcache-rank") as threads:
        starting = [
            threads.submit(start, rank.model_copy(update={"cancel": own}))
            for rank, own in zip(ranks, cancels, strict=True)
        ]
        try:
            _wait(starting, cancelled)
            return [server.result() for server in starting]
        except BaseException as error:
            for cancel in cancels:
                cancel.set()
            wait(
                [threads.submit(_close, each) for each in starting]
            )  # in a thread: this wait may be interrupted as well
            if isinstance(error, EngineStartError | ConfigError):
                rank = next(i for i, each in enumerate(starting) if each.exception() is error)
                kind = type(error)
                raise kind(f"rank {rank} of {len(ranks)}, at port {ranks[rank].port}: {error}") from error
            raise


def _close(starting: Future[LaunchedServer]) -> None:
    """End a server that is ready, or will be."""
    if starting.exception() is None:
        starting.result().supervisor.close()


def _wait(starting: list[Future[LaunchedServer]], cancelled: threading.Event) -> None:
    """Wait until all are ready.

    Raises:
        EngineClosedError: the launch was given up. Of a server: why it could not start.
    """
    left = set(starting)
    while left:
        done, left = wait(left, timeout=_HEALTH_CHECK_INTERVAL_S, return_when=FIRST_COMPLETED)
        for each in done:
            each.result()
        if cancelled.is_set():
            raise EngineClosedError("the launch was aborted before its servers were ready")


def plan_ranks(size: int, launch: LaunchSettings) -> list[LaunchSettings]:
    """Return the settings of each server: ports, devices, folders, logs, shares of memory and disk differ.

    Raises:
        ConfigError: there are fewer devices than they need, or a setting that means one engine with several ranks.
        EngineStartError: a port is taken.
    """
    if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= _MAX_RANKS:
        raise ConfigError(f"data_parallel_size is {size!r:.80}: give 1 to {_MAX_RANKS}, the number of servers")
    arguments = [*vllm_arguments(launch.vllm_args), *launch.extra_args]
    named = [argument.split("=")[0] for argument in arguments if argument.startswith("-")]
    flags = {name.removeprefix("--").replace("-", "_") for name in named}
    if together := sorted(flag for flag in flags if flag.startswith(_TOGETHER) or flag in ("_dp", "_dpl")):
        raise ConfigError(
            f"data_parallel_size is {size}, which launches a server a rank that shares nothing, beside "
            f"{together[0]}, which means one engine: leave one of them out, or pass vLLM's own "
            f'extra_args=["--data-parallel-size", "{size}"] for ranks behind one server'
        )
    _check_kv(launch.cache, size)
    ports = _ports(launch.host, launch.port, size)
    parts = _parts(size, _num_workers(arguments), launch.environment)
    key = launch.api_key or secrets.token_urlsafe(24)
    return [
        launch.model_copy(
            update={
                "port": ports[rank],
                "api_key": key,
                "cache": _cache_of(launch.cache, rank, size),
                "num_ranks": size,
                "env": {**(launch.env or {}), **parts[rank]},
                "log_path": own_log(launch.log_path, f"rank-{rank}"),
                "progress": _progress_of(launch.progress, rank),
            }
        )
        for rank in range(size)
    ]


def _check_kv(cache: CacheConfig | VLLMOffload | None, size: int) -> None:
    """Refuse more KV in main memory than is free for all ranks: each rank checks only its own.

    Raises:
        ConfigError: with what to lower.
    """
    if not isinstance(cache, CacheConfig) or cache.kv_cache_bytes is None or has_gpu():
        return
    memory, each = read_memory(), cache.kv_cache_bytes
    if each * size > memory.available:
        raise ConfigError(
            f"CacheConfig.kv_cache_bytes is {each.human_readable()} for each of {size} ranks, {memory.whose} "
            f"{ByteSize(memory.available).human_readable()} of memory free: lower kv_cache_bytes or data_parallel_size"
        )


def _num_workers(arguments: list[str]) -> int:
    tensor, pipeline = (number_of(arguments, *flags) or 1 for flags in _WORKERS)
    return tensor * pipeline


def _ports(host: str, first: int | None, size: int) -> list[int]:
    if first is None:
        ports: list[int] = []
        while len(ports) < size:
            if (port := free_port(host)) not in ports:
                ports.append(port)
        return ports
    for port in range(first, first + size):
        check_port_free(host, port)
    return list(range(first, first + size))


def _parts(size: int, num_workers: int, env: Mapping[str, str]) -> list[dict[str, str]]:
    """Return the variables that give each server its own GPUs, or where there is none, cores.

    Raises:
        ConfigError: there are too few, or one is named twice.
    """
    if devices := _devices(env.get(_DEVICES_ENV)):
        if len(devices) < size * num_workers:
            raise ConfigError(
                f"data_parallel_size is {size} with {num_workers} GPUs a rank, which needs {size * num_workers}; "
                f"{len(devices)} are here: lower it, or name them in {_DEVICES_ENV}"
            )
        return [{_DEVICES_ENV: ",".join(devices[r * num_workers : (r + 1) * num_workers])} for r in range(size)]
    if bound := env.get(_CORES_ENV):
        of_workers = bound.split("|")
        if len(of_workers) != size * num_workers:
            return [{}] * size  # "nobind", "auto", or the same for all
        return [{_CORES_ENV: "|".join(of_workers[r * num_workers : (r + 1) * num_workers])} for r in range(size)]
    cores = sorted(os.sched_getaffinity(0))
    each = len(cores) // (size * num_workers)
    if not each:
        return [{_CORES_ENV: "nobind"}] * size
    bounds = [",".join(map(str, cores[i * each : (i + 1) * each])) for i in range(size * num_workers)]
    return [{_CORES_ENV: "|".join(bounds[r * num_workers : (r + 1) * num_workers])} for r in range(size)]


def _devices(named: str | None) -> list[str]:
    """Return the GPUs that are ``named``, which may be none, or all that CUDA counts here.

    Raises:
        ConfigError: one is named twice, and two servers would share it.
    """
    if named is None:
        return [str(number) for number in range(num_nvidia_gpus())]
    devices = [device.strip() for device in named.split(",") if device.strip()]
    if len(set(devices)) < len(devices):
        raise ConfigError(f"{_DEVICES_ENV} is {named!r:.80}, which names a GPU twice: name each once")
    return devices


def _cache_of(cache: CacheConfig | VLLMOffload | None, rank: int, size: int) -> CacheConfig | VLLMOffload | None:
    """Return a rank's part of host memory and disk; without a size of host memory the launch divides it."""
    cache = own_folder(cache, f"rank-{rank}")
    if isinstance(cache, VLLMOffload):
        return replace(cache, host_bytes=cache.host_bytes // size)
    if cache is None:
        return None
    changed: dict[str, Any] = {}
    if cache.host_bytes is not None:
        changed["host_bytes"] = int(cache.host_bytes) // size
    if cache.disk_bytes:
        changed["disk_bytes"] = int(cache.disk_bytes) // size
    return type(cache)(**{**cache.model_dump(exclude_unset=True), **changed})


def own_folder(cache: CacheConfig | VLLMOffload | None, name: str) -> CacheConfig | VLLMOffload | None:
    """Return settings of one of several servers: what it keeps on disk is in a folder of that ``name``."""
    if isinstance(cache, VLLMOffload):
        return cache if cache.directory is None else replace(cache, directory=cache.directory / name)
    if cache is None or not cache.disk_bytes:
        return cache
    return type(cache)(**{**cache.model_dump(exclude_unset=True), "directory": cache.folder / name})


def own_log(path: Path | None, name: str) -> Path | None:
    """Return the log of one of several servers."""
    return path if path is None or is_stream(path) else path.with_stem(f"{path.stem}-{name}")


def _progress_of(progress: bool | Callable[[str], None] | None, rank: int) -> bool | Callable[[str], None] | None:
    """Return who is told how far a rank's start is; of several bars the first rank's is drawn."""
    if callable(progress):
        return lambda stage: progress(f"rank {rank}: {stage}")
    return False if rank else progress
