"""Which files are read, in which order, and under which name."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ragcache_core.errors import DocumentError
from ragcache_core.ingest.readers import READERS
from ragcache_core.ingest.source import SourceFile


@dataclass(frozen=True, slots=True)
class FoundFiles:
    """The files that can be read, in sorted order, and how many others were passed over for their suffix."""

    files: tuple[SourceFile, ...]
    num_skipped: int


def find_files(paths: Iterable[Path]) -> FoundFiles:
    """Return every readable file at ``paths``: files as they are, directories with all that is below them.

    Hidden files and directories are left out. Files with a suffix that no reader knows are counted, as are links to
    directories, which are not followed. A file that is named itself must have a known suffix.

    Raises:
        DocumentError: nothing is at a path, or nothing there can be read.
    """
    files: list[SourceFile] = []
    num_skipped = 0
    known = ", ".join(sorted(READERS))
    for path in paths:
        if path.is_dir():
            below = list(_walk(path))
            readable = [file for file in below if file.path.suffix.lower() in READERS]
            if not readable:
                raise DocumentError(
                    f"directory {str(path)!r} holds no document ({len(below)} other files): give a directory with "
                    f"{known} files"
                )
            files += readable
            num_skipped += len(below) - len(readable)
        elif not path.exists():
            raise DocumentError(f"nothing is at {str(path)!r}: give a file, or a directory with {known} files")
        elif path.suffix.lower() not in READERS:
            raise DocumentError(f"file {str(path)!r} has suffix {path.suffix!r}, only {known} are read: convert it")
        else:
            files.append(SourceFile(path, path.name))
    return FoundFiles(tuple(files), num_skipped)


def _walk(root: Path) -> Iterator[SourceFile]:
    def stop(error: OSError) -> None:
        raise DocumentError(f"directory {error.filename!r} cannot be read ({error.strerror}): check its permissions")

    for folder, folders, names in os.walk(root, onerror=stop):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        links = [name for name in folders if Path(folder, name).is_symlink()]
        for name in sorted([*names, *links]):
            if not name.startswith("."):
                path = Path(folder, name)
                yield SourceFile(path, path.relative_to(root).as_posix(), within=root)
