"""Start a supervised server for a launch."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from ragcache_core.chunk import AlphaPoint, choose_alpha
from ragcache_core.chunkstore.encryption import load_keys
from ragcache_core.chunkstore.remote import check_reachable, open_remote
from ragcache_core.client.launch.arguments import (
    cache_arguments,
    check_launch,
    new_log_path,
    num_engines_of,
    server_environment,
)
from ragcache_core.client.launch.process import ServerProcess, claim_port, free_port, is_stream
from ragcache_core.client.launch.settings import LaunchSettings, VLLMOffload
from ragcache_core.client.launch.supervisor import LoadProgress, Supervisor
from ragcache_core.client.server_api import import_requests
from ragcache_core.config import SHARED_PASSWORD_ENV, CacheConfig, ChunkReuse
from ragcache_core.errors import ConfigError, EngineStartError
from ragcache_core.log import logger_of
from ragcache_core.profiles.calibration import find_calibration, load_calibration
from ragcache_core.profiles.prefill import find_profile
from ragcache_core.runtime.environment import HANG_TIMEOUT_ENV, SOCKETS_ENV, STARTED_AGAIN_ENV
from ragcache_core.runtime.shared_memory import EngineFiles, new_engine_id, sweep_shared_memory
from ragcache_core.runtime.tenants import Tenants
from ragcache_core.types import Tier

_held: weakref.WeakSet[DirectoryLock] = weakref.WeakSet()
_SHUTDOWN_TIMEOUT_S = 20.0
"""An engine whose owner was killed has noticed and ended by then."""
_HEALTH_CHECK_INTERVAL_S = 0.25
_TOO_SMALL = re.compile(
    r"KV cache is needed, which is larger than the available KV cache memory \([^)]*\)[^`]*?\.(?= Try)"
)
"""vLLM's error if its KV memory does not fit one prompt of maximum length."""
_NOT_FOUND = re.compile(
    r"(LocalEntryNotFound|RepositoryNotFound|GatedRepo|OfflineModeIsEnabled)Error|Cannot find an appropriate cached"
    r"|is not a local folder and is not a valid model identifier|We couldn't connect to .* to load the files"
)
"""Errors of the Hugging Face hub's client and of Transformers for an unknown name."""
_NO_DEVICE = "Failed to infer device type"
"""vLLM's error if no device fits its build."""
_NO_SPACE = "No space left on device"
_LEAST_FREE_BYTES = 256 << 20
"""A disk with less has no space for compiled code."""
_COMPILED = {
    "VLLM_CACHE_ROOT": "~/.cache/vllm",
    "TORCHINDUCTOR_CACHE_DIR": tempfile.gettempdir(),
    "TRITON_CACHE_DIR": "~/.triton",
}
"""The folders of compiled code, which an engine writes while it starts: by variable, with their defaults."""
_KV_CURE = "Raise kv_cache_bytes, or lower max_model_len"
logger = logger_of(__name__)


class DirectoryLock:
    """The lock of a cache directory, held by the launching process until :meth:`release` or its end.

    Two engines must not keep the same KV in one directory. Whether theirs is the same is known only when the model is
    loaded (``vllm_plugin/identity.py``), and then the second one ends. For two that are launched in the same way it is
    known before. Other engines may share a directory: each has a folder there.
    """

    def __init__(self, directory: Path, launch: str) -> None:
        """Take the lock; do nothing if the file system has no locks, or another user owns the file.

        Raises:
            EngineStartError: an engine that was launched in the same way has it.
        """
        self._descriptor = -1
        with suppress(OSError):
            self._descriptor = os.open(
                directory / f"{launch}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
            )
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._close()
                raise EngineStartError(
                    f"{directory} is the cache directory of another engine that is running with the same model and "
                    "settings: stop that one, or give each engine a directory of its own"
                ) from None
        _held.add(self)

    def release(self) -> None:
        """Release the lock. Idempotent."""
        if self._descriptor >= 0:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        self._close()

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


