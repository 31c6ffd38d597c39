"""Document order of a prompt: retrieval order, sorted, or with the longest cached prefix.

KV depends on everything before it, so documents are cached for one order of them. ``retrieval`` keeps the order of the
search. ``canonical`` sorts by id: the same set of documents always has the same prefix. ``cache_aware`` takes the order
whose prefix is cached the furthest, according to :class:`CachedPaths`, and otherwise the order of the search.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Literal, NamedTuple

from ragcache_core.types import DocId, PromptSegment, SegmentKind
from ragcache_core.wire import MAX_DOC_ID_CHARS

DocumentOrder = Literal["retrieval", "canonical", "cache_aware"]
DOCUMENT_ORDERS: tuple[DocumentOrder, ...] = ("retrieval", "canonical", "cache_aware")
MAX_PATH_DOCUMENTS = 32
"""Documents of a prompt that are mirrored, from the first on; those behind them hardly find the same 32 in front."""
MAX_PREFIXES = 32
"""The number of prefixes that count where a prompt's static prefix is unknown: those that changed last."""
PATHS_VERSION = 3
"""Version of a server's report of cached prefixes."""

ANYWHERE = b"anywhere"
"""Stands for the static prefix of chunks stored for chunk reuse."""

_DIGEST_BYTES = 16
_MAX_PATHS = 200_000
_MAX_TOKENS = 1 << 40
_MAX_LOOKUPS = 1_000

DocPath = tuple[DocId, ...]


def static_prefix_digest(token_ids: Sequence[int], segments: Iterable[PromptSegment]) -> bytes | None:
    """Return the identity of the tokens before a prompt's first document; ``None`` without documents."""
    for segment in segments:
        if segment.kind is SegmentKind.DOCUMENT:
            static = array("q", token_ids[: segment.start])
            if sys.byteorder == "big":
                static.byteswap()
            return hashlib.blake2b(static.tobytes(), digest_size=_DIGEST_BYTES).digest()
    return None


class PathChange(NamedTuple):
    """The cached tokens of a prompt up to the end of ``documents``, with static prefix; 0 for none.

    The path without documents is the static prefix alone. That is so as far as the paths before this one are whole:
    what is cached of a document is no use where the end of another is missing in front of it.
    """

    prefix: bytes
    documents: DocPath
    num_tokens: int
    is_whole: bool = True


class Cached(NamedTuple):
    """The cached tokens of a prompt up to the end of a path, and whether its last document is complete."""

    num_tokens: int
    is_whole: bool


def encode_changes(changes: Iterable[PathChange]) -> list[object]:
    """Return plain JSON data for :meth:`CachedPaths.apply`."""
    return [[change.prefix.hex(), list(change.documents), change.num_tokens, change.is_whole] for change in changes]


def chunk_change(key: bytes, num_tokens: int) -> PathChange:
    """Return the change of a chunk's stored tokens for chunk reuse; 0 tokens for none."""
    return PathChange(ANYWHERE, (key[:_DIGEST_BYTES].hex(),), num_tokens)


