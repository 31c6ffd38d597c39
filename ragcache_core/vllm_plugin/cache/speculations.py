"""Speculative requests: prefilled or answered ahead while a search goes on (RAGCache §5.3)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from ragcache_core.vllm_plugin.cache.request_state import RequestState

_MAX_REMEMBERED = 1024
_MAX_ENDED = 64
"""Of one speculation: a client that sends its id again and again fills no memory with it."""


@dataclass(frozen=True, slots=True)
class Confirmed:
    """The requests of a speculation that is confirmed now: those in the engine, and those that ended before."""

    alive: list[RequestState]
    ended: list[RequestState]


class QueuedSpeculations:
    """Confirms the requests of speculations, and counts what they cost.

    A confirmation may come at any time: before its request (the two travel separately), while it is queued or runs, or
    after it has ended by itself. Of speculations whose request has not arrived yet, and of those whose request has
    ended, the newest ``max_remembered`` are remembered.
    """

    def __init__(self, max_remembered: int = _MAX_REMEMBERED) -> None:
        self._max_remembered = max_remembered
        self._num_unconfirmed = 0
        self._confirmed_early: OrderedDict[str, None] = OrderedDict()
        self._ended: OrderedDict[str, list[RequestState]] = OrderedDict()
        self._first_admitted: OrderedDict[str, str] = OrderedDict()
        self._waited_s: dict[str, float] = {}
        self.num_requests = 0
        self.num_confirmed = 0
        self.num_tokens = 0
        self.num_wasted_tokens = 0

    def __bool__(self) -> bool:
        """Whether a request in the engine is speculative."""
        return self._num_unconfirmed > 0

    def on_new_request(self, state: RequestState) -> None:
        """Take a request in; one that was confirmed before it came is real from the beginning."""
        speculation = state.metadata.speculation
        if speculation is None:
            return
        self.num_requests += 1
        if speculation in self._confirmed_early:
            self._confirm(state)
        else:
            self._num_unconfirmed += 1

    def confirm(self, speculation: str, requests: Iterable[RequestState]) -> Confirmed:
        """Make a speculation's requests real, and return them; ``requests`` are all in the engine.

        Repeating it, and an unknown id, do no harm.
        """
        self._confirmed_early[speculation] = None
        if len(self._confirmed_early) > self._max_remembered:
            self._confirmed_early.popitem(last=False)
        alive: list[RequestState] = []
        if self:
            alive = [state for state in requests if state.metadata.speculation == speculation and state.is_speculative]
        confirmed = Confirmed(alive, self._ended.pop(speculation, []))
        self._num_unconfirmed -= len(alive)
        for state in confirmed.ended:
            self.num_wasted_tokens -= state.num_speculative_tokens
        for state in (*alive, *confirmed.ended):
            self._confirm(state)
        return confirmed

    def on_admitted(self, state: RequestState) -> None:
        """Record that a request begins, or resumes; of several of one speculation, the first counts."""
        speculation = state.metadata.speculation
        if speculation is None or state.waited_s is None:
            return
        if self._first_admitted.setdefault(speculation, state.request_id) == state.request_id:
            self._waited_s[speculation] = state.waited_s
        if len(self._first_admitted) > self._max_remembered:
            self._first_admitted.popitem(last=False)

    @property
    def has_waited(self) -> bool:
        """Whether :meth:`take_waited_s` has something to return."""
        return bool(self._waited_s)

    def take_waited_s(self) -> dict[str, float]:
        """Return the speculations that were admitted since the last call, and how long each was queued."""
        waited_s, self._waited_s = self._waited_s, {}
        return waited_s

    def on_computed(self, state: RequestState, num_tokens: int) -> None:
        """Count prompt tokens that are computed for a speculative request."""
        state.num_speculative_tokens += num_tokens
        self.num_tokens += num_tokens

    def on_finished(self, state: RequestState) -> None:
        """Release a request; what was computed for it is wasted unless it is confirmed after all, or was a forecast."""
        speculation = state.metadata.speculation
        if speculation is None or not state.is_speculative:
            return
        self._num_unconfirmed -= 1
        if state.metadata.expected_uses:  # nobody will confirm it
            return
        self.num_wasted_tokens += state.num_speculative_tokens
        ended = self._ended.setdefault(speculation, [])
        if len(ended) < _MAX_ENDED:
            ended.append(state)
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

    def _confirm(self, state: RequestState) -> None:
        state.is_confirmed = True
        self.num_confirmed += 1
