"""The one configuration of the cache, validated when it is made."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ByteSize, ConfigDict, Field, ValidationError

from ragcache_core.errors import ConfigError


def _parse_bytes(value: object) -> object:
    return value.strip() if isinstance(value, str) else value


Bytes = Annotated[ByteSize, BeforeValidator(_parse_bytes), Field(gt=0)]
"""A positive number of bytes: 1073741824, "1GiB", "512 MiB"."""


class CacheConfig(BaseModel):
    """What the engine keeps of the documents that it has read.

    ``CacheConfig()`` caches in the engine's own KV memory with vLLM's defaults; ``cache=None`` at
    :meth:`Engine.launch <ragcache_core.client.Engine.launch>` runs plain vLLM.

    Raises:
        ConfigError: a field has a value that cannot work.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kv_cache_bytes: Bytes | None = None
    """KV memory of the engine: of the GPU, or of main memory on a machine without one. ``None`` leaves it to vLLM
    (a share of GPU memory; 1 GiB without a GPU)."""

    block_size: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Tokens in a KV block; a document is cached in whole blocks. ``None`` leaves it to vLLM."""

    def __init__(self, **data: object) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"]) or "CacheConfig"
            raise ConfigError(f"CacheConfig.{field} is {first['input']!r:.80}: {first['msg']}") from error
