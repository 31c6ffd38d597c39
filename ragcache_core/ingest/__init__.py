"""Read files as documents: text, pages, tables, code and PDF, split at natural boundaries, with stable ids.

::

    find_files -> read_records (a reader per format) -> Splitting.split -> Document -> compare (with a store)
"""

from ragcache_core.ingest.documents import FileReading, FoundFiles, find_files, read_documents, read_files
from ragcache_core.ingest.readers import READERS, read_records
from ragcache_core.ingest.records import Record
from ragcache_core.ingest.source import FileLimits, SourceFile
from ragcache_core.ingest.splitting import Splitting
from ragcache_core.ingest.store_files import (
    Changes,
    Chunking,
    FileOrigin,
    compare,
    read_chunking,
    read_origins,
    write_chunking,
    write_origins,
)

__all__ = [
    "READERS",
    "Changes",
    "Chunking",
    "FileLimits",
    "FileOrigin",
    "FileReading",
    "FoundFiles",
    "Record",
    "SourceFile",
    "Splitting",
    "compare",
    "find_files",
    "read_chunking",
    "read_documents",
    "read_files",
    "read_origins",
    "read_records",
    "write_chunking",
    "write_origins",
]
