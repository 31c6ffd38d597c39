"""A chunk: its key, its bytes, and its metadata."""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import xxhash

if TYPE_CHECKING:
    from typing_extensions import Buffer

MAX_KEY_BYTES = 64
_MAX_DOC_ID_BYTES = 4096
_INT64 = 1 << 63
_SEVERAL = "\x1e"
_OWNED = "\x1d"


@dataclass(frozen=True, slots=True)
class ChunkNote:
    """Metadata of a chunk, from which the caller rebuilds its tree.

    Raises:
        ValueError: a value that could not be read back as it is.
    """

    parent: bytes | None = None
    doc_id: str | None = None
    position: int = 0
    frequency: float = 0.0
    cost: float = 0.0
    stored_s: float = 0.0
    """Time of computation, in seconds since 1970."""
    is_private: bool = False
    """Whether only requests with its salt may know that it is here."""

    def __post_init__(self) -> None:
        if self.parent is not None:
            check_key(self.parent)
        if self.doc_id is not None and not _is_short_text(self.doc_id):
            raise ValueError(
                f"doc_id {self.doc_id!r:.80} is not a text of at most {_MAX_DOC_ID_BYTES} bytes in UTF-8: shorten it"
            )
        if not isinstance(self.position, int) or not 0 <= self.position < _INT64:
            raise ValueError(f"position is {self.position!r}: count from 0")
        check_worth(self.frequency, self.cost)
        if not math.isfinite(self.stored_s):
            raise ValueError(f"stored_s is {self.stored_s!r}: give seconds since 1970")


@dataclass(frozen=True, slots=True)
class ChunkWrite:
    """A chunk to write. ``payload`` is a contiguous buffer of the store's ``chunk_bytes``."""

    key: bytes
    payload: Buffer
    note: ChunkNote = field(default_factory=ChunkNote)


class ChunkEntry(NamedTuple):
    """A chunk of the store without its bytes."""

    key: bytes
    parent: bytes | None
    doc_id: str | None
    position: int
    frequency: float
    cost: float
    stored_s: float = 0.0
    is_private: bool = False


@dataclass(frozen=True, slots=True)
class ChunkStoreStats:
    """Statistics of a store since it was opened."""

    num_chunks: int
    num_slots: int
    used_bytes: int
    num_damaged: int
    """Chunks that were dropped because their bytes were not those that had been written."""
    num_missing: int
    """Chunks of the index that the data file turned out to be too short for."""
    num_read_errors: int
    num_resets: int
    """1 if the store was damaged as a whole and started empty."""
    num_over_capacity: int
    """Chunks that were dropped because the store was opened with less capacity than before."""


def text_of_names(doc_id: str | None, other_ids: Collection[str]) -> str | None:
    """Return the metadata text of a chunk's documents, as many as fit."""
    if not other_ids and not (doc_id or "").startswith((_SEVERAL, _OWNED)):
        return doc_id
    names = [doc_id, *sorted(other_ids)]
    while names:
        text = _SEVERAL + json.dumps(names, ensure_ascii=False)
        if len(text.encode()) <= _MAX_DOC_ID_BYTES:
            return text
        names.pop()
    return None


def names_of_text(text: str | None) -> tuple[str | None, frozenset[str]]:
    """Undo :func:`text_of_names`."""
    if text is None or not text.startswith(_SEVERAL):
        return text, frozenset()
    try:
        doc_id, *others = json.loads(text.removeprefix(_SEVERAL))
    except ValueError:  # an id that looks like it, of an older engine
        return text, frozenset()
    return doc_id, frozenset(others)


def text_with_owner(owner: str | None, names: str | None) -> str | None:
    """Return the metadata text of a tenant's chunk; its documents are left out if both do not fit."""
    if owner is None:
        return names
    text = f"{_OWNED}{owner}{_OWNED}{names or ''}"
    return text if _is_short_text(text) else f"{_OWNED}{owner}{_OWNED}"


def owner_of_text(text: str | None) -> tuple[str | None, str | None]:
    """Undo :func:`text_with_owner`."""
    if text is None or not text.startswith(_OWNED) or text.count(_OWNED) < 2:
        return None, text
    _, owner, names = text.split(_OWNED, 2)
    return owner, names or None


def check_key(key: object) -> None:
    """Raise ValueError for an invalid key."""
    if not isinstance(key, bytes) or not 1 <= len(key) <= MAX_KEY_BYTES:
        raise ValueError(f"{key!r:.80} cannot be the key of a chunk: use 1 to {MAX_KEY_BYTES} bytes")


def check_worth(frequency: float, cost: float) -> None:
    """Raise ValueError unless both are finite."""
    if not (math.isfinite(frequency) and math.isfinite(cost)):
        raise ValueError(f"frequency {frequency!r} and cost {cost!r} must be finite numbers")


def contiguous(buffer: Buffer, num_bytes: int, *, writable: bool = False) -> memoryview:
    """Return the bytes of a buffer.

    Raises:
        ValueError: there are not exactly ``num_bytes``, they are not contiguous, or cannot be written to.
    """
    view = memoryview(buffer)
    if not view.c_contiguous:
        raise ValueError("the buffer of a chunk is not contiguous: copy it into one that is")
    if view.nbytes != num_bytes:
        raise ValueError(f"the buffer of a chunk has {view.nbytes} bytes: chunks of this store have {num_bytes}")
    if writable and view.readonly:
        raise ValueError("the buffer to read a chunk into is read-only: pass one that can be written to")
    return view.cast("B")


def checksum(key: bytes, payload: memoryview) -> int:
    """Return the XXH3 of payload and key as a signed 64-bit integer, so that another key's bytes do not match."""
    return xxhash.xxh3_64_intdigest(payload, xxhash.xxh3_64_intdigest(key)) - _INT64


def place_checksum(key: bytes, parent: bytes | None, doc_id: bytes | None, position: int) -> int:
    """Return the XXH3 of a chunk's placement metadata as a signed 64-bit integer.

    A tree that grew with a chunk in two places would not know which of them goes.
    """
    return xxhash.xxh3_64_intdigest(repr((key, parent, doc_id, position)).encode()) - _INT64


def _is_short_text(value: object) -> bool:
    try:
        return isinstance(value, str) and len(value.encode("utf-8")) <= _MAX_DOC_ID_BYTES
    except UnicodeEncodeError:
        return False