def launch_digest(
    model: str, cache: CacheConfig, arguments: Sequence[str], environment: Mapping[str, str] = os.environ
) -> str:
    """Return a digest of the launch settings that decide the cache namespace.

    Engines of one digest keep the same KV: the model's files, vLLM's arguments and its variables are the same.
    """
    folder = Path(model).expanduser()
    files = [path.resolve() for path in sorted(folder.iterdir()) if path.is_file()] if folder.is_dir() else []
    facts = [(str(path), status.st_size, status.st_mtime_ns) for path in files for status in [path.stat()]]
    chunks = None if cache.chunk_reuse is None else cache.chunk_reuse.model_dump(mode="json")
    variables = sorted(
        (k, v) for k, v in environment.items() if k.startswith(("VLLM_", "CUDA_", "PYTHONHASH")) and k != "VLLM_API_KEY"
    )
    key_parts = [str(folder.resolve()) if files else model, facts, cache.block_size, chunks, list(arguments), variables]
    return hashlib.sha256(json.dumps(key_parts).encode()).hexdigest()[:32]


def _forget_all() -> None:
    """Close inherited locks in a fork, so that it does not keep them after its parent ends."""
    for lock in _held:
        lock._close()


os.register_at_fork(after_in_child=_forget_all)


@dataclass(frozen=True, slots=True)
class LaunchedServer:
    """A server that is ready, with its address."""

    base_url: str
    api_key: str = field(repr=False)
    supervisor: Supervisor
    log_path: Path


def launch_server(settings: LaunchSettings) -> LaunchedServer:
    """Launch a server, and return it when it is ready.

    Raises:
        EngineStartError: no model there, the port is taken, or the server ended or got stuck before it was ready.
        EngineClosedError: ``cancel`` was set before the server was ready.
        ConfigError: an argument that is a setting of ``launch`` or ``CacheConfig``, or one that vLLM does not have.
    """
    given = check_launch(settings)
    port = free_port(settings.host) if settings.port is None else settings.port
    with claim_port(settings.host, port):
        return _launch(settings, port, given)


