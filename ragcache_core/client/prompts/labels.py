"""Readable names of documents whose ids are not: requests carry them, and the engine's statistics show them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import replace

from ragcache_core.types import DocId, Document, PromptSegment

_MAX_REMEMBERED = 1 << 16


class RememberedLabels:
    """Remembers the labels of documents that this process has seen; thread-safe."""

    def __init__(self) -> None:
        self._labels: OrderedDict[DocId, str] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, documents: Iterable[Document]) -> None:
        """Remember the labels of documents."""
        for document in documents:
            if (label := document.label) is not None:
                with self._lock:
                    self._labels[document.doc_id] = label
                    if len(self._labels) > _MAX_REMEMBERED:
                        self._labels.popitem(last=False)

    def labelled(self, segments: Iterable[PromptSegment]) -> tuple[PromptSegment, ...]:
        """Return segments with the labels of their documents, where they are known."""
        if not self._labels:
            return tuple(segments)
        with self._lock:
            return tuple(replace(each, label=each.label or self._labels.get(each.doc_id or "")) for each in segments)


LABELS = RememberedLabels()
"""Of all documents that this process has retrieved, or asked about."""
