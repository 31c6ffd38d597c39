"""Convert the settings of a launch to arguments and environment of vLLM's server."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from difflib import get_close_matches
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from typing import Any

import platformdirs

from ragcache_core.chunk import AlphaPoint
from ragcache_core.client.launch.settings import SETTINGS, LaunchSettings, VLLMOffload
from ragcache_core.config import MULTI_CONNECTOR, CacheConfig
from ragcache_core.errors import ConfigError, EngineStartError
from ragcache_core.memory import has_gpu
from ragcache_core.private_files import make_private_folder
from ragcache_core.runtime.environment import CPU_KV_CACHE_BYTES_ENV, ENGINE_ID_ENV

_SOURCES = ("engine/arg_utils.py", "entrypoints/launchers/cli_args.py", "entrypoints/openai/cli_args.py")
"""Where vLLM's releases define the arguments: as flags, and as fields of data classes."""
_FLAG = re.compile(r'"--([a-z][a-z0-9-]*)"')
_FIELD = re.compile(r"^    ([a-z]\w*)\s*:", re.MULTILINE)
_PLATFORM_PLUGINS = "vllm.platform_plugins"
"""Packages that may add arguments of their own."""
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_RESERVED = {
    "model": "the first argument of launch()",
    "host": "host=",
    "port": "port=",
    "api_key": "api_key=",
    "kv_transfer_config": "cache=, which sets it; another connector beside RAGCache's (NIXL, LMCache) goes into "
    "CacheConfig.connectors",
    "scheduler_cls": "cache=, which sets it",
    "kv_offloading_size": "CacheConfig.host_bytes",
    "kv_offloading_backend": "CacheConfig.host_bytes",
}
_REFUSED = {
    "disable_log_stats": "it takes away the server's statistics, with which the engine tells what it has cached, what "
    "was hidden and whether there is room for speculation: leave it out",
}
_MAX_LOGS = 50
STANDARD_ERROR = Path("/dev/stderr")
_CPU_BLOCK = 32
"""Tokens that vLLM's attention without a GPU takes at a time; latent attention (``kv_lora_rank``) has its own size."""
_RESERVED_CORES_ENV = "VLLM_CPU_NUM_OF_RESERVED_CPU"
"""How many cores the model leaves to the scheduler on a machine without a GPU. vLLM reserves one, and one more for any
connector, which ours does not need; of two cores it then reserves none, and everything takes three times as long."""
_TOKENIZER_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length")
"""Keys of a model's configuration with its number of positions."""
_LONGER_CONTEXT_ENV = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"
_ALLOCATOR_ENV = "PYTORCH_CUDA_ALLOC_CONF"
_PLUGIN = "ragcache_core.vllm_plugin"


def check_names(names: Iterable[str], extra_args: Sequence[str], own: Collection[str]) -> None:
    """Reject settings that vLLM's server does not have.

    Nothing is rejected where the names are unknown, or where a platform plugin may add some.

    Args:
        names: settings as keyword arguments, ``max_model_len``.
        extra_args: raw arguments, ``--max-model-len``.
        own: the settings of ``launch`` itself, for the hint.

    Raises:
        ConfigError: with the nearest name.
    """
    known = _known_names()
    if not known:
        return
    for name in names:
        if not _is_known(name.replace("_", "-"), known):
            candidates = {flag.replace("-", "_") for flag in known} | set(own)
            raise ConfigError(
                f"{name} is neither a setting of launch() nor an argument of vLLM's server: {_hint(name, candidates)}"
            )
    for argument in extra_args:
        flag = argument.split("=")[0].split(".")[0].replace("_", "-")  # --compilation-config.mode=3
        if flag.startswith("--") and flag != "--" and not _is_known(flag[2:], known):
            hint = _hint(flag[2:].replace("-", "_"), {name.replace("-", "_") for name in known}, is_flag=True)
            raise ConfigError(f"{flag} is no argument of vLLM's server: {hint}")


def is_vllm_flag(flag: str) -> bool:
    """Return whether ``flag``, such as ``--max-model-len``, is for certain an argument of vLLM's server."""
    name = flag.removeprefix("--")
    return name in _known_names() or name.removeprefix("no-") in _known_names()


