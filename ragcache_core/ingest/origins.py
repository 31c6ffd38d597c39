"""Which file each document of a store came from: ``origins.json`` in the store's folder, beside what the store knows.

A document that is not named there came from somewhere else, and nothing here takes it away.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ragcache_core.errors import StoreCorruptError
from ragcache_core.ingest.source import SourceFile
from ragcache_core.private_files import open_private
from ragcache_core.types import DocId

_FILE_NAME = "origins.json"
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Origin:
    """A file: the absolute path of the directory that was read, and its name below it."""

    folder: str
    name: str

    @classmethod
    def of(cls, file: SourceFile) -> Origin:
        """Return where a file is."""
        folder = file.path.absolute().parents[file.name.count("/")]
        return cls(os.path.realpath(folder), file.name)

    def is_gone(self) -> bool:
        """Return whether the file is deleted; ``False`` where its directory cannot be searched."""
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


def read_origins(store: Path) -> dict[DocId, Origin]:
    """Return where the documents of the store at ``store`` came from; nothing, where none came from a file.

    Raises:
        StoreCorruptError: the file that says so is damaged.
    """
    path = store / _FILE_NAME
    try:
        content = json.loads(path.read_bytes())
        if content["format"] != _FORMAT:
            raise ValueError(f"format {content['format']!r}")
        return {
            str(doc_id): Origin(folder, name)
            for folder, files in content["folders"].items()
            for name, doc_ids in files.items()
            for doc_id in doc_ids
        }
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise StoreCorruptError(
            f"{path}, which says what files the documents came from, cannot be read ({error}): delete it, and index "
            "the directories again"
        ) from error


def write_origins(store: Path, origins: Mapping[DocId, Origin]) -> None:
    """Save where documents came from; what was saved before stays until that is whole.

    For whom the store is locked, after it was changed: without its last entries a document is only not recognised.
    """
    folders: dict[str, dict[str, list[DocId]]] = {}
    for doc_id, origin in origins.items():
        folders.setdefault(origin.folder, {}).setdefault(origin.name, []).append(doc_id)
    temporary = store / f"{_FILE_NAME}.new"
    with open(temporary, "w", encoding="ascii", opener=open_private) as file:
        json.dump({"format": _FORMAT, "folders": folders}, file)
    temporary.replace(store / _FILE_NAME)
