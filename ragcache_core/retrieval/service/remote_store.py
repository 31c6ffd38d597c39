"""A document store that another process serves over HTTP, as those who read one know it."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import aclosing, contextmanager, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar

import numpy as np

from ragcache_core.errors import (
    ConfigError,
    EmptyStoreError,
    SearchTimeoutError,
    StoreAuthError,
    StoreError,
    StoreUnreachableError,
    TooFewDocumentsError,
    UnknownDocumentError,
)
from ragcache_core.retrieval.base import IndexKind, Metric, Vectors, stage_cuts
from ragcache_core.retrieval.embedders.base import Embedder, PrecomputedEmbedder, check_query
from ragcache_core.retrieval.filters import filter_as_mapping
from ragcache_core.retrieval.service.protocol import (
    MAX_IDS,
    SERVICE,
    StageReader,
    StoreFacts,
    check_protocol,
    document_read,
    error_read,
    understood,
)
from ragcache_core.retrieval.storage.snapshot import StoreStats, check_k, check_text
from ragcache_core.retrieval.threads import closed_error
from ragcache_core.retrieval.wanted import MMR, Filter, Wanted
from ragcache_core.runtime.event_loop_thread import EventLoopThread
from ragcache_core.runtime.handle import Handle
from ragcache_core.types import DocId, Document, RetrievalUpdate

if TYPE_CHECKING:
    import httpx

_Result = TypeVar("_Result")

_SEARCH = "/v1/search"
_FACTS_EVERY_S = 2.0
"""How often it is asked what the store holds; each search says it as well."""
_KEEP_ALIVE_S = 20.0
_BROKEN_PATIENCE_S = 1.0
"""How long a request is sent again to a service that is gone: it may be started again, or be another one's turn."""
_FIRST_PAUSE_S = 0.03
_MAX_PAUSE_S = 0.5

_logger = logging.getLogger(__name__)