@cache
def _known_names() -> frozenset[str]:
    """Return the names of all arguments of vLLM's server; empty if they are not known for certain."""
    spec = find_spec("vllm")
    if spec is None or spec.origin is None or entry_points(group=_PLATFORM_PLUGINS):
        return frozenset()
    known = set[str]()
    for source in _SOURCES:
        path = Path(spec.origin).parent / source
        if path.is_file():
            text = path.read_text(encoding="utf-8")
            known |= {*_FLAG.findall(text), *(name.replace("_", "-") for name in _FIELD.findall(text))}
    return frozenset(known) if "max-model-len" in known and "chat-template" in known else frozenset()


def _is_known(name: str, known: Collection[str]) -> bool:
    """Return whether vLLM's parser accepts a name: as it is, negated, or abbreviated."""
    return any(each.startswith((name, name.removeprefix("no-"))) for each in known)


def _hint(name: str, candidates: Collection[str], *, is_flag: bool = False) -> str:
    abbreviated = [field for field in CacheConfig.model_fields if field.startswith(name.removeprefix("cache_"))]
    nearest = abbreviated or get_close_matches(name, {*candidates, *CacheConfig.model_fields}, n=1)
    if not nearest:
        return "leave it out, or look its name up in vLLM's documentation"
    found = nearest[0]
    question = f"did you mean {'--' + found.replace('_', '-') if is_flag else found}?"
    if found in candidates:
        return question
    how = f"{'give it before --, or ' if is_flag else ''}pass cache=CacheConfig({found}=...)"
    return how if found == name else f"{question} {how}"


def check_launch(settings: LaunchSettings) -> list[str]:
    """Check a launch, and return vLLM's arguments for it.

    Raises:
        ConfigError, EngineStartError: with what to do instead.
    """
    arguments = [*vllm_arguments(settings.vllm_args), *settings.extra_args]
    check_extra_args(settings.extra_args)
    check_vllm()
    check_names(settings.vllm_args, settings.extra_args, own={*SETTINGS, "data_parallel_size"})
    check_worker(settings.cache, arguments)
    check_allocator(settings.cache, settings.environment, arguments)
    check_model(settings.model)
    check_tokenizer(settings.tokenizer)
    check_context(settings.model, arguments, settings.environment)
    check_block_size(settings.model, settings.cache)
    return arguments


def check_vllm() -> None:
    """Reject a launch if vLLM is not installed.

    Raises:
        EngineStartError: with how to install it, and what works without.
    """
    if find_spec("vllm") is None:
        raise EngineStartError(
            "vLLM is not installed here, which serves the model: pip install 'ragcache[gpu]' on a machine with a GPU, "
            "'make setup' in a checkout on one without, or connect to an engine that runs elsewhere"
        )


def check_model(model: str) -> None:
    """Reject a path without a model. The server checks names such as ``org/model``.

    Raises:
        EngineStartError: nothing, or no ``config.json``, is there.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise EngineStartError(f"{model!r} holds no config.json: name a folder with a model in Hugging Face format")
    elif path.exists():
        raise EngineStartError(f"{model!r} is a file: name the folder of a model in Hugging Face format")
    elif not _HUB_NAME.fullmatch(model):
        raise EngineStartError(
            f"there is no model at {model!r}: name a folder with a model in Hugging Face format, or a model of the "
            "Hugging Face hub as 'organisation/name'"
        )


def check_tokenizer(tokenizer: str | None) -> None:
    """Reject a path without a tokenizer. The server checks names of the hub.

    Raises:
        EngineStartError: no folder is there.
    """
    if tokenizer is None or Path(tokenizer).expanduser().is_dir() or _TOKENIZER_NAME.fullmatch(tokenizer):
        return
    raise EngineStartError(
        f"there is no tokenizer at {tokenizer!r}: name a folder that holds the model's tokenizer.json, or a name of "
        "the Hugging Face hub"
    )


def check_context(model: str, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """Reject a context longer than the model's, if its configuration states one without scaling.

    Raises:
        ConfigError: with the longest that it has.
    """
    requested_len, path = number_of(arguments, "--max-model-len"), Path(model).expanduser() / "config.json"
    may_be_longer = _LONGER_CONTEXT_ENV in environment or any("hf" in a and "overrides" in a for a in arguments)
    if requested_len is None or may_be_longer or not path.is_file():
        return
    try:
        config = json.loads(path.read_bytes())
        lengths = [int(config[key]) for key in _CONTEXT_KEYS if config.get(key) is not None]
        is_plain = _has_plain_positions(config)
    except (ValueError, TypeError, AttributeError):
        return
    if lengths and is_plain and requested_len > max(lengths):
        raise ConfigError(
            f"max_model_len is {requested_len}, this model has positions for {max(lengths)} tokens ({path}): lower "
            "max_model_len"
        )


def _has_plain_positions(config: Mapping[str, Any]) -> bool:
    """Return whether a model has exactly the positions that its configuration states, without scaling."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    return "text_config" not in config and kind == "default" and not any(isinstance(v, dict) for v in rope.values())


