"""The document store: documents, their vectors and a staged index in one folder."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import faiss
import filelock

from ragcache_core.errors import (
    ConfigError,
    StoreError,
    StoreExistsError,
    StoreLockedError,
    UnknownDocumentError,
)
from ragcache_core.retrieval.base import Cancellation, Encoding, IndexKind, IndexOptions, Metric, Stage, stage_cuts
from ragcache_core.retrieval.embed import Embedder, as_embedder, check_query
from ragcache_core.retrieval.manifest import (
    LOCK_NAME,
    MANIFEST_NAME,
    Manifest,
    read_manifest,
    saving,
    write_manifest,
)
from ragcache_core.retrieval.snapshot import Filter, Snapshot
from ragcache_core.retrieval.tfidf import TfidfSvdEmbedder
from ragcache_core.retrieval.writer import Progress, Writer, load_snapshot, match_embedder
from ragcache_core.types import DocId, Document, RetrievalUpdate

_logger = logging.getLogger(__name__)
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class StoreStats:
    """What a store holds. ``index_layout`` is ``flat`` while there are too few documents to train ``ivf``."""

    num_documents: int
    dimension: int | None
    embedder: str
    index_kind: IndexKind
    index_layout: str | None
    metric: Metric
    generation: int
    num_segments: int
    num_bytes: int


class DocumentStore:
    """Documents that can be searched by meaning, in stages, while others are added.

    Make one with :meth:`create` or :meth:`open` and close it, or use it as a context manager. One process writes, any
    number read. All methods may be called from several threads and event loops at once. ``add`` and ``delete`` are
    atomic and durable: when they return, a crash cannot undo them; when they raise, nothing has changed.

    A search keeps the state it began with. Every change copies the index in memory, so add in batches, not one by one.
    """

    def __init__(self, folder: Path, snapshot: Snapshot, writer: Writer | None, lock: filelock.BaseFileLock | None):
        """Use :meth:`create` or :meth:`open`."""
        self._folder = folder
        self._snapshot = snapshot
        self._writer = writer
        self._lock = lock
        self._changing = threading.Lock()
        self._is_closed = False
        self._executor = ThreadPoolExecutor(
            max_workers=min(16, (os.cpu_count() or 1) + 4),
            thread_name_prefix="ragcache-retrieval",
            initializer=_use_one_thread,
        )
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
        of documents.

        Raises:
            ConfigError: a setting that cannot work. StoreExistsError: there is one already.
            StoreLockedError, StoreFullError, StoreError: the folder cannot be used.
        """
        options = IndexOptions(index, metric, encoding, nlist, nprobe, pq_m, hnsw_m, ef_construction, ef_search)
        chosen: Embedder = TfidfSvdEmbedder() if embedder is None else as_embedder(embedder)
        folder = Path(path)
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"{folder} is a file: choose a folder for the store")
        with saving(folder):
            folder.mkdir(parents=True, exist_ok=True)
        lock = _lock(folder)
        try:
            if (folder / MANIFEST_NAME).exists() or any(folder.glob("documents-*.sqlite")):
                raise StoreExistsError(f"{folder} holds a document store: open it, or choose another folder")
            manifest = Manifest(options, chosen.name, chosen.dimension)
            write_manifest(folder, manifest)
            snapshot = load_snapshot(folder, lambda _: chosen)
            return cls(folder, snapshot, Writer(folder), lock)
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
        lock and stays at the state it was opened in. ``rebuild_index`` makes the index anew from the stored vectors.

        Raises:
            StoreNotFoundError, StoreCorruptError, StoreVersionError, StoreLockedError, EmbedderMismatchError
        """
        folder = Path(path)
        given = None if embedder is None else as_embedder(embedder)
        if read_only or not (folder / MANIFEST_NAME).exists():  # the second: for its error
            snapshot = load_snapshot(folder, lambda found: match_embedder(folder, found, given), rebuild_index)
            return cls(folder, snapshot, None, None)
        lock = _lock(folder)
        try:
            snapshot = load_snapshot(folder, lambda found: match_embedder(folder, found, given), rebuild_index)
            writer = Writer(folder)
            return cls(folder, writer.adopt(snapshot), writer, lock)
        except BaseException:
            lock.release()
            raise

    def close(self) -> None:
        """Finish running searches, save the index and let others write. May be called twice."""
        with self._changing:
            if self._is_closed:
                return
            self._is_closed = True
            self._executor.shutdown(wait=True)
            try:
                if self._writer is not None:
                    self._writer.save_index(self._snapshot)
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
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise ConfigError(f"batch_size is {batch_size!r}: give a whole number of at least 1")
        batch = list(documents)
        with self._changing:
            writer = self._writable()
            if batch:
                self._publish(writer.add(self._snapshot, batch, embeddings, progress, batch_size))
        return [document.doc_id for document in batch]

    def delete(self, doc_ids: Iterable[DocId]) -> None:
        """Remove documents. Atomic and durable.

        Raises:
            UnknownDocumentError: one of them is not stored; nothing was removed. StoreFullError, StoreError
        """
        wanted = list(dict.fromkeys([doc_ids] if isinstance(doc_ids, str) else doc_ids))
        with self._changing:
            writer = self._writable()
            if wanted:
                self._publish(writer.delete(self._snapshot, list(self._find(wanted).values())))

    def _writable(self) -> Writer:
        self._check_open()
        if self._writer is None:
            raise StoreError(f"{self._folder} was opened read-only: open it without read_only to change it")
        if read_manifest(self._folder).generation != self._snapshot.manifest.generation:
            # An interrupt fell between the commit and its publication.
            embedder = self._snapshot.embedder
            self._publish(load_snapshot(self._folder, lambda found: match_embedder(self._folder, found, embedder)))
        return self._writer

    def _publish(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._prepare_index()

    def _prepare_index(self) -> None:
        prepare = getattr(self._snapshot.index, "prepare", None)
        if prepare is not None:
            self._executor.submit(prepare)

    # Looking up

    def get(self, doc_ids: Iterable[DocId]) -> list[Document]:
        """Return documents in the order of ``doc_ids``.

        Raises:
            UnknownDocumentError: one of them is not stored.
        """
        wanted = [doc_ids] if isinstance(doc_ids, str) else list(doc_ids)
        self._check_open()
        found = self._find(wanted)
        documents = self._snapshot.documents.read(list(found.values()))
        return [documents[found[doc_id]] for doc_id in wanted]

    def _find(self, doc_ids: Sequence[DocId]) -> dict[DocId, int]:
        found = self._snapshot.documents.find(doc_ids)
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
        return isinstance(doc_id, str) and bool(self._snapshot.documents.find([doc_id]))

    # Searching

    def search(self, query: str, k: int, *, where: Filter | None = None) -> RetrievalUpdate:
        """Return the ``k`` nearest documents: the answer of the unmodified index, in one stage.

        With ``where``, the nearest that it accepts: more and more neighbours are looked at until ``k`` pass, and at
        last all documents, so that fewer than ``k`` come back only where fewer match.

        Raises:
            SearchError: an empty query or an impossible ``k``. TooFewDocumentsError, EmptyStoreError
        """
        self._check_open()
        snapshot = self._snapshot
        snapshot.index_for(k)
        return snapshot.search(snapshot.embed(query), k, where)

    def search_vector(self, vector: object, k: int, *, where: Filter | None = None) -> RetrievalUpdate:
        """Return the ``k`` documents nearest to a vector ``[dimension]``. See :meth:`search`."""
        self._check_open()
        snapshot = self._snapshot
        snapshot.index_for(k)
        return snapshot.search(check_query(vector, snapshot.manifest.dimension), k, where)

    async def search_staged(
        self, query: str, k: int, *, stages: int | Sequence[float] | None = None
    ) -> AsyncGenerator[RetrievalUpdate, None]:
        """Yield what the search knows after each stage; the last update is final and equals :meth:`search`'s.

        ``stages`` is a number of them, or increasing shares of the work as ``(0.1, 0.5, 1.0)``; by default 5, 15, 40
        and 100 %, without stages shorter than about a millisecond. There are at most so many: a stage that adds no
        work is left out, and a search that is done ends. Closing the iterator early stops the search.
        """
        self._check_open()
        snapshot = self._snapshot
        snapshot.index_for(k)
        vector = await asyncio.wrap_future(self._submit(lambda: snapshot.embed(query)))
        async with aclosing(self._stages(snapshot, vector, k, stages)) as updates:
            async for update in updates:
                yield update

    async def search_vector_staged(
        self, vector: object, k: int, *, stages: int | Sequence[float] | None = None
    ) -> AsyncGenerator[RetrievalUpdate, None]:
        """Yield what the search knows after each stage. See :meth:`search_staged`."""
        self._check_open()
        snapshot = self._snapshot
        snapshot.index_for(k)
        checked = check_query(vector, snapshot.manifest.dimension)
        async with aclosing(self._stages(snapshot, checked, k, stages)) as updates:
            async for update in updates:
                yield update

    async def _stages(
        self, snapshot: Snapshot, vector: Any, k: int, stages: Any
    ) -> AsyncGenerator[RetrievalUpdate, None]:
        index = snapshot.index_for(k)
        cancel = Cancellation()
        steps = index.stages(vector, int(k), stage_cuts(stages, index.work(k)), cancel)
        seen: dict[int, Document] = {}
        number = 0

        def advance() -> RetrievalUpdate | None:
            stage: Stage | None = next(steps, None)
            return None if stage is None else snapshot.update(stage, number, seen)

        try:
            while (update := await self._cancellable(advance, cancel)) is not None:
                yield update
                if update.is_final:
                    return
                number += 1
        finally:
            cancel.cancel()

    async def _cancellable(self, work: Callable[[], _Result], cancel: Cancellation) -> _Result:
        """Run ``work`` in the executor; when cancelled, stop it and wait until its thread is free."""
        future = self._submit(work)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            cancel.cancel()
            if not future.done():
                await asyncio.wait([asyncio.wrap_future(future)])
            raise

    def _submit(self, work: Callable[[], _Result]) -> Future[_Result]:
        try:
            return self._executor.submit(work)
        except RuntimeError as error:
            raise self._closed_error() from error

    # About the store

    @property
    def path(self) -> Path:
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
        return self._snapshot.manifest.options.metric

    @property
    def index_kind(self) -> IndexKind:
        return self._snapshot.manifest.options.kind

    @property
    def faiss_index(self) -> Any:
        """The unmodified Faiss index of this moment, or ``None``. Its ids are internal. Do not change it."""
        index = self._snapshot.index
        return None if index is None else index.native

    @property
    def is_read_only(self) -> bool:
        return self._writer is None

    def stats(self) -> StoreStats:
        """Return what the store holds now."""
        snapshot = self._snapshot
        manifest = snapshot.manifest
        return StoreStats(
            num_documents=len(snapshot.documents),
            dimension=manifest.dimension,
            embedder=manifest.embedder_name,
            index_kind=manifest.options.kind,
            index_layout=None if snapshot.index is None else snapshot.index.layout,
            metric=manifest.options.metric,
            generation=manifest.generation,
            num_segments=len(manifest.segments),
            num_bytes=sum(entry.num_bytes for entry in manifest.files()),
        )

    def _check_open(self) -> None:
        if self._is_closed:
            raise self._closed_error()

    def _closed_error(self) -> StoreError:
        return StoreError(f"{self._folder} was closed: open it again")


def _lock(folder: Path) -> filelock.BaseFileLock:
    lock = filelock.FileLock(folder / LOCK_NAME, timeout=0, thread_local=False)
    try:
        lock.acquire()
    except filelock.Timeout:
        raise StoreLockedError(
            f"{folder} is being written by another store handle: close that one, or open this one with read_only=True"
        ) from None
    except OSError as error:
        raise StoreError(f"{folder} cannot be locked ({error.strerror}): open it with read_only=True") from error
    return lock


def _use_one_thread() -> None:
    faiss.omp_set_num_threads(1)  # per thread: a team of threads for each stage costs more than the stage
