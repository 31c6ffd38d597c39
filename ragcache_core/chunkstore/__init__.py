"""Chunks of KV on disk: fixed size, by key, checked at every read, and intact after ``kill -9``.

::

    directory/
      directory.lock      held for the moment in which an engine opens or deletes a namespace
      2f6c.../            a namespace: everything that was computed by the same model, in the same layout
        ragcache-namespace  the marker: only a folder with it is deleted, and only the files listed here
        identity.json     what those are, for people and for messages
        writer.lock       held by the one engine that uses it
        chunks.data       slots, each aligned to a page
        index.sqlite      slot -> key, checksum, and what the caller noted about the chunk

A chunk that is lost, truncated or damaged is a miss, counted and logged once: never wrong bytes, never an error.
"""

from ragcache_core.chunkstore.async_store import AsyncStore, Scratch, Transfer
from ragcache_core.chunkstore.chunks import ChunkEntry, ChunkNote, ChunkStoreStats, ChunkWrite
from ragcache_core.chunkstore.namespace import Namespace, list_namespaces
from ragcache_core.chunkstore.slotfile import aligned_rows
from ragcache_core.chunkstore.store import ChunkStore

__all__ = [
    "AsyncStore",
    "ChunkEntry",
    "ChunkNote",
    "ChunkStore",
    "ChunkStoreStats",
    "ChunkWrite",
    "Namespace",
    "Scratch",
    "Transfer",
    "aligned_rows",
    "list_namespaces",
]
