"""Publishes the cached tokens of documents by path, for clients that order documents by them.

::

    changes("")       ->  {"cursor": "5f0c.2", "is_reset": true, "is_complete": true,
                           "changes": [[prefix, [document, ...], tokens, is whole], ...]}
    changes("5f0c.2") ->  what has changed since

The server merges the answers of its engines (``server/several_engines.py``). The tree's changes are followed while
clients ask for them. The documents of a path are known from requests or, for paths from before a restart, from the
tree's nodes: the first request with a static prefix identifies the prefix of the paths behind it.
"""

from __future__ import annotations

import secrets
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import cast

from ragcache_core.ordering import (
    MAX_PATH_DOCUMENTS,
    DocPath,
    PathChange,
    chunk_change,
    encode_changes,
    static_prefix_digest,
)
from ragcache_core.tree import KnowledgeTree, NodeChanges, TreeNode
from ragcache_core.types import PromptSegment, SegmentKind

_MAX_PATHS = 100_000
_MAX_AT_ONCE = 1000
"""Paths that one answer looks at, and says: the engine core's next step waits for it, some 3 ms."""
_MAX_UNREAD = 50_000
_MAX_PLACES = 1000
"""Static prefixes behind which paths from before a restart are looked for; some applications have one for each user."""
_MIN_LOG = 10_000


class _Path:
    """Documents after a static prefix, and the units ``first`` to ``last`` of the prompt, that of ``key`` the last.

    They are its last document's own; of the first document the static prefix's too. ``node_ids`` are the tree's for
    them, and ``said`` is what was said last, in the log of ``epoch``.
    """

    __slots__ = ("documents", "epoch", "first", "key", "last", "node_ids", "prefix", "published")

    def __init__(self, prefix: bytes, documents: DocPath, key: bytes, first: int, last: int) -> None:
        self.prefix = prefix
        self.documents = documents
        self.key = key
        self.first = first
        self.last = last
        self.begin("")

    def begin(self, epoch: str) -> None:
        """Reset what was published of it, for a new log."""
        self.epoch = epoch
        self.node_ids: list[int] = []
        self.published = 0, False