class CachedPaths:
    """A client-side copy of an engine's cached prefixes: static prefix and documents -> tokens, in any tier.

    Not thread-safe. At most ``max_paths`` are kept; further ones are not taken in, as if they were not cached.
    """

    def __init__(self, max_paths: int = _MAX_PATHS) -> None:
        self._max_paths = max_paths
        self._num_paths = 0
        self._by_prefix: OrderedDict[bytes, dict[DocPath, Cached]] = OrderedDict()
        self.on_change: Callable[[bytes, DocPath, Cached | None, Cached | None], None] | None = None
        """Is told each change of a path: what was cached before, and what is now."""
        self.bit = 0
        """That of this cache in an index of many; 0 where it is in none."""

    def __len__(self) -> int:
        """Return the number of prefixes."""
        return self._num_paths

    def apply(self, changes: object) -> None:
        """Apply changes of :func:`encode_changes`.

        A path of more than :data:`MAX_PATH_DOCUMENTS` documents, or with an id that no engine takes, is ignored.

        Raises:
            ValueError: these are no such changes. What came before the error is taken in.
        """
        try:
            for prefix, documents, num_tokens, is_whole in changes:  # type: ignore[attr-defined]
                if len(documents) > MAX_PATH_DOCUMENTS or any(len(doc_id) > MAX_DOC_ID_CHARS for doc_id in documents):
                    continue
                if not 0 <= num_tokens <= _MAX_TOKENS or len(prefix) > 2 * _DIGEST_BYTES:
                    raise ValueError(f"{num_tokens!r:.40} tokens, a prefix of {len(prefix)} characters")
                path = tuple(map(sys.intern, documents))
                self.set(PathChange(bytes.fromhex(prefix), path, int(num_tokens), bool(is_whole)))
        except (TypeError, ValueError) as error:
            raise ValueError(f"no change of cached paths: {error}; is the engine of another version?") from error

    def set(self, change: PathChange) -> None:
        """Apply one change."""
        paths = self._by_prefix.get(change.prefix)
        before = None if paths is None else paths.get(change.documents)
        now = Cached(change.num_tokens, change.is_whole) if change.num_tokens > 0 else None
        if now is None:
            if paths is None or before is None:
                return
            del paths[change.documents]
            self._num_paths -= 1
            if not paths:
                del self._by_prefix[change.prefix]
        else:
            if before is None and self._num_paths >= self._max_paths:
                return
            if paths is None:
                paths = self._by_prefix[change.prefix] = {}
            self._by_prefix.move_to_end(change.prefix)
            paths[change.documents] = now
            self._num_paths += before is None
        if self.on_change is not None:
            self.on_change(change.prefix, change.documents, before, now)

    def items(self) -> Iterator[tuple[bytes, DocPath, Cached]]:
        """Return all prefixes, those with the earliest changed static prefix first."""
        for prefix, paths in self._by_prefix.items():
            for path, cached in paths.items():
                yield prefix, path, cached

    def num_cached_tokens(self, prefix: bytes, documents: Sequence[DocId]) -> int:
        """Return the cached tokens of a prompt with ``documents`` in this order."""
        paths = self._by_prefix.get(prefix, {})
        num_tokens = _num_static_tokens(paths)
        for end in range(1, len(documents) + 1):
            here = paths.get(tuple(documents[:end]))
            if here is None:
                break
            num_tokens = max(num_tokens, here.num_tokens)
            if not here.is_whole:
                break
        return num_tokens

    def num_document_tokens(self, prefix: bytes | None, documents: Sequence[DocId]) -> int:
        """Return the cached tokens after the static prefix of a prompt with ``documents``.

        Without a ``prefix`` it is the most after any of the static prefixes that changed last.
        """
        prefixes = [each for each in self._by_prefix if each != ANYWHERE] if prefix is None else [prefix]
        return max(
            (
                self.num_cached_tokens(each, documents) - _num_static_tokens(self._by_prefix.get(each, {}))
                for each in prefixes[-MAX_PREFIXES:]
            ),
            default=0,
        )

    def has_chunk(self, key: bytes) -> bool:
        """Return whether the chunk with that key is stored for chunk reuse."""
        return (key[:_DIGEST_BYTES].hex(),) in self._by_prefix.get(ANYWHERE, {})

    def after(self, prefix: bytes | None) -> Iterable[Mapping[DocPath, Cached]]:
        """Return the prefixes after a static prefix; for ``None``, after each recently changed one."""
        if prefix is None:
            named = (paths for prefix, paths in reversed(self._by_prefix.items()) if prefix != ANYWHERE)
            return islice(named, MAX_PREFIXES)
        return (known,) if (known := self._by_prefix.get(prefix)) is not None else ()


