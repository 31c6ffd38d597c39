"""The one configuration of the cache, validated when it is made."""

from __future__ import annotations

import re
import shutil
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import parse_qs, urlsplit

import platformdirs
from pydantic import (
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from ragcache_core.errors import ConfigError, quoted
from ragcache_core.memory import Memory, has_gpu, read_memory
from ragcache_core.private_files import make_private_folder
from ragcache_core.types import SelectionName

PolicyName = Literal["pgdsf", "gdsf", "lru", "lfu", "s3fifo", "arc", "mixture"]
"""Name of a replacement policy."""
CompressionName = Literal["auto", "off", "lz4", "zstd", "int8"]
"""How KV on disk and in a shared store is compressed."""
QueueOrder = Literal["cache_aware", "fifo"]
"""Which waiting request is next: the one with the most cached tokens, or the one that came first."""

REDIS_SCHEMES = ("redis", "rediss")
SHARED_PASSWORD_ENV = "RAGCACHE_SHARED_PASSWORD"  # noqa: S105 (the name of a variable)
"""The environment variable that holds the password of a shared Redis server."""
MULTI_CONNECTOR = "MultiConnector"
OWN_CONNECTORS = ("RAGCacheConnector", "DocumentConnector", "ChunkRAGCacheConnector", "ChunkDocumentConnector")
_TRANSFERS_ONLY = ("NixlConnector", "NixlPullConnector", "NixlPushConnector")
"""Connectors of vLLM that move KV between engines, and keep none."""
_MAX_DEFAULT_HOST_BYTES = 8 << 30
_MIB = 1 << 20
_LARGEST = (1 << 63) - 1
_SIZE = re.compile(r"\d{1,24}(\.\d+)?\s*([kmgtpe]?i?b?)?", re.IGNORECASE)


def _parse_bytes(value: object) -> object:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError("a size is a number of bytes, or text such as '64GiB'")  # noqa: TRY004 (pydantic wraps it)
    if value < 0 if isinstance(value, int) else not _SIZE.fullmatch(value.strip()):
        raise ValueError("write a size of 0 or more, as 64GiB, 512 MiB or 1073741824")
    return value.strip() if isinstance(value, str) else value


def _parse_directory(value: object) -> object:
    if value == "":
        raise ValueError("name a directory, or leave it out")
    return value


def _parse_file(value: object) -> object:
    if value == "":
        raise ValueError("name a file, or leave it out")
    return value


def check_shared_url(url: str) -> str:
    """Return a store's URL after checks.

    Raises:
        ValueError: its scheme is unknown, it names no place, or it holds a password, which process lists would show.
    """
    parts = urlsplit(url)
    if parts.password is not None or "password" in parse_qs(parts.query):
        name = "AWS_SECRET_ACCESS_KEY" if parts.scheme == "s3" else SHARED_PASSWORD_ENV
        raise ValueError(
            f"CacheConfig.shared holds a password, which process lists would show: leave it out, and set {name}"
        )
    is_folder = parts.scheme == "file" and parts.netloc in ("", "localhost") and parts.path.strip("/")
    if not is_folder and (parts.scheme not in (*REDIS_SCHEMES, "s3") or not parts.hostname):
        raise ValueError(
            f"CacheConfig.shared is {url!r:.80}: name a store as redis://host:6379/0, rediss://host:6379/0, "
            "s3://bucket/prefix or file:///absolute/path"
        )
    return url


def check_compression(compression: CompressionName) -> None:
    """Reject a compression method whose package is not installed.

    Raises:
        ConfigError: with the command that installs it.
    """
    if compression not in ("auto", "off") and find_spec("blosc2") is None:
        raise ConfigError(
            f"CacheConfig.compression is {compression!r}, for which blosc2 is not installed: pip install "
            "'ragcache[compression]', or leave compression out"
        )


def keeping(connectors: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the connectors of vLLM that may keep KV of their own."""
    names = (str(connector.get("kv_connector")) for connector in connectors)
    return [name for name in names if name not in _TRANSFERS_ONLY]


def check_connectors(
    connectors: Sequence[Mapping[str, Any]], *, approximation: str | None = None, max_age: float | None = None
) -> None:
    """Reject vLLM connectors that do not work with RAGCache, given as in its ``kv_transfer_config``.

    Args:
        connectors: their settings.
        approximation: the setting with which RAGCache's KV is approximate.
        max_age: ``CacheConfig.max_age``.

    Raises:
        ValueError: with what to leave out.
    """
    for connector in connectors:
        name = connector.get("kv_connector")
        if not isinstance(name, str) or not name or name in (MULTI_CONNECTOR, *OWN_CONNECTORS):
            raise ValueError(
                f"connectors has {dict(connector)!r:.80}: name one of vLLM's in kv_connector, with its settings, as "
                "{'kv_connector': 'NixlConnector', 'kv_role': 'kv_both'}; RAGCache's own is there in any case"
            )
        if name == "OffloadingConnector":
            raise ValueError(
                "connectors has OffloadingConnector, which would write into RAGCache's host memory: "
                "leave it out, and set host_bytes instead"
            )
        if "engine_id" in connector:
            raise ValueError(f"connectors has an engine_id for {name}: leave it out, all have the engine's")
    if connectors and approximation is not None:
        raise ValueError(
            f"{approximation} is set beside {_names(connectors)}, which would keep approximate KV as if it were exact: "
            f"leave {approximation} or connectors out"
        )
    if max_age is not None and (keepers := keeping(connectors)):
        raise ValueError(
            f"max_age is {max_age:g}, but KV of {', '.join(keepers)} does not expire: leave max_age or connectors out"
        )


def _names(connectors: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(str(connector["kv_connector"]) for connector in connectors)


Bytes = Annotated[ByteSize, BeforeValidator(_parse_bytes), Field(gt=0, le=_LARGEST)]
"""A positive number of bytes: 1073741824, "1GiB", "512 MiB"."""
BytesOrNone = Annotated[ByteSize, BeforeValidator(_parse_bytes), Field(ge=0, le=_LARGEST)]
"""A number of bytes; 0 is none."""


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, **data: object) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise ConfigError(_first_problem(error, type(self))) from error


class ChunkReuseRequest(_Settings):
    """A request's choice of chunk reuse; ``None`` for the engine's default.

    Raises:
        ConfigError: a field has a value that cannot work, or two contradict each other.
    """

    quality: Annotated[float, Field(gt=0, le=1, strict=True)] | None = None
    """The quality of answers that is wanted, as ``ragcache calibrate`` measured it on this model: it chooses
    ``alpha``."""

    selection: SelectionName | None = None
    """Tokens of a reused document to recompute: ``whole_chunks`` all tokens of the documents that depend on what is
    missing and none of the others, ``cache_craft`` the tokens with the most attention to other documents (Cache-Craft
    Eq. 14)."""

    alpha: Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)] | None = None
    """How many: Eq. 12's factor, in place of ``quality``. ``None`` without ``quality`` is 1.7 with ``whole_chunks``, 1
    with ``cache_craft``."""

    max_recompute: Annotated[float, Field(ge=0, le=1, strict=True)] | None = None
    """The largest share of a reused document that is computed."""

    focus: Annotated[int, Field(ge=0, le=1024, strict=True)] | None = None
    """After how many layers, one after the other, in which the question looks at the same documents, no token of the
    others is computed any further (Cache-Craft Algorithm 1's w); 0: never. A smaller number computes less, and trusts
    earlier layers. It acts on selections of a part of a document, thus not on ``whole_chunks``."""

    kind: Annotated[str, Field(pattern=r"^[\w .:/-]{1,64}$", strict=True)] | None = None
    """The kind of its documents, such as ``manual``. With ``max_error`` each kind has an error rate of its own, the
    first 32 kinds of an engine that is; further kinds share one. ``None``: ``default``."""

    @model_validator(mode="after")
    def _check_budget(self) -> Self:
        if self.quality is not None and self.alpha is not None:
            raise ValueError(
                f"{type(self).__name__}.quality is {self.quality:g} and alpha {self.alpha:g}: quality chooses alpha, "
                "so give one"
            )
        return self


class ChunkReuse(ChunkReuseRequest):
    """Chunk reuse (Cache-Craft): a document's KV is reused after other documents. **Approximate.**

    The KV of a document depends on what stood before it. Reused elsewhere, some of its tokens are recomputed, and
    answers may differ from those of a full prefill: ``ragcache quality`` measures by how much, on your model.
    ``quality`` and ``alpha`` are a request's that has none of its own; see :class:`ChunkReuseRequest`.

    Raises:
        ConfigError: a field has a value that cannot work, or two contradict each other.
    """

    selection: SelectionName = "whole_chunks"
    max_recompute: Annotated[float, Field(ge=0, le=1, strict=True)] = 1.0
    focus: Annotated[int, Field(ge=0, le=1024, strict=True)] = 3

    share: Annotated[float, Field(gt=0, le=1, strict=True)] = 0.5
    """Share of ``host_bytes`` and ``disk_bytes`` for chunks. The rest is for exact prefixes."""

    max_variants: Annotated[int, Field(ge=1, le=64, strict=True)] = 5
    """Cached versions of a document, each computed behind other documents (the M of Cache-Craft §3.3). A further one
    replaces the one that saved least."""

    is_default: bool = True
    """Whether requests without a setting of their own reuse chunks."""

    max_error: Annotated[float, Field(gt=0, le=0.5, allow_inf_nan=False, strict=True)] | None = None
    """The largest share of answers of a kind that may differ from exact ones, such as 0.02. Audits of approximate
    answers, in idle steps, then choose between exact answers and values of ``alpha`` up to the one set here. A request
    with another setting of its own than ``kind`` is answered exactly. ``None``: no audits, ``alpha`` is as set."""

    @model_validator(mode="after")
    def _check_guard(self) -> Self:
        if self.max_error is not None and self.quality is not None:
            raise ValueError(
                f"ChunkReuse.quality is {self.quality:g} and max_error {self.max_error:g}: both choose alpha, so give "
                "one"
            )
        return self


class CacheConfig(_Settings):
    """Settings of the cache: tiers and their sizes, policy, queue and speculation.

    ``CacheConfig()`` caches KV on the GPU and in a share of host memory; ``cache=None`` at
    :meth:`Engine.launch <ragcache_core.client.Engine.launch>` runs plain vLLM. :meth:`from_toml` reads a file.

    Raises:
        ConfigError: a field has a value that cannot work, or two contradict each other.
    """

    kv_cache_bytes: Bytes | None = None
    """Size of the GPU KV cache; on a machine without a GPU it is in main memory. By default vLLM chooses (a share of
    GPU memory; 1 GiB without a GPU)."""

    block_size: Annotated[int, Field(ge=1, le=1024, strict=True)] | None = None
    """Tokens in a KV block; a document is cached in whole blocks. By default vLLM chooses (mostly 16; 32 without a
    GPU)."""

    host_bytes: BytesOrNone | None = None
    """Size of the host tier (CPU memory), such as 64GiB; 0 for none. All of it is allocated at launch, so it must be
    free then. By default it is an eighth of the memory that is available to the machine or container, at most 8 GiB; if
    the GPU KV cache is larger, that size, up to half of the available memory (without a GPU: a quarter)."""

    disk_bytes: BytesOrNone = ByteSize(0)
    """Size of the disk tier, such as 1TiB; its KV outlives the engine. 0 for none."""

    directory: Annotated[Path, BeforeValidator(_parse_directory)] | None = None
    """Directory of the disk tier; created if it is missing, and used by one engine at a time. By default it is
    ``kv`` in the user's cache folder. From a TOML file, a relative path is relative to that file."""

    disk_key_file: Annotated[Path, BeforeValidator(_parse_directory)] | None = None
    """Encrypts what is on disk (AES-256-GCM) with the key in this file: 32 bytes in base64 on a line; further lines are
    keys that were used before. By default the key is what ``RAGCACHE_DISK_KEY`` of the environment holds; with neither
    nothing is encrypted. From a TOML file, a relative path is relative to that file."""

    shared: str | None = None
    """A store that several engines share, below their host tiers: ``redis://host:6379/0`` (Redis or
    Valkey; ``rediss`` with TLS), ``s3://bucket/prefix``, or a folder that their machines mount,
    ``file:///absolute/path``. Passwords are ``RAGCACHE_SHARED_PASSWORD`` and ``AWS_SECRET_ACCESS_KEY`` of the
    environment. What one engine has computed, another one loads.
    ``disk_key_file`` encrypts its objects as well."""

    shared_bytes: Bytes | None = None
    """Limit of the KV of this model in a ``shared`` store, over all engines, as 200GiB: the writers delete the least
    recently used there, in a bucket or folder the oldest. By default the store's own settings decide."""

    shared_ttl: Annotated[float, Field(gt=0, le=_LARGEST, allow_inf_nan=False, strict=True)] | None = None
    """Seconds after which a ``shared`` Redis or Valkey deletes what this engine stored. By default the server's
    ``maxmemory-policy`` decides. Buckets have lifecycle rules instead."""

    shared_read_only: bool = False
    """Whether the ``shared`` store is only read, such as one that ``ragcache compile`` has filled: nothing is stored or
    deleted there."""

    compression: CompressionName = "auto"
    """How KV on disk and in a ``shared`` store is compressed, without loss: by ``lz4``, by ``zstd``, which keeps fewer
    bytes and is slower, or not at all (``off``). ``auto`` chooses for each tier, by the measured speed of the tier and
    of the cores; without ``ragcache[compression]`` it is ``off``. ``int8`` is approximate: it stores 8-bit numbers,
    compressed, and answers may differ. It has folders and objects of its own."""

    tenants: Annotated[Path, BeforeValidator(_parse_file)] | None = None
    """A TOML file of tenants and collections: their API keys, shares and quotas. By default all clients with the
    server's key share all KV. From a TOML file, a relative path is relative to that
    file."""

    policy: PolicyName = "mixture"
    """What a full tier evicts first: ``mixture`` what it expects to be used least often, ``lru`` what was not used for
    the longest time, ``lfu`` what was used least often, ``pgdsf`` the lowest product of uses and recompute time per
    token, ``gdsf`` the same without what the prefix adds to that time, ``s3fifo`` what was not used again soon,
    ``arc`` the least recently used of what was used once, or of the rest, as the traffic decides. See RAGCache §5.1."""

    max_cached_documents: Annotated[int, Field(ge=1, le=_LARGEST, strict=True)] | None = None
    """The number of documents of a prompt that are cached, from the first one on. By default all are."""

    layerwise_loads: bool | None = None
    """Whether a request may compute its first layers while KV of later layers is still loaded from host memory. It does
    so if no other request runs, or if its prefill is expected to take longer than the load; answers are the same. By
    default only without a GPU: it was not tested on one."""

    replicated_share: Annotated[float, Field(ge=0, le=1, strict=True)] = 0.0
    """Share of host memory for copies of the most used prompt beginnings (static prefix and first documents), which
    stay there while the GPU has them too, so that an engine that is restarted after a failure of the GPU has
    them. See RAGCache §6."""

    pinned_share: Annotated[float, Field(ge=0, le=1, strict=True)] = 0.25
    """Share of the smallest tier that the prefixes of pinned documents may take; pinned documents are evicted last, 0
    allows no pins. See :meth:`EngineClient.cache <ragcache_core.client.engine_client.EngineClient>`."""

    max_age: Annotated[float, Field(gt=0, le=_LARGEST, allow_inf_nan=False, strict=True)] | None = None
    """Seconds after its computation at which KV expires: no request hits older KV, and every tier deletes it, also on
    an idle engine and over restarts. By default KV stays until it is evicted."""

    max_retain_s: Annotated[float, Field(ge=0, le=86_400, allow_inf_nan=False, strict=True)] = 600.0
    """Seconds for which a request may have its prompt and answer retained (``retain_s``, ``priority``); more is
    shortened to this. 0 retains nothing."""

    retained_share: Annotated[float, Field(ge=0, le=1, strict=True)] = 0.25
    """Share of the smallest tier, for each tenant of its part, that retained prompts and answers may take. 0 retains
    nothing."""

    queue: QueueOrder = "cache_aware"
    """The scheduling order of waiting requests: ``cache_aware`` by cached tokens per token to compute, ``fifo`` by
    arrival. See RAGCache §5.2."""

    queue_window: Annotated[int, Field(ge=0, le=_LARGEST, strict=True)] = 32
    """Number of later requests that may overtake a waiting request; 0 for none."""

    max_prefill_bs: Annotated[int, Field(ge=0, le=_LARGEST, strict=True)] | None = None
    """How many speculative requests, which prefill documents before the search ends, may run at a time while no other
    request waits or is prefilled; 0 switches speculation off. By default another one starts while the prompts of those
    that run are shorter together than a step of the engine, and than the GPU KV cache. See RAGCache §5.3."""

    max_documents: Annotated[int, Field(ge=0, le=_LARGEST, strict=True)] = 100_000
    """Registered documents that the server recognises in prompts without a tenant; a tenant has a fifth of it. 0: none
    are registered. Each takes about 1 kB in every API server."""

    connectors: tuple[dict[str, Any], ...] = ()
    """Other KV connectors of vLLM beside RAGCache's, each as vLLM's ``kv_transfer_config`` describes it:
    ``({"kv_connector": "NixlConnector", "kv_role": "kv_both"},)``. KV is loaded from the first connector that has a
    prefix of the prompt; every connector stores."""

    chunk_reuse: ChunkReuse | None = None
    """Chunk reuse: a document's KV is reused at another position in the prompt. **Approximate**, so it is off by
    default. In a TOML file it is the table ``[cache.chunk_reuse]``."""

    @property
    def speculates(self) -> bool:
        """Whether speculative requests are admitted."""
        return self.max_prefill_bs != 0

    @model_validator(mode="after")
    def _check_tiers(self) -> Self:
        if self.directory is not None and not self.disk_bytes:
            raise ValueError(
                f"CacheConfig.directory is {str(self.directory)!r:.80} but disk_bytes is 0: set disk_bytes to keep "
                "documents on disk, or leave directory out"
            )
        if self.disk_key_file is not None and not self.disk_bytes and self.shared is None:
            raise ValueError(
                f"CacheConfig.disk_key_file is {str(self.disk_key_file)!r:.80} but disk_bytes is 0: set disk_bytes to "
                "keep documents on disk, or leave disk_key_file out"
            )
        if self.shared is not None:
            check_shared_url(self.shared)
        if self.shared is not None and self.host_bytes == 0:
            raise ValueError(
                f"CacheConfig.shared is {self.shared!r:.80} but host_bytes is 0: documents reach the store through "
                "host memory, so set host_bytes or leave shared out"
            )
        if self.shared_bytes is not None and self.shared is None:
            raise ValueError(
                f"CacheConfig.shared_bytes is {_shown(self.shared_bytes)} but shared is None: name a store, or leave "
                "shared_bytes out"
            )
        if self.shared_ttl is not None and not (self.shared or "").startswith("redis"):
            raise ValueError(
                f"CacheConfig.shared_ttl is {self.shared_ttl:g} but shared is {self.shared!r:.80}: give it with a "
                "redis:// store; for a bucket or a folder, set shared_bytes"
            )
        if self.shared_read_only and self.shared is None:
            raise ValueError(
                "CacheConfig.shared_read_only is True but shared is None: name a store, or leave shared_read_only out"
            )
        for name in ("shared_bytes", "shared_ttl"):
            if self.shared_read_only and (limit := getattr(self, name)) is not None:
                raise ValueError(
                    f"CacheConfig.shared_read_only is True but {name} is {limit:,}, which limits what is written: "
                    "leave one of them out"
                )
        if self.compression not in ("auto", "off") and not self.disk_bytes and self.shared is None:
            raise ValueError(
                f"CacheConfig.compression is {self.compression!r} but disk_bytes is 0: set disk_bytes or shared, whose "
                "KV it compresses, or leave compression out"
            )
        if self.compression == "int8" and self.chunk_reuse is not None:
            raise ValueError(
                "CacheConfig.compression is 'int8' and chunk_reuse is set: the audits of one approximation would take "
                "the other for exact, so leave one of them out"
            )
        if self.disk_bytes and self.host_bytes == 0:
            raise ValueError(
                f"CacheConfig.disk_bytes is {_shown(self.disk_bytes)} but host_bytes is 0: documents reach the disk "
                "through host memory, so set host_bytes or leave disk_bytes out"
            )
        if self.chunk_reuse is not None and self.host_bytes == 0:
            raise ValueError(
                "CacheConfig.chunk_reuse is set but host_bytes is 0: reused KV is in host memory, so "
                "set host_bytes or leave chunk_reuse out"
            )
        try:
            check_connectors(self.connectors, approximation=self.approximation, max_age=self.max_age)
        except ValueError as error:
            raise ValueError(f"CacheConfig.{error}") from error
        return self

    @property
    def approximation(self) -> str | None:
        """The setting with which answers may be approximate."""
        if self.chunk_reuse is not None:
            return "chunk_reuse"
        return "compression='int8'" if self.compression == "int8" else None

    @property
    def folder(self) -> Path:
        """Folder of the disk tier's files."""
        return self.directory or Path(platformdirs.user_cache_dir("ragcache")) / "kv"

    def for_chunks(self) -> tuple[int, int]:
        """Return the bytes of host memory and disk for :class:`ChunkReuse`."""
        share = 0.0 if self.chunk_reuse is None else self.chunk_reuse.share
        return int((self.host_bytes or 0) * share), int(self.disk_bytes * share)

    @classmethod
    def from_toml(cls, path: str | Path, **overrides: object) -> Self:
        """Return the configuration in the ``[cache]`` table of a TOML file; ``overrides`` take precedence.

        ::

            [cache]
            host_bytes = "64GiB"
            disk_bytes = "1TiB"
            directory = "/var/cache/ragcache"

        Raises:
            ConfigError: there is no such file or table, or it holds a value that cannot work.
        """
        path = Path(path)
        try:
            table = tomllib.loads(path.read_text(encoding="utf-8")).get("cache")
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be read ({error.strerror}): name a TOML file with a [cache] table"
            ) from error
        except ValueError as error:
            raise ConfigError(f"{path} is not TOML ({error}): correct it; it must have a [cache] table") from error
        if not isinstance(table, dict):
            raise ConfigError(f"{path} has no [cache] table: begin it with the line [cache]")
        for name in ("directory", "disk_key_file", "tenants"):
            if isinstance(named := table.get(name), str) and named and not named.startswith("~"):
                table[name] = path.parent / named
            is_used = name == "tenants" or (name == "disk_key_file" and overrides.get("shared", table.get("shared")))
            if not is_used and _is_none(overrides.get("disk_bytes")):
                table.pop(name, None)  # of the tier that is switched off
        try:
            return cls(**{**table, **overrides})
        except ConfigError as error:
            beside = f" (with {', '.join(overrides)} from elsewhere)" if overrides else ""
            raise ConfigError(f"{path}{beside}: {error}") from error

    def resolved(self) -> Self:
        """Return this configuration with defaults chosen for this machine, and checked on it.

        ``host_bytes`` is a number then; with a disk tier ``directory`` is absolute, exists, and can be written to.
        Resolving again changes nothing.

        Raises:
            ConfigError: a capacity is larger than what is free of the memory of this machine or container, or than its
                disk, the directory is unwritable, or the package of ``compression`` is not installed.
        """
        memory = read_memory()
        kv_bytes = _kv_in_memory(self.kv_cache_bytes)
        host_bytes = _default_host_bytes(kv_bytes, memory) if self.host_bytes is None else self.host_bytes
        _check_memory(kv_bytes, host_bytes, memory)
        decided: dict[str, object] = {"host_bytes": host_bytes}
        if self.chunk_reuse is not None and not decided["host_bytes"]:
            raise ConfigError(
                f"CacheConfig.chunk_reuse is set, but no host memory is free ({_shown(memory.available)} of "
                "memory are available): set host_bytes, or free some"
            )
        if self.tenants is not None:
            decided["tenants"] = self.tenants.expanduser().absolute()
        if (self.disk_bytes or self.shared is not None) and not decided["host_bytes"]:
            asked = f"disk_bytes is {_shown(self.disk_bytes)}" if self.disk_bytes else f"shared is {self.shared!r:.80}"
            raise ConfigError(
                f"CacheConfig.{asked}, but no memory is free for the host tier, through which documents pass "
                f"({_shown(memory.available)} of memory are available): set host_bytes, or free some"
            )
        if self.disk_bytes:
            decided["directory"] = _writable(self.folder, self.disk_bytes)
        check_compression(self.compression)
        if self.disk_key_file is not None:
            decided["disk_key_file"] = self.disk_key_file.expanduser().absolute()
        return type(self)(**{**self.model_dump(exclude_unset=True), **decided})

    def most_host_bytes(self) -> int | None:
        """Return the maximum host memory if the GPU KV cache is larger; ``None`` if its size was set.

        That is known when the model is loaded.
        """
        if self.host_bytes is not None:
            return None
        share = 2 if has_gpu() else 4  # without one, weights and activations lie there as well
        return _beside(_kv_in_memory(self.kv_cache_bytes), read_memory()) // share // _MIB * _MIB


def _first_problem(error: ValidationError, model: type[BaseModel]) -> str:
    first = error.errors()[0]
    said = first["msg"]
    if isinstance(cause := first.get("ctx", {}).get("error"), ValueError):
        said = str(cause)
    if not first["loc"]:
        return said
    if first["type"] == "extra_forbidden":
        said = f"there is no such setting, use one of {', '.join(model.model_fields)}"
    return f"{model.__name__}.{first['loc'][0]} is {quoted(first['input'])}: {said}"


def _is_none(disk_bytes: object) -> bool:
    """Return whether a size, as text or number, is 0."""
    try:
        return TypeAdapter(BytesOrNone).validate_python(disk_bytes) == 0
    except ValidationError:
        return False


def _shown(num_bytes: int) -> str:
    return ByteSize(num_bytes).human_readable()


def _kv_in_memory(kv_cache_bytes: int | None) -> int:
    """Return the main memory known to be used for the GPU KV cache; vLLM itself checks GPU memory."""
    return 0 if kv_cache_bytes is None or has_gpu() else kv_cache_bytes


def _beside(kv_bytes: int, memory: Memory) -> int:
    return max(memory.available - kv_bytes, 0)


def _default_host_bytes(kv_bytes: int, memory: Memory) -> int:
    return min(_beside(kv_bytes, memory) // 8, _MAX_DEFAULT_HOST_BYTES) // _MIB * _MIB


def _check_memory(kv_bytes: int, host_bytes: int, memory: Memory) -> None:
    """Reject sizes above the free memory, as all of the host tier is allocated at the start."""
    has = f"{memory.whose} {_shown(memory.total)} of memory, {_shown(memory.available)} of it free"
    for num_bytes, cure in ((host_bytes, "lower host_bytes"), (kv_bytes, "lower kv_cache_bytes")):
        if num_bytes > memory.available:
            name = cure.removeprefix("lower ")
            raise ConfigError(f"CacheConfig.{name} is {_shown(num_bytes)}, {has}: {cure}, or free some")
    if kv_bytes + host_bytes > memory.available:
        raise ConfigError(
            f"CacheConfig.kv_cache_bytes and host_bytes are {_shown(kv_bytes + host_bytes)} together, {has}: lower one "
            "of them, or free some"
        )


def _writable(directory: Path, disk_bytes: int) -> Path:
    """Return the absolute path of an existing, writable directory on a disk that is large enough."""
    try:
        path = directory.expanduser().absolute()
        make_private_folder(path)
        with tempfile.TemporaryFile(dir=path):
            pass
        total_bytes = shutil.disk_usage(path).total
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"CacheConfig.directory is {str(directory)!r:.200}, which cannot be written to ({error}): choose another "
            "directory, or change its owner"
        ) from error
    if disk_bytes > total_bytes:
        raise ConfigError(
            f"CacheConfig.disk_bytes is {_shown(disk_bytes)}, the disk of {path} holds {_shown(total_bytes)}: "
            "lower disk_bytes, or choose another directory"
        )
    return path