class RemoteStore(Handle):
    """A store that runs elsewhere, ``ragcache serve-store``, wherever a :class:`DocumentStore` is read.

    ::

        with RemoteStore("http://retrieval:8100", api_key=key) as store:
            retriever = RAGCacheRetriever(store=store, engine=engine)

    Documents, scores and errors of a search are those of the store itself. Closing a staged search early ends it in the
    service. A request that gets no answer because the service is gone, or full, is sent again, for a second or for
    ``timeout_s``; a search whose service ends after its first stage fails.

    Filters are expressions here, which can be sent; functions are refused. What the store holds, as its length, is
    known as of two seconds ago, or of the last search. It is safe to use from several threads and event loops.

    Args:
        url: where the service is, ``http://`` or ``https://``.
        api_key: the service's.
        timeout_s: the longest that it may say nothing.

    Raises:
        ConfigError: an address, a key or a time that cannot work.
        StoreUnreachableError: nothing answers there. StoreAuthError: it wants another key.
        StoreVersionError: it speaks another protocol. StoreError: what answers there is no service of a store.
    """

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float = 10.0) -> None:
        import httpx

        if not isinstance(url, str) or not url.startswith(("http://", "https://")):
            raise ConfigError(f"the service's address is {url!r:.80}: give http://host:port, or https://")
        if not (isinstance(timeout_s, int | float) and 0 < timeout_s < math.inf):
            raise ConfigError(f"timeout_s is {timeout_s!r:.40}: give seconds above 0")
        if api_key is not None and not (isinstance(api_key, str) and api_key.isascii() and api_key.isprintable()):
            raise ConfigError("the api_key has characters that HTTP cannot send: pass it as the service has it")
        self._url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._process = os.getpid()
        self._is_closed = False
        try:
            self._http = httpx.AsyncClient(
                base_url=self._url,
                headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"},
                timeout=timeout_s,
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=16, keepalive_expiry=_KEEP_ALIVE_S),
                verify=httpx.create_ssl_context() if url.startswith("https") else False,
            )
        except httpx.InvalidURL as error:
            raise ConfigError(f"the service's address is {url!r:.80} ({error}): give http://host:port") from error
        self._loop = EventLoopThread("ragcache-remote-store", at_end=self._http.aclose)
        try:
            self._facts = self._wait(self._ask_facts())
        except BaseException:
            self.close()
            raise
        self._loop.run(self._follow_facts())

    def close(self) -> None:
        """End its connections, and the searches that run. May be called twice."""
        self._is_closed = True
        if os.getpid() == self._process:
            self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Looking up

    def get(self, doc_ids: Iterable[DocId], *, missing_ok: bool = False) -> list[Document]:
        """Return documents in the order of ``doc_ids``; ``missing_ok`` leaves out those that are not stored.

        Raises:
            UnknownDocumentError: one of them is not stored. StoreUnreachableError
        """
        wanted = [doc_ids] if isinstance(doc_ids, str) else list(doc_ids)
        found = self._find(wanted)
        for doc_id in () if missing_ok else wanted:
            if doc_id not in found:
                raise UnknownDocumentError(f"document {doc_id!r} is not in {self._url}: check ids() for what is")
        return [found[doc_id] for doc_id in wanted if doc_id in found]

    def _find(self, doc_ids: Sequence[DocId]) -> dict[DocId, Document]:
        async def find() -> dict[DocId, Document]:
            found: dict[DocId, Document] = {}
            for start in range(0, len(doc_ids), MAX_IDS):
                said = await self._ask("/v1/documents", {"ids": list(doc_ids[start : start + MAX_IDS])})
                with understood(self._url):
                    documents = [document_read(each) for each in said["documents"]]
                found.update((document.doc_id, document) for document in documents)
            return found

        return self._wait(find())

    def ids(self) -> list[DocId]:
        """Return the ids of all documents, in the order they were added."""

        async def all_ids() -> list[DocId]:
            found: list[DocId] = []
            async with aclosing(self._lines("GET", "/v1/ids")) as lines:
                async for said in lines:
                    if said.get("is_final"):
                        return found
                    with understood(self._url):
                        found += said["ids"]
            raise self._ended("the ids ended before the last")

        return self._wait(all_ids())

    def __len__(self) -> int:
        return self._facts.stats.num_documents

    def __contains__(self, doc_id: object) -> bool:
        return isinstance(doc_id, str) and bool(self._find([doc_id]))

    # Searching

    def search(
        self,
        query: str,
        k: int,
        *,
        where: Filter | None = None,
        score_threshold: float | None = None,
        mmr: MMR | None = None,
    ) -> RetrievalUpdate:
        """Return the ``k`` best documents, in one stage. See :meth:`DocumentStore.search`.

        Raises:
            SearchError, EmptyStoreError, ConfigError: as the store itself raises them.
            SearchTimeoutError: it said nothing for ``timeout_s``. StoreUnreachableError
        """
        asked = self._asked(k, 1, where, score_threshold, mmr, query=check_text(query))
        return self._wait(self._last(asked))

    def search_vector(
        self,
        vector: object,
        k: int,
        *,
        where: Filter | None = None,
        score_threshold: float | None = None,
        mmr: MMR | None = None,
    ) -> RetrievalUpdate:
        """Return the ``k`` documents nearest to a vector ``[dimension]``, by vectors alone. See :meth:`search`."""
        asked = self._asked(k, 1, where, score_threshold, mmr, vector=check_query(vector, None).tolist())
        return self._wait(self._last(asked))

    async def search_staged(
        self,
        query: str,
        k: int,
        *,
        stages: int | Sequence[float] | None = None,
        where: Filter | None = None,
        score_threshold: float | None = None,
        mmr: MMR | None = None,
    ) -> AsyncGenerator[RetrievalUpdate, None]:
        """Yield what the search knows after each stage; the last update is final and equals :meth:`search`'s.

        See :meth:`DocumentStore.search_staged`. Closing the iterator early ends the search in the service.
        """
        asked = self._asked(k, stages, where, score_threshold, mmr, query=check_text(query))
        async with aclosing(self._updates(asked)) as updates:
            async for update in updates:
                yield update

    async def search_vector_staged(
        self,
        vector: object,
        k: int,
        *,
        stages: int | Sequence[float] | None = None,
        where: Filter | None = None,
        score_threshold: float | None = None,
        mmr: MMR | None = None,
    ) -> AsyncGenerator[RetrievalUpdate, None]:
        """Yield what the search knows after each stage. See :meth:`search_staged`."""
        asked = self._asked(k, stages, where, score_threshold, mmr, vector=check_query(vector, None).tolist())
        async with aclosing(self._updates(asked)) as updates:
            async for update in updates:
                yield update

    def check_k(self, k: int) -> None:
        """Raise unless the store holds ``k`` documents. A search with a larger ``k`` returns all documents.

        Raises:
            SearchError, EmptyStoreError, TooFewDocumentsError
        """
        if not len(self):
            raise EmptyStoreError("the store holds no documents yet: add some before searching")
        if check_k(k) > len(self):
            raise TooFewDocumentsError(f"{k} documents were asked for, the store holds {len(self)}: use a smaller k")

    def _asked(
        self,
        k: int,
        stages: int | Sequence[float] | None,
        where: Filter | None,
        score_threshold: float | None,
        mmr: MMR | None,
        **question: object,
    ) -> dict[str, Any]:
        """Return a search as it is sent.

        Raises:
            SearchError, ConfigError: what no store could search for.
        """
        self._check_open()
        wanted = Wanted.of(check_k(k), where, score_threshold, mmr)
        if callable(wanted.where):
            raise ConfigError(
                f"the filter is a function, which cannot be sent to {self._url}: write it as an expression, "
                "{'town': 'Aro', 'year': {'$gte': 2020}}"
            )
        if stages is not None:
            cuts = stage_cuts(stages, 1.0)
            stages = int(stages) if isinstance(stages, int | np.integer) else list(cuts)
        return {
            **question,
            "k": wanted.k,
            "stages": stages,
            "where": None if wanted.where is None else filter_as_mapping(wanted.where),
            "score_threshold": score_threshold,
            "mmr": None if mmr is None else {"fetch_k": mmr.fetch_k, "lambda_mult": float(mmr.lambda_mult)},
        }

    async def _updates(self, asked: Mapping[str, Any]) -> AsyncGenerator[RetrievalUpdate, None]:
        """Yield a search's stages, which arrive in the store's own loop, in the caller's."""
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[RetrievalUpdate | Exception] = asyncio.Queue()

        def tell(news: RetrievalUpdate | Exception) -> None:
            with suppress(RuntimeError):  # the caller's loop is closed: nobody waits
                loop.call_soon_threadsafe(arrived.put_nowait, news)

        async def follow() -> None:
            try:
                async with aclosing(self._stages(asked)) as stages:
                    async for update in stages:
                        tell(update)
            except Exception as error:
                tell(error)
            except asyncio.CancelledError:
                tell(closed_error(self._url))
                raise

        following, is_final = self._run(follow()), False
        try:
            while not is_final:
                news = await arrived.get()
                if isinstance(news, Exception):
                    raise news
                is_final = news.is_final
                yield news
        finally:
            if not is_final:
                following.cancel()

    async def _last(self, asked: Mapping[str, Any]) -> RetrievalUpdate:
        return [update async for update in self._stages(asked)][-1]

    # About the store

    @property
    def identity(self) -> str:
        """What names the store in every process: its address."""
        return self._url

    @property
    def url(self) -> str:
        """Where the service is."""
        return self._url

    @property
    def embedder(self) -> Embedder:
        """What turns texts into vectors as the store does: the service; of a store without one, what refuses."""
        if not self._facts.embeds:
            return PrecomputedEmbedder(self.dimension)
        return _RemoteEmbedder(self, self._embedded)

    def _embedded(self, texts: Sequence[str], of: str) -> Vectors:
        async def embed() -> list[list[float]]:
            rows: list[list[float]] = []
            for start in range(0, len(texts), MAX_IDS):
                said = await self._ask("/v1/embed", {"texts": list(texts[start : start + MAX_IDS]), "of": of})
                with understood(self._url):
                    rows += said["vectors"]
            return rows

        return np.asarray(self._wait(embed()), np.float32).reshape(len(texts), -1)

    @property
    def dimension(self) -> int | None:
        """Dimensions of the vectors; ``None`` until the embedder was first used."""
        return self._facts.stats.dimension

    @property
    def metric(self) -> Metric:
        """How near two vectors are: ``l2`` or ``ip``."""
        return self._facts.stats.metric

    @property
    def squared_length(self) -> float:
        """The inner product of a typical stored vector with itself: 1 for unit vectors, and where words count."""
        return self._facts.squared_length

    @property
    def word_weight(self) -> float:
        """The share of the words in how alike a question and a document are; 0 where vectors alone decide."""
        return self._facts.word_weight

    @property
    def index_kind(self) -> IndexKind:
        """The kind of index that was chosen: ``ivf``, ``hnsw`` or ``flat``."""
        return self._facts.stats.index_kind

    def stats(self) -> StoreStats:
        """Return what the store holds now."""
        self._facts = self._wait(self._ask_facts())
        return self._facts.stats

    # Changing

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        """Refuse: a store is changed where it is, and its service takes that up.

        Raises:
            StoreError: always.
        """
        raise StoreError(f"{self._url} is a service, which is only read: change the store itself, and it takes that up")

    add = put = replace = delete = bind = unbind = _refuse

    # The service

    async def _stages(self, asked: Mapping[str, Any]) -> AsyncGenerator[RetrievalUpdate, None]:
        """Yield the stages of a search; the last is final. Read to the end, it leaves its connection to the next."""
        reader, is_final = StageReader(), False
        async with aclosing(self._lines("POST", _SEARCH, asked)) as lines:
            async for said in lines:
                with understood(self._url):
                    update = reader.read(said)
                is_final = update.is_final
                yield update
        if not is_final:
            raise self._ended("the search ended before its last stage")

    async def _lines(
        self, method: str, path: str, asked: Mapping[str, Any] | None = None
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the lines of an answer after the first, which says what the store holds."""
        response, is_first = await self._answer(method, path, asked), True
        try:
            with self._reading(path):
                async for text in response.aiter_lines():
                    with understood(self._url):
                        said = json.loads(text)
                        if (error := said.get("error")) is not None:
                            raise error_read(error)
                        if is_first:
                            check_protocol(said, self._url)
                            self._facts = StoreFacts.read(said["store"])
                    if not is_first:
                        yield said
                    is_first = False
        finally:
            await response.aclose()

    async def _ask(self, path: str, asked: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return what is answered, as one object."""
        response = await self._answer("GET" if asked is None else "POST", path, asked)
        try:
            with self._reading(path):
                text = await response.aread()
        finally:
            await response.aclose()
        with understood(self._url):
            said: dict[str, Any] = json.loads(text)
            check_protocol(said, self._url)
        return said

    async def _answer(self, method: str, path: str, asked: Mapping[str, Any] | None) -> httpx.Response:
        """Return an answer that says yes, as it begins. A request that got none is sent again: it changes nothing.

        Raises:
            StoreUnreachableError: there is none in time. Exception: the error that was answered.
        """
        import httpx

        began_s, pause_s = time.monotonic(), _FIRST_PAUSE_S
        while True:
            request = self._http.build_request(method, path, json=None if asked is None else dict(asked))
            try:
                response = await self._http.send(request, stream=True)
                if response.status_code == 200:
                    return response
                try:
                    why: Exception = self._error_of(response.status_code, await response.aread())
                finally:
                    await response.aclose()
                patience_s = self._timeout_s if response.status_code == 503 else 0.0
            except httpx.TimeoutException as error:
                raise self._late(path) from error
            except httpx.HTTPError as error:
                why = StoreUnreachableError(
                    f"no service of a store answers at {self._url} ({error or type(error).__name__}): is it running, "
                    "and the address right?"
                )
                why.__cause__ = error
                patience_s = min(_BROKEN_PATIENCE_S, self._timeout_s)
            if time.monotonic() - began_s + pause_s > patience_s:
                raise why
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)

    @contextmanager
    def _reading(self, path: str) -> Iterator[None]:
        """Raise the errors of a connection, while an answer is read, as ours."""
        import httpx

        try:
            yield
        except httpx.TimeoutException as error:
            raise self._late(path) from error
        except httpx.HTTPError as error:
            raise self._ended(f"the answer broke off ({error or type(error).__name__})") from error

    def _error_of(self, status: int, body: bytes) -> Exception:
        try:
            said = json.loads(body)["error"]
            error: Exception = error_read(said)
        except (ValueError, KeyError, TypeError, AttributeError):
            return StoreError(
                f"what answers at {self._url} is no service of a store (status {status}): check the address"
            )
        if isinstance(error, StoreAuthError):
            return StoreAuthError(f"the store's service at {self._url} refused the API key: pass the service's api_key")
        return error

    async def _ask_facts(self) -> StoreFacts:
        said = await self._ask("/v1/store")
        with understood(self._url):
            if said["service"] != SERVICE:
                raise KeyError("service")
            return StoreFacts.read(said["store"])

    async def _follow_facts(self) -> None:
        while True:
            await asyncio.sleep(_FACTS_EVERY_S)
            try:
                self._facts = await self._ask_facts()
            except Exception as error:
                _logger.debug("the store's service does not say what it holds: %s", error)

    def _late(self, path: str) -> StoreError | SearchTimeoutError:
        why = (
            f"the store's service at {self._url} said nothing for {self._timeout_s:g} s: raise timeout_s, or lower its "
            "load"
        )
        return SearchTimeoutError(why) if path == _SEARCH else StoreUnreachableError(why)

    def _ended(self, how: str) -> StoreUnreachableError:
        return StoreUnreachableError(f"the store's service at {self._url} is gone, {how}: ask again")

    def _run(self, work: Coroutine[Any, Any, _Result]) -> Future[_Result]:
        """Begin work in the store's loop."""
        try:
            self._check_open()
            return self._loop.run(work)
        except RuntimeError as error:  # closed meanwhile
            work.close()
            raise closed_error(self._url) from error
        except StoreError:
            work.close()
            raise

    def _wait(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Return what work in the store's loop comes to; an interrupt cancels it."""
        running = self._run(work)
        try:
            return running.result()
        except CancelledError:
            raise closed_error(self._url) from None
        finally:
            running.cancel()

    def _check_open(self) -> None:
        if os.getpid() != self._process:
            raise StoreError(f"{self._url} was connected to before a fork: connect again in this process")
        if self._is_closed:
            raise closed_error(self._url)


class _RemoteEmbedder:
    """The embedder of a store, where the store is."""

    def __init__(self, store: RemoteStore, embed: Callable[[Sequence[str], str], Vectors]) -> None:
        self._store = store
        self._embed = embed

    @property
    def name(self) -> str:
        return self._store._facts.stats.embedder

    @property
    def dimension(self) -> int | None:
        return self._store.dimension

    def embed_documents(self, texts: Sequence[str]) -> Vectors:
        """Return one row for each text: ``[n, dimension]``."""
        return self._embed(texts, "documents")

    def embed_query(self, text: str) -> Vectors:
        """Return the vector of a query: ``[dimension]``."""
        row: Vectors = self._embed([check_text(text)], "query")[0]
        return row
