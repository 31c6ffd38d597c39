"""The built-in embedder: hashed words, TF-IDF and a truncated SVD. It needs no download and no network.

It finds documents by their words, and by the words that go with them in the corpus it was fitted on. Its dimensions
are split, so that words which that corpus did not have can still be found, and do not disturb those it had::

    |<------ SVD of the fitted words ------>|<- hashed directions of later words ->|
    0                          rank <= 3/4 dimension                       dimension
"""

from __future__ import annotations

import math
import re
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragcache_core.errors import ConfigError, StoreCorruptError
from ragcache_core.retrieval.base import Ids, Vectors, check_count, extra_module
from ragcache_core.retrieval.lexical import words_of

_NUM_BUCKETS = 1 << 22
_SVD_SHARE = 0.75
_DENSE_SVD_ROWS = 512
"""Number of documents up to which the exact SVD of their Gram matrix takes less time than a randomised one."""
_MOST_FITTED = 10_000
"""Number of texts to learn from; of more texts, an even sample: it shows which words go together."""
_SVD_ITERATIONS = 4
_SVD_OVERSAMPLING = 10
_TEXTS_PER_REPORT = 64
_COUNTING_SHARE = 0.25
"""Of the time that learning takes; the SVD takes the rest."""

_NAME = re.compile(r"tfidf-svd-(\d+)(?:-seed(\d+))?")


def _ignore(_: float) -> None:
    pass


