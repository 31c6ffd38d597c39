"""Statistics of sources: how early their stages are final, and what recent questions retrieved."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from math import inf
from pathlib import Path

import platformdirs

from ragcache_core.client.pipeline.stages import close_stages
from ragcache_core.log import logger_of
from ragcache_core.private_files import make_private_folder, replacing
from ragcache_core.retrieval.threads import in_thread
from ragcache_core.speculation import StageRecord, StageStabilityStats
from ragcache_core.types import DocId, Document, RetrievalUpdate

CACHED_RESULT_STAGE = -1
"""The stage before a search's own."""

_MOST_QUESTIONS = 1024
_LEAST_SEARCH_S = 0.02
"""Searches that took less time the last time get no earlier result first."""
_FORMAT = 2
_MOST_KEPT = 256
"""How many sources and settings are remembered, in the process and in files: those used last."""
_SAVED_EVERY = 8
_LEAST_CHANGE = 0.1
logger = logger_of(__name__)


class RecentQuestions:
    """The document ids that the last thousand questions retrieved, without texts. Thread-safe.

    The documents are read again from their store, so that one that was changed is shown as it is now, and one that was
    deleted is no candidate. They are a guess, as those of any stage: what the search finds is final.
    """

    def __init__(self) -> None:
        self._found: OrderedDict[Hashable, tuple[DocId, ...]] = OrderedDict()
        self._search_s = 0.0  # the last one's

    async def stages(
        self,
        updates: AsyncGenerator[RetrievalUpdate, None],
        question: Hashable,
        read: Callable[[Sequence[DocId]], Sequence[Document]],
    ) -> AsyncGenerator[RetrievalUpdate, None]:
        """Yield ``updates``; first the earlier result of ``question``, if it is read before the first of them.

        ``question`` is all that decides what is found; ``read`` returns documents by their ids, in a thread.
        """
        began_s = time.perf_counter()
        ids = self._found.get(question, ()) if self._search_s >= _LEAST_SEARCH_S else ()
        first = asyncio.create_task(_next(updates)) if ids else None
        try:
            if first is not None:
                if (documents := await _read_before(first, partial(read, ids))) is not None:
                    scores = (math.nan,) * len(documents)
                    yield RetrievalUpdate(tuple(documents), scores, CACHED_RESULT_STAGE, is_final=False)
                await asyncio.wait((first,))
            while (update := await (_next(updates) if first is None else first)) is not None:
                first = None
                if update.is_final:
                    self._remember(question, update, began_s)
                yield update
        finally:
            if first is not None:
                first.cancel()
                await asyncio.gather(first, return_exceptions=True)
            await close_stages(updates)

    def _remember(self, question: Hashable, update: RetrievalUpdate, began_s: float) -> None:
        self._search_s = time.perf_counter() - began_s
        self._found[question] = tuple(document.doc_id for document in update.documents)
        self._found.move_to_end(question)
        if len(self._found) > _MOST_QUESTIONS:
            self._found.popitem(last=False)


async def _next(updates: AsyncGenerator[RetrievalUpdate, None]) -> RetrievalUpdate | None:
    return await anext(updates, None)


async def _read_before(
    first: asyncio.Task[RetrievalUpdate | None], read: Callable[[], Sequence[Document]]
) -> Sequence[Document] | None:
    """Return the read result; ``None`` if it cannot be read, or arrives after the ``first`` stage."""
    reading = asyncio.ensure_future(in_thread(read))
    try:
        await asyncio.wait((first, reading), return_when=asyncio.FIRST_COMPLETED)
        return None if first.done() else reading.result()
    except Exception as error:  # deleted, or the store was closed, which the search says
        logger.debug("what a question found last is no candidate: %s", error)
        return None
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


@dataclass(frozen=True, slots=True)
class SourceHistory:
    """Statistics of a source's earlier searches: how early its stages were final, and which ids questions retrieved."""

    history: StageStabilityStats = field(default_factory=StageStabilityStats)
    recent: RecentQuestions = field(default_factory=RecentQuestions)


