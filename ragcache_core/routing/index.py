"""Find a prefix in many caches with one traversal for a whole fleet."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from ragcache_core.ordering import ANYWHERE, MAX_PATH_DOCUMENTS, MAX_PREFIXES, Cached, CachedPaths, DocPath
from ragcache_core.types import DocId

_MAX_LOOKUPS = 2_000
_AT_ONCE = 500
"""Paths of a cache that are added or removed before other threads may look."""

_Holders = dict[Cached, int]
"""How much is cached up to the end of a path, and by whom: a bit for each cache."""


class Found(NamedTuple):
    """A document order, its cached tokens after the static prefix, and the caches that have them."""

    num_tokens: int
    order: tuple[int, ...]
    caches: int


class PathIndex:
    """The prefixes of several :class:`CachedPaths`, each a bit of a set, which they keep up to date.

    Not thread-safe: no cache may change while another thread looks.
    """

    def __init__(self) -> None:
        self._by_prefix: OrderedDict[bytes, dict[DocPath, _Holders]] = OrderedDict()
        self._taken = 0

    def __len__(self) -> int:
        """Return the number of distinct prefixes."""
        return sum(map(len, self._by_prefix.values()))

    def join(self, paths: CachedPaths) -> Iterator[None]:
        """Add a cache in pieces, between which other threads may see a part of it.

        It belongs to one index at a time, and must not change until all of it is in.
        """
        bit = paths.bit = ~self._taken & (self._taken + 1)
        self._taken |= bit
        for number, (prefix, path, cached) in enumerate(paths.items()):
            self._change(bit, prefix, path, None, cached)
            if number % _AT_ONCE == _AT_ONCE - 1:
                yield
        paths.on_change = lambda prefix, path, before, now: self._change(bit, prefix, path, before, now)

    def leave(self, paths: CachedPaths) -> Iterator[None]:
        """Remove a cache in pieces, between which other threads may search, but not for it."""
        paths.on_change = None
        for number, (prefix, path, cached) in enumerate(paths.items()):
            self._change(paths.bit, prefix, path, cached, None)
            if number % _AT_ONCE == _AT_ONCE - 1:
                yield
        self._taken &= ~paths.bit  # from now on another cache may get the bit
        paths.bit = 0

    def _change(self, bit: int, prefix: bytes, path: DocPath, before: Cached | None, now: Cached | None) -> None:
        if prefix == ANYWHERE:
            return
        paths = self._by_prefix.setdefault(prefix, {})
        holders = paths.setdefault(path, {})
        if before is not None and not (left := holders[before] & ~bit):
            del holders[before]
        elif before is not None:
            holders[before] = left
        if now is not None:
            holders[now] = holders.get(now, 0) | bit
            self._by_prefix.move_to_end(prefix)
        elif not holders:
            del paths[path]
            if not paths:
                del self._by_prefix[prefix]

    def longest(
        self,
        caches: int,
        documents: Sequence[DocId],
        *,
        prefix: bytes | None,
        keep_first: bool = False,
        keep_order: bool = False,
    ) -> list[Found]:
        """Return the longest cached order of each cache, as :func:`~ragcache_core.ordering.longest_cached` of each.

        The best comes first; a cache that has nothing of any order is in none. With ``keep_order`` nothing but the
        order as it is counts. Where very many orders are cached the search ends early: it begins with the longest.
        """
        search = _PrefixSearch(documents, keep_first=keep_first, keep_order=keep_order)
        for paths in self._after(prefix):
            behind = caches
            for static, holders in paths.get((), {}).items():
                search.walk(paths, static.num_tokens, holders & caches)
                behind &= ~holders
            search.walk(paths, 0, behind)
        return search.of_each(caches)

    def _after(self, prefix: bytes | None) -> Iterable[Mapping[DocPath, _Holders]]:
        """Return the prefixes after a static prefix; for ``None``, after each recently changed one."""
        if prefix is None:
            return islice(reversed(self._by_prefix.values()), MAX_PREFIXES)
        return (known,) if (known := self._by_prefix.get(prefix)) is not None else ()


class _PrefixSearch:
    """Traverses the prefixes of many caches at once, depth first, the longest child first."""

    def __init__(self, documents: Sequence[DocId], *, keep_first: bool, keep_order: bool) -> None:
        self._documents = documents
        self._is_fixed_until = len(documents) if keep_order else int(keep_first)
        self._found: list[tuple[int, tuple[int, ...], int]] = []
        self._num_lookups = 0

    def walk(self, paths: Mapping[DocPath, _Holders], num_static_tokens: int, caches: int) -> None:
        """Search the prefixes of ``caches``, each with ``num_static_tokens`` of the static prefix."""
        if caches:
            self._num_lookups = 0
            self._visit(paths, num_static_tokens, (), (), tuple(range(len(self._documents))), caches)

    def _visit(
        self,
        paths: Mapping[DocPath, _Holders],
        num_static_tokens: int,
        path: DocPath,
        chosen: tuple[int, ...],
        remaining: tuple[int, ...],
        caches: int,
    ) -> None:
        deeper = []
        for index in remaining[:1] if len(chosen) < self._is_fixed_until else remaining:
            if self._num_lookups >= _MAX_LOOKUPS:
                break
            self._num_lookups += 1
            child = (*path, self._documents[index])
            if (holders := paths.get(child)) is None:
                continue
            most, whole = 0, 0
            rest = tuple(i for i in remaining if i != index)
            for cached, bits in holders.items():
                if here := bits & caches:
                    num_tokens = cached.num_tokens - num_static_tokens
                    self._found.append((-num_tokens, (*chosen, index, *rest), here))
                    if cached.is_whole:
                        most, whole = max(most, num_tokens), whole | here
            if whole and rest and len(child) < MAX_PATH_DOCUMENTS:
                deeper.append((-most, index, child, rest, whole))
        for _, index, child, rest, whole in sorted(deeper):
            self._visit(paths, num_static_tokens, child, (*chosen, index), rest, whole)

    def of_each(self, caches: int) -> list[Found]:
        """Return each cache's best order."""
        best = []
        for minus_tokens, order, found in sorted(self._found):
            if minus_tokens >= 0 or not caches:
                break
            if here := found & caches:
                best.append(Found(-minus_tokens, order, here))
                caches &= ~here
        return best
