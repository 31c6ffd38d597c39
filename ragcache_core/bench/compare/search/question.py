"""One question's search in front of its request: whole, in stages, or in stages with the answer asked for ahead.

Stages and speculation are the pipeline's, as behind the integrations of the frameworks; a whole search is what any
other retriever does, in a thread of the same store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Self

from ragcache_core.bench.compare.search.prompts import SearchedPrompts
from ragcache_core.bench.token_client import TokenRequest
from ragcache_core.client import Engine
from ragcache_core.client.pipeline.run import run_pipeline
from ragcache_core.client.pipeline.session import SearchSession
from ragcache_core.client.pipeline.stages import DEFAULT_TIMEOUT_S
from ragcache_core.client.speculation.speculation import Speculation
from ragcache_core.ordering import DocumentOrder
from ragcache_core.speculation import SettlingHistory
from ragcache_core.types import DocId, Document


@dataclass(frozen=True, slots=True)
class Searched:
    """What became of one search: seconds, all of it and the part that its answer waited for; speculations sent."""

    search_s: float
    unhidden_s: float
    num_stages: int
    num_speculations: int
    is_right: bool


@dataclass(frozen=True, slots=True)
class SearchRun:
    """The searches of a run, request by request: seconds, and seconds that the answer waited for; and their counts.

    ``num_speculated`` requests had anything sent ahead, ``num_speculations`` were sent in all, and ``num_right``
    requests got their answer from one.
    """

    search_s: tuple[float, ...]
    unhidden_s: tuple[float, ...]
    num_stages: int
    num_speculated: int
    num_speculations: int
    num_right: int

    @classmethod
    def of(cls, searches: Iterable[Searched | None]) -> Self | None:
        """Return what searches come to; ``None`` where there were none."""
        found = [searched for searched in searches if searched is not None]
        if not found:
            return None
        return cls(
            tuple(round(searched.search_s, 6) for searched in found),
            tuple(round(searched.unhidden_s, 6) for searched in found),
            sum(searched.num_stages for searched in found),
            sum(searched.num_speculations > 0 for searched in found),
            sum(searched.num_speculations for searched in found),
            sum(searched.is_right for searched in found),
        )

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Return the searches as a file has them.

        Raises:
            TypeError, KeyError: ``data`` is not such a dictionary.
        """
        columns = {name: tuple(data[name]) for name in ("search_s", "unhidden_s")}
        return cls(**{**data, **columns})

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Searching:
    """How an engine's requests are searched for: by one retriever, which learns from its searches.

    ``is_staged``: in stages; ``speculates``: with the request sent ahead. ``body`` is the body of a request, ``post``
    how it is sent.
    """

    engine: Engine
    prompts: SearchedPrompts
    order: DocumentOrder
    is_staged: bool
    speculates: bool
    body: Callable[[TokenRequest], dict[str, Any]]
    post: Callable[[dict[str, Any]], object]
    history: SettlingHistory = field(default_factory=SettlingHistory)

    async def question(self, number: int) -> Question:
        """Search for request ``number``, and return it with what it found. Whoever gets it closes it.

        Raises:
            SearchError: and its kinds.
        """
        question = Question(self, number)
        try:
            await question.search()
        except BaseException:
            question.close()
            raise
        return question


class Question:
    """A request whose documents are known, and perhaps its answer on the way."""

    def __init__(self, searching: Searching, number: int) -> None:
        self._searching = searching
        self._number = number
        self._session = SearchSession()
        self._reordered: set[tuple[DocId, ...]] = set()
        self._doc_ids: tuple[DocId, ...] = ()

    async def search(self) -> None:
        """Find the documents: whole or in stages, as the engine is asked."""
        how, vector = self._searching, self._searching.prompts.question(self._number)
        store, k = how.prompts.store, how.prompts.k
        if how.is_staged:
            result = await run_pipeline(
                store.search_vector_staged(vector, k),
                how.engine.integration.speculation if how.speculates else None,
                self if how.speculates else None,
                timeout_s=DEFAULT_TIMEOUT_S,
                arrange=self._arranged,
                history=how.history,
                k=k,
            )
            self._session.take(result)
            documents: Sequence[Document] = result.documents
        else:
            _, threads = store.begin_search()

            async def find() -> Sequence[Document]:
                return (await threads.run(partial(store.search_vector, vector, k))).documents

            documents = await self._session.search_at_once(find, list, lambda _: None, timeout_s=None)
        self._doc_ids = _ids(documents)

    def prepare(self, documents: Sequence[Document]) -> Callable[[], Speculation]:
        """Make the request about candidates, to be sent ahead; called in a thread of the pipeline's."""
        how, body = self._searching, self._body(_ids(documents))
        with self.asking():
            return how.engine.integration.speculation.prepare(lambda: how.post(body))

    def body(self) -> dict[str, Any]:
        """Return the request about what was found."""
        return self._body(self._doc_ids)

    @property
    def is_reordered(self) -> bool:
        """Whether the documents are shown in another order than they were found in."""
        return self._doc_ids in self._reordered

    def asking(self) -> AbstractContextManager[None]:
        """Ask in this question's scope: the request joins what was sent ahead of it."""
        return self._session.asking()

    def searched(self) -> Searched:
        """Return what became of the search, when the answer has ended."""
        self._session.settle()
        report = self._session.pipeline_report()
        assert report is not None, "a question is given away after its search"
        times = (report["search_s"], report["unhidden_search_s"])
        return Searched(*times, report["num_stages"], report["num_started"], report["is_confirmed"])

    def close(self) -> None:
        """End what was sent ahead, unless the request took it over."""
        self._session.close()

    def _body(self, doc_ids: tuple[DocId, ...]) -> dict[str, Any]:
        how = self._searching
        request = how.prompts.request_about(
            self._number, doc_ids, is_reordered=doc_ids in self._reordered, sends_documents=how.is_staged
        )
        return how.body(request)

    def _arranged(self, documents: Sequence[Document]) -> Sequence[Document]:
        if self._searching.order == "retrieval":
            return documents
        arranged = self._searching.engine.arrange_documents(documents, self._searching.order)
        if arranged.is_reordered:
            self._reordered.add(_ids(arranged.documents))
        return arranged.documents


def _ids(documents: Iterable[Document]) -> tuple[DocId, ...]:
    return tuple(document.doc_id for document in documents)
