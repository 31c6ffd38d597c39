"""Publishes how much of which documents is cached, for clients that choose the order of documents in prompts.

::

    engine   PrefixPublisher   the tree's changes -> deltas          with the statistics of a step
    server   PrefixFeed      deltas -> a mirror -> its readers     GET /v1/ragcache/cached_paths

A question to the engine core would wait for its running step, so it is not asked: it publishes what has changed.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Hashable, Sequence

from ragcache_core.ordering import (
    MAX_PATH_DOCUMENTS,
    DocPath,
    PathChange,
    encode_delta,
    static_prefix_digest,
)
from ragcache_core.tree import KnowledgeTree, NodeChanges, TreeNode
from ragcache_core.types import PromptSegment, SegmentKind

_MAX_PATHS = 100_000
_MAX_VISITS_PER_DELTA = 2048
"""Nodes that are looked at for one delta, on the way down from the root too. That took 2 to 3 ms of a step behind one
another in a prompt of 3,000 documents, and 6 at most where each had 64 blocks; a delta is seldom so large."""


class _TrackedPath:
    """Documents after a static prefix, and where their KV ends: the unit ``key``, ``num_tokens`` from the start.

    ``num_sent_tokens`` is what was last said of it; None at first, which readers take for 0.
    """

    __slots__ = ("documents", "key", "num_sent_tokens", "num_tokens", "prefix")

    def __init__(self, prefix: bytes, documents: DocPath, key: bytes, num_tokens: int) -> None:
        self.prefix = prefix
        self.documents = documents
        self.key = key
        self.num_tokens = num_tokens
        self.num_sent_tokens: int | None = None


class PrefixPublisher:
    """Knows which paths of documents lie where in the tree, and publishes when more or less of one is cached.

    A path is known from the request that showed it; the ``max_paths`` seen last are tracked. The tree's changes are
    looked at in :meth:`take_delta` only: from a changed node down, to where a path ends of which nothing new is to be
    said, or behind which none ends. Nothing is kept of nodes but those that wait to be looked at.
    """

    def __init__(self, tree: KnowledgeTree, tokens_per_unit: int, max_paths: int = _MAX_PATHS) -> None:
        self._tree = tree
        self._tokens_per_unit = tokens_per_unit
        self._max_paths = max_paths
        self._paths: OrderedDict[tuple[bytes, DocPath], _TrackedPath] = OrderedDict()
        self._by_key: dict[Hashable, list[_TrackedPath]] = {}
        self._max_units = 0  # of the longest path that ever was
        if tree.changes is None:
            tree.changes = NodeChanges()
        self._changed = tree.changes.subscribe()
        self._dropped: list[PathChange] = []
        self._has_begun = False

    def __len__(self) -> int:
        """Return the number of tracked paths."""
        return len(self._paths)

    @property
    def has_news(self) -> bool:
        """Whether anything has happened that :meth:`take_delta` has not looked at."""
        return bool(self._changed or self._dropped)

    def track(self, token_ids: Sequence[int], segments: Sequence[PromptSegment], keys: Sequence[bytes]) -> None:
        """Track the path of a request's documents; ``keys`` are those of its prompt's units, in order."""
        prefix = static_prefix_digest(token_ids, segments)
        if prefix is None:
            return
        shown = [s for s in segments if s.kind is SegmentKind.DOCUMENT][:MAX_PATH_DOCUMENTS]
        documents = tuple(sys.intern(s.doc_id or "") for s in shown)
        ends = (shown[0].start, *(s.end for s in shown))
        for num_documents in range(len(shown), -1, -1):  # what is dropped first is the end of a path
            num_units = min(ends[num_documents] // self._tokens_per_unit, len(keys))
            if num_units:
                self._track(prefix, documents[:num_documents], keys[num_units - 1], num_units)
        while len(self._paths) > self._max_paths:
            _, oldest = self._paths.popitem(last=False)
            self._untrack(oldest)

    def take_delta(self) -> dict[str, object] | None:
        """Return what has changed since the last call, for :meth:`CachedPaths.apply`; None if nothing has.

        What is too much for one call comes with the next ones. The very first one voids what another engine said.
        """
        if not self.has_news:
            return None
        changes, self._dropped = self._dropped, []
        if not self._paths:
            self._changed.clear()
        num_left = _MAX_VISITS_PER_DELTA
        while self._changed and num_left > 0:
            num_left = self._look_at(self._changed.pop(), changes, num_left)
        if not changes:
            return None
        is_first, self._has_begun = not self._has_begun, True
        return encode_delta(changes, is_reset=is_first)

    def _track(self, prefix: bytes, documents: DocPath, key: bytes, num_units: int) -> None:
        at = (prefix, documents)
        known = self._paths.get(at)
        if known is not None:
            self._paths.move_to_end(at)
            if known.key == key:
                return
            self._untrack(known)  # the same ids show other texts now
        path = _TrackedPath(prefix, documents, key, num_units * self._tokens_per_unit)
        self._paths[at] = path
        self._by_key.setdefault(key, []).append(path)
        self._max_units = max(self._max_units, num_units)
        if (location := self._tree.locate(key)) is not None:
            self._changed.add(location.node)

    def _untrack(self, path: _TrackedPath) -> None:
        there = self._by_key[path.key]
        there.remove(path)
        if not there:
            del self._by_key[path.key]
        self._update(path, 0, self._dropped)

    def _look_at(self, node: TreeNode, changes: list[PathChange], num_left: int) -> int:
        """Say what is new of a node, or of the first above it of which something is; then what follows from it.

        From the root down, for what was said of a node is no measure for those below while they know more than it.
        Return what is left of the ``num_left`` nodes that may be visited, and more are only where the way down is as
        long; what follows beyond is looked at with the next delta.
        """
        if node.start >= self._max_units:
            return num_left - 1
        location = self._tree.locate(node.keys[0])
        if location is None or location.node is not node:
            self._look_for(node.keys, changes)
            return num_left - _visits_of(node)
        path = node.path()
        num_before, is_whole = 0, True  # of what is cached before `node`
        for step in path[:-1]:
            num_leading, is_step_whole = self._lead_on(step, num_before, is_whole)
            if self._is_news(step, num_leading):
                self._changed.add(node)
                node = step
                break
            num_before, is_whole = num_leading, is_step_whole
        num_left -= len(path)
        num_following = max(num_left, len(path))  # else a way down that is long would be gone for each node
        following = [(node, num_before, is_whole)]
        while following:
            node, num_before, is_whole = following.pop()
            self._changed.discard(node)
            num_leading, is_whole = self._lead_on(node, num_before, is_whole)
            if node.start < self._max_units and self._say(node, num_leading, changes):
                following += [(child, num_leading, is_whole) for child in node.iter_children()]
            num_left -= _visits_of(node)
            num_following -= _visits_of(node)
            if num_following <= 0:
                break
        self._changed.update(node for node, *_ in following)
        return num_left

    def _lead_on(self, node: TreeNode, num_before: int, is_whole: bool) -> tuple[int, bool]:
        """Return how many tokens are cached up to the end of ``node``, and whether these are all."""
        if not is_whole:
            return num_before, False
        num_own = self._tree.num_own_leading_tokens(node)
        return num_before + num_own, num_own == node.num_tokens

    def _say(self, node: TreeNode, num_leading: int, changes: list[PathChange]) -> bool:
        """Say what is cached of the paths that end in a node; return whether that may be news to what follows it."""
        at_end = self._by_key.get(node.keys[-1])
        is_news = not at_end or self._is_news(node, num_leading)  # or it may be, where no path ends
        for key in node.keys:
            for path in self._by_key.get(key, ()):
                self._update(path, min(num_leading, path.num_tokens), changes)
        return is_news

    def _is_news(self, node: TreeNode, num_leading: int) -> bool:
        """Return whether something else was said, or nothing yet, of a path that ends with ``node``."""
        at_end = self._by_key.get(node.keys[-1], ())
        return any(path.num_sent_tokens != min(num_leading, path.num_tokens) for path in at_end)

    def _look_for(self, keys: Sequence[Hashable], changes: list[PathChange]) -> None:
        """Look at the paths to the units of a node that is gone: they may be other nodes' by now."""
        for key in keys:
            if not (paths := self._by_key.get(key, ())):
                continue
            if (location := self._tree.locate(key)) is not None:
                self._changed.add(location.node)
                continue
            for path in paths:
                self._update(path, 0, changes)

    def _update(self, path: _TrackedPath, num_tokens: int, changes: list[PathChange]) -> None:
        num_sent, path.num_sent_tokens = path.num_sent_tokens or 0, num_tokens
        if num_tokens != num_sent:
            changes.append(PathChange(path.prefix, path.documents, num_tokens))


def _visits_of(node: TreeNode) -> int:
    """Return how many visits it counts as to look at a node: its units are looked up."""
    return 1 + len(node.keys) // 8
