"""The document store: documents, their vectors and a staged index in one folder; this module changes it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import filelock

from ragcache_core.errors import ConfigError, StoreError, StoreExistsError, StoreNotFoundError
from ragcache_core.log import logger_of
from ragcache_core.retrieval.base import Encoding, IndexKind, IndexOptions, Metric, check_count, extra_module
from ragcache_core.retrieval.embedders.base import Embedder, as_embedder
from ragcache_core.retrieval.embedders.tfidf import TfidfSvdEmbedder
from ragcache_core.retrieval.reader import StoreReader
from ragcache_core.retrieval.storage.framework_documents import AnyDocument, as_documents
from ragcache_core.retrieval.storage.manifest import MANIFEST_NAME, Manifest, lock_folder, make_folder, read_manifest
from ragcache_core.retrieval.storage.snapshot import Snapshot, load_snapshot, match_embedder
from ragcache_core.retrieval.storage.writer import Progress, Writer
from ragcache_core.runtime.handle import Handle
from ragcache_core.types import DocId, Document

_BUILT_IN_WORD_WEIGHT = 0.95
"""The built-in vectors are made of the same words, blurred. Measured on 206 named pages: more of them finds fewer."""

logger = logger_of(__name__)

Warming = bool | Callable[[Document], Any]
"""Whether a new version is prefilled, or a function that returns its prompt."""


class CachesDocuments(Protocol):
    """The engine methods that a store calls."""

    def forget(self, doc_ids: Iterable[DocId]) -> object:
        """Delete the KV of documents."""
        ...

    def warm(self, documents: Iterable[Document], prompt: Callable[[Document], Any] | None = None) -> object:
        """Prefill documents."""
        ...

    def register_in_background(self, documents: Iterable[Document]) -> object:
        """Register documents, so that they are recognised in prompts of any client."""
        ...


class _BoundEngines:
    """Engines that delete the KV of replaced and deleted documents."""

    def __init__(self) -> None:
        self._engines: list[tuple[CachesDocuments, Warming, bool]] = []

    def __bool__(self) -> bool:
        return bool(self._engines)

    def add(self, engine: CachesDocuments, warm: Warming, *, registers: bool) -> None:
        """Bind an engine."""
        self._engines.append((engine, warm, registers))

    def remove(self, engine: CachesDocuments) -> None:
        """Undo :meth:`add`."""
        self._engines = [bound for bound in self._engines if bound[0] is not engine]

    def forget(self, gone: Sequence[DocId], new: Sequence[Document] = ()) -> None:
        """Delete documents that are ``gone`` from the engines; prefill ``new`` versions where that is set."""
        for engine, warm, _ in self._engines if gone else ():
            engine.forget(gone)
            if warm and new:
                engine.warm(new, None if warm is True else warm)

    def register(self, documents: Sequence[Document]) -> None:
        """Register documents with the engines bound for that."""
        for engine, _, registers in self._engines if documents else ():
            if registers:
                engine.register_in_background(documents)


class DocumentStore(Handle, StoreReader):
    """Documents in a folder, searched by meaning in stages, also while documents are added.

    Make one with :meth:`create`, :meth:`open` or :meth:`open_or_create` and close it, or use it as a context manager.
    One process writes, any number read. All methods may be called from several threads and event loops at once. ``add``
    and ``delete`` are atomic and durable: when they return, a crash cannot undo them; when they raise, nothing has
    changed.

    A handle belongs to the process that made it: in a forked child it can only be closed, which leaves the store alone.

    A search keeps the state it began with. Every change copies the index in memory, so add in batches, not one by one.
    """

    def __init__(
        self,
        folder: Path,
        snapshot: Snapshot,
        writer: Writer | None,
        lock: filelock.BaseFileLock | None,
        load: Callable[[], Snapshot] | None = None,
    ):
        """Use :meth:`create` or :meth:`open`."""
        super().__init__(folder, snapshot)
        self._load = load
        self._writer = writer
        self._lock = lock
        self._changing = threading.RLock()
        self._is_changing = False  # by the thread that holds the lock
        self._engines = _BoundEngines()

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
        word_weight: float | None = None,
    ) -> Self:
        """Make an empty store in a folder, which is created.

        ``embedder`` is one of ours, a LangChain ``Embeddings`` or a LlamaIndex ``BaseEmbedding``; by default the
        built-in one, which is fitted on the first documents that are added. What is ``None`` is chosen from the number
        of documents. HNSW looks among ``max(ef_search, k)`` candidates.

        ``word_weight`` is the share of the words in the score of a document: 0 searches by vectors alone (the default
        of any embedder but the built-in one), 1 by words (BM25) alone, a number in between by both.
        Words of a document's id, ``title`` and ``source`` are among its words. Scores then are those of unit vectors.

        Raises:
            ConfigError: a setting that cannot work, or the extra ``retrieval`` is not installed.
            StoreExistsError: there is one already.
            StoreLockedError, StoreFullError, StoreError: the folder cannot be used.
        """
        extra_module("faiss")
        chosen: Embedder = TfidfSvdEmbedder() if embedder is None else as_embedder(embedder)
        if word_weight is None:
            word_weight = _BUILT_IN_WORD_WEIGHT if isinstance(chosen, TfidfSvdEmbedder) else 0.0
        options = IndexOptions(
            index, metric, encoding, nlist, nprobe, pq_m, hnsw_m, ef_construction, ef_search, word_weight
        )
        folder = Path(path).absolute()  # the process may change its working directory
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"{folder} is a file: choose a folder for the store")
        make_folder(folder)
        lock = lock_folder(folder)
        try:
            if (folder / MANIFEST_NAME).exists() or any(folder.glob("documents-*.sqlite")):
                raise StoreExistsError(
                    f"{folder} holds a document store: open it with open_or_create, or choose another folder"
                )
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
        lock and stays at the state it was opened in, until :meth:`refresh`. ``rebuild_index`` rebuilds the index from
        the stored vectors and does not read its file. Hashes tell damage, not malice: open a stranger's store with
        ``rebuild_index``.

        Raises:
            StoreError: there is none, it is damaged, of another version, or open elsewhere (each has a subclass).
            EmbedderMismatchError: it was made with another embedder.
        """
        extra_module("faiss")
        folder = Path(path).absolute()  # the process may change its working directory
        given = None if embedder is None else as_embedder(embedder)

        def load() -> Snapshot:
            return load_snapshot(folder, lambda found: match_embedder(folder, found, given), rebuild_index)

        if read_only:
            snapshot = load()
            _warn_of_wordless(folder, snapshot)
            return cls(folder, snapshot, None, None, load)
        read_manifest(folder)  # for its error, before there is a lock where no store is
        lock = lock_folder(folder)
        try:
            snapshot = load()
            _warn_of_wordless(folder, snapshot)
            writer = Writer(folder)
            return cls(folder, writer.adopt(snapshot), writer, lock)
        except BaseException:
            lock.release()
            raise

    @classmethod
    def open_or_create(cls, path: str | os.PathLike[str], *, embedder: object | None = None, **settings: Any) -> Self:
        """Open the store in a folder, or make one if there is none.

        ``settings`` are those of :meth:`create`. A store that is there has to agree with those that are given.

        Raises:
            ConfigError: the store that is there was made with another setting.
            Exception: whatever :meth:`open` and :meth:`create` raise.
        """
        try:
            store = cls.open(path, embedder=embedder)
        except StoreNotFoundError:
            return cls.create(path, embedder=embedder, **settings)
        there = store.begin_search()[0].manifest.options
        for name, value in settings.items():
            if (found := getattr(there, "kind" if name == "index" else name, None)) != value:
                store.close()
                raise ConfigError(
                    f"{store.path} holds a store with {name} {found!r}, not {value!r}: leave {name} out, or choose "
                    "another folder"
                )
        return store

    def refresh(self) -> bool:
        """Load changes of other processes into a store opened ``read_only``; return whether there were any.

        Searches that run keep the state they began with. Where the folder holds another store now, it is that one. A
        store that is open to be changed is always up to date.

        Raises:
            StoreNotFoundError, StoreCorruptError, StoreVersionError, EmbedderMismatchError, StoreError: what is there
                now cannot be read; the state is still the one before.
        """
        self._check_open()
        if self._load is None:
            return False
        with self._changing:
            there = read_manifest(self._folder)
            if there == replace(self._snapshot.manifest, index=there.index):  # the index may only have been saved
                return False
            self._snapshot = self._load()
            return True

    def close(self) -> None:
        """Finish running searches, save the index and release the lock for other writers. Idempotent.

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
                logger.warning(
                    "RC-STORE-UNSAVED: the index was not saved and will be brought up to date when it is opened: %s",
                    error,
                )
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
        documents: Iterable[AnyDocument],
        *,
        embeddings: object | None = None,
        progress: bool | Progress = False,
        batch_size: int = 256,
    ) -> list[DocId]:
        """Store documents and return their ids. Atomic and durable.

        LangChain documents and LlamaIndex nodes are stored with their ids, texts and metadata.

        ``embeddings: [n, dimension]`` replace the embedder's. ``progress`` shows a bar, or is called with the numbers
        of finished steps and of all; a step is a document that is embedded, or used for fitting.

        Raises:
            DocumentError, or a subclass: an invalid document. EmbedderMismatchError: another dimension.
            StoreFullError, StoreError: saving failed. In all cases nothing of the batch was added.
        """
        return self._write(documents, False, embeddings, progress, batch_size)

    def put(
        self,
        documents: Iterable[AnyDocument],
        *,
        embeddings: object | None = None,
        progress: bool | Progress = False,
        batch_size: int = 256,
    ) -> list[DocId]:
        """Store documents, replacing those with the same ids. See :meth:`add`."""
        return self._write(documents, True, embeddings, progress, batch_size)

    def replace(self, document: AnyDocument, *, embedding: object | None = None) -> None:
        """Store a new version of a stored document. Atomic and durable.

        ``embedding: [dimension]`` replaces the embedder's.

        Raises:
            UnknownDocumentError: it is not stored. DocumentError, or a subclass: it is invalid.
            StoreFullError, StoreError: saving failed. In all cases nothing has changed.
        """
        embeddings = None if embedding is None else [embedding]
        self._write([document], True, embeddings, False, 1, must_be_here=True)

    def bind(self, engine: CachesDocuments, *, warm: Warming = False, register: bool = False) -> None:
        """Delete KV of documents from an engine when they are replaced or deleted here.

        The engine is called after the change is durable. :meth:`delete`, :meth:`put` and :meth:`replace` return after
        its answer. They raise its errors, which undo no change: call ``engine.forget`` again then. A search that began
        before may still cache the old version again.

        Args:
            engine: an ``Engine``; several may be bound.
            warm: whether the engine prefills the new version, with its bound prompt or the one that this function
                returns.
            register: whether stored documents, present and later ones, are registered with the server in the
                background, so that it recognises them in prompts of any client.
        """
        self._check_open()
        self._engines.add(engine, warm, registers=register)
        if register:
            engine.register_in_background(self.get(self.ids()))

    def unbind(self, engine: CachesDocuments) -> None:
        """Undo :meth:`bind`."""
        self._engines.remove(engine)

    def _write(
        self,
        documents: Iterable[AnyDocument],
        replacing: bool,
        embeddings: object | None,
        progress: bool | Progress,
        batch_size: int,
        *,
        must_be_here: bool = False,
    ) -> list[DocId]:
        check_count("batch_size", batch_size, 1)
        batch = as_documents(documents)
        gone: list[DocId] = []
        with self._change() as writer:
            if batch:
                snapshot = self._current()
                if must_be_here:
                    self._find(snapshot, [document.doc_id for document in batch])
                if replacing and self._engines:
                    here = {document.doc_id: document for document in batch if document.doc_id in self}
                    gone = _outdated(self.get(here), here)
                changed = writer.add(
                    snapshot,
                    batch,
                    replacing=replacing,
                    embeddings=embeddings,
                    progress=progress,
                    batch_size=batch_size,
                )
                self._snapshot = changed
        self._engines.forget(gone, [document for document in batch if document.doc_id in set(gone)])
        self._engines.register(batch)
        return [document.doc_id for document in batch]

    def delete(self, doc_ids: Iterable[DocId], *, missing_ok: bool = False) -> None:
        """Delete documents. Atomic and durable. ``missing_ok`` skips ids that are not stored.

        Raises:
            UnknownDocumentError: one of them is not stored; nothing was removed. StoreFullError, StoreError
        """
        wanted = list(dict.fromkeys([doc_ids] if isinstance(doc_ids, str) else doc_ids))
        with self._change() as writer:
            snapshot = self._current()
            found = self._find(snapshot, wanted, missing_ok=missing_ok)
            if found:
                self._snapshot = writer.delete(snapshot, found.values())
        self._engines.forget([doc_id for doc_id in wanted if doc_id in found])

    @contextmanager
    def _change(self) -> Iterator[Writer]:
        """Hold the lock that admits one changing thread."""
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
        """Return the snapshot on disk; it differs if an interrupt came between commit and publication."""
        if read_manifest(self._folder).generation != self._snapshot.manifest.generation:
            embedder = self._snapshot.embedder
            self._snapshot = load_snapshot(self._folder, lambda found: match_embedder(self._folder, found, embedder))
        return self._snapshot


def _outdated(stored: Iterable[Document], new: Mapping[DocId, Document]) -> list[DocId]:
    """Return the ids of the stored documents that differ from their new versions."""

    def content(document: Document) -> tuple[str, dict[str, object]]:
        return document.text, dict(document.metadata)

    return [document.doc_id for document in stored if content(document) != content(new[document.doc_id])]


def _warn_of_wordless(folder: Path, snapshot: Snapshot) -> None:
    if snapshot.manifest.options.word_weight is None and isinstance(snapshot.embedder, TfidfSvdEmbedder):
        logger.warning(
            "RC-STORE-WORDLESS: %s was made by an older RAGCache and is searched by vectors alone, which seldom find a "
            "document by its name: add its documents to a new store",
            folder,
        )