def check_block_size(model: str, cache: CacheConfig | VLLMOffload | None) -> None:
    """Reject block sizes that CPU attention does not support. vLLM itself checks models that are not on this machine.

    Raises:
        ConfigError: with the sizes that it takes.
    """
    size = cache.block_size if isinstance(cache, CacheConfig) else None
    if size is None or size % _CPU_BLOCK == 0 or has_gpu():
        return
    config = Path(model).expanduser() / "config.json"
    if config.is_file() and b"kv_lora_rank" not in config.read_bytes():
        raise ConfigError(
            f"CacheConfig.block_size is {size}: without a GPU attention takes multiples of {_CPU_BLOCK}, so set "
            f"block_size to {max(size // _CPU_BLOCK, 1) * _CPU_BLOCK}, or leave it out"
        )


def cache_arguments(
    cache: CacheConfig | VLLMOffload | None,
    *,
    engine_id: str,
    profile: Path | None = None,
    alphas: Sequence[AlphaPoint] = (),
    most_host_bytes: int | None = None,
) -> list[str]:
    """Return the server's arguments for a cache configuration; ``None`` is plain vLLM. Later ones override.

    Args:
        cache: what to keep, resolved for this machine.
        engine_id: names what the engine has in shared memory, so that a restart finds it.
        profile: measured prefill times of the model.
        alphas: measured qualities of chunk reuse on the model.
        most_host_bytes: the size of host memory is a default, which grows to this where the engine's own KV is larger.
            Where it holds no block of the model's KV, the engine runs without it. With a disk tier it cannot: blocks
            pass through host memory on their way to the disk.
    """
    if cache is None:
        return []
    if isinstance(cache, VLLMOffload):
        return ["--kv-transfer-config", json.dumps(cache.transfer_config(engine_id))]
    worker = "SeededWorker" if cache.chunk_reuse is None else "RAGCacheWorker"
    arguments = [
        *("--kv-transfer-config", json.dumps(transfer_config(cache, engine_id, profile, alphas, most_host_bytes))),
        *("--scheduler-cls", f"{_PLUGIN}.scheduler.RAGCacheScheduler"),
        *("--worker-cls", f"{_PLUGIN}.worker.{worker}"),
    ]
    if cache.kv_cache_bytes is not None:
        arguments += ["--kv-cache-memory-bytes", str(int(cache.kv_cache_bytes))]
    if cache.block_size is not None:
        arguments += ["--block-size", str(cache.block_size)]
    return arguments


