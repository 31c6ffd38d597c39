"""Which files are read, in which order, and under which name."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ragcache_core.errors import DocumentError
from ragcache_core.ingest.documents import stop_at_bad
from ragcache_core.ingest.readers import READERS
from ragcache_core.ingest.records import OnBad
from ragcache_core.ingest.source import SourceFile


@dataclass(frozen=True, slots=True)
class FoundFiles:
    """The readable files in sorted order, the number of files of other kinds, and the unreadable directories."""

    files: tuple[SourceFile, ...]
    num_skipped: int
    unreadable: tuple[Path, ...] = ()


def find_files(paths: Iterable[Path], *, on_bad: OnBad = stop_at_bad) -> FoundFiles:
    """Return every readable file at ``paths``: files as they are, directories with all that is below them.

    Hidden files and directories are left out. Files with a suffix that no reader knows are counted, as are links to
    directories, which are not followed. A file that is named itself must have a known suffix.

    Args:
        paths: files and directories.
        on_bad: called with the error of each directory that cannot be listed; by default it raises the error.

    Raises:
        DocumentError: nothing is at a path, or nothing there can be read.
    """
    files: list[SourceFile] = []
    num_skipped = 0
    unreadable: list[Path] = []

    def leave_out(error: OSError) -> None:
        on_bad(DocumentError(f"directory {error.filename!r} cannot be read ({error.strerror}): check its permissions"))
        unreadable.append(Path(error.filename))

    known = ", ".join(sorted(READERS))
    for path in paths:
        if path.is_dir():
            num_unreadable = len(unreadable)
            below = list(_walk(path, leave_out))
            readable = [file for file in below if file.path.suffix.lower() in READERS]
            if not readable and len(unreadable) == num_unreadable:
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
    return FoundFiles(tuple(files), num_skipped, tuple(unreadable))


def _walk(root: Path, on_error: Callable[[OSError], None]) -> Iterator[SourceFile]:
    for folder, folders, names in os.walk(root, onerror=on_error):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        links = [name for name in folders if Path(folder, name).is_symlink()]
        for name in sorted([*names, *links]):
            if not name.startswith("."):
                path = Path(folder, name)
                yield SourceFile(path, path.relative_to(root).as_posix(), within=root)
