"""Speculative requests: prefilled or answered during a search (RAGCache §5.3)."""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass, replace
from typing import TypeVar

from ragcache_core.runtime.tenant_entries import TenantEntries
from ragcache_core.types import DocId
from ragcache_core.vllm_plugin.cache.request_state import Key, RequestState

_Key = TypeVar("_Key")

_MAX_REMEMBERED = 1024
_MAX_ENDED = 64
"""Of one speculation: a client that sends its id again and again fills no memory with it."""


@dataclass(frozen=True, slots=True)
class Confirmed:
    """The requests of a confirmed speculation: those in the engine, and those that ended before."""

    alive: list[RequestState]
    ended: list[RequestState]


class QueuedSpeculations:
    """Confirms speculative requests, and counts their cost.

    A confirmation may come at any time: before its request (the two travel separately), while it is queued or runs, or
    after it has ended by itself. Of speculations whose request has not arrived yet, and of those whose request has
    ended, the newest ``max_remembered`` of each tenant are remembered.

    A prefill answers no request itself, so a confirmation does not say that it was of use: its tokens count as wasted
    until a real request arrives whose prompt begins with the same blocks.
    """

    def __init__(self, max_remembered: int = _MAX_REMEMBERED) -> None:
        self._num_unconfirmed = 0
        self._confirmed_early: TenantEntries[str, bool] = TenantEntries(max_remembered)
        self._ended: TenantEntries[str, list[RequestState]] = TenantEntries(max_remembered)
        self._unused_prefills: TenantEntries[Key, list[RequestState]] = TenantEntries(max_remembered)
        self._first_admitted: TenantEntries[str, str] = TenantEntries(max_remembered)
        self._waited_s: dict[str, tuple[float, str | None]] = {}
        self.num_requests = 0
        self.num_confirmed = 0
        self.num_tokens = 0
        self.num_wasted_tokens = 0

    def __bool__(self) -> bool:
        """Whether a request in the engine is speculative."""
        return self._num_unconfirmed > 0

    def on_new_request(self, state: RequestState) -> None:
        """Add a request; one that was confirmed before its arrival is real."""
        speculation = state.metadata.speculation
        if speculation is None:
            self._use_prefills(state)
            return
        self.num_requests += 1
        if state.metadata.is_prefill and state.keys and not state.metadata.expected_uses:
            _append(self._unused_prefills, state.keys[-1], state)
        if self._confirmed_early.get(state.tenant, speculation):
            self._confirm(state)
        else:
            self._num_unconfirmed += 1

    def confirm(self, speculation: str, requests: Iterable[RequestState], tenant: str | None = None) -> Confirmed:
        """Make a tenant's speculative requests real, and return them; ``requests`` are all in the engine.

        Repeating it, and an unknown id, do no harm.
        """
        self._confirmed_early.put(tenant, speculation, True)
        alive: list[RequestState] = []
        if self:
            own = (state for state in requests if state.tenant == tenant)
            alive = [state for state in own if state.metadata.speculation == speculation and state.is_speculative]
        confirmed = Confirmed(alive, self._ended.pop(tenant, speculation) or [])
        self._num_unconfirmed -= len(alive)
        for state in confirmed.ended:
            if not state.metadata.is_prefill:
                self._take_back(state)
        for state in (*alive, *confirmed.ended):
            self._confirm(state)
        return confirmed

    def on_admitted(self, state: RequestState) -> None:
        """Record that a request starts or resumes; the first of a speculation counts."""
        speculation = state.metadata.speculation
        if speculation is None or state.waited_s is None:
            return
        first = self._first_admitted.get(state.tenant, speculation)
        if first is None:
            self._first_admitted.put(state.tenant, speculation, state.request_id)
        if first in (None, state.request_id):
            self._waited_s[speculation] = state.waited_s, state.tenant

    @property
    def has_waited(self) -> bool:
        """Whether :meth:`take_waited_s` has results."""
        return bool(self._waited_s)

    def take_waited_s(self) -> dict[str, tuple[float, str | None]]:
        """Return the queue time and tenant of each speculation admitted since the last call."""
        waited_s, self._waited_s = self._waited_s, {}
        return waited_s

    def on_computed(self, state: RequestState, num_tokens: int) -> None:
        """Count prompt tokens computed for a speculative request."""
        state.num_speculative_tokens += num_tokens
        self.num_tokens += num_tokens

    def on_finished(self, state: RequestState) -> None:
        """Remove a request; its computed tokens are wasted unless it is confirmed later, or was a forecast."""
        speculation = state.metadata.speculation
        if speculation is None:
            return
        self._num_unconfirmed -= state.is_speculative
        if state.metadata.expected_uses:  # no confirmation follows
            return
        if not state.is_used if state.metadata.is_prefill else state.is_speculative:
            state.num_wasted_tokens = state.num_speculative_tokens
            self.num_wasted_tokens += state.num_wasted_tokens
        if state.is_speculative:
            _append(self._ended, speculation, state)

    def forget(self, doc_ids: Set[DocId] | None) -> None:
        """Forget what ended requests with some (or any) documents showed."""
        for ended in (*self._ended.values(), *self._unused_prefills.values()):
            for state in ended:
                if doc_ids is None or any(segment.doc_id in doc_ids for segment in state.metadata.segments):
                    segments = tuple(replace(segment, doc_id=None, label=None) for segment in state.metadata.segments)
                    state.metadata, state.keys = replace(state.metadata, segments=segments), ()
                    state.has_forgotten = True

    def to_dict(self) -> dict[str, object]:
        """Return the counts by their names in the engine's report."""
        return {
            "num_speculative_requests": self.num_requests,
            "num_confirmed_speculations": self.num_confirmed,
            "num_speculative_tokens": self.num_tokens,
            "num_wasted_tokens": self.num_wasted_tokens,
        }

    def _confirm(self, state: RequestState) -> None:
        state.is_confirmed = True
        self.num_confirmed += 1

    def _use_prefills(self, request: RequestState) -> None:
        """Count prefills as used if a real request's prompt begins with their blocks."""
        if self._unused_prefills:
            for key in request.keys:
                for prefill in self._unused_prefills.pop(request.tenant, key) or ():
                    prefill.is_used = True
                    self._take_back(prefill)

    def _take_back(self, state: RequestState) -> None:
        self.num_wasted_tokens -= state.num_wasted_tokens
        state.num_wasted_tokens = 0


def _append(states: TenantEntries[_Key, list[RequestState]], key: _Key, state: RequestState) -> None:
    """Add a request to those with the same key; keep at most ``_MAX_ENDED``."""
    known = states.get(state.tenant, key) or []
    if len(known) < _MAX_ENDED:
        states.put(state.tenant, key, [*known, state])