def _launch(settings: LaunchSettings, port: int, given: Sequence[str]) -> LaunchedServer:
    """Launch a server at a port that is free, with the vLLM arguments ``given``."""
    model, host, env, cancel = settings.model, settings.host, settings.env or {}, settings.cancel or threading.Event()
    api_key = settings.api_key or secrets.token_urlsafe(24)
    named = [] if settings.tokenizer is None else ["--tokenizer", settings.tokenizer]
    if "served_model_name" not in settings.vllm_args:
        named += ["--served-model-name", Path(model).resolve().name if Path(model).is_dir() else model]
    engine_id, most_host_bytes = new_engine_id(os.getpid()), None
    num_engines = num_engines_of(given)
    cache = settings.cache
    if isinstance(cache, CacheConfig):
        given_cache, cache = cache, _resolved(cache, cancel)
        most_host_bytes = given_cache.most_host_bytes()
        if given_cache.host_bytes is None:
            cache = cache.model_copy(update={"host_bytes": (cache.host_bytes or 0) // settings.num_ranks})
            most_host_bytes = None if most_host_bytes is None else most_host_bytes // settings.num_ranks
        cache, most_host_bytes = _share(cache, most_host_bytes, num_engines)
        _check_tenants(cache, api_key, most_host_bytes)
        _check_shared(cache, env)
    alphas = _alphas(model, cache.chunk_reuse) if isinstance(cache, CacheConfig) else ()
    arguments = [
        *("--model", model, "--host", host, "--port", str(port), "--enable-prompt-tokens-details"),
        "--disable-uvicorn-access-log",
        *cache_arguments(
            cache,
            engine_id=engine_id,
            profile=find_profile(model),
            alphas=alphas,
            most_host_bytes=most_host_bytes,
        ),
        *named,
        *given,
    ]
    variables = {HANG_TIMEOUT_ENV: f"{settings.hang_timeout_s or 0:g}", **env}
    environment = server_environment(api_key, cache, variables, engine_id=engine_id)
    log = settings.log_path or new_log_path(port)
    # Of a log that is a stream a bar would stand between the lines.
    progress = False if settings.progress is None and is_stream(log) else settings.progress
    lock = _lock(model, cache, given, environment)
    address = f"http://{_reachable(host)}:{port}"
    threading.Thread(target=import_requests, name="ragcache-imports", daemon=True).start()  # while the server loads

    files = EngineFiles(
        engine_id,
        host_bytes=max(0 if cache is None else int(cache.host_bytes or 0), most_host_bytes or 0),
        num_replicas=num_engines,
    )

    def end() -> None:
        files.remove()
        if lock is not None:
            lock.release()

    runs = count()

    def start() -> ServerProcess:
        files.prepare()
        again = {STARTED_AGAIN_ENV: "1"} if next(runs) else {}
        return ServerProcess(
            arguments,
            env={SOCKETS_ENV: str(files.sockets), **environment, **again},
            log_path=log,
            log_as_json=settings.log_format == "json",
        )

    try:
        supervisor = Supervisor(
            start,
            f"{address}/health",
            max_restarts=settings.max_restarts,
            restart_window_s=settings.restart_window_s,
            hang_timeout_s=settings.hang_timeout_s,
            startup_timeout_s=settings.startup_timeout_s,
            progress=LoadProgress.of(progress),
            closing=cancel,
            on_end=end,
        )
    except EngineStartError as error:
        if isinstance(cache, CacheConfig) and (too_small := _TOO_SMALL.search(str(error))) is not None:
            raise EngineStartError(f"{str(error)[: too_small.end()]} {_KV_CURE} (log: {log})") from error
        if _NO_DEVICE in str(error):
            raise EngineStartError(
                "vLLM found no GPU here: give the container one (docker run --gpus all; in Kubernetes a node with "
                f"nvidia.com/gpu), check the driver with nvidia-smi, or use vLLM's build for the CPU (log: {log})"
            ) from error
        if _NO_SPACE in str(error) and (full := _full_folders(environment)):
            raise EngineStartError(
                f"no space is left where the engine writes compiled code: {full}. "
                f"Free space, or set these variables to folders of another disk (log: {log})"
            ) from error
        if Path(model).exists():
            raise
        if _NOT_FOUND.search(str(error)) is not None:
            others = "" if settings.tokenizer is None else f", or tokenizer {settings.tokenizer!r},"
            raise EngineStartError(
                f"model {model!r}{others} was not found: there is no such folder, and the Hugging Face hub gave no "
                "model of that name. Correct the name, or name a folder. Where there is no network, download the model "
                f"before (hf download {model}); for a private model set HF_TOKEN (log: {log})"
            ) from error
        raise EngineStartError(f"{error}; no folder {model!r} exists, so it was taken for a name of the hub") from error
    return LaunchedServer(
        f"{address}/v1",
        api_key,
        supervisor,
        log,
    )


def _full_folders(environment: Mapping[str, str]) -> str:
    """Return the folders of compiled code whose disk is full, each with its variable and free space."""
    shown = []
    for name, default in _COMPILED.items():
        folder = Path(environment.get(name) or os.environ.get(name) or default).expanduser()
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        if (free_bytes := shutil.disk_usage(there).free) < _LEAST_FREE_BYTES:
            shown.append(f"{name}={folder} ({free_bytes >> 20} MiB free)")
    return ", ".join(shown)


def _resolved(cache: CacheConfig, cancel: threading.Event) -> CacheConfig:
    """Return ``cache`` with sizes for this machine, after freeing shared memory of crashed engines.

    Such an engine may still be about to end, and has its memory until then.

    Raises:
        ConfigError: it cannot work here.
    """
    timeout_s = _SHUTDOWN_TIMEOUT_S if sweep_shared_memory() else 0.0
    ends_s = time.monotonic() + timeout_s
    while True:
        try:
            return cache.resolved()
        except ConfigError:
            if time.monotonic() >= ends_s or cancel.wait(_HEALTH_CHECK_INTERVAL_S):
                raise


def _share(cache: CacheConfig, most_host_bytes: int | None, num_engines: int) -> tuple[CacheConfig, int | None]:
    """Return the share of host memory and disk for one of several data-parallel engines on this machine."""
    sizes = {"host_bytes": (cache.host_bytes or 0) // num_engines, "disk_bytes": cache.disk_bytes // num_engines}
    return cache.model_copy(update=sizes), None if most_host_bytes is None else most_host_bytes // num_engines


def _check_tenants(cache: CacheConfig, api_key: str, most_host_bytes: int | None) -> None:
    """Reject an invalid file of tenants before the engine starts.

    Raises:
        ConfigError: it cannot be used, a quota is more than a tier, or the server's key is a tenant's.
    """
    if cache.tenants is None:
        return
    tenants = Tenants.from_toml(cache.tenants)
    tenants.check_own_keys([api_key])
    for_chunks = cache.for_chunks()
    host_bytes = max(cache.host_bytes or 0, most_host_bytes or 0) - for_chunks[0]
    tenants.check_fit(Tier.HOST, host_bytes, "host_bytes")
    tenants.check_fit(Tier.DISK, cache.disk_bytes - for_chunks[1], "disk_bytes")
    if cache.kv_cache_bytes is not None:
        tenants.check_fit(Tier.GPU, cache.kv_cache_bytes, "kv_cache_bytes")


def _check_shared(cache: CacheConfig, env: Mapping[str, str]) -> None:
    """Reject a shared store that denies access; one that does not answer is only logged.

    Credentials that are given to the engine alone are not tried here.

    Raises:
        ConfigError: it cannot work, its client is not installed, or a password is wrong.
    """
    if cache.shared is None:
        return
    if any(name == SHARED_PASSWORD_ENV or name.startswith("AWS_") for name in env):
        open_remote(cache.shared, is_read_only=cache.shared_read_only).close()
    elif (
        why := check_reachable(
            cache.shared, is_limited=cache.shared_bytes is not None, is_read_only=cache.shared_read_only
        )
    ) is not None:
        logger.warning(
            "RC-SHARED-UNREACHABLE: the shared store %s does not answer, and is tried again later (%s)",
            cache.shared,
            why,
        )


def _lock(
    model: str, cache: CacheConfig | VLLMOffload | None, arguments: Sequence[str], environment: Mapping[str, str]
) -> DirectoryLock | None:
    """Return the lock of the directory that the engine will write to.

    Raises:
        EngineStartError: another engine has it. ConfigError: the keys that it is encrypted with cannot be read.
    """
    if not isinstance(cache, CacheConfig):
        return None
    if cache.disk_bytes or cache.shared is not None:
        load_keys(cache.disk_key_file)  # refused here rather than by the engine
    if not cache.disk_bytes or cache.directory is None:
        return None
    return DirectoryLock(cache.directory, launch_digest(model, cache, arguments, environment))


def _alphas(model: str, reuse: ChunkReuse | None) -> tuple[AlphaPoint, ...]:
    """Return the measured alphas of chunk reuse on ``model``.

    Raises:
        ConfigError: a quality is wanted that was not measured, or not reached.
    """
    path = None if reuse is None else find_calibration(model, reuse.selection)
    if reuse is None or (path is None and reuse.quality is None):
        return ()
    if path is None:
        raise ConfigError(
            f"ChunkReuse.quality is {reuse.quality:g}, but no calibration of {model!r} with "
            f"selection {reuse.selection!r} exists: run 'ragcache calibrate', or give alpha"
        )
    calibration = load_calibration(path)
    is_as_measured = calibration.max_recompute == reuse.max_recompute
    if reuse.quality is not None:
        if not is_as_measured:
            raise ConfigError(
                f"ChunkReuse.max_recompute is {reuse.max_recompute:g}, {path} was measured with "
                f"{calibration.max_recompute:g}: run 'ragcache calibrate' again, or set max_recompute to that"
            )
        choose_alpha(calibration.points, reuse.quality)
    return calibration.points if is_as_measured else ()


def _reachable(host: str) -> str:
    """Return the host to connect to, for a host that a server listens on."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 (the user's choice)
    return f"[{host}]" if ":" in host else host