class TfidfSvdEmbedder:
    """TF-IDF and truncated SVD, fitted on the first documents of the store. Vectors have length 1.

    A store fits its own copy on the first ``add`` and keeps it with the documents; alone it works as
    ``TfidfSvdEmbedder().fit(texts).embed_query("...")``. Fit it on a good part of the corpus: words that come later are
    found too, but not what goes with them. The same texts, dimension and seed give the same vectors. They blur words:
    alone they do not find a document by its name, which is why a store counts the words as well.

    Raises:
        ConfigError: fewer than 8 dimensions, or used before it was fitted.
    """

    def __init__(self, dimension: int = 128, *, seed: int = 0) -> None:
        check_count("dimension", dimension, 8)
        self.name = f"tfidf-svd-{dimension}" + (f"-seed{seed}" if seed else "")
        self.dimension = dimension
        self.seed = seed
        self._buckets: Ids | None = None
        self._idf: Vectors
        self._projection: Vectors  # [num buckets, rank]
        self._later_idf = 1.0

    @classmethod
    def from_name(cls, name: str) -> TfidfSvdEmbedder | None:
        """Return the unfitted embedder with this name; ``None`` for other names."""
        match = _NAME.fullmatch(name)
        return cls(int(match[1]), seed=int(match[2] or 0)) if match else None

    @property
    def is_fitted(self) -> bool:
        """Whether it is fitted."""
        return self._buckets is not None

    def fit(self, texts: Sequence[str], progress: Callable[[float], object] = _ignore) -> TfidfSvdEmbedder:
        """Fit words, weights and SVD on ``texts``; return this embedder.

        Of more than 10,000 texts, that many are learnt from, evenly spread. ``progress`` is called with the share of
        the work that is done, up to 1.
        """
        if not texts:
            raise ConfigError("there are no texts to fit the embedder on: give it at least one")
        texts = texts[:: -(-len(texts) // _MOST_FITTED)]
        counts = []
        for number, text in enumerate(texts, 1):
            counts.append(_count_buckets(text))
            if number % _TEXTS_PER_REPORT == 0:
                progress(_COUNTING_SHARE * number / len(texts))
        frequency: Counter[int] = Counter()
        for count in counts:
            frequency.update(count.keys())
        buckets = np.array(sorted(frequency), np.int64)
        in_documents = np.array([frequency[b] for b in buckets.tolist()], np.float64)
        self._idf = (np.log((1 + len(texts)) / (1 + in_documents)) + 1).astype(np.float32)
        self._later_idf = math.log(1 + len(texts)) + 1
        self._projection = self._decompose(
            counts, buckets, lambda share: progress(_COUNTING_SHARE + (1 - _COUNTING_SHARE) * share)
        )
        self._buckets = buckets
        progress(1.0)
        return self

    def embed_documents(self, texts: Sequence[str]) -> Vectors:
        """Return one row for each text: ``[n, dimension]``."""
        vectors = np.zeros((len(texts), self.dimension), np.float32)
        for row, text in enumerate(texts):
            vectors[row] = self.embed_query(text)
        return vectors

    def embed_query(self, text: str) -> Vectors:
        """Return the vector of a text: ``[dimension]``."""
        if self._buckets is None:
            raise ConfigError(f"{self.name} is not fitted: call fit(texts), or add documents to its store, first")
        count = _count_buckets(text)
        wanted = np.fromiter(count, np.int64, len(count))
        weights = 1 + np.log(np.fromiter(count.values(), np.float32, len(count)))
        at = np.minimum(np.searchsorted(self._buckets, wanted), len(self._buckets) - 1)
        known = self._buckets[at] == wanted
        rank = self._projection.shape[1]
        vector = np.zeros(self.dimension, np.float32)
        at = at[known]
        vector[:rank] = (weights[known] * self._idf[at]) @ self._projection[at]
        if not known.all():
            directions = _directions(wanted[~known], self.dimension - rank, self.seed)
            vector[rank:] = (weights[~known] * np.float32(self._later_idf)) @ directions
        length = float(np.linalg.norm(vector))
        return vector / np.float32(length) if length > 0 else vector

    def state(self) -> dict[str, NDArray[Any]]:
        """Return the fitted state as plain arrays, for ``numpy.savez``."""
        assert self._buckets is not None
        return {
            "buckets": self._buckets,
            "idf": self._idf,
            "projection": self._projection,
            "settings": np.array([self.dimension, self.seed], np.int64),
            "later_idf": np.array([self._later_idf], np.float64),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, NDArray[Any]]) -> TfidfSvdEmbedder:
        """Return the embedder with a state of :meth:`state`."""
        try:
            dimension, seed = (int(value) for value in state["settings"])
            embedder = cls(dimension, seed=seed)
            embedder._idf = np.asarray(state["idf"], np.float32)
            embedder._projection = np.asarray(state["projection"], np.float32)
            embedder._later_idf = float(state["later_idf"][0])
            embedder._buckets = np.asarray(state["buckets"], np.int64)
        except (KeyError, ValueError, IndexError) as error:
            raise StoreCorruptError(f"the saved embedder lacks {error}: restore the store from a backup") from error
        return embedder

    def _decompose(self, counts: Sequence[Counter[int]], buckets: Ids, progress: Callable[[float], object]) -> Vectors:
        """Return the right singular vectors of the weighted term matrix: ``[num buckets, rank]``."""
        sparse = extra_module("scipy.sparse")

        starts = np.cumsum([0, *(len(count) for count in counts)])
        wanted = np.fromiter((b for count in counts for b in count), np.int64, starts[-1])
        columns = np.searchsorted(buckets, wanted)
        values = np.fromiter((v for count in counts for v in count.values()), np.float64, starts[-1])
        values = (1 + np.log(values)) * self._idf[columns]
        lengths = np.sqrt(np.add.reduceat(values**2, starts[:-1]))
        values /= np.repeat(lengths, np.diff(starts))
        terms = sparse.csr_matrix((values, columns, starts), shape=(len(counts), len(buckets)))

        rank = min(int(self.dimension * _SVD_SHARE), *terms.shape)
        if len(counts) <= _DENSE_SVD_ROWS:
            eigenvalues, left = np.linalg.eigh((terms @ terms.T).toarray())
            order = [i for i in np.argsort(-eigenvalues, kind="stable")[:rank] if eigenvalues[i] > 1e-8]
            right = terms.T @ left[:, order] / np.sqrt(eigenvalues[order])
        else:
            right = _right_singular_vectors(terms, rank, self.seed, progress)
        return np.ascontiguousarray(right, np.float32)


def _right_singular_vectors(terms: Any, rank: int, seed: int, progress: Callable[[float], object]) -> Any:
    """Return the first ``rank`` right singular vectors of a sparse matrix, by randomised subspace iteration (Halko et
    al. 2011, Algorithm 4.4): ``[num columns, rank]``.
    """
    linalg = extra_module("scipy.linalg")

    rng = np.random.default_rng(seed)
    width = min(rank + _SVD_OVERSAMPLING, *terms.shape)
    basis = rng.standard_normal((terms.shape[1], width))
    num_steps = 2 * _SVD_ITERATIONS + 2
    for step in range(num_steps):
        reached = (terms if step % 2 == 0 else terms.T) @ basis
        if step < num_steps - 1:
            basis, _ = linalg.lu(reached, permute_l=True, check_finite=False)  # spans the same, sooner
        else:
            basis, _ = linalg.qr(reached, mode="economic", check_finite=False)
        progress((step + 1) / num_steps)
    _, _, transposed = np.linalg.svd(terms @ basis, full_matrices=False)
    return basis @ transposed[:rank].T


def _count_buckets(text: str) -> Counter[int]:
    words = words_of(text) or [text]
    return Counter(zlib.crc32(word.encode("utf-8", "replace")) % _NUM_BUCKETS for word in words)


def _directions(buckets: Ids, dimension: int, seed: int) -> Vectors:
    """Return a pseudo-random unit vector of signs for each bucket: ``[n, dimension]`` (splitmix64)."""
    num_words = -(-dimension // 64)
    with np.errstate(over="ignore"):
        x = buckets.astype(np.uint64)[:, None] * np.uint64(num_words) + np.arange(num_words, dtype=np.uint64)
        x = (x + np.uint64(seed & 0xFFFFFFFF)) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    bits = np.unpackbits(x.astype("<u8").view(np.uint8).reshape(len(buckets), -1), axis=1)[:, :dimension]
    return (bits.astype(np.float32) * 2 - 1) / np.float32(math.sqrt(dimension))
