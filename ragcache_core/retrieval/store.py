"""The document store: documents, their vectors and a staged index in one folder."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import filelock

from ragcache_core.errors import ConfigError, StoreError, StoreExistsError, UnknownDocumentError
from ragcache_core.retrieval.base import Encoding, IndexKind, IndexOptions, Metric
from ragcache_core.retrieval.embed import Embedder, as_embedder, check_query
from ragcache_core.retrieval.manifest import MANIFEST_NAME, Manifest, lock_folder, make_folder, read_manifest
from ragcache_core.retrieval.opening import load_snapshot, match_embedder
from ragcache_core.retrieval.snapshot import Filter, Snapshot, StoreStats
from ragcache_core.retrieval.tfidf import TfidfSvdEmbedder
from ragcache_core.retrieval.threads import SearchThreads, closed_error
from ragcache_core.retrieval.writer import Progress, Writer
from ragcache_core.types import DocId, Document, RetrievalUpdate

_logger = logging.getLogger(__name__)


class DocumentStore:
    """Documents that can be searched by meaning, in stages, while others are added.

    Make one with :meth:`create` or :meth:`open` and close it, or use it as a context manager. One process writes, any
    number read. All methods may be called from several threads and event loops at once. ``add`` and ``delete`` are
    atomic and durable: when they return, a crash cannot undo them; when they raise, nothing has changed.

    A handle belongs to the process that made it: in a forked child it can only be closed, which leaves the store alone.

    A search keeps the state it began with. Every change copies the index in memory, so add in batches, not one by one.
    """

    def __init__(self, folder: Path, snapshot: Snapshot, writer: Writer | None, lock: filelock.BaseFileLock | None):
        """Use :meth:`create` or :meth:`open`."""
        self._folder = folder
        self._snapshot = snapshot
        self._writer = writer
        self._lock = lock
        self._process = os.getpid()
        self._changing = threading.RLock()
        self._is_changing = False  # by the thread that holds the lock
        self._is_closed = False
        self._threads = SearchThreads(str(folder))
        self._prepare_index()

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        *,
        embedder: object | None = None,
        index: IndexKind = "ivf",
        metric: Metric = "l2",
        encoding: Encoding = "flat",
        nlist: int | None = None,
        nprobe: int | None = None,
        pq_m: int | None = None,
        hnsw_m: int = 32,
        ef_construction: int = 80,
        ef_search: int = 64,
    ) -> Self:
        """Make an empty store in a folder, which is made too.

        ``embedder`` is one of ours, a LangChain ``Embeddings`` or a LlamaIndex ``BaseEmbedding``; by default the
        built-in one, which is fitted on the first documents that are added. What is ``None`` is chosen from the number
        of documents. HNSW looks among ``max(ef_search, k)`` candidates.

        Raises:
            ConfigError: a setting that cannot work. StoreExistsError: there is one already.
            StoreLockedError, StoreFullError, StoreError: the folder cannot be used.
        """
        options = IndexOptions(index, metric, encoding, nlist, nprobe, pq_m, hnsw_m, ef_construction, ef_search)
        chosen: Embedder = TfidfSvdEmbedder() if embedder is None else as_embedder(embedder)
        folder = Path(path).absolute()  # the process may change its working directory
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"{folder} is a file: choose a folder for the store")
        make_folder(folder)
        lock = lock_folder(folder)
        try:
            if (folder / MANIFEST_NAME).exists() or any(folder.glob("documents-*.sqlite")):
                raise StoreExistsError(f"{folder} holds a document store: open it, or choose another folder")
            writer = Writer(folder)
            writer.begin(Manifest(options, chosen.name, chosen.dimension), chosen)
            return cls(folder, load_snapshot(folder, lambda _: chosen), writer, lock)
        except BaseException:
            lock.release()
            raise

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        embedder: object | None = None,
        read_only: bool = False,
        rebuild_index: bool = False,
    ) -> Self:
        """Open a store. Every file is checked against the SHA-256 in its manifest before it is read.

        The built-in embedder comes with the store; any other has to be passed again. A ``read_only`` store needs no
        lock and stays at the state it was opened in. ``rebuild_index`` makes the index anew from the stored vectors and
        does not read its file. Hashes tell damage, not malice: open a stranger's store with ``rebuild_index``.

        Raises:
            StoreNotFoundError, StoreCorruptError, StoreVersionError, StoreLockedError, EmbedderMismatchError
        """
        folder = Path(path).absolute()  # the process may change its working directory
        given = None if embedder is None else as_embedder(embedder)
        if read_only or not (folder / MANIFEST_NAME).exists():  # the second: for its error
            snapshot = load_snapshot(folder, lambda found: match_embedder(folder, found, given), rebuild_index)
            return cls(folder, snapshot, None, None)
        lock = lock_folder(folder)
        try:
            snapshot = load_snapshot(folder, lambda found: match_embedder(folder, found, given), rebuild_index)
            writer = Writer(folder)
            return cls(folder, writer.adopt(snapshot), writer, lock)
        except BaseException:
            lock.release()
            raise

    def close(self) -> None:
        """Finish running searches, save the index and let others write. May be called twice.

        An interrupt lets others write at once; what runs still is waited for by the next call.
        """
        if os.getpid() != self._process:  # the lock and the files are the parent's
            self._is_closed = True
            return
        with self._changing:
            self._check_not_changing()
            self._is_closed = True
            is_owner = self._lock is not None and self._lock.is_locked
            try:
                self._threads.close()
                if self._writer is not None and is_owner and self._snapshot.num_unsaved:
                    self._writer.save_index(self._current())
            except StoreError as error:
                _logger.warning("the index was not saved and will be brought up to date when it is opened: %s", error)
            finally:
                if self._lock is not None:
                    self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Changing

    def add(
        self,
        documents: Iterable[Document],
        *,
        embeddings: object | None = None,
        progress: bool | Progress = False,
        batch_size: int = 256,
    ) -> list[DocId]:
        """Store documents and return their ids. Atomic and durable.

        ``embeddings: [n, dimension]`` are used instead of the embedder's. ``progress`` shows a bar, or is called with
        the numbers of documents embedded and of all.

        Raises:
            DocumentError: and its kinds; nothing of the batch was added. EmbedderMismatchError: another dimension.
            StoreFullError, StoreError: it could not be saved; nothing of the batch was added.
        """
        return self._write(documents, False, embeddings, progress, batch_size)

    def put(
        self,
        documents: Iterable[Document],
        *,
        embeddings: object | None = None,
        progress: bool | Progress = False,
        batch_size: int = 256,
    ) -> list[DocId]:
        """Store documents in the place of those with the same ids, where there are any. See :meth:`add`."""
        return self._write(documents, True, embeddings, progress, batch_size)

    def _write(
        self,
        documents: Iterable[Document],
        replacing: bool,
        embeddings: object | None,
        progress: bool | Progress,
        batch_size: int,
    ) -> list[DocId]:
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise ConfigError(f"batch_size is {batch_size!r}: give a whole number of at least 1")
        batch = list(documents)
        with self._change() as writer:
            if batch:
                changed = writer.add(
                    self._current(),
                    batch,
                    replacing=replacing,
                    embeddings=embeddings,
                    progress=progress,
                    batch_size=batch_size,
                )
                self._publish(changed)
        return [document.doc_id for document in batch]

    def delete(self, doc_ids: Iterable[DocId]) -> None:
        """Remove documents. Atomic and durable.

        Raises:
            UnknownDocumentError: one of them is not stored; nothing was removed. StoreFullError, StoreError
        """
        wanted = list(dict.fromkeys([doc_ids] if isinstance(doc_ids, str) else doc_ids))
        with self._change() as writer:
            if wanted:
                snapshot = self._current()
                self._publish(writer.delete(snapshot, self._find(snapshot, wanted).values()))

    @contextmanager
    def _change(self) -> Iterator[Writer]:
        """Let one thread at a time change the store."""
        self._writable()  # in a forked child the lock may never become free
        with self._changing:
            self._check_not_changing()
            try:
                self._is_changing = True
                yield self._writable()
            finally:
                self._is_changing = False

    def _check_not_changing(self) -> None:
        if self._is_changing:
            raise StoreError(f"{self._folder} is being changed by this very call: change or close it when that is done")

    def _writable(self) -> Writer:
        self._check_open()
        if self._writer is None:
            raise StoreError(f"{self._folder} was opened read-only: open it without read_only to change it")
        return self._writer

    def _current(self) -> Snapshot:
        """Return the snapshot that is on disk: another one, if an interrupt fell between commit and publication."""
        if read_manifest(self._folder).generation != self._snapshot.manifest.generation:
            embedder = self._snapshot.embedder
            self._snapshot = load_snapshot(self._folder, lambda found: match_embedder(self._folder, found, embedder))
        return self._snapshot

    def _publish(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._prepare_index()

    def _prepare_index(self) -> None:
        prepare = getattr(self._snapshot.index, "prepare", None)
        if prepare is not None:
            with suppress(StoreError):  # no thread to be had: the first staged search prepares it
                self._threads.submit(prepare)

    # Looking up

    def get(self, doc_ids: Iterable[DocId]) -> list[Document]:
        """Return documents in the order of ``doc_ids``.

        Raises:
            UnknownDocumentError: one of them is not stored.
        """
        wanted = [doc_ids] if isinstance(doc_ids, str) else list(doc_ids)
        self._check_open()
        snapshot = self._snapshot
        found = self._find(snapshot, wanted)
        documents = snapshot.documents.read(list(found.values()))
        return [documents[found[doc_id]] for doc_id in wanted]

    def _find(self, snapshot: Snapshot, doc_ids: Sequence[DocId]) -> dict[DocId, int]:
        found = snapshot.documents.find(doc_ids)
        for doc_id in doc_ids:
            if doc_id not in found:
                raise UnknownDocumentError(f"document {doc_id!r} is not in {self._folder}: check ids() for what is")
        return found

    def ids(self) -> list[DocId]:
        """Return the ids of all documents, in the order they were added."""
        self._check_open()
        return list(self._snapshot.documents.doc_ids())

    def __len__(self) -> int:
        return len(self._snapshot.documents)

    def __contains__(self, doc_id: object) -> bool:
        self._check_process()
        return isinstance(doc_id, str) and bool(self._snapshot.documents.find([doc_id]))

    # Searching

    def search(self, query: str, k: int, *, where: Filter | None = None) -> RetrievalUpdate:
        """Return the ``k`` nearest documents: the answer of the unmodified index, in one stage.

        An HNSW index is searched with ``efSearch = max(ef_search, k)``, more while deleted documents are in its graph,
        and its answer is that of the unmodified index with this value.

        With ``where``, the nearest that it accepts: more and more neighbours are looked at until ``k`` pass, and at
        last all documents, so that fewer than ``k`` come back only where fewer match.

        Raises:
            SearchError: an empty query or an impossible ``k``. TooFewDocumentsError, EmptyStoreError
        """
        snapshot, _ = self.begin_search()
        snapshot.index_for(k)
        return snapshot.search(snapshot.embed(query), k, where)

    def search_vector(self, vector: object, k: int, *, where: Filter | None = None) -> RetrievalUpdate:
        """Return the ``k`` documents nearest to a vector ``[dimension]``. See :meth:`search`."""
        snapshot, _ = self.begin_search()
        snapshot.index_for(k)
        return snapshot.search(check_query(vector, snapshot.manifest.dimension), k, where)

    async def search_staged(
        self, query: str, k: int, *, stages: int | Sequence[float] | None = None
    ) -> AsyncGenerator[RetrievalUpdate, None]:
        """Yield what the search knows after each stage; the last update is final and equals :meth:`search`'s.

        ``stages`` is a number of them, or increasing shares of the work as ``(0.1, 0.5, 1.0)``; by default 5, 15, 40
        and 100 %, without those that would, by the searches so far, take less than about a millisecond. There are at
        most so many: a stage that adds no work is left out, and a search that is done ends. Closing the iterator early
        stops the search.
        """
        snapshot, threads = self.begin_search()
        snapshot.index_for(k)
        vector = await threads.run(lambda: snapshot.embed(query))
        async with aclosing(threads.updates(snapshot, vector, k, stages)) as updates:
            async for update in updates:
                yield update

    async def search_vector_staged(
        self, vector: object, k: int, *, stages: int | Sequence[float] | None = None
    ) -> AsyncGenerator[RetrievalUpdate, None]:
        """Yield what the search knows after each stage. See :meth:`search_staged`."""
        snapshot, threads = self.begin_search()
        snapshot.index_for(k)
        checked = check_query(vector, snapshot.manifest.dimension)
        async with aclosing(threads.updates(snapshot, checked, k, stages)) as updates:
            async for update in updates:
                yield update

    def begin_search(self) -> tuple[Snapshot, SearchThreads]:
        """Return the state that a search beginning now keeps until it ends, and the threads that run it.

        Raises:
            StoreError: the store was closed, or opened before a fork.
        """
        self._check_open()
        return self._snapshot, self._threads

    # About the store

    @property
    def path(self) -> Path:
        """The folder, as an absolute path."""
        return self._folder

    @property
    def embedder(self) -> Embedder:
        """The embedder; of a trainable one, the store's own fitted copy."""
        return self._snapshot.embedder

    @property
    def dimension(self) -> int | None:
        """Dimensions of the vectors; ``None`` until the embedder was first used."""
        return self._snapshot.manifest.dimension

    @property
    def metric(self) -> Metric:
        """How near two vectors are: ``l2`` or ``ip``."""
        return self._snapshot.manifest.options.metric

    @property
    def index_kind(self) -> IndexKind:
        """The kind of index that was chosen: ``ivf``, ``hnsw`` or ``flat``."""
        return self._snapshot.manifest.options.kind

    @property
    def faiss_index(self) -> Any:
        """The unmodified Faiss index of this moment, or ``None``. Its ids are internal. Do not change it.

        To compare with :meth:`search`, search an HNSW index with ``efSearch = max(ef_search, k)``.
        """
        index = self._snapshot.index
        return None if index is None else index.native

    @property
    def is_read_only(self) -> bool:
        """Whether it was opened to search only."""
        return self._writer is None

    def stats(self) -> StoreStats:
        """Return what the store holds now."""
        return self._snapshot.stats()

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise StoreError(f"{self._folder} was opened before a fork: open it again in this process")

    def _check_open(self) -> None:
        self._check_process()
        if self._is_closed:
            raise closed_error(str(self._folder))