class PrefixPublisher:
    """Tracks paths of documents in the tree, and keeps a log of their cached tokens.

    The ``max_paths`` most recent paths are known. The tree is followed from the first :meth:`changes` on, until
    ``max_unread`` nodes have changed since the last call. A path that the tree drops is known again when a request
    shows it again. ``chunks`` returns the chunks stored for position-independent reuse, with their tokens. Of the
    tree's nodes from before a restart, only those are reported for which ``is_own`` is true.
    """

    def __init__(
        self,
        tree: KnowledgeTree,
        tokens_per_unit: int,
        max_paths: int = _MAX_PATHS,
        max_unread: int = _MAX_UNREAD,
        chunks: Callable[[], Mapping[bytes, int]] = dict,
        is_own: Callable[[TreeNode], bool] = lambda _: True,
    ) -> None:
        self._tree = tree
        self._tokens_per_unit = tokens_per_unit
        self._max_paths = max_paths
        self._max_unread = max_unread
        self._chunks = chunks
        self._is_own = is_own
        self._looked_behind: set[bytes] = set()
        """The last units of static prefixes; that of one shorter than a unit is empty."""
        self._from_before: deque[Iterator[_Path | None]] = deque()
        self._paths: OrderedDict[tuple[bytes, DocPath], _Path] = OrderedDict()
        self._changed: set[TreeNode] | None = None
        self._begin_log()

    def _begin_log(self) -> None:
        self._epoch = secrets.token_hex(4)
        self._log: list[PathChange] = []
        self._by_node: dict[int, set[_Path]] = {}
        self._unsaid = set(self._paths.values()) if self.is_following else set()
        self._published_chunks: frozenset[bytes] = frozenset()

    def __len__(self) -> int:
        """Return the number of known paths."""
        return len(self._paths)

    @property
    def is_following(self) -> bool:
        """Whether the tree's changes are followed."""
        return self._changed is not None

    def track(self, token_ids: Sequence[int], segments: Sequence[PromptSegment], keys: Sequence[bytes]) -> None:
        """Take in the path of a request's documents; ``keys`` are those of its prompt's units, in order."""
        prefix = static_prefix_digest(token_ids, segments)
        if prefix is None:
            return
        shown = [s for s in segments if s.kind is SegmentKind.DOCUMENT][:MAX_PATH_DOCUMENTS]
        documents = tuple(sys.intern(s.doc_id or "") for s in shown)
        ends = [min(end // self._tokens_per_unit, len(keys)) for end in (shown[0].start, *(s.end for s in shown))]
        if self._tree.is_regrown:
            self._look_behind(prefix, keys[ends[0] - 1] if ends[0] else b"")
        for num_documents in range(len(shown), -1, -1):  # what is forgotten first is the end of a path
            if last := ends[num_documents]:
                first = ends[num_documents - 1] if num_documents > 1 else 0
                self._track(_Path(prefix, documents[:num_documents], keys[last - 1], first, last))
        while len(self._paths) > self._max_paths:
            self._forget(next(iter(self._paths.values())))

    def _look_behind(self, prefix: bytes, unit: bytes) -> None:
        """Queue paths from before a restart that follow a static prefix whose last whole unit is ``unit``.

        For prefixes that differ only in a partial unit, or have no whole one, all paths are attributed to the first. A
        wrongly attributed path is reported as cached until a request shows it, which gets no hit.
        """
        if unit in self._looked_behind or len(self._looked_behind) >= _MAX_PLACES:
            return
        location = self._tree.locate(unit) if unit else None
        if unit and (location is None or location.unit + 1 < len(location.node.keys)):
            return
        self._looked_behind.add(unit)
        node = self._tree.root if location is None else location.node
        self._from_before.append(self._paths_below(prefix, node, ()))

    def _paths_below(self, prefix: bytes, node: TreeNode, documents: DocPath) -> Iterator[_Path | None]:
        """Yield a path for each document that no request has shown since the restart, else None; shorter ones first.

        Documents that fill no unit are known from requests alone, and so are the paths behind them.
        """
        if len(documents) == MAX_PATH_DOCUMENTS:
            return
        for child in list(node.iter_children()):
            if child.doc_id is None or child.other_ids or child.is_private or not self._is_own(child):
                yield None
                continue
            last = child
            while (more := _same_document(last)) is not None:
                last = more
            path = (*documents, sys.intern(child.doc_id))
            first, end = child.start if documents else 0, last.start + len(last.keys)
            is_from_before = last.frequency > 0 and not last.last_request
            yield _Path(prefix, path, cast("bytes", last.keys[-1]), first, end) if is_from_before else None
            yield from self._paths_below(prefix, last, path)

    def _take_in(self) -> None:
        """Take in paths from before a restart, as many as an answer may look at."""
        num_looked_at = 0
        while self._from_before and num_looked_at < _MAX_AT_ONCE:
            for path in islice(self._from_before[0], _MAX_AT_ONCE - num_looked_at):
                num_looked_at += 1
                if path and (path.prefix, path.documents) not in self._paths and len(self._paths) < self._max_paths:
                    self._track(path)
                    self._paths.move_to_end((path.prefix, path.documents), last=False)
            if num_looked_at < _MAX_AT_ONCE:
                self._from_before.popleft()

    def _track(self, path: _Path) -> None:
        at = path.prefix, path.documents
        known = self._paths.get(at)
        if known is not None and known.key == path.key:
            self._paths.move_to_end(at)
            return
        if known is not None:
            self._forget(known)  # the same ids show other texts now
        self._paths[at] = path
        if self.is_following:
            self._unsaid.add(path)

    def changes(self, cursor: str) -> dict[str, object]:
        """Return what has changed since the answer that ended with ``cursor``, or all there is after none.

        What is too much for one answer comes with the next one, until it ``is_complete``. A cursor may be those of
        several engines: the one with this log's epoch counts.
        """
        if self._changed is None:
            self._follow()
        elif len(self._log) > max(2 * (len(self._paths) + len(self._published_chunks)), _MIN_LOG):
            self._begin_log()
        self._look()
        numbers = dict(each.split(".") for each in cursor.split("-") if each)
        is_reset = self._epoch not in numbers
        start = int(numbers.get(self._epoch, 0))
        changes = self._log[start : start + _MAX_AT_ONCE]
        end = start + len(changes)
        return {
            "cursor": f"{self._epoch}.{end}",
            "is_reset": is_reset,
            "is_complete": end >= len(self._log) and not self._unsaid and not self._from_before,
            "changes": encode_changes(changes),
        }

    def drop_unread(self) -> None:
        """Stop following the tree after a long time without a reader, which would fill the memory."""
        if self._changed is not None and len(self._changed) > self._max_unread:
            assert self._tree.changes is not None
            self._tree.changes.unsubscribe(self._changed)
            self._changed = None
            self._begin_log()

    def _follow(self) -> None:
        if self._tree.changes is None:
            self._tree.changes = NodeChanges()
        self._changed = self._tree.changes.subscribe()
        self._begin_log()

    def _look(self) -> None:
        """Log the changes of paths in changed nodes, up to ``_MAX_AT_ONCE`` paths."""
        assert self._changed is not None
        for node in self._changed:
            self._unsaid.update(self._by_node.get(node.id, ()))
        self._changed.clear()
        self._take_in()
        for _ in range(min(len(self._unsaid), _MAX_AT_ONCE)):
            path = self._unsaid.pop()
            self._leave(path)
            location = self._tree.locate(path.key)
            if location is None:
                self._forget(path)
                continue
            num_units = self._follow_path(path, location.node)
            is_whole = num_units == path.last
            self._publish(path, num_units if is_whole or num_units > path.first else 0, is_whole)
        chunks = self._chunks()
        if chunks.keys() != self._published_chunks:
            self._log += [chunk_change(key, chunks[key]) for key in chunks.keys() - self._published_chunks]
            self._log += [chunk_change(key, 0) for key in self._published_chunks - chunks.keys()]
            self._published_chunks = frozenset(chunks)

    def _follow_path(self, path: _Path, last: TreeNode) -> int:
        """Have changes of a path's nodes lead to it, and return up to which unit it is cached from ``path.first`` on.

        ``last`` is the last of its nodes. Nodes may reach beyond it; a document shorter than a unit has none.
        """
        nodes, node = [], last
        while node.parent is not None and node.start + len(node.keys) > path.first:
            nodes.append(node)
            node = node.parent
        path.node_ids = [node.id for node in nodes]
        for node_id in path.node_ids:
            self._by_node.setdefault(node_id, set()).add(path)
        num_units = path.first
        for node in reversed(nodes):
            num_units = node.start + self._tree.num_own_leading_tokens(node) // self._tokens_per_unit
            if num_units < node.start + len(node.keys):
                break
        return min(max(num_units, path.first), path.last)

    def _publish(self, path: _Path, num_units: int, is_whole: bool) -> None:
        if (num_units, is_whole) != path.published:
            path.published = num_units, is_whole
            num_tokens = num_units * self._tokens_per_unit
            self._log.append(PathChange(path.prefix, path.documents, num_tokens, is_whole))

    def _forget(self, path: _Path) -> None:
        del self._paths[path.prefix, path.documents]
        self._unsaid.discard(path)
        self._leave(path)
        self._publish(path, 0, False)

    def _leave(self, path: _Path) -> None:
        if path.epoch != self._epoch:
            path.begin(self._epoch)
        for node_id in path.node_ids:
            paths = self._by_node[node_id]
            paths.discard(path)
            if not paths:
                del self._by_node[node_id]
        path.node_ids = []


def _same_document(node: TreeNode) -> TreeNode | None:
    """Return the node that goes on with a document that was divided, if there is one."""
    return next((child for child in node.iter_children() if child.doc_id == node.doc_id), None)
