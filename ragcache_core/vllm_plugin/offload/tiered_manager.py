"""vLLM's manager of tiers, which can drop what is being stored."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from ragcache_core.vllm_plugin.compat import OffloadKey, ReqContext, TieringOffloadingManager

if TYPE_CHECKING:
    from ragcache_core.vllm_plugin.compat import CPUPrimaryTierOffloadingManager, SecondaryTierManager
    from ragcache_core.vllm_plugin.offload.host_tier import HostTier


class TieredManager(TieringOffloadingManager):
    """Host memory and the tiers below it.

    Stores of what another connector failed to load end as failed ones (:meth:`spoil`). A reset would give their rows to
    something else, as a read from disk, while a copy writes to them.
    """

    def __init__(
        self, primary: HostTier | CPUPrimaryTierOffloadingManager, secondary: list[SecondaryTierManager]
    ) -> None:
        super().__init__(primary_tier=primary, secondary_tiers=secondary)
        self._spoiled: set[OffloadKey] = set()

    def spoil(self, keys: Collection[OffloadKey]) -> None:
        """Have the stores of ``keys``, which are under way, end as ones that failed."""
        self._spoiled.update(keys)

    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        is_spoiled = not self._spoiled.isdisjoint(keys)
        self._spoiled.difference_update(keys)
        super().complete_store(keys, req_context, success and not is_spoiled)

    def reset_cache(self) -> None:
        super().reset_cache()
        self._spoiled.clear()
