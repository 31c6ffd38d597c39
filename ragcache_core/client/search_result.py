"""What a search with speculation tells while it runs, and what it comes to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ragcache_core.client.speculating import Speculation
from ragcache_core.stats import PipelineReport
from ragcache_core.types import DocId, Document, RetrievalUpdate


@dataclass(frozen=True, slots=True)
class PipelineEvent:
    """Something that happened during a search.

    ``stage``: a stage ended; ``doc_ids`` are best first, with their ``scores``. ``start``, ``cancel``, ``confirm``: a
    speculation from ``doc_ids``, in the order of the prompt, was sent, given up, or right. ``miss``: the final
    documents were not those of the speculation that was sent. ``search_s`` is the time since the search began,
    ``hidden_search_s`` how much of it the engine worked on the answer already; known once the documents are final.
    """

    kind: Literal["stage", "start", "cancel", "confirm", "miss"]
    stage: int
    doc_ids: tuple[DocId, ...]
    scores: tuple[float, ...]
    is_final: bool
    hidden_search_s: float | None
    search_s: float


@dataclass(frozen=True, slots=True)
class PipelineResult:
    """The final documents of a search, and the speculation that may be answering from them already.

    ``update`` holds the documents best first, ``documents`` in the order of the prompt. Who gets the result owns the
    ``speculation``: the real request joins it, or its ``cancel()`` ends it.
    """

    update: RetrievalUpdate
    documents: tuple[Document, ...]
    report: PipelineReport
    speculation: Speculation | None
