"""What a request and an engine report about the cache. The same objects reach every framework's callbacks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

from ragcache_core.types import DocId, PromptSegment, SegmentKind


@dataclass(frozen=True, slots=True)
class DocumentStats:
    """How much of one document of a prompt came out of the cache."""

    doc_id: DocId
    num_tokens: int
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class RequestStats:
    """What one request cost: tokens by origin and times in seconds.

    ``num_cached_tokens`` is what the engine reported as served from its KV cache. ``ttft_s`` is measured at the
    client, from sending the request to its first token; it is ``None`` where the answer was not streamed.
    """

    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    ttft_s: float | None
    total_s: float
    documents: tuple[DocumentStats, ...] = ()

    @property
    def num_computed_tokens(self) -> int:
        """Prompt tokens that the engine had to prefill."""
        return self.num_prompt_tokens - self.num_cached_tokens

    def to_dict(self) -> dict[str, object]:
        """Return plain JSON data, the content of ``response_metadata["ragcache"]``."""
        return {**asdict(self), "documents": [asdict(d) for d in self.documents],
                "num_computed_tokens": self.num_computed_tokens}  # fmt: skip


def document_stats(segments: Iterable[PromptSegment], num_cached_tokens: int) -> tuple[DocumentStats, ...]:
    """Return how much of each document lies inside the cached prefix of ``num_cached_tokens`` tokens.

    vLLM's prefix cache serves a prefix, so a document is cached as far as the prefix reaches into it.
    """
    return tuple(
        DocumentStats(s.doc_id or "", s.num_tokens, min(max(num_cached_tokens - s.start, 0), s.num_tokens))
        for s in segments
        if s.kind is SegmentKind.DOCUMENT
    )


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A reading of the server's counters since it started.

    ``kv_cache_usage`` is the share of GPU (or CPU-platform) KV blocks in use, 0 to 1. ``num_prefix_query_tokens``
    and ``num_prefix_hit_tokens`` are prompt tokens that were looked up in, and found in, the prefix cache.
    """

    num_running: int
    num_waiting: int
    kv_cache_usage: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_prefix_query_tokens: int
    num_prefix_hit_tokens: int
    num_preemptions: int
    num_restarts: int = 0

    @property
    def prefix_hit_rate(self) -> float:
        """Share of looked-up prompt tokens that were in the cache; 0 before the first look-up."""
        return self.num_prefix_hit_tokens / self.num_prefix_query_tokens if self.num_prefix_query_tokens else 0.0

    def to_dict(self) -> dict[str, object]:
        """Return plain JSON data."""
        return {**asdict(self), "prefix_hit_rate": self.prefix_hit_rate}


def request_stats_from_dict(data: Mapping[str, object]) -> RequestStats:
    """Return the stats that :meth:`RequestStats.to_dict` wrote (a callback reads them from a response).

    Raises:
        ValueError: ``data`` is not such a dictionary.
    """
    fields = dict(data)
    fields.pop("num_computed_tokens", None)
    documents = fields.pop("documents", [])
    try:
        return RequestStats(**fields, documents=tuple(DocumentStats(**d) for d in documents))  # type: ignore[arg-type, attr-defined]
    except TypeError as error:
        raise ValueError(f"not the statistics of a RAGCache request: {error}") from error
