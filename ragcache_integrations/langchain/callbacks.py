"""Sum up what the cache did for a chain, an agent or a batch; record its requests as a trace."""

from __future__ import annotations

import os
import threading
from collections import deque
from typing import Any
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import BaseMessage
from langchain_core.outputs import ChatGeneration, LLMResult

from ragcache_core.client.stats.cache_summary import CacheSummary, CacheTally
from ragcache_core.runtime.trace_recorder import TraceRecorder
from ragcache_core.stats import ANSWER_KEY, STATS_KEY, RequestStats, request_stats_from_dict
from ragcache_integrations.langchain.events import SPECULATION_EVENT


class CacheStatsCallbackHandler(BaseCallbackHandler):
    """Collects the :class:`~ragcache_core.stats.RequestStats` of every ``ChatRAGCache`` call that it sees, and sums up
    how much searching was hidden.

    Pass it as a callback to a chain, an agent or a model: ``chain.invoke(question, {"callbacks": [handler]})``. It may
    be shared by threads and by event loops. The statistics of the last ``num_runs_kept`` runs are kept, sums of all.
    ``print(handler)`` says in one line what :meth:`summary` does.
    """

    def __init__(self, num_runs_kept: int = 10_000) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._runs: deque[tuple[UUID, RequestStats]] = deque(maxlen=num_runs_kept)
        self._tally = CacheTally()

    def reset(self) -> None:
        """Forget everything."""
        with self._lock:
            self._runs.clear()
            self._tally.reset()

    @property
    def runs(self) -> list[tuple[UUID, RequestStats]]:
        """The model runs with their statistics, in the order in which they ended."""
        with self._lock:
            return list(self._runs)

    def summary(self) -> CacheSummary:
        """Return the sums up to now."""
        return self._tally.summary()

    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **kwargs: Any) -> None:
        """Take the statistics out of a finished model run."""
        first = [g for generations in response.generations for g in generations[:1]]
        stats, num_kept = [s for g in first if (s := _stats_of(g))], sum(map(_is_kept, first))
        for _ in range(num_kept):
            self._tally.add_kept_answer()
        if not stats and not num_kept:
            self._tally.add_unfinished()
        with self._lock:
            for each in stats:
                self._runs.append((run_id, each))
                self._tally.add(each)

    def on_llm_error(self, error: BaseException, **kwargs: Any) -> None:
        """Count a model run that failed, or whose stream was closed early."""
        self._tally.add_unfinished()

    def on_custom_event(self, name: str, data: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """Count what the engine was asked ahead of a search's end."""
        if name == SPECULATION_EVENT:
            self._tally.add_speculation(data["event"], data["hidden_search_s"])

    def __str__(self) -> str:
        return str(self.summary())

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self}>"


class TraceCallbackHandler(BaseCallbackHandler):
    """Records every ``ChatRAGCache`` call that it sees in a file that ``ragcache simulate`` runs again.

    ::

        with TraceCallbackHandler("mine.jsonl") as recording:
            chain.invoke(question, {"callbacks": [recording]})

    A line says when a request was made, the ids and lengths of its documents, and how long question and answer were; it
    holds no text. The question is all of the prompt that is no document. Calls that fail are left out.

    Raises:
        TraceError: the file cannot be made, or holds something already.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        self._recorder = TraceRecorder(path)

    def on_chat_model_start(self, serialized: Any, messages: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """Take note of the time of a model run."""
        self._recorder.begin(run_id)

    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **kwargs: Any) -> None:
        """Record a finished model run."""
        for generations in response.generations:
            if generations and (stats := _stats_of(generations[0])) is not None:
                self._recorder.end_with(run_id, stats)
        self._recorder.drop(run_id)

    def on_llm_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """Leave out a model run that failed, or whose stream was closed early."""
        self._recorder.drop(run_id)

    def close(self) -> None:
        """Close the file; the end of the process does so, too."""
        self._recorder.close()

    def __enter__(self) -> TraceCallbackHandler:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _stats_of(generation: object) -> RequestStats | None:
    data = _told_of(generation)
    return request_stats_from_dict(data) if data and ANSWER_KEY not in data else None


def _is_kept(generation: object) -> bool:
    """Return whether a cache of answers gave it."""
    return ANSWER_KEY in _told_of(generation)


def _told_of(generation: object) -> dict[str, Any]:
    message: BaseMessage | None = generation.message if isinstance(generation, ChatGeneration) else None
    data = message.response_metadata.get(STATS_KEY) if message is not None else None
    return data if isinstance(data, dict) else {}
