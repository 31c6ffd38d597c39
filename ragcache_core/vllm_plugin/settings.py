"""What the plugin is told by whoever starts the engine: ``ragcache`` in the connector's configuration."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from ragcache_core.chunk import AlphaPoint, choose_alpha
from ragcache_core.errors import ConfigError
from ragcache_core.policy import PrefillCostModel
from ragcache_core.profiles.prefill import load_profile
from ragcache_core.types import DEFAULT_ALPHA, ChunkReuseRequest, SelectionName

KEY = "ragcache"
logger = logging.getLogger(f"vllm.{__name__}")


@dataclass(frozen=True, slots=True)
class ChunkSettings:
    """The plain values of a :class:`~ragcache_core.config.ChunkReuse`, and the shares of memory that are for it.

    ``points`` are what was measured on this model with ``selection``.

    Raises:
        ConfigError: none of the ``points`` reaches ``quality``.
    """

    host_bytes: int
    disk_bytes: int = 0
    directory: Path | None = None
    quality: float | None = None
    selection: SelectionName = "whole_chunks"
    alpha: float | None = None
    max_recompute: float = 1.0
    max_variants: int = 5
    is_default: bool = True
    points: tuple[AlphaPoint, ...] = ()

    def __post_init__(self) -> None:
        if self.quality is not None:
            choose_alpha(self.points, self.quality)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Self:
        """Return the settings that a launch sends.

        Raises:
            TypeError, ValueError: a name or a value that this version does not know.
        """
        given = dict(raw)
        if (directory := given.get("directory")) is not None:
            given["directory"] = Path(directory)
        given["points"] = tuple(AlphaPoint(**point) for point in given.get("points", ()))
        return cls(**given)

    def alpha_for(self, asked: ChunkReuseRequest) -> float | None:
        """Return Eq. 12's alpha for a request; None where it wants a quality that nothing measured here reaches.

        What was measured holds for ``selection`` alone, and for as many recomputed tokens as the engine allows.
        """
        if asked.alpha is not None:
            return asked.alpha
        selection = self.selection if asked.selection is None else asked.selection
        quality = self.quality if asked.quality is None else asked.quality
        if quality is None:
            is_chosen = self.alpha is not None and selection == self.selection
            return self.alpha if is_chosen else DEFAULT_ALPHA[selection]
        is_as_measured = selection == self.selection and asked.max_recompute in (None, self.max_recompute)
        try:
            return choose_alpha(self.points, quality).alpha if is_as_measured else None
        except ConfigError:
            return None


@dataclass(frozen=True, slots=True)
class PluginSettings:
    """The plain values of a :class:`~ragcache_core.config.CacheConfig` that the engine's process needs."""

    policy: str = "tournament"
    keeps_frequency: bool = True
    ghost_size: int = 100_000
    max_cached_documents: int | None = None
    profile: Path | None = None
    is_queue_cache_aware: bool = True
    queue_window: int = 32
    max_prefill_bs: int = 4
    chunk_reuse: ChunkSettings | None = None

    @classmethod
    def from_extra_config(cls, extra_config: Mapping[str, Any]) -> Self:
        """Return the settings in a connector's ``kv_connector_extra_config``; what is missing has its default.

        Raises:
            ConfigError: a name or a value that this version does not know.
        """
        raw = extra_config.get(KEY) or {}
        try:
            given = dict(raw)
            if (profile := given.get("profile")) is not None:
                given["profile"] = Path(profile)
            if (chunk_reuse := given.get("chunk_reuse")) is not None:
                given["chunk_reuse"] = ChunkSettings.from_dict(chunk_reuse)
            return cls(**given)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"kv_connector_extra_config['{KEY}'] is {raw!r:.200}: {error}") from error

    def prefill_cost(self) -> PrefillCostModel:
        """Return the measured profile, or the default where there is none; a damaged one is logged."""
        if self.profile is None:
            return PrefillCostModel.default()
        try:
            return load_profile(self.profile)
        except ConfigError as error:
            logger.warning("RAGCache estimates the cost of a prefill by default: %s", error)
            return PrefillCostModel.default()
