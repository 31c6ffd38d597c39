"""The settings of ``Engine.launch``, and vLLM's own offloading as an alternative to RAGCache."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, InstanceOf, ValidationError

from ragcache_core.client.http.attempt import AUTO, FirstTokenTimeout
from ragcache_core.config import CacheConfig
from ragcache_core.errors import ConfigError, quoted
from ragcache_core.runtime.api_keys import check_api_key

VLLMEviction = Literal["lru", "arc"]
"""Which chunk vLLM's host tier evicts: the one least recently used, or the one that ARC chooses."""


@dataclass(frozen=True, slots=True)
class VLLMOffload:
    """Runs vLLM with its own offloading tier, scheduler and policies, as ``Engine.launch(cache=VLLMOffload(...))``.

    Of RAGCache it has what copies blocks on a machine without a GPU, where vLLM has nothing, and no more. KV memory
    and block size are vLLM's own arguments, ``kv_cache_memory_bytes`` and ``block_size``.

    Raises:
        ConfigError: no host memory, or no such policy.
    """

    host_bytes: int
    eviction: VLLMEviction = "lru"
    directory: Path | None = None
    """Folder of vLLM's own file tier, which has no size limit; ``None`` for no such tier."""

    def __post_init__(self) -> None:
        if self.host_bytes <= 0:
            raise ConfigError(f"VLLMOffload.host_bytes is {self.host_bytes}: give a size above 0, or cache=None")
        if self.eviction not in get_args(VLLMEviction):
            known = ", ".join(get_args(VLLMEviction))
            raise ConfigError(f"VLLMOffload.eviction is {self.eviction!r:.80}: vLLM has {known}")

    def transfer_config(self, engine_id: str) -> dict[str, object]:
        """Return vLLM's ``kv_transfer_config``; ``engine_id`` names the shared memory."""
        extra: dict[str, object] = {
            "cpu_bytes_to_use": self.host_bytes,
            "spec_name": "VLLMSpec",
            "spec_module_path": "ragcache_core.vllm_plugin.offload.vllm_spec",
            "eviction_policy": self.eviction,
        }
        if self.directory is not None:
            extra["secondary_tiers"] = [{"type": "fs", "root_dir": str(self.directory)}]
        return {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "engine_id": engine_id,
            "kv_connector_extra_config": extra,
        }


def _path_text(value: object) -> object:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


_Named = Annotated[str, BeforeValidator(_path_text)]
_Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_HINTS = {
    "cache": "pass CacheConfig(...), VLLMOffload(...), or None for plain vLLM",
    "env": "pass a mapping of names to values",
    "extra_args": "pass a list, ['--max-model-len', '2048']",
    "hang_timeout_s": "it must be a number of seconds above 0, or None for no limit",
    "restart_window_s": "it must be a number of seconds above 0",
    "startup_timeout_s": "it must be a number of seconds above 0",
}
"""Hints for settings, if pydantic's message has none."""


class LaunchSettings(BaseModel):
    """The settings of :meth:`Engine.launch <ragcache_core.client.Engine.launch>`, which documents them.

    ``num_ranks`` servers on this machine share the host memory whose size was not set.

    Raises:
        ConfigError: a setting has a value that cannot work.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: _Named
    cache: InstanceOf[CacheConfig] | InstanceOf[VLLMOffload] | None = CacheConfig()
    host: str = "127.0.0.1"
    port: int | None = None
    api_key: str | None = Field(default=None, repr=False)
    tokenizer: _Named | None = None
    startup_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    max_restarts: Annotated[int, Field(ge=0)] = 3
    restart_window_s: _Seconds = 600.0
    hang_timeout_s: _Seconds | None = 30.0
    first_token_timeout_s: FirstTokenTimeout = AUTO
    resume_streams: str = "all"
    log_path: Path | None = None
    log_format: Literal["text", "json"] = "text"
    progress: bool | Callable[[str], None] | None = None
    env: dict[str, str] | None = None
    extra_args: tuple[str, ...] = ()
    cancel: InstanceOf[threading.Event] | None = None
    vllm_args: dict[str, Any] = {}
    num_ranks: int = 1

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            first = error.errors()[0]
            name = str(first["loc"][0])
            raise ConfigError(f"{name} is {quoted(data.get(name))}: {_HINTS.get(name, first['msg'])}") from error
        check_api_key(self.api_key)

    @classmethod
    def of(cls, model: str, settings: Mapping[str, Any]) -> Self:
        """Return the settings of a launch; unknown names are arguments of vLLM."""
        own = {name: value for name, value in settings.items() if name in SETTINGS}
        return cls(model=model, vllm_args={n: value for n, value in settings.items() if n not in SETTINGS}, **own)

    @property
    def environment(self) -> dict[str, str]:
        """The server's environment, before the additions of the launch."""
        return {**os.environ, **(self.env or {})}


SETTINGS = frozenset(LaunchSettings.model_fields) - {"model", "vllm_args", "num_ranks"}
"""Names of the settings that are not vLLM's."""
