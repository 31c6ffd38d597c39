"""What a scripted server says it has cached: orders of documents after the static parts of prompts that it has seen."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ragcache_core.client import Engine
from ragcache_core.ordering import PATHS_VERSION, PathChange, encode_changes, static_prefix_digest
from ragcache_core.types import Document, PromptSegment, SegmentKind
from tests.support.scripted_server import ScriptedServer, Seen
from tests.support.waiting import until


def keep_cached(server: ScriptedServer, engine: Engine, *orders: tuple[Seen, str, int]) -> None:
    """Have ``engine`` know that after the static part of each request that many tokens of documents are cached."""
    changes = []
    for seen, documents, num_tokens in orders:
        prefix, ids = _static_prefix(server, seen), tuple(documents.split())
        changes += [PathChange(prefix, ids[:n], 8 + n * num_tokens) for n in range(len(ids) + 1)]
    changes.append(PathChange(b"told" * 4, ("all is told",), 8))
    server.cached_paths = all_cached(changes)
    told = [Document("something else", ""), Document("all is told", "")]
    assert until(lambda: engine.arrange_documents(told, "cache_aware").is_reordered)


def all_cached(*engines: Iterable[PathChange], cursor: str = "0.0", is_reset: bool = True) -> dict[str, Any]:
    """Return an answer of the server's that says all there is, of each engine."""
    return {
        "version": PATHS_VERSION,
        "cursor": cursor,
        "is_complete": True,
        "engines": [{"is_reset": is_reset, "changes": encode_changes(changes)} for changes in engines],
    }


def _static_prefix(server: ScriptedServer, seen: Seen) -> bytes:
    token_ids, documents = server._prompt(seen)
    segments = [PromptSegment(SegmentKind.DOCUMENT, d["start"], d["end"], d["id"]) for d in documents]
    prefix = static_prefix_digest(token_ids, segments)
    assert prefix is not None
    return prefix
