"""What the plugin is told by whoever starts the engine: ``ragcache`` in the connector's configuration."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from ragcache_core.client.profiles import load_profile
from ragcache_core.errors import ConfigError
from ragcache_core.policy import PrefillCostModel

KEY = "ragcache"
logger = logging.getLogger(f"vllm.{__name__}")


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
