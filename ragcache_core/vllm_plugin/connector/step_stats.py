"""Cache statistics of a step, which vLLM sends to the server's process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ragcache_core.vllm_plugin.compat import KVConnectorStats, OffloadingConnectorStats

_LOAD = ("num_pending_prefills", "pending_prefill_s", "has_room")
_PARTS = ("requests", "engine", "offload", "waited_s")


class RAGCacheStats(KVConnectorStats):
    """The statistics of a step.

    ``data`` holds ``requests`` by id, the latest ``engine`` report or None, the data of vLLM's offloading, how long
    each speculation that was admitted has ``waited_s``, with its tenant, and ``num_pending_prefills``, with how long
    they take, and ``has_room`` where they have changed.
    """

    @classmethod
    def of(
        cls,
        *,
        requests: dict[str, Any],
        engine: dict[str, Any] | None,
        offload: KVConnectorStats | None,
        waited_s: Mapping[str, tuple[float, str | None]] | None = None,
        num_pending_prefills: int | None = None,
        pending_prefill_s: float | None = None,
        has_room: bool | None = None,
    ) -> RAGCacheStats:
        """Return the statistics of one step."""
        below = offload.data if offload else None
        return cls(
            data={
                "requests": requests,
                "engine": engine,
                "offload": below,
                "waited_s": dict(waited_s or {}),
                "num_pending_prefills": num_pending_prefills,
                "pending_prefill_s": pending_prefill_s,
                "has_room": has_room,
            }
        )

    def is_empty(self) -> bool:
        has_load = any(self.data.get(part) is not None for part in _LOAD)
        return not (has_load or any(self.data.get(part) for part in _PARTS))

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> RAGCacheStats:
        """Return both as one; ``other`` is later."""
        offload = [OffloadingConnectorStats(data=s.data["offload"]) for s in (self, other) if s.data.get("offload")]
        requests = {**(self.data.get("requests") or {}), **(other.data.get("requests") or {})}
        merged = offload[0].aggregate(offload[1]) if len(offload) == 2 else next(iter(offload), None)
        engine = other.data.get("engine") or self.data.get("engine")
        waited_s = {**(self.data.get("waited_s") or {}), **(other.data.get("waited_s") or {})}
        load = {
            part: self.data.get(part) if (part_value := other.data.get(part)) is None else part_value for part in _LOAD
        }
        return self.of(requests=requests, engine=engine, offload=merged, waited_s=waited_s, **load)

    def reduce(self) -> dict[str, int | float]:
        """Return a line for vLLM's log."""
        offload = self.data.get("offload")
        line: dict[str, int | float] = OffloadingConnectorStats(data=offload).reduce() if offload else {}
        return {**line, "ragcache_requests": len(self.data.get("requests") or {})}