def best_order(
    caches: Iterable[CachedPaths], documents: Sequence[DocId], *, prefix: bytes | None, keep_first: bool
) -> tuple[int, ...]:
    """Return the permutation of ``documents`` with the longest prefix in one of the ``caches``.

    Of equal ones it is the first in order. Without a ``prefix`` that is the best after any of the static prefixes that
    changed last. Where very many orders are cached the search ends early, with the best that it has seen: it begins
    with the longest.
    """
    return longest_cached(caches, documents, prefix=prefix, keep_first=keep_first)[1]


def longest_cached(
    caches: Iterable[CachedPaths],
    documents: Sequence[DocId],
    *,
    prefix: bytes | None,
    keep_first: bool,
) -> tuple[int, tuple[int, ...]]:
    """Return the result of :func:`best_order`, with its cached tokens after the static prefix."""
    search = _Search(documents, keep_first)
    for cache in caches:
        for paths in cache.after(prefix):
            search.walk(paths)
    return search.num_tokens, search.best


def arrange(
    documents: Sequence[DocId],
    order: DocumentOrder,
    paths: CachedPaths | None,
    *,
    prefix: bytes | None = None,
    keep_first: bool = False,
) -> tuple[int, ...]:
    """Return the order of ``documents``, given best first, as indices.

    Args:
        documents: their ids, the best first.
        order: what decides; ``cache_aware`` without ``paths`` is the order of the search.
        paths: what the engine has cached.
        prefix: :func:`static_prefix_digest` of the prompt; None where it is not known.
        keep_first: the best document stays in front.

    Raises:
        ValueError: there is no such order.
    """
    identity = tuple(range(len(documents)))
    match order:
        case "retrieval":
            return identity
        case "canonical":
            kept = 1 if keep_first else 0
            return (*identity[:kept], *sorted(identity[kept:], key=lambda i: documents[i]))
        case "cache_aware":
            caches = () if paths is None else (paths,)
            return best_order(caches, documents, prefix=prefix, keep_first=keep_first)
    raise ValueError(f"document_order is {order!r}; it must be one of {', '.join(DOCUMENT_ORDERS)}")


def _num_static_tokens(paths: Mapping[DocPath, Cached]) -> int:
    return static.num_tokens if (static := paths.get(())) is not None else 0


class _Search:
    """Traverses cached prefixes depth first, the longest child first, and keeps the best order.

    What counts are tokens beyond the static prefix: prefixes of different lengths compete.
    """

    def __init__(self, documents: Sequence[DocId], keep_first: bool) -> None:
        self.best = tuple(range(len(documents)))
        self._documents = documents
        self._keep_first = keep_first
        self.num_tokens = 0
        self._num_lookups = 0

    def walk(self, paths: Mapping[DocPath, Cached]) -> None:
        self._visit(paths, _num_static_tokens(paths), (), (), tuple(range(len(self._documents))))

    def _visit(
        self,
        paths: Mapping[DocPath, Cached],
        num_static_tokens: int,
        path: DocPath,
        chosen: tuple[int, ...],
        remaining: tuple[int, ...],
    ) -> None:
        found = []
        for index in remaining[:1] if self._keep_first and not chosen else remaining:
            if self._num_lookups >= _MAX_LOOKUPS:
                break
            self._num_lookups += 1
            child = (*path, self._documents[index])
            if (cached := paths.get(child)) is not None:
                found.append((num_static_tokens - cached.num_tokens, index, child, cached.is_whole))
        for minus_tokens, index, child, is_whole in sorted(found):
            rest = tuple(i for i in remaining if i != index)
            order = (*chosen, index, *rest)
            if (minus_tokens, order) < (-self.num_tokens, self.best):
                self.num_tokens, self.best = -minus_tokens, order
            if rest and is_whole and len(child) < MAX_PATH_DOCUMENTS:
                self._visit(paths, num_static_tokens, child, (*chosen, index), rest)
