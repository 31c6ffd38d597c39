"""Questions compared by their words: the same ones, in any order, are the same question."""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence

import numpy as np

from ragcache_core.retrieval.base import Vectors

_WORD = re.compile(r"\w+")


class WordEmbedder:
    """Counts the words of a text: each has a place of its own, but for one in a thousand or so."""

    name = "question-words"
    dimension: int | None = 2048

    def embed_documents(self, texts: Sequence[str]) -> Vectors:
        """Return how often each word is in each of the texts, ``[n, dimension]``."""
        return np.stack([self.embed_query(text) for text in texts])

    def embed_query(self, text: str) -> Vectors:
        """Return how often each word is in a text, ``[dimension]``."""
        counts = np.zeros(self.dimension or 0, np.float32)
        for word in _WORD.findall(text.casefold()):
            counts[zlib.crc32(word.encode("utf-8", "surrogatepass")) % len(counts)] += 1
        return counts
