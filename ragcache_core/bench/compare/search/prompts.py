"""The requests of a workload whose documents are what a search of an index finds for their questions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ragcache_core.bench.compare.prompts import TracedPrompts
from ragcache_core.bench.compare.search.index import SearchIndex
from ragcache_core.bench.compare.search.vectors import DocumentVectors, Vectors
from ragcache_core.bench.token_client import TokenRequest
from ragcache_core.runtime.terminal import Bar
from ragcache_core.sim.traces.trace import Trace, TracedRequest
from ragcache_core.sim.traces.workload import Workload, document_tokens, draw_retrievals, make_trace
from ragcache_core.types import DocId, PromptSegment


class SearchedPrompts(TracedPrompts):
    """Questions as vectors, and the prompts that follow from the documents that a search finds.

    What a request is about is drawn as the workload says, among its first documents; the others are there to be looked
    through. ``store`` is the index, ``k`` how many documents a request shows.
    """

    def __init__(
        self,
        store: SearchIndex,
        workload: Workload,
        num_requests: int,
        vocab_size: int,
        *,
        seed: int,
        scale: float,
        num_output_tokens: int | None = None,
    ) -> None:
        """Search for every question once, so that it is known how long the prompts are."""
        count, dim = len(store), store.dimension
        assert dim is not None, "an index without a vector"
        corpus = replace(workload, num_documents=count)
        workload = replace(workload, num_documents=min(count, workload.num_documents))
        self.store, self.k = store, workload.documents_per_request
        self._lengths = np.maximum(np.rint(document_tokens(corpus, seed) * scale), 1).astype(np.int32)
        about = draw_retrievals(workload, num_requests, seed).primaries
        self._questions = DocumentVectors(count, dim).questions(about, seed, workload.primary_first)
        drawn = make_trace(workload, num_requests, seed)
        super().__init__(
            Trace.from_requests(self._found(drawn, scale)), vocab_size, seed=seed, num_output_tokens=num_output_tokens
        )

    def question(self, number: int) -> Vectors:
        """Return the vector that request ``number`` searches for: [dim]."""
        vector: NDArray[np.float32] = self._questions[number]
        return vector

    def request_about(
        self, number: int, doc_ids: Sequence[DocId], *, is_reordered: bool, sends_documents: bool
    ) -> TokenRequest:
        """Return request ``number`` about these documents, whether or not they are what the search ends with."""
        token_ids: list[int] = []
        spans: list[PromptSegment] = []
        self._show(number, doc_ids, self._sizes(doc_ids), token_ids, spans)
        return self._asked(self._trace[number], token_ids, spans if sends_documents else None, is_reordered)

    def _found(self, drawn: Iterable[TracedRequest], scale: float) -> Iterator[TracedRequest]:
        with Bar("questions", len(self._questions), "searches") as bar:
            for request, vector in zip(drawn, self._questions, strict=True):
                ids = tuple(document.doc_id for document in self.store.search_vector(vector, self.k).documents)
                tokens = max(1, round(request.question_tokens * scale))
                yield replace(request, doc_ids=ids, doc_tokens=tuple(self._sizes(ids)), question_tokens=tokens)
                bar.advance()

    def _sizes(self, doc_ids: Iterable[DocId]) -> list[int]:
        return [int(self._lengths[int(doc_id.removeprefix("d"))]) for doc_id in doc_ids]