def transfer_config(
    cache: CacheConfig,
    engine_id: str,
    profile: Path | None,
    alphas: Sequence[AlphaPoint],
    most_host_bytes: int | None = None,
) -> dict[str, object]:
    """Return vLLM's ``kv_transfer_config``: RAGCache's connector, the tiers, and further connectors."""
    settings = cache.model_dump(mode="json", exclude_none=True, exclude={"connectors"})
    if profile is not None:
        settings["profile"] = str(profile)
    if cache.chunk_reuse is not None:
        settings["points"] = [asdict(point) for point in alphas]
    extra: dict[str, object] = {"ragcache": settings}
    for_chunks = cache.for_chunks()
    host_bytes, disk_bytes = (cache.host_bytes or 0) - for_chunks[0], cache.disk_bytes - for_chunks[1]
    prefix = "" if cache.chunk_reuse is None else "Chunk"
    if host_bytes:
        extra |= {
            "cpu_bytes_to_use": host_bytes,
            "self_describing_kv_events": True,  # where vLLM's kv_events_config has them published at all
            "is_host_optional": most_host_bytes is not None
            and not disk_bytes
            and cache.shared is None
            and not cache.connectors,  # vLLM finds RAGCache's connector by this name
            "most_host_bytes": None if most_host_bytes is None else max(most_host_bytes - for_chunks[0], host_bytes),
            "spec_name": "RAGCacheSpec",
            "spec_module_path": f"{_PLUGIN}.offload.spec",
        }
    key_file = None if cache.disk_key_file is None else str(cache.disk_key_file)
    below: list[dict[str, object]] = []  # the nearest tier first, which is queried first
    if disk_bytes:
        place = {"directory": str(cache.directory), "capacity_bytes": disk_bytes, "key_file": key_file}
        below.append({"type": "DiskTier", "module_path": f"{_PLUGIN}.disk.manager", **place})
    if cache.shared is not None:
        store = {
            "url": cache.shared,
            "max_bytes": cache.shared_bytes,
            "ttl_s": cache.shared_ttl,
            "is_read_only": cache.shared_read_only,
            "key_file": key_file,
        }
        below.append({"type": "SharedTier", "module_path": f"{_PLUGIN}.shared.tier", **store})
    if below:
        extra["secondary_tiers"] = below
    ours: dict[str, object] = {
        "kv_connector": f"{prefix}RAGCacheConnector" if host_bytes else f"{prefix}DocumentConnector",
        "kv_connector_module_path": f"{_PLUGIN}.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
    if cache.connectors:
        others = [{"kv_role": "kv_both", **connector} for connector in cache.connectors]
        ours = {
            "kv_connector": MULTI_CONNECTOR,
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"connectors": [*others, ours]},  # it loads from the first that has tokens
        }
    return {
        **ours,
        "kv_load_failure_policy": "recompute",  # a lost block is a miss
        "engine_id": engine_id,
    }


def vllm_arguments(vllm_args: Mapping[str, object]) -> list[str]:
    """Return ``max_model_len=2048, enforce_eager=True`` as ``--max-model-len 2048 --enforce-eager``.

    ``True`` gives the flag, ``False`` its ``--no-`` form, ``None`` nothing, a tuple several values, a list or a
    dictionary JSON.

    Raises:
        ConfigError: an argument that is a setting of ``launch`` or ``CacheConfig``, or that RAGCache cannot do without.
    """
    arguments: list[str] = []
    for name, value in vllm_args.items():
        if name in _RESERVED:
            raise ConfigError(f"{name}={value!r} cannot be passed to vLLM directly: use {_RESERVED[name]}")
        flag = "--" + name.replace("_", "-")
        match value:
            case None:
                continue
            case True if name in _REFUSED:
                raise ConfigError(f"{name}={value!r} is refused: {_REFUSED[name]}")
            case True:
                arguments.append(flag)
            case False:
                arguments.append("--no-" + flag[2:])
            case list() | dict():
                arguments += [flag, json.dumps(value)]
            case tuple():
                arguments += [flag, *map(str, value)]
            case _:
                arguments += [flag, str(value)]
    return arguments


def check_extra_args(extra_args: Sequence[str]) -> None:
    """Reject raw arguments that bypass a setting of RAGCache, or remove what it needs.

    Raises:
        ConfigError: with what to do instead.
    """
    check_needed(extra_args)
    for argument in extra_args:
        name = argument.split("=")[0].removeprefix("--").replace("-", "_")
        if argument.startswith("--") and name in _RESERVED:
            raise ConfigError(f"{argument} cannot be passed to vLLM directly: use {_RESERVED[name]}")


