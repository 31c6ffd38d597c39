"""Figure 6: how unevenly searches choose documents, by embedding model and by index, and in recorded searches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.papers.figure import PaperFigure, Row
from ragcache_core.errors import ConfigError
from ragcache_core.ingest import find_files, read_documents
from ragcache_core.quality.files import read_questions
from ragcache_core.reports.page import Table
from ragcache_core.retrieval import (
    DocumentStore,
    Embedder,
    MiniLMEmbedder,
    PrecomputedEmbedder,
    TfidfSvdEmbedder,
)
from ragcache_core.sim.traces.trace import read_trace
from ragcache_core.types import Document

CORPUS = Path("examples/demo_corpus")
QUESTIONS = Path("examples/demo_corpus_questions.jsonl")
_INDEXES: Mapping[str, Mapping[str, Any]] = {
    "flat": {"index": "flat"},
    "IVF": {"index": "ivf"},
    "IVF, one list": {"index": "ivf", "nprobe": 1},
    "IVF, SQ8": {"index": "ivf", "encoding": "sq8"},
    "HNSW": {"index": "hnsw"},
}
_EXACT = "flat"
_SHARES = (0.03, 0.1, 0.3)
_GRID = np.linspace(0.0, 1.0, 201)


@dataclass(frozen=True, slots=True)
class Skew:
    """How many of the searches each document answers, in descending order."""

    counts: tuple[int, ...]

    @classmethod
    def of(cls, documents: Iterable[str]) -> Skew:
        """Return that of each search's best document.

        Raises:
            ConfigError: there is no search.
        """
        counts = tuple(sorted(Counter(documents).values(), reverse=True))
        if not counts:
            raise ConfigError("no search found a document: record searches that find some")
        return cls(counts)

    def share(self, top: float) -> float:
        """Return the share of the searches that the ``top`` share of the documents found answers, between two of
        them in a straight line."""
        return float(self._curve(np.asarray([top]))[0])

    def distance(self, other: Skew) -> float:
        """Return the largest difference between both curves of :meth:`share`."""
        return float(np.abs(self._curve(_GRID) - other._curve(_GRID)).max())

    def _curve(self, top: Any) -> Any:
        sums = np.concatenate([[0], np.cumsum(self.counts)]) / sum(self.counts)
        return np.interp(top, np.linspace(0.0, 1.0, len(sums)), sums)


def figure_6(searches: Sequence[Path] = (), questions: Path | None = None) -> PaperFigure:
    """Return how unevenly documents are retrieved, by embedding model, index and recorded trace.

    Args:
        searches: traces; of each request the best document counts.
        questions: a file of ``ragcache quality`` whose documents are the corpus; by default the demo corpus with its
            questions.

    Raises:
        ConfigError: a file cannot be read, or has no search.
    """
    found = dict(_retrieved(questions))
    skews = {name: Skew.of(documents) for name, documents in found.items()}
    exact = {model: skews[model, _EXACT] for model, _ in skews}
    rows = [
        Row.of_range(
            f"{model}: searches of the top 3 % of the documents found, by index",
            [100 * skew.share(_SHARES[0]) for (of, _), skew in skews.items() if of == model],
            None,
            "%",
        )
        for model in exact
    ]
    table = [
        [f"{model}, {index}", *_cells(skew), f"{skew.distance(exact[model]):.2f}", _same(found, model, index)]
        for (model, index), skew in skews.items()
    ]
    for path in searches:
        trace = read_trace(path)
        skew = Skew.of(request.doc_ids[0] for request in trace if request.doc_ids)
        share = 100 * skew.share(_SHARES[0])
        rows.append(Row(f"{path.stem}: searches of the top 3 %", share, share, None, "%"))
        table.append([path.stem, *_cells(skew), "", ""])
    heads = ("searches", "number", "documents found", *(f"of the top {share:.0%}" for share in _SHARES))
    return PaperFigure(
        "Figure 6",
        "retrieval pattern by embedding model and index",
        "The best document of each search (top-1, as in §3.2), by embedding model and index. The curve is the share of "
        "the searches that the most frequent documents answer; its distance is the largest from that of exact search "
        "with the same model. The paper plots curves and says that they are similar: it has no number to compare.",
        rows,
        (),
        "ragcache trace import, and --searches FILE",
        [Table("Searches by document", (*heads, "distance from exact", "same document as exact"), table)],
    )


def _retrieved(questions: Path | None) -> Iterator[tuple[tuple[str, str], list[str]]]:
    """Yield (embedding model, index) and the best document of each question."""
    asked = read_questions(questions or QUESTIONS, None if questions else CORPUS)
    if questions is None:
        corpus = list(read_documents(find_files([CORPUS]).files))
    else:
        corpus = list({document.doc_id: document for each in asked for document in each.documents}.values())
    texts = [document.text for document in corpus]
    for model, embedder in _embedders(texts).items():
        vectors = embedder.embed_documents(texts)
        wanted = [embedder.embed_query(each.text) for each in asked]
        for index, settings in _INDEXES.items():
            yield (model, index), _best(corpus, vectors, wanted, settings)


def _best(corpus: Sequence[Document], vectors: Any, wanted: Sequence[Any], settings: Mapping[str, Any]) -> list[str]:
    with (
        TemporaryDirectory(prefix="ragcache-skew-") as folder,
        DocumentStore.create(folder, embedder=PrecomputedEmbedder(vectors.shape[1]), **settings) as store,
    ):
        store.add(corpus, embeddings=vectors)
        return [store.search_vector(vector, 1).documents[0].doc_id for vector in wanted]


def _embedders(texts: Sequence[str]) -> dict[str, Embedder]:
    embedders: dict[str, Embedder] = {
        "TF-IDF, 128 dimensions": TfidfSvdEmbedder().fit(texts),
        "TF-IDF, 32 dimensions": TfidfSvdEmbedder(32).fit(texts),
    }
    with suppress(ConfigError):  # the extra is not installed
        embedders["MiniLM"] = MiniLMEmbedder()
    return embedders


def _cells(skew: Skew) -> list[str]:
    return [f"{sum(skew.counts):,}", f"{len(skew.counts):,}", *(f"{skew.share(top):.1%}" for top in _SHARES)]


def _same(found: Mapping[tuple[str, str], Sequence[str]], model: str, index: str) -> str:
    pairs = list(zip(found[model, index], found[model, _EXACT], strict=True))
    return f"{sum(one == other for one, other in pairs) / len(pairs):.0%}"
