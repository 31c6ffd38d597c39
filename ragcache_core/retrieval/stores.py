"""Whatever is searched as a store: one on disk, several as one, or one that another process serves."""

from __future__ import annotations

from ragcache_core.retrieval.service.remote_store import RemoteStore
from ragcache_core.retrieval.shards import ShardedStore
from ragcache_core.retrieval.store import DocumentStore

AnyStore = DocumentStore | ShardedStore | RemoteStore


def place_of(store: AnyStore) -> str:
    """Return where a store is, for those who are told of it."""
    match store:
        case RemoteStore():
            return store.url
        case DocumentStore():
            return str(store.path)
    return "the shards"
