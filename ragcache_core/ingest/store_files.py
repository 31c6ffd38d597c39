"""Source records in a store's folder: the file of each document, and the splitting.

``origins.json`` and ``chunking.json`` are in the store's folder. A document without an origin came from elsewhere, and
indexing a directory again does not delete it. :func:`compare` finds what a new reading changes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from ragcache_core.errors import ConfigError, StoreCorruptError
from ragcache_core.ingest.source import SourceFile
from ragcache_core.private_files import open_private
from ragcache_core.types import DocId, Document

_ORIGINS_NAME, _CHUNKING_NAME = "origins.json", "chunking.json"
_FORMAT = 1
_LEAST_TOKENS = 32  # one character may be a dozen tokens, and none is cut in two
_DAMAGED = (ValueError, KeyError, TypeError, AttributeError, RecursionError)


@dataclass(frozen=True, slots=True)
class FileOrigin:
    """A file: the absolute path of the indexed directory, and the name below it."""

    folder: str
    name: str

    @classmethod
    def of(cls, file: SourceFile) -> FileOrigin:
        """Return the origin of a file."""
        folder = file.path.absolute().parents[file.name.count("/")]
        return cls(os.path.realpath(folder), file.name)

    def is_gone(self) -> bool:
        """Return whether the file is deleted; ``False`` if its directory cannot be read."""
        try:
            Path(self.folder, self.name).stat()
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:
            return False
        return False

    def is_below(self, folder: Path) -> bool:
        """Return whether the file is in ``folder`` or in a directory below it."""
        return Path(self.folder, self.name).is_relative_to(os.path.realpath(folder))


def read_origins(store: Path) -> dict[DocId, FileOrigin]:
    """Return the origins of the documents in the store at ``store``; empty if none came from a file.

    Raises:
        StoreCorruptError: the file that says so is damaged.
    """
    path = store / _ORIGINS_NAME
    try:
        content = json.loads(path.read_bytes())
        if content["format"] != _FORMAT:
            raise ValueError(f"format {content['format']!r}")
        return {
            str(doc_id): FileOrigin(folder, name)
            for folder, files in content["folders"].items()
            for name, doc_ids in files.items()
            for doc_id in doc_ids
        }
    except FileNotFoundError:
        return {}
    except _DAMAGED as error:
        raise StoreCorruptError(
            f"{path}, which says what files the documents came from, cannot be read ({error}): delete it, and index "
            "the directories again"
        ) from error


def write_origins(store: Path, origins: Mapping[DocId, FileOrigin]) -> None:
    """Save origins. The caller holds the store's lock, and has changed the store.

    After a crash between both, the origins of the last documents are missing, and no others are wrong.
    """
    folders: dict[str, dict[str, list[DocId]]] = {}
    for doc_id, origin in origins.items():
        folders.setdefault(origin.folder, {}).setdefault(origin.name, []).append(doc_id)
    _replace_json(store / _ORIGINS_NAME, {"format": _FORMAT, "folders": folders})


@dataclass(frozen=True, slots=True)
class Chunking:
    """Lengths of chunks, in characters or in tokens of a tokenizer.

    ``tokenizer`` is a folder or a name of the hub, and ``tokenizer_sha256`` what it was when the texts were split.

    Raises:
        ConfigError: fewer tokens than a single character may have.
    """

    max_length: int = 1600
    min_length: int | None = None
    overlap: int = 0
    tokenizer: str | None = None
    tokenizer_sha256: str | None = None

    def __post_init__(self) -> None:
        if self.tokenizer is not None and self.max_length < _LEAST_TOKENS:
            raise ConfigError(
                f"chunks of {self.max_length} tokens cannot be cut, a character may have more: give {_LEAST_TOKENS} or "
                "more"
            )

    @property
    def unit(self) -> str:
        """Unit of the lengths."""
        return "characters" if self.tokenizer is None else "tokens"


def read_chunking(store: Path) -> Chunking | None:
    """Return the recorded splitting of the store at ``store``; ``None`` if there is none.

    Raises:
        StoreCorruptError: the file that says so is damaged.
    """
    path = store / _CHUNKING_NAME
    try:
        content = json.loads(path.read_bytes())
        if content.pop("format") != _FORMAT:
            raise ValueError("another format")
        return Chunking(**content)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except _DAMAGED as error:
        raise StoreCorruptError(
            f"{path}, which says how the documents were split, cannot be read ({error}): delete it, and give the "
            "lengths again that they were split with"
        ) from error


def write_chunking(store: Path, chunking: Chunking) -> None:
    """Save the splitting. The caller holds the store's lock."""
    _replace_json(store / _CHUNKING_NAME, {"format": _FORMAT, **asdict(chunking)})


class StoredDocuments(Protocol):
    """The used methods of a store."""

    def ids(self) -> list[DocId]:
        """Return the ids of all documents."""
        ...

    def get(self, doc_ids: Sequence[DocId]) -> list[Document]:
        """Return documents by id, in the order of ``doc_ids``."""
        ...


@dataclass(frozen=True, slots=True)
class Changes:
    """The read documents compared with those in a store.

    ``left_over`` are stored documents that the same files do not hold any more: chunks of a text that is cut
    differently now, a row that was taken out of a table.
    """

    new: tuple[Document, ...]
    changed: tuple[Document, ...]
    left_over: tuple[DocId, ...]
    num_unchanged: int

    @property
    def replaced(self) -> tuple[DocId, ...]:
        """Ids in the store that an update replaces."""
        return (*(document.doc_id for document in self.changed), *self.left_over)


def compare(documents: Iterable[Document], stored: StoredDocuments, former: Collection[DocId] = ()) -> Changes:
    """Return the changes of ``documents`` to a store; ``former`` came from the same files before.

    Stored documents of other files are none of their business.
    """
    documents = tuple(documents)
    read_ids = {document.doc_id for document in documents}
    stored_ids = set(stored.ids())
    before = {d.doc_id: d for d in stored.get([d.doc_id for d in documents if d.doc_id in stored_ids])}
    new = tuple(document for document in documents if document.doc_id not in stored_ids)
    changed = tuple(d for d in documents if d.doc_id in before and not _same(d, before[d.doc_id]))
    left_over = tuple(sorted((stored_ids & set(former)) - read_ids))
    return Changes(new, changed, left_over, len(documents) - len(new) - len(changed))


def _same(one: Document, other: Document) -> bool:
    return one.text == other.text and dict(one.metadata) == dict(other.metadata)


def _replace_json(path: Path, content: object) -> None:
    """Write a JSON file atomically."""
    temporary = path.with_name(f"{path.name}.new")
    with open(temporary, "w", encoding="ascii", opener=open_private) as file:
        json.dump(content, file)
    temporary.replace(path)
