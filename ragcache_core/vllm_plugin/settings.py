"""The plugin's settings, from the engine's launcher: ``ragcache`` in the connector's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import model_validator

from ragcache_core.chunk import AlphaPoint, choose_alpha
from ragcache_core.config import CacheConfig, ChunkReuseRequest
from ragcache_core.errors import ConfigError
from ragcache_core.log import logger_of
from ragcache_core.policy import PrefillCostModel
from ragcache_core.profiles.prefill import load_profile
from ragcache_core.types import DEFAULT_ALPHA

KEY = "ragcache"
logger = logger_of(__name__)


class PluginSettings(CacheConfig):
    """A launch's :class:`~ragcache_core.config.CacheConfig`, and what was measured of its model.

    Raises:
        ConfigError: a setting has a value that cannot work, or none of the ``points`` reaches the quality of answers
            that is wanted.
    """

    profile: Path | None = None
    """Prefill times."""

    points: tuple[AlphaPoint, ...] = ()
    """Which quality of answers chunk reuse has by which alpha, with the selection of ``chunk_reuse``."""

    keeps_frequency: bool = True
    """Whether the uses of a document count on after its eviction. RAGCache's text leaves it open; the simulator can do
    either, and is held against an engine that does what it does."""

    ghost_size: int = 100_000
    """Evicted documents whose uses are remembered; with few, a returning document counts as new. Each takes 0.7 KiB,
    and 0.2 KiB for each of its blocks."""

    @model_validator(mode="after")
    def _check_quality(self) -> Self:
        if self.chunk_reuse is not None and self.chunk_reuse.quality is not None:
            choose_alpha(self.points, self.chunk_reuse.quality)
        return self

    @classmethod
    def from_extra_config(cls, extra_config: Mapping[str, Any]) -> Self:
        """Return the settings in a connector's ``kv_connector_extra_config``; what is missing has its default.

        Raises:
            ConfigError: a name or a value that this version does not know.
        """
        raw = extra_config.get(KEY) or {}
        try:
            return cls(**dict(raw))
        except (TypeError, ValueError, ConfigError) as error:
            raise ConfigError(f"kv_connector_extra_config['{KEY}'] is {raw!r:.200}: {error}") from error

    def alpha_for(self, options: ChunkReuseRequest) -> float | None:
        """Return Eq. 12's alpha for a request; None where it wants a quality that nothing measured here reaches.

        What was measured holds for one selection alone, and for as many recomputed tokens as the engine allows.
        """
        if options.alpha is not None:
            return options.alpha
        reuse = self.chunk_reuse
        assert reuse is not None
        selection = reuse.selection if options.selection is None else options.selection
        quality = reuse.quality if options.quality is None else options.quality
        if quality is None:
            is_chosen = reuse.alpha is not None and selection == reuse.selection
            return reuse.alpha if is_chosen else DEFAULT_ALPHA[selection]
        is_as_measured = (
            selection == reuse.selection
            and options.max_recompute in (None, reuse.max_recompute)
            and options.focus in (None, reuse.focus)
        )
        try:
            return choose_alpha(self.points, quality).alpha if is_as_measured else None
        except ConfigError:
            return None

    def measured_prefill_cost(self) -> PrefillCostModel | None:
        """Return the measured profile; None where there is none, or a damaged one, which is logged."""
        if self.profile is None:
            return None
        try:
            return load_profile(self.profile)
        except ConfigError as error:
            logger.warning("RC-PROFILE-UNUSED: RAGCache estimates the cost of a prefill by default: %s", error)
            return None

    def prefill_cost(self) -> PrefillCostModel:
        """Return the measured profile, or the default where there is none."""
        return self.measured_prefill_cost() or PrefillCostModel.default()
