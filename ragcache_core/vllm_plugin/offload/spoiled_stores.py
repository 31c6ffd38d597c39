"""Stores of what another connector failed to load: nothing of them is kept, and their memory is free when they end."""

from __future__ import annotations

from collections.abc import Collection

from ragcache_core.vllm_plugin.compat import OffloadKey, ReqContext, TieringOffloadingManager


class SpoilingManager(TieringOffloadingManager):
    """vLLM's tiers, which can be told that what is being stored is not what it should be; takes over one that is built.

    Host memory is not given to anything else, as a read from disk, while a copy writes to it: a reset would do that.
    """

    spoiled: set[OffloadKey]

    @classmethod
    def take_over(cls, manager: TieringOffloadingManager) -> None:
        """Make ``manager`` one of this class, before its first request."""
        manager.__class__ = cls
        assert isinstance(manager, cls)
        manager.spoiled = set()

    def spoil(self, keys: Collection[OffloadKey]) -> None:
        """Have the stores of ``keys``, which are under way, end as ones that failed."""
        self.spoiled.update(keys)

    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        is_spoiled = not self.spoiled.isdisjoint(keys)
        self.spoiled.difference_update(keys)
        super().complete_store(keys, req_context, success and not is_spoiled)

    def reset_cache(self) -> None:
        super().reset_cache()
        self.spoiled.clear()
