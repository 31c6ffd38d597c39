"""Events and result of a search with speculation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from ragcache_core.client.speculation.speculation import Speculation
from ragcache_core.stats import PipelineReport
from ragcache_core.types import DocId, Document, RetrievalUpdate, Swap

if TYPE_CHECKING:  # the client does not need the store
    from ragcache_core.retrieval.base import Metric


@dataclass(frozen=True, slots=True)
class PipelineEvent:
    """An event during a search.

    ``stage``: a stage ended; ``doc_ids`` are best first, with their ``scores``, which are the search's own (see
    :class:`~ragcache_core.types.RetrievalUpdate`; :func:`similarities`), and ``swaps`` exchanged some. ``start``,
    ``cancel``, ``confirm``: a speculation from ``doc_ids``, in the order of the prompt, was sent, given up, or right.
    ``miss``: the final documents were not those of the speculation that was sent. ``settle``: the answer has ended
    whose speculation was confirmed. ``search_s`` is the time since the search began.

    ``overlapped_search_s`` is reported once: during how much of the search the answer was on its way.
    Of an answer it is known when that has ended (``settle``; ``None`` where no request joined the speculation: it was
    not right after all), of a prefill that no request joins with the final documents (``confirm``; ``None`` where the
    engine has not told by then when it began).
    """

    kind: Literal["stage", "start", "cancel", "confirm", "miss", "settle"]
    stage: int
    doc_ids: tuple[DocId, ...]
    scores: tuple[float, ...]
    is_final: bool
    overlapped_search_s: float | None
    search_s: float
    swaps: tuple[Swap, ...] = ()


@dataclass(frozen=True, slots=True)
class PipelineResult:
    """The final documents of a search, and the speculation that may already be answering from them.

    ``update`` holds the documents best first, ``documents`` in the order of the prompt. Who gets the result owns the
    ``speculation``: the real request joins it, or its ``cancel()`` ends it. ``report`` is what was known when the
    search ended, at ``began_s + report.search_s`` by ``time.perf_counter()``.
    """

    update: RetrievalUpdate
    documents: tuple[Document, ...]
    report: PipelineReport
    speculation: Speculation | None
    began_s: float

    def settled_report(self) -> PipelineReport:
        """Return the present report; complete at the answer's end.

        Search time counts as overlapped after the engine has reported the start of the speculation, and only if a
        request adopted it: not if the request differed or the speculation failed.
        """
        if self.speculation is None:
            return self.report
        is_right = self.speculation.is_claimed or not (self.speculation.can_be_adopted or self.speculation.is_failed)
        unhidden_s = non_overlapped_search_s(self.speculation, self.began_s, self.report.search_s)
        return replace(
            self.report,
            is_confirmed=is_right,
            non_overlapped_search_s=unhidden_s if is_right else self.report.search_s,
        )

    def settled(self, report: PipelineReport) -> PipelineEvent | None:
        """Return the event with the overlapped time of ``report``; ``None`` if there was no answer."""
        if self.speculation is None or not self.speculation.can_be_adopted:
            return None
        doc_ids = tuple(document.doc_id for document in self.documents)
        hidden_s = report.overlapped_search_s if report.is_confirmed else None
        return PipelineEvent("settle", self.update.stage, doc_ids, (), True, hidden_s, report.search_s)


def non_overlapped_search_s(speculation: Speculation, began_s: float, search_s: float) -> float:
    """Return the search time since ``began_s`` that did not overlap with the answer; all of it until this is known.

    This is the time until the speculation was sent, less the time of making its request, plus its waits for admission:
    see :class:`~ragcache_core.stats.PipelineReport`. A prefill of only the static prefix does not count.
    """
    if speculation.started_s is None or not speculation.has_documents:
        return search_s
    return min(max(speculation.started_s - speculation.making_s - began_s, 0.0), search_s)


def similarities(scores: Sequence[float], metric: Metric | None) -> list[float]:
    """Return scores where larger is nearer: inner products as they are, a squared distance ``d`` as ``1 / (1 + d)``.

    Of a source that does not tell its ``metric`` the order says it: the first document is the best. Its scores may be
    anything that ascends, negative numbers too.
    """
    if metric is None:
        metric = "l2" if scores and scores[0] < scores[-1] else "ip"
    if metric == "ip":
        return list(scores)
    return [1.0 / (1.0 + distance) if distance >= 0.0 else 1.0 - distance for distance in scores]