class Histories:
    """Keeps a :class:`SourceHistory` per source and settings, shared by retrievers. Thread-safe.

    A source is known by its ``identity``, a string that is the same in every process: of a store its path. Files hold
    shares, seconds and numbers of searches under a digest of the names, nothing of questions. A file that is damaged,
    or of another version, is ignored. A folder that cannot be written to is not used.

    Args:
        folder: where the files are, by default in the user's cache folder.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self._at = lru_cache(_MOST_KEPT)(lambda path: SourceHistory(PersistentHistory(path)))

    def of(self, source: object, settings: Sequence[object], *, default: SourceHistory) -> SourceHistory:
        """Return the history of a source with ``settings``; ``default`` if the source has no name."""
        identity = getattr(source, "identity", None)
        if not isinstance(identity, str) or not identity:
            return default
        named = json.dumps([identity, *map(repr, settings)])
        key = hashlib.sha256(named.encode("utf-8", "surrogatepass")).hexdigest()[:32]
        folder = self.folder or Path(platformdirs.user_cache_dir("ragcache")) / "stages"
        return self._at(folder / f"{key}.json")

    def forget(self) -> None:
        """Clear the histories in memory; the next use reads them from their files."""
        self._at.cache_clear()


class PersistentHistory(StageStabilityStats):
    """A history in a file, which is read at first use and written after every eight searches."""

    def __init__(self, path: Path) -> None:
        """Load the history from ``path``, if it has one."""
        super().__init__(_read(path))
        self._path = path
        self._saved = self.learnt
        self._num_unsaved = 0
        self._saving = threading.Lock()  # acquired without waiting

    def record(self, stage: int, candidates: Sequence[object], final: Sequence[object], left_s: float) -> None:
        """Record a search; see :meth:`StageStabilityStats.record`."""
        was_known = self.is_known(stage)
        super().record(stage, candidates, final, left_s)
        self._num_unsaved += 1
        if (self.is_known(stage) != was_known or self._num_unsaved >= _SAVED_EVERY) and self._saving.acquire(False):
            try:
                self._save()
            finally:
                self._saving.release()

    def _save(self) -> None:
        self._num_unsaved = 0
        known = {stage: counts for stage, counts in self.learnt.items() if self.is_known(stage)}
        if not any(_differ(self._saved.get(stage), recent) for stage, recent in known.items()):
            return
        try:
            make_private_folder(self._path.parent)
            if not self._path.exists():
                _make_place(self._path.parent)
            with replacing(self._path, is_waited_for=False) as file:
                file.write(json.dumps({"format": _FORMAT, "stages": known}).encode())
        except OSError as error:
            logger.debug("what was learnt of a search's stages is not kept: %s", error)
        self._saved = known


def _differ(saved: StageRecord | None, now: StageRecord) -> bool:
    return saved is None or abs(now.share - saved.share) >= _LEAST_CHANGE or saved.has_lead_time != now.has_lead_time


def _read(path: Path) -> dict[int, StageRecord]:
    try:
        match json.loads(path.read_bytes()):
            case {"format": int(version), "stages": dict(stages)} if version == _FORMAT:
                return {int(stage): _checked(*counts) for stage, counts in stages.items()}
    except (OSError, ValueError, TypeError) as error:
        logger.debug("nothing is known of a search's stages: %s", error)
    return {}


def _checked(share: float, left_s: float, count: int) -> StageRecord:
    if not (isinstance(count, int) and 0 <= share <= 1 and 0 <= left_s < inf and count > 0):
        raise ValueError(f"a stage is right by {share!r}, {left_s!r} s before the end, after {count!r} searches")
    return StageRecord(float(share), float(left_s), count)


def _make_place(folder: Path) -> None:
    """Delete the oldest files if there are too many for one more."""
    written = []
    for path in folder.glob("*.json"):
        with suppress(OSError):  # another process was faster
            written.append((path.stat().st_mtime, path))
    for _, path in sorted(written)[: max(0, len(written) - _MOST_KEPT + 1)]:
        path.unlink(missing_ok=True)


HISTORIES = Histories()
"""Those of this process."""
