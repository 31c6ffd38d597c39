"""The requests that nobody has asked for yet: generated ahead while a search goes on (RAGCache §5.3)."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from ragcache_core.vllm_plugin.cache.request_state import RequestRecord

_MAX_REMEMBERED = 1024
_MAX_ENDED = 64
"""Of one speculation: whoever sends its id again and again fills no memory with it."""


@dataclass(frozen=True, slots=True)
class Confirmed:
    """The requests of a speculation that somebody asks for now: those in the engine, by id, and those that ended."""

    alive: dict[str, RequestRecord]
    ended: list[RequestRecord]


class QueuedSpeculations:
    """Knows which requests are speculative until they are confirmed, and counts what they cost.

    A confirmation may come at any time: before its request (the two travel separately), while it waits or runs, or
    after it has ended by itself. The newest ``max_remembered`` of what is not here yet, and of what is not here any
    more, are remembered.
    """

    def __init__(self, max_remembered: int = _MAX_REMEMBERED) -> None:
        self._max_remembered = max_remembered
        self._requests: dict[str, dict[str, RequestRecord]] = {}
        self._confirmed_early: OrderedDict[str, None] = OrderedDict()
        self._ended: OrderedDict[str, list[RequestRecord]] = OrderedDict()
        self._first_admitted: OrderedDict[str, str] = OrderedDict()
        self._waited_s: dict[str, float] = {}
        self.num_requests = 0
        self.num_confirmed = 0
        self.num_tokens = 0
        self.num_wasted_tokens = 0

    def __bool__(self) -> bool:
        """Whether a request is in the engine that nobody has asked for."""
        return bool(self._requests)

    def on_new_request(self, request_id: str, record: RequestRecord) -> None:
        """Take a request in; one that was confirmed before it came is real from the beginning."""
        speculation = record.metadata.speculation
        if speculation is None:
            return
        self.num_requests += 1
        if speculation in self._confirmed_early:
            self._confirm(record)
        else:
            self._requests.setdefault(speculation, {})[request_id] = record

    def confirm(self, speculation: str) -> Confirmed:
        """Make a speculation's requests real, and return them. Repeating it, and an unknown id, do no harm."""
        self._confirmed_early[speculation] = None
        if len(self._confirmed_early) > self._max_remembered:
            self._confirmed_early.popitem(last=False)
        confirmed = Confirmed(self._requests.pop(speculation, {}), self._ended.pop(speculation, []))
        for record in confirmed.ended:
            self.num_wasted_tokens -= record.num_speculative_tokens
        for record in (*confirmed.alive.values(), *confirmed.ended):
            self._confirm(record)
        return confirmed

    def on_admitted(self, request_id: str, record: RequestRecord) -> None:
        """Take note that a request begins, or goes on; of several of one speculation, the first counts."""
        speculation = record.metadata.speculation
        if speculation is None or record.waited_s is None:
            return
        if self._first_admitted.setdefault(speculation, request_id) == request_id:
            self._waited_s[speculation] = record.waited_s
        if len(self._first_admitted) > self._max_remembered:
            self._first_admitted.popitem(last=False)

    @property
    def has_waited(self) -> bool:
        """Whether :meth:`take_waited_s` has something to return."""
        return bool(self._waited_s)

    def take_waited_s(self) -> dict[str, float]:
        """Return the speculations that were admitted since the last call, and how long each has waited for room."""
        waited_s, self._waited_s = self._waited_s, {}
        return waited_s

    def on_computed(self, record: RequestRecord, num_tokens: int) -> None:
        """Count prompt tokens that are computed for a request that nobody has asked for."""
        record.num_speculative_tokens += num_tokens
        self.num_tokens += num_tokens

    def on_finished(self, request_id: str, record: RequestRecord) -> None:
        """Let a request go; what was computed for it is wasted unless it is confirmed after all."""
        speculation = record.metadata.speculation
        if speculation is None or not record.is_speculative:
            return
        requests = self._requests[speculation]
        del requests[request_id]
        if not requests:
            del self._requests[speculation]
        self.num_wasted_tokens += record.num_speculative_tokens
        ended = self._ended.setdefault(speculation, [])
        if len(ended) < _MAX_ENDED:
            ended.append(record)
        if len(self._ended) > self._max_remembered:
            self._ended.popitem(last=False)

    def to_dict(self) -> dict[str, object]:
        """Return the counts by the names that they have in the engine's report."""
        return {
            "num_speculative_requests": self.num_requests,
            "num_confirmed_speculations": self.num_confirmed,
            "num_speculative_tokens": self.num_tokens,
            "num_wasted_tokens": self.num_wasted_tokens,
        }

    def _confirm(self, record: RequestRecord) -> None:
        record.is_confirmed = True
        self.num_confirmed += 1
