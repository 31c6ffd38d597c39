"""The order of a batch of known requests: those with a common prefix follow each other.

A depth-first traversal of the prefix tree of all prompts visits each prefix once, in one stretch. A cache that holds
the longest prompt then computes each distinct prefix once, which is the least that any order of these prompts computes.
A smaller tree needs less: :func:`arrange_documents` builds it where documents may change their order.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from ragcache_core.types import DocId

MAX_CONCURRENCY = 64
"""Requests of a batch in flight by default: enough to fill the engine's steps, and few to repeat after a crash."""

PrefixKey = tuple[str | tuple[int, ...], ...]
"""A prompt from its beginning on, in parts. The first part names the kind of prompt; parts of a kind are comparable."""


def order_requests(prompts: Sequence[PrefixKey]) -> list[int]:
    """Return the indices of ``prompts`` in the depth-first order of their prefix tree.

    Sorted sequences are such an order: all sequences that begin with the same parts are adjacent, and so are parts
    that begin with the same characters. Equal prompts keep their order.
    """
    return sorted(range(len(prompts)), key=prompts.__getitem__)


def arrange_documents(retrieved: Sequence[Sequence[DocId]], num_tokens: Mapping[DocId, int]) -> list[tuple[DocId, ...]]:
    """Return the documents of each request in an order that makes the prefix tree of the whole batch smaller.

    Greedy from the root of the tree: of the requests below a node, those that have the document whose sharing saves
    most tokens form its next child. Documents that no other request below a node has keep the order of the search.
    Where the tree of the retrieved orders is not larger, all requests keep their order.

    Args:
        retrieved: the documents of each request, the best first, each document once.
        num_tokens: the length of each document in tokens, or in another unit for all documents.
    """
    arranged = [tuple(ids) for ids in retrieved]
    pending: list[tuple[list[int], tuple[DocId, ...]]] = [(list(range(len(retrieved))), ())]
    while pending:
        members, prefix = pending.pop()
        left = {i: [doc_id for doc_id in retrieved[i] if doc_id not in prefix] for i in members}
        for i in members:
            arranged[i] = (*prefix, *left[i])
        pending += [(child, (*prefix, doc_id)) for doc_id, child in _children(left, num_tokens)]
    return arranged if tree_size(arranged, num_tokens) < tree_size(retrieved, num_tokens) else [*map(tuple, retrieved)]


def tree_size(paths: Iterable[Sequence[DocId]], num_tokens: Mapping[DocId, int]) -> int:
    """Return the tokens of all nodes of the prefix tree of ``paths``."""
    size, root = 0, _Node()
    for path in paths:
        node = root
        for doc_id in path:
            if doc_id not in node:
                node[doc_id] = _Node()
                size += num_tokens[doc_id]
            node = node[doc_id]
    return size


class _Node(dict[DocId, "_Node"]):
    """The children of a node of a prefix tree."""


def _children(left: Mapping[int, Sequence[DocId]], num_tokens: Mapping[DocId, int]) -> list[tuple[DocId, list[int]]]:
    """Return the documents shared by several requests, with the requests below each."""
    having: defaultdict[DocId, list[int]] = defaultdict(list)
    for i, ids in left.items():
        for doc_id in ids:
            having[doc_id].append(i)
    counts = Counter({doc_id: len(members) for doc_id, members in having.items()})
    queue = [(-(count - 1) * num_tokens[doc_id], doc_id) for doc_id, count in counts.items() if count > 1]
    heapq.heapify(queue)
    placed: set[int] = set()
    children = []
    while queue:
        queued, doc_id = heapq.heappop(queue)
        if counts[doc_id] < 2:
            continue
        saved = (counts[doc_id] - 1) * num_tokens[doc_id]
        if saved < -queued:  # requests that have it were placed below another document since
            heapq.heappush(queue, (-saved, doc_id))
            continue
        members = [i for i in having[doc_id] if i not in placed]
        placed.update(members)
        counts.subtract(each for i in members for each in left[i])
        children.append((doc_id, members))
    return children
