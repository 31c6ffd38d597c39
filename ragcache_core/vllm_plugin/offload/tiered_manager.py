"""vLLM's manager of tiers, which can drop what is being stored."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from ragcache_core.vllm_plugin.compat import OffloadKey, ReqContext, TieringOffloadingManager

if TYPE_CHECKING:
    from ragcache_core.vllm_plugin.compat import (
        CPUPrimaryTierOffloadingManager,
        LoadStoreSpec,
        PrepareStoreOutput,
        SecondaryTierManager,
    )
    from ragcache_core.vllm_plugin.offload.host_tier import HostTier


class TieredManager(TieringOffloadingManager):
    """Host memory and the tiers below it.

    Stores of what another connector failed to load end as failed ones (:meth:`spoil`). A reset would give their rows to
    something else, as a read from disk, while a copy writes to them.

    vLLM has the blocks of a copy as a set. The tiers get them in the order of their path, in which a run of one tree
    node is one step.
    """

    def __init__(
        self, primary: HostTier | CPUPrimaryTierOffloadingManager, secondary: list[SecondaryTierManager]
    ) -> None:
        super().__init__(primary_tier=primary, secondary_tiers=secondary)
        self._spoiled: set[OffloadKey] = set()
        self._copies: dict[str, list[Sequence[OffloadKey]]] = {}

    def spoil(self, keys: Collection[OffloadKey]) -> None:
        """Have the stores of ``keys``, which are under way, end as ones that failed."""
        self._spoiled.update(keys)

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        output: PrepareStoreOutput | None = super().prepare_store(keys, req_context)
        if output is not None and output.keys_to_store:
            self._copies.setdefault(req_context.req_id, []).append(list(output.keys_to_store))
        return output

    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        is_spoiled = bool(self._spoiled) and not self._spoiled.isdisjoint(keys)
        self._spoiled.difference_update(keys)
        super().complete_store(self._in_order(keys, req_context), req_context, success and not is_spoiled)

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        self._copies.setdefault(req_context.req_id, []).append(list(keys))
        return super().prepare_load(keys, req_context)

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        super().complete_load(self._in_order(keys, req_context), req_context)

    def reset_cache(self) -> None:
        super().reset_cache()
        self._spoiled.clear()
        self._copies.clear()

    def _in_order(self, keys: Collection[OffloadKey], req_context: ReqContext) -> Collection[OffloadKey]:
        """Return the blocks of a copy that ends in the order in which it began."""
        copies, ended = self._copies.get(req_context.req_id, []), frozenset(keys)
        for copy in copies:
            if len(copy) == len(ended) and ended.issuperset(copy):
                copies.remove(copy)
                if not copies:
                    del self._copies[req_context.req_id]
                return copy
        return keys
