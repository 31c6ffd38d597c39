"""The latest requests with their phases: queued, loaded, prefilled, answered."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Set
from itertools import islice

from ragcache_core.types import DocId, Origin, SegmentKind
from ragcache_core.vllm_plugin.cache.request_state import RequestState

MAX_REQUESTS = 256
_MAX_DOCUMENTS = 16


def response_id_of(request_id: str) -> str:
    """Return a request's id without vLLM's eight random digits."""
    head, dash, tail = request_id.rpartition("-")
    return head if dash and len(tail) == 8 else request_id


class RecentRequests:
    """The last ``max_requests`` ended requests, without the names of deleted documents."""

    def __init__(self, max_requests: int = MAX_REQUESTS) -> None:
        self._ended: deque[tuple[float, dict[str, object]]] = deque(maxlen=max_requests)

    def add(self, state: RequestState, ended_s: float) -> None:
        """Add an ended request."""
        self._ended.append((state.arrived_s, {**_times_of(state), "total_s": ended_s - state.arrived_s}))

    def forget(self, doc_ids: Set[DocId]) -> None:
        """Remove the names of documents."""
        for _, said in self._ended:
            said["doc_ids"] = [doc_id for doc_id in _names(said) if doc_id not in doc_ids]

    def forget_all(self) -> None:
        """Remove the names of all documents so far."""
        for _, said in self._ended:
            said["doc_ids"] = []

    def newest(self, running: Iterable[RequestState], limit: int, now_s: float) -> list[dict[str, object]]:
        """Return the latest ``limit`` requests, ``running`` ones first, with their arrival.

        Times are seconds since then; None is not yet, or never. Of a request's documents the first are named, none
        where it has a salt or one of them is forgotten.
        """
        latest = [(state.arrived_s, {**_times_of(state), "total_s": None}) for state in islice(running, limit)]
        latest += islice(reversed(self._ended), limit - len(latest))
        return [{**said, "age_s": now_s - arrived_s} for arrived_s, said in latest]


def _times_of(state: RequestState) -> dict[str, object]:
    documents = [s.doc_id for s in state.metadata.segments if s.kind is SegmentKind.DOCUMENT and s.doc_id]
    named = [] if state.is_salted or state.has_forgotten else documents[:_MAX_DOCUMENTS]
    return {
        "id": state.request_id,
        "num_prompt_tokens": state.num_prompt_tokens,
        **{f"num_{origin.label}_tokens": state.num_tokens_by_tier[origin] for origin in Origin},
        "num_loaded_bytes": state.num_loaded_bytes,
        "num_documents": len(documents),
        "doc_ids": named,
        "is_speculative": state.metadata.speculation is not None,
        "is_confirmed": state.is_confirmed,
        "queue_s": _since(state, state.admitted_s),
        "load_s": _since(state, state.loaded_s),
        "ttft_s": _since(state, state.first_token_s),
    }


def _since(state: RequestState, moment_s: float | None) -> float | None:
    return None if moment_s is None else moment_s - state.arrived_s


def _names(said: dict[str, object]) -> list[DocId]:
    names = said["doc_ids"]
    assert isinstance(names, list)
    return names