def check_needed(extra_args: Sequence[str]) -> None:
    """Reject raw arguments that switch off what RAGCache needs.

    Raises:
        ConfigError: with what it is.
    """
    for argument in extra_args:
        if argument.startswith("--") and (why := _REFUSED.get(argument.removeprefix("--").replace("-", "_"))):
            raise ConfigError(f"{argument} is refused: {why}")


def number_of(arguments: Sequence[str], *flags: str) -> int | None:
    """Return the number given by the last of ``flags`` among a server's arguments; ``None`` if there is none."""
    found = None
    for argument, following in zip_longest(arguments, arguments[1:], fillvalue=""):
        name, equals, value = argument.partition("=")
        if name.replace("_", "-") in flags:
            text = value if equals else following
            found = int(text) if text.isdecimal() else None
    return found


def num_engines_of(arguments: Sequence[str]) -> int:
    """Return how many data-parallel engines a server's arguments start on this machine."""
    here, all_together = ("--data-parallel-size-local", "-dpl"), ("--data-parallel-size", "-dp")
    return number_of(arguments, *here) or number_of(arguments, *all_together) or 1


def check_worker(cache: CacheConfig | VLLMOffload | None, arguments: Sequence[str]) -> None:
    """Reject a worker class other than the one that chunk reuse needs.

    Raises:
        ConfigError: with what to leave out.
    """
    is_needed = isinstance(cache, CacheConfig) and cache.chunk_reuse is not None
    if is_needed and any(argument.split("=")[0].replace("_", "-") == "--worker-cls" for argument in arguments):
        raise ConfigError(
            "worker_cls cannot be set beside CacheConfig.chunk_reuse, which sets it: leave one of them out"
        )


def check_allocator(cache: CacheConfig | VLLMOffload | None, env: Mapping[str, str], arguments: Sequence[str]) -> None:
    """Reject a CUDA allocator that vLLM does not allow with a KV connector, as it may move KV memory.

    Raises:
        ConfigError: with what to set instead.
    """
    allows = {"--enable-cumem-allocator", "--enable-sleep-mode"}
    is_safe = any(argument.split("=")[0].replace("_", "-") in allows for argument in arguments)
    if cache is not None and not is_safe and "expandable_segments:True" in env.get(_ALLOCATOR_ENV, ""):
        raise ConfigError(
            f"{_ALLOCATOR_ENV} is {env[_ALLOCATOR_ENV]!r:.80}: with expandable segments KV memory may move, and vLLM "
            "takes no connector: unset it, set enable_cumem_allocator=True, or launch without RAGCache (cache=None)"
        )


def server_environment(
    api_key: str, cache: CacheConfig | VLLMOffload | None, extra: Mapping[str, str] | None, *, engine_id: str
) -> dict[str, str]:
    """Return the environment of the server. It has the API key, which others could read on a command line."""
    is_configured = isinstance(cache, CacheConfig) and cache.kv_cache_bytes is not None
    default = {} if is_configured else {CPU_KV_CACHE_BYTES_ENV: str(1 << 30)}
    return {
        **({} if cache is None else {_RESERVED_CORES_ENV: "1"}),
        **os.environ,
        **default,
        ENGINE_ID_ENV: engine_id,
        "VLLM_API_KEY": api_key,
        "PYTHONUNBUFFERED": "1",
        **(extra or {}),
    }


def new_log_path(port: int) -> Path:
    """Return the log path of a new server: a new file in the user's log folder, which keeps the newest 50.

    Where that cannot be written to, as in a container with a read-only root, it is standard error.
    """
    folder = Path(platformdirs.user_log_dir("ragcache"))
    try:
        make_private_folder(folder)
        for old in sorted(folder.glob("engine-*.log"))[: -_MAX_LOGS + 1]:
            old.unlink(missing_ok=True)
    except OSError:
        return STANDARD_ERROR
    is_writable = os.access(folder, os.W_OK)
    return folder / f"engine-{time.strftime('%Y%m%d-%H%M%S')}-{port}.log" if is_writable else STANDARD_ERROR
