"""The engine's state in the server's process: latest statistics, and recent requests."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from ragcache_core.config import ChunkReuseRequest
from ragcache_core.runtime.tenant_entries import TenantEntries
from ragcache_core.stats import ENGINE_SERIES, merged_report
from ragcache_core.vllm_plugin.cache.recent_requests import response_id_of
from ragcache_core.vllm_plugin.settings import PluginSettings

_Found = TypeVar("_Found")


class Notifier:
    """Wakes waiting coroutines, which then check their condition. Thread-safe."""

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Event, asyncio.AbstractEventLoop] = {}

    def notify(self) -> None:
        """Wake all waiting coroutines."""
        for event, loop in list(self._waiting.items()):
            with suppress(RuntimeError):  # the loop was closed, with its coroutines
                loop.call_soon_threadsafe(event.set)

    async def wait_for(self, find: Callable[[], _Found | None], timeout_s: float) -> _Found | None:
        """Return the first result of ``find`` that is not ``None``; ``None`` after ``timeout_s`` seconds."""
        event = asyncio.Event()
        self._waiting[event] = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_s):
                while (found := find()) is None:
                    await event.wait()
                    event.clear()
                return found
        except TimeoutError:
            return None
        finally:
            del self._waiting[event]


_MAX_REQUESTS = 10_000
_MAX_TENANT_REQUESTS = 1024
_MAX_ADMITTED = 1024


@dataclass(frozen=True, slots=True)
class Wait:
    """A speculation's queue time in an engine, which has reported it ``num_reports`` times.

    The engine reports it at the start and after each pause. Of several engines with requests of one speculation, the
    first report counts.
    """

    engine_index: int
    num_reports: int
    waited_s: float


class Received:
    """The engines' latest reports, and the statistics of the newest ``max_requests`` requests.

    For a tenant these are the newest 1,024: no tenant's requests replace or evict another's.
    Its ``notifier`` wakes coroutines that wait for a request's statistics, or for a speculation's admission.
    """

    def __init__(self, max_requests: int = _MAX_REQUESTS) -> None:
        self.notifier = Notifier()
        self._requests: TenantEntries[str, dict[str, Any]] = TenantEntries(
            max_requests, min(max_requests, _MAX_TENANT_REQUESTS)
        )
        self._engines: dict[int, dict[str, Any]] = {}
        self._before_the_first: dict[str, Any] | None = None
        self._waits: TenantEntries[str, Wait] = TenantEntries(_MAX_ADMITTED)
        self._num_pending: dict[int, int] = {}
        self._pending_until_s: dict[int, float] = {}
        self._has_room: dict[int, bool] = {}
        self._max_prefill_bs = 0
        self._settings: PluginSettings | None = None
        self._indices: Sequence[int] = (0,)
        self._observe: Callable[[dict[str, Any], int], None] = self.add
        self._lock = threading.Lock()

    def begin(
        self,
        settings: PluginSettings,
        observe: Callable[[dict[str, Any], int], None] | None = None,
        engines: Sequence[int] = (0,),
        max_num_seqs: int = 1,
    ) -> None:
        """Set empty reports until the ``engines`` are asked for one, shortly before the server is ready.

        ``observe`` receives reports outside of steps, and calls :meth:`add`. One of several servers may have only later
        engines. ``max_num_seqs`` is reported where the engine's size limits speculative requests.
        """
        self._indices = sorted(engines)
        if observe is not None:
            self._observe = observe
        zeros = dict.fromkeys(ENGINE_SERIES, 0)
        self._max_prefill_bs = max_num_seqs if settings.max_prefill_bs is None else settings.max_prefill_bs
        self._settings = settings
        self._before_the_first = {
            **zeros,
            "policy": settings.policy,
            "num_nodes": 0,
            "tiers": [],
            "hottest_documents": [],
        }

    @property
    def num_engines(self) -> int:
        """Number of data-parallel engines of this server."""
        return len(self._indices)

    def update(self, reports: Sequence[dict[str, Any] | None]) -> None:
        """Store each engine's report outside of a step; ``None`` if it has none."""
        for engine, report in zip(self._indices, reports, strict=True):
            if report is not None:
                self._observe({"engine": report}, engine)

    def add(self, data: dict[str, Any], engine_index: int) -> None:
        """Store the statistics of a step."""
        with self._lock:
            if data.get("engine"):
                self._engines[engine_index] = data["engine"]
            if (num_pending := data.get("num_pending_prefills")) is not None:
                self._num_pending[engine_index] = num_pending
            if (pending_s := data.get("pending_prefill_s")) is not None:
                self._pending_until_s[engine_index] = time.monotonic() + pending_s
            if (has_room := data.get("has_room")) is not None:
                self._has_room[engine_index] = has_room
            for request_id, figures in (data.get("requests") or {}).items():
                self._requests.put(figures.get("tenant"), response_id_of(request_id), figures)
            for speculation, (waited_s, tenant) in (data.get("waited_s") or {}).items():
                before = self._waits.get(tenant, speculation) or Wait(engine_index, 0, 0.0)
                if before.engine_index == engine_index:
                    self._waits.put(tenant, speculation, Wait(engine_index, before.num_reports + 1, waited_s))
        if data.get("requests") or data.get("waited_s"):
            self.notifier.notify()

    def request(
        self, response_id: str, tenant: str | None = None, *, any_tenant: bool = False
    ) -> dict[str, Any] | None:
        """Return the statistics of a tenant's answered request by the ``id`` of its response.

        Of several prompts in one request, or several answers to it, the first counts. With ``any_tenant`` the request
        may be any tenant's.
        """
        with self._lock:
            for candidate in (response_id, f"{response_id}-0", f"{response_id}_0", f"0_{response_id}"):
                found = self._requests.find(candidate) if any_tenant else self._requests.get(tenant, candidate)
                if found is not None:
                    return found
        return None

    def wait_of(self, speculation: str, tenant: str | None = None, *, after: int = 0) -> Wait | None:
        """Return a speculation's queue time after more than ``after`` reports; ``None`` until then.

        None long afterwards as well.
        """
        with self._lock:
            wait = self._waits.get(tenant, speculation)
        return None if wait is None or wait.num_reports <= after else wait

    def engine(self) -> dict[str, Any] | None:
        """Return the latest report, merged over data-parallel engines."""
        with self._lock:
            return merged_report([*self._engines.values()]) if self._engines else self._before_the_first

    def load(self) -> dict[str, Any] | None:
        """Return whether a speculative request would be admitted, as of the last step; ``None`` without RAGCache.

        The result also says whether there is a disk to prefetch from.

        All of several data-parallel engines must admit it, as the engine that will serve it is not known yet. An engine
        without a report counts as idle. ``pending_prefill_s`` is the time that the busiest engine needs for its pending
        prefills, less the time since its report.
        """
        now_s = time.monotonic()
        with self._lock:
            if self._before_the_first is None:
                return None
            tiers = (tier for report in self._engines.values() for tier in report.get("tiers", ()))
            ends_s = max(self._pending_until_s.values(), default=now_s) if any(self._num_pending.values()) else now_s
            return {
                "reads_ahead": any(tier["name"] == "disk" and tier["is_enabled"] for tier in tiers),
                "num_pending_prefills": sum(self._num_pending.values()),
                "pending_prefill_s": max(ends_s - now_s, 0.0),
                "max_prefill_bs": self._max_prefill_bs,
                "is_speculative": self._max_prefill_bs > 0,
                "has_room": self._max_prefill_bs > 0 and all(self._has_room.values()),
            }

    def costs(self) -> dict[str, Any] | None:
        """Return the model's measured costs; ``None`` without RAGCache.

        It reads a file: the prefill times, ``None`` where there are none. ``chunk_reuse`` has the engine's own alpha
        and the calibrated points; ``None`` without chunk reuse, and where audits choose alpha.
        """
        settings = self._settings
        if settings is None:
            return None
        cost, alpha = settings.measured_prefill_cost(), None
        if settings.chunk_reuse is not None and settings.chunk_reuse.max_error is None:
            alpha = settings.alpha_for(ChunkReuseRequest())
        reuse = None if alpha is None else {"alpha": alpha, "points": [asdict(point) for point in settings.points]}
        return {"prefill": None if cost is None else cost.to_dict(), "chunk_reuse": reuse}


received = Received()
"""Of this process: vLLM makes the metrics, and our routes are another plugin, so they meet here."""
