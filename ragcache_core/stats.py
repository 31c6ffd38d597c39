"""What a request and an engine report about the cache. The same objects reach every framework's callbacks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from typing import Any, TypeVar

from ragcache_core.types import DocId, PromptSegment, SegmentKind, Swap, Tier

MAX_HOTTEST = 10
"""Documents that an engine names as its hottest."""
CONTENTS_ORDERS = ("bytes", "uses", "saved", "age")
"""What cached documents are listed by, the largest first."""
MAX_LISTED = 10_000
"""Documents in one list."""
STATS_KEY = "ragcache"
"""Key of a response's metadata for its statistics, :meth:`RequestStats.to_dict`, in every framework."""
PIPELINE_KEY = "pipeline"
"""Key beside these statistics for the report of the search, :meth:`PipelineReport.to_dict`."""
ANSWER_KEY = "answer_cache"
"""Key in their place of an answer that was kept from before: to which question, and how near that is."""


@dataclass(frozen=True, slots=True)
class Series:
    """How ``/metrics`` shows a figure: the name and description of its series; what is no gauge is a counter."""

    name: str
    text: str
    is_gauge: bool = False


# A statistic is declared once, as a field: its name is the key in JSON and on the wire. The metadata says who reports
# it ("series": RAGCache's engine, also on /metrics; "vllm": vLLM on /metrics; "reported": RAGCache's engine, in its
# answers alone), whether it only grows, and how the values of several engines become one.


def series_of(stats: type) -> dict[str, Series]:
    """Return which of the fields of ``stats`` are series of the server's ``/metrics``."""
    return {each.name: each.metadata["series"] for each in fields(stats) if "series" in each.metadata}


def vllm_series_of(stats: type) -> dict[str, str]:
    """Return which of the fields of ``stats`` are vLLM's own series, and the names of these."""
    return {each.name: each.metadata["vllm"] for each in fields(stats) if "vllm" in each.metadata}


def reported_fields(stats: type, *, required: bool = False) -> list[str]:
    """Return the fields of ``stats`` that RAGCache's engine reports; with ``required``, those that it always does."""
    reported = (each for each in fields(stats) if {"series", "reported"} & each.metadata.keys())
    return [each.name for each in reported if not required or each.metadata.get("reported") == "always"]


def fields_merged_by(merge: str, stats: type) -> list[str]:
    """Return the fields of ``stats`` whose values of several engines become one by ``merge``, ``max`` or ``mean``."""
    return [each.name for each in fields(stats) if each.metadata.get("merge") == merge]


def _counter(name: str, text: str, default: Any = 0) -> Any:
    return field(default=default, metadata={"series": Series(name, text)})


def _gauge(name: str, text: str, default: Any = MISSING, *, merge: str = "sum") -> Any:
    return field(default=default, metadata={"series": Series(name, text, is_gauge=True), "merge": merge})


def _of_vllm(name: str, default: Any = MISSING, *, is_gauge: bool = False, merge: str = "sum") -> Any:
    return field(default=default, metadata={"vllm": f"vllm:{name}", "is_gauge": is_gauge, "merge": merge})


_REPORTED = {"reported": "if known"}
_ALWAYS_REPORTED = {"reported": "always"}
_ORIGIN = {**_REPORTED, "is_origin": True}


def _counters_of(stats: type) -> list[str]:
    series = {name: shown.is_gauge for name, shown in series_of(stats).items()}
    return [each.name for each in fields(stats) if not series.get(each.name, each.metadata.get("is_gauge", True))]


_Stats = TypeVar("_Stats", "EngineStats", "TierStats")


def _growth(later: _Stats, earlier: _Stats) -> dict[str, Any]:
    return {name: getattr(later, name) - getattr(earlier, name) for name in _counters_of(type(later))}


@dataclass(frozen=True, slots=True)
class DocumentStats:
    """The tokens of one document of a prompt, and how many were cached."""

    doc_id: DocId
    num_tokens: int
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class ChunkReuseStats:
    """Chunk reuse of one request.

    ``num_chunks`` documents were reused, with ``num_reused_tokens`` tokens as stored and ``num_recomputed_tokens``
    recomputed. ``num_computed_tokens`` were computed for it, those between the reused documents included: vLLM reports
    them as cached, ``RequestStats.num_cached_tokens`` does not. ``fix_overhead`` is the estimated share of the reused
    documents that has to be recomputed (CFO, Cache-Craft Eq. 12; the mean over them). ``variants`` are the numbers of
    the cached versions that were used. ``num_prefix_tokens`` are prompt tokens from the approximate prefix of an
    earlier request with the same settings on the GPU; they are not recomputed.
    """

    num_chunks: int
    num_reused_tokens: int
    num_recomputed_tokens: int
    num_computed_tokens: int
    fix_overhead: float
    variants: tuple[int, ...] = ()
    num_prefix_tokens: int = 0

    def to_dict(self) -> dict[str, object]:
        """Return plain JSON data."""
        return {**asdict(self), "variants": list(self.variants)}


@dataclass(frozen=True, slots=True)
class PlannedPrompt:
    """One option for a prompt, with its predicted TTFT in seconds from sending it.

    ``name`` is ``exact``, ``document_order`` or ``chunk_reuse``, which has the ``quality`` that was calibrated with its
    ``alpha``. Of the prompt ``num_new_tokens`` have to be computed.
    """

    name: str
    ttft_s: float
    num_cached_tokens: int
    num_new_tokens: int
    alpha: float | None = None
    quality: float | None = None


@dataclass(frozen=True, slots=True)
class DeadlineReport:
    """The plan of a request with a TTFT SLO, ``ttft_slo_s``: the ``choice`` of its prompt, and ``why``.

    ``is_in_time``: the first token is predicted in time; ``None`` if nothing could be predicted, and the prompt was
    sent unchanged. ``exact_ttft_s`` is the predicted TTFT of the unchanged prompt. ``queue_s``, a part of each
    prediction, is the engine's pending work. ``options`` are the available choices, the least deviation first;
    ``left_out`` are the excluded ones, with reasons.
    """

    ttft_slo_s: float
    choice: str
    is_in_time: bool | None
    why: str
    exact_ttft_s: float | None = None
    queue_s: float | None = None
    options: tuple[PlannedPrompt, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, object]:
        """Return plain JSON data."""
        return {**asdict(self), "options": [asdict(option) for option in self.options]}


@dataclass(frozen=True, slots=True)
class RequestStats:
    """Statistics of one request: tokens by tier, copied bytes, and times in seconds.

    ``num_cached_tokens`` is what the engine reported as served from its KV cache. ``num_gpu_tokens``,
    ``num_host_tokens``, ``num_disk_tokens`` and ``num_shared_tokens`` (of a shared store) are these by tier.
    ``num_loaded_bytes`` were loaded into GPU memory for the request, ``num_stored_bytes`` offloaded from it, and the
    request waited ``queue_s`` seconds to be scheduled. These are ``None`` for plain vLLM, which does not report them.

    ``ttft_s`` is measured at the client, from sending the request to its first token. Without
    streaming it is measured by the engine, from the request's arrival there; ``None`` without one.

    ``chunk_reuse`` is ``None`` where the answer is exact, as far as the engine says. ``deadline`` says how a request
    with a ``ttft_slo`` was planned, and is ``None`` without one.

    ``num_resumes`` is how often a streamed answer continued after a failure of its engine. ``is_resampled``: it was
    sampled, and continued with another random state than an undisturbed answer would have.
    """

    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    ttft_s: float | None
    total_s: float
    documents: tuple[DocumentStats, ...] = ()
    num_gpu_tokens: int | None = field(default=None, metadata=_ORIGIN)
    num_host_tokens: int | None = field(default=None, metadata=_ORIGIN)
    num_disk_tokens: int | None = field(default=None, metadata=_ORIGIN)
    num_shared_tokens: int | None = field(default=None, metadata=_ORIGIN)
    num_loaded_bytes: int | None = field(default=None, metadata=_REPORTED)
    num_stored_bytes: int | None = field(default=None, metadata=_REPORTED)
    queue_s: float | None = field(default=None, metadata=_REPORTED)
    chunk_reuse: ChunkReuseStats | None = field(default=None, metadata=_REPORTED)
    deadline: DeadlineReport | None = None
    num_resumes: int = 0
    is_resampled: bool = False

    @property
    def num_computed_tokens(self) -> int:
        """Prompt tokens that the engine had to prefill."""
        return self.num_prompt_tokens - self.num_cached_tokens

    def to_dict(self) -> dict[str, object]:
        """Return plain JSON data, the content of ``response_metadata["ragcache"]``; a deadline where there was one."""
        reuse = None if self.chunk_reuse is None else self.chunk_reuse.to_dict()
        data = {**asdict(self), "documents": [asdict(d) for d in self.documents], "chunk_reuse": reuse,
                "num_computed_tokens": self.num_computed_tokens}  # fmt: skip
        del data["deadline"]
        return data if self.deadline is None else {**data, "deadline": self.deadline.to_dict()}


TOKENS_BY_ORIGIN = tuple(each.name for each in fields(RequestStats) if each.metadata.get("is_origin"))
"""Statistics of a request that say which tier its cached tokens came from."""


def document_stats(segments: Iterable[PromptSegment], num_cached_tokens: int) -> tuple[DocumentStats, ...]:
    """Return how much of each document lies inside the cached prefix of ``num_cached_tokens`` tokens.

    vLLM's prefix cache serves a prefix, so a document is cached as far as the prefix reaches into it. What stands
    between two documents, a turn of a chat perhaps, is none of theirs. One that is shown twice is there twice.
    """
    documents = [s for s in segments if s.kind is SegmentKind.DOCUMENT]
    lengths = [(s.end if s.text_end is None else s.text_end) - s.start for s in documents]
    return tuple(
        DocumentStats(s.doc_id or "", num_tokens, min(max(num_cached_tokens - s.start, 0), num_tokens))
        for s, num_tokens in zip(documents, lengths, strict=True)
    )


@dataclass(frozen=True, slots=True)
class PipelineReport:
    """Statistics of one search and its speculation. Times in seconds.

    ``search_s`` is from the start of the search to its final documents, in ``num_stages`` stages. ``num_started``
    speculations were sent, ``num_cancelled`` of them ended because the documents changed; ``is_confirmed``: the last
    one was a hit. ``non_overlapped_search_s`` is the search time that did not overlap (RAGCache §7.4): the delay of the
    engine's start, compared with a request whose documents are known at once. It is the time until the confirmed
    speculation was sent, less the CPU time to build its request, plus its waiting time in the engine, at first and
    after each preemption before its confirmation. It is the whole search without a speculation hit, or until the engine
    has reported. ``skipped_because`` says why nothing was sent; ``None`` where something was. ``swaps`` are the
    documents that are shown in place of nearly equal ones.
    """

    search_s: float
    non_overlapped_search_s: float
    num_stages: int
    num_started: int
    num_cancelled: int
    is_confirmed: bool
    skipped_because: str | None = None
    swaps: tuple[Swap, ...] = ()

    @property
    def overlapped_search_s(self) -> float:
        """The search time that overlapped with work on the answer."""
        return self.search_s - self.non_overlapped_search_s

    def to_dict(self) -> dict[str, object]:
        """Return plain JSON data."""
        swaps = [asdict(swap) for swap in self.swaps]
        return {**asdict(self), "swaps": swaps, "overlapped_search_s": self.overlapped_search_s}


@dataclass(frozen=True, slots=True)
class TierStats:
    """One tier of the engine's cache, counted since the engine started.

    ``name`` is ``gpu``, ``host``, ``disk`` or ``shared``. ``num_hit_tokens`` are prompt tokens that were served from
    here. A tier that failed (a disk that is missing or hangs) is switched off: ``is_enabled`` is false, and the other
    tiers work. A disk or shared store is tried again. ``num_blocks`` of a shared store are the blocks that this engine
    stored or found there; its ``capacity_bytes`` is ``shared_bytes``, and 0 without it. With it ``used_bytes`` are
    those of all engines' blocks.

    ``num_corrupt_blocks`` of the disk or the shared store were damaged, and recomputed. ``num_dropped_blocks`` were not
    written: the tier was full, slow, or failed.
    """

    name: str
    capacity_bytes: int = _gauge("ragcache_tier_capacity_bytes", "Size of a tier.")
    used_bytes: int = _gauge("ragcache_tier_used_bytes", "Bytes of cached KV in a tier.")
    num_blocks: int = _gauge("ragcache_tier_blocks", "Blocks of cached KV in a tier.")
    num_evicted_blocks: int = _counter("ragcache_tier_evicted_blocks", "Blocks evicted from a tier.", MISSING)
    num_hit_tokens: int = _counter("ragcache_tier_hit_tokens", "Prompt tokens served from a tier.", MISSING)
    is_enabled: bool = _gauge("ragcache_tier_enabled", "Whether a tier works: 1 or 0.")
    num_corrupt_blocks: int = _counter(
        "ragcache_corrupt_blocks", "Offload blocks with a wrong checksum; each was a miss."
    )
    num_dropped_blocks: int = _counter(
        "ragcache_dropped_blocks", "Offload blocks that were not written: the tier was full, slow, or failed."
    )

    @property
    def usage(self) -> float:
        """Share of the capacity that is in use; 0 for a tier without any."""
        return self.used_bytes / self.capacity_bytes if self.capacity_bytes else 0.0


@dataclass(frozen=True, slots=True)
class DocumentUse:
    """A document, and how many requests showed it since the engine started, at any position.

    Requests without metadata are not counted. ``num_tokens`` is its length in whole blocks in the latest request.
    ``tiers`` hold a part of it behind any prefix; empty if it is evicted. ``label`` is its source, if the id is not
    readable. Of more than 1,024 documents the least used are dropped, and their counts start again.
    """

    doc_id: DocId
    frequency: float
    num_tokens: int
    tiers: tuple[str, ...]
    label: str | None = None

    @property
    def name(self) -> str:
        """The label with the id, or the id alone."""
        return self.doc_id if self.label is None else f"{self.label} ({self.doc_id})"

    def to_dict(self) -> dict[str, object]:
        """Return plain JSON data."""
        label = {} if self.label is None else {"label": self.label}
        return {
            "doc_id": self.doc_id,
            "frequency": self.frequency,
            "num_tokens": self.num_tokens,
            "tiers": list(self.tiers),
            **label,
        }


@dataclass(frozen=True, slots=True)
class ChunkStats:
    """The documents that an engine stores for chunk reuse, counted since it started.

    ``num_chunks`` contents are stored as ``num_variants``, on ``used_tokens`` of ``capacity_tokens`` in host memory and
    ``used_disk_tokens`` of ``disk_capacity_tokens`` on disk, in whole pages. ``num_requests`` reused
    ``num_reused_chunks``: ``num_reused_tokens`` as they were stored, ``num_recomputed_tokens`` recomputed, and found
    ``num_prefix_tokens`` as requests before them, with the same settings, had left them on the GPU.

    ``num_refused_requests``, speculative ones included, wanted to reuse documents and were answered exactly: with an
    adapter, a cache salt, images, prompt embeddings or prompt logprobs, more documents than a request may have, or a
    quality that was not measured. ``num_mismatched_chunks`` had other tokens than stored, ``num_too_long_chunks`` were
    longer than the memory, ``num_capacity_misses`` found no free space: they were computed exactly.
    ``num_dropped_chunks`` were not written to disk, ``num_corrupt_chunks`` were damaged or gone there,
    ``num_lost_chunks`` dropped because of that.
    """

    num_chunks: int = _gauge("ragcache_chunk_stored", "Documents stored for reuse.")
    num_variants: int = _gauge(
        "ragcache_chunk_variants", "Cached versions of these documents, each computed behind other documents."
    )
    capacity_tokens: int = _gauge(
        "ragcache_chunk_capacity_tokens", "Tokens that fit into the share of host memory for chunk reuse."
    )
    used_tokens: int = _gauge("ragcache_chunk_used_tokens", "Tokens of this share in use.")
    disk_capacity_tokens: int = _gauge(
        "ragcache_chunk_disk_capacity_tokens", "Tokens that fit into the share of the disk for chunk reuse."
    )
    used_disk_tokens: int = _gauge("ragcache_chunk_disk_used_tokens", "Tokens of this share in use.")
    is_disk_enabled: bool = _gauge(
        "ragcache_chunk_disk_enabled", "Whether documents for reuse are stored on disk: 1 or 0."
    )
    num_requests: int = _counter("ragcache_chunk_requests", "Requests that reused documents.")
    num_refused_requests: int = _counter(
        "ragcache_chunk_refused_requests", "Requests that asked for reuse, but were answered exactly."
    )
    num_reused_chunks: int = _counter("ragcache_chunk_reused", "Documents that requests reused.")
    num_reused_tokens: int = _counter(
        "ragcache_chunk_reused_tokens", "Tokens of reused documents whose stored KV was used."
    )
    num_recomputed_tokens: int = _counter(
        "ragcache_chunk_recomputed_tokens", "Tokens of reused documents that were recomputed."
    )
    num_prefix_tokens: int = _counter(
        "ragcache_chunk_prefix_tokens", "Prompt tokens served from approximate prefixes of earlier requests on the GPU."
    )
    num_captured_chunks: int = _counter("ragcache_chunk_captured", "Documents whose KV was stored for reuse.")
    num_evicted_chunks: int = _counter(
        "ragcache_chunk_evicted", "Documents for reuse that were evicted from host memory."
    )
    num_mismatched_chunks: int = _counter(
        "ragcache_chunk_mismatched",
        "Documents with other tokens than their stored version. They were computed exactly.",
    )
    num_too_long_chunks: int = _counter(
        "ragcache_chunk_too_long", "Documents longer than the memory for chunk reuse. They were computed exactly."
    )
    num_capacity_misses: int = _counter(
        "ragcache_chunk_crowded_out", "Documents for which there was no free space. They were computed exactly."
    )
    num_dropped_chunks: int = _counter("ragcache_chunk_dropped", "Documents for reuse that were not written to disk.")
    num_corrupt_chunks: int = _counter(
        "ragcache_chunk_corrupt", "Documents for reuse that were damaged or missing on disk; each was a miss."
    )
    num_lost_chunks: int = _counter(
        "ragcache_chunk_lost", "Documents for reuse that were dropped because of damaged or missing parts."
    )


@dataclass(frozen=True, slots=True)
class ForgetReceipt:
    """The KV of documents that an engine deleted.

    The documents were cached behind ``num_paths`` prefixes. Their KV, and the KV behind them, took ``num_blocks`` by
    tier (``gpu``, ``host``, ``disk``) and ``num_variants`` cached versions for chunk reuse; ``num_bytes`` are those of
    both. ``unknown`` are ids that the engine does not know.

    ``num_requests`` running requests still use some of this KV, which no other request can hit, until they end.
    ``num_pending`` blocks are still being copied or overwritten. ``problems`` say what may be left for good, and what
    to do. The receipt is complete when there is none of these.
    """

    forgotten: tuple[DocId, ...] = ()
    unknown: tuple[DocId, ...] = ()
    num_paths: int = 0
    num_variants: int = 0
    num_blocks: Mapping[str, int] = field(default_factory=dict)
    num_bytes: Mapping[str, int] = field(default_factory=dict)
    num_requests: int = 0
    num_pending: int = 0
    problems: tuple[str, ...] = ()
    duration_s: float = 0.0
    unsearched: tuple[str, ...] = ()
    """KV that is not known by document, with how to delete it: copies of a text that the server did not recognise."""

    @property
    def is_complete(self) -> bool:
        """Whether no KV of the documents is left in any tier or request."""
        return not (self.num_requests or self.num_pending or self.problems)

    def merge_sequential(self, other: ForgetReceipt) -> ForgetReceipt:
        """Return this and the receipt for other documents, which came later, as one."""
        return ForgetReceipt(
            forgotten=self.forgotten + other.forgotten,
            unknown=self.unknown + other.unknown,
            num_paths=self.num_paths + other.num_paths,
            num_variants=self.num_variants + other.num_variants,
            num_blocks=_summed(self.num_blocks, other.num_blocks),
            num_bytes=_summed(self.num_bytes, other.num_bytes),
            num_requests=other.num_requests,
            num_pending=other.num_pending,
            problems=other.problems,
            duration_s=self.duration_s + other.duration_s,
            unsearched=tuple(dict.fromkeys(self.unsearched + other.unsearched)),
        )

    def merge_replicas(self, other: ForgetReceipt) -> ForgetReceipt:
        """Return this and another engine's receipt for the same documents as one: unknown is what both do not know."""
        known = dict.fromkeys(self.forgotten + other.forgotten)
        return replace(
            self.merge_sequential(other),
            forgotten=tuple(known),
            unknown=tuple(doc_id for doc_id in self.unknown if doc_id not in known),
            num_requests=self.num_requests + other.num_requests,
            num_pending=self.num_pending + other.num_pending,
            problems=tuple(dict.fromkeys(self.problems + other.problems)),
            duration_s=max(self.duration_s, other.duration_s),
        )

    def to_dict(self) -> dict[str, object]:
        """Return plain JSON data."""
        return {**asdict(self), "is_complete": self.is_complete}


@dataclass(frozen=True, slots=True)
class RegistrationReceipt:
    """What became of documents that were registered with a server.

    ``errors`` say why documents could not be registered, ``warnings`` what to look at in others, by id.
    """

    num_registered: int = 0
    errors: Mapping[DocId, str] = field(default_factory=dict)
    warnings: Mapping[DocId, str] = field(default_factory=dict)

    def merge(self, other: RegistrationReceipt) -> RegistrationReceipt:
        """Return this and the receipt for other documents as one."""
        return RegistrationReceipt(
            self.num_registered + other.num_registered,
            {**self.errors, **other.errors},
            {**self.warnings, **other.warnings},
        )

    def to_dict(self) -> dict[str, object]:
        """Return plain JSON data."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class CachedPlace:
    """One prefix of a cached document: the documents before it (``behind``), and its bytes by tier."""

    behind: tuple[DocId, ...]
    tokens: int
    bytes: Mapping[str, int]
    uses: int = 0


@dataclass(frozen=True, slots=True)
class CachedDocument:
    """The cached KV of one document.

    It is cached behind ``paths`` prefixes, with ``variants`` cached versions for chunk reuse; ``bytes`` are those of
    both, by tier (``gpu``, ``host``, ``disk``). A text with two ids is listed under both, with the same bytes.

    ``uses`` are the requests that showed it, ``saved_s`` the seconds of compute that its hits saved. Both survive
    restarts if there is a disk. ``age_s`` is the age of its oldest KV. ``places`` are its prefixes, if requested.
    """

    id: DocId
    paths: int
    tokens: int
    variants: int
    bytes: Mapping[str, int]
    uses: int
    saved_s: float
    age_s: float | None
    pinned: bool
    places: tuple[CachedPlace, ...] = ()


@dataclass(frozen=True, slots=True)
class CacheContents:
    """Documents in the cache, the largest first by what they were sorted by; ``total`` is how many there are.

    ``unknown`` are requested ids without a cached token.
    """

    documents: tuple[CachedDocument, ...] = ()
    total: int = 0
    unknown: tuple[DocId, ...] = ()

    def to_dict(self) -> dict[str, object]:
        """Return plain JSON data."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class PinReceipt:
    """The result of a call that pins or unpins documents: ids that ``changed``, and ids ``unknown`` to the cache.

    ``num_pinned`` documents are pinned now; their prefixes take ``num_bytes`` of the engine's own KV memory, of the
    ``limit_bytes`` that they may take. Prefixes of tenants are not counted.
    """

    changed: tuple[DocId, ...] = ()
    unknown: tuple[DocId, ...] = ()
    num_pinned: int = 0
    num_bytes: int = 0
    limit_bytes: int = 0

    def to_dict(self) -> dict[str, object]:
        """Return plain JSON data."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class PrefetchReceipt:
    """The tokens of documents that are being read from disk into host memory, on ``num_paths`` prefixes.

    ``num_left_out`` further prefixes are on disk only, and take too much host memory: a prefix may take a quarter of
    it. ``unknown`` documents are in no tier.
    """

    num_read_tokens: int = 0
    num_paths: int = 0
    num_left_out: int = 0
    unknown: tuple[DocId, ...] = ()

    def to_dict(self) -> dict[str, object]:
        """Return plain JSON data."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class CollectedFolder:
    """A cache namespace that no engine used for ``days``, and the model that it belongs to."""

    path: str
    num_bytes: int
    days: float
    of: str


@dataclass(frozen=True, slots=True)
class CollectedFolders:
    """Folders that were deleted, or with ``dry_run`` would be."""

    folders: tuple[CollectedFolder, ...] = ()
    dry_run: bool = False

    @property
    def num_bytes(self) -> int:
        """Their size on disk."""
        return sum(folder.num_bytes for folder in self.folders)

    def to_dict(self) -> dict[str, object]:
        """Return plain JSON data."""
        return asdict(self)


def _summed(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return {name: one.get(name, 0) + other.get(name, 0) for name in {**one, **other}}


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A reading of the server's counters since it started.

    ``kv_cache_usage`` is the share of GPU (or CPU-platform) KV blocks in use, 0 to 1. ``num_prefix_query_tokens``
    and ``num_prefix_hit_tokens`` are prompt tokens that were looked up in, and found in, the prefix cache.

    ``num_first_tokens`` answers have begun, ``sum_ttft_s`` after the arrival of their requests, added up.

    The rest is RAGCache's own: ``policy`` is the name of its replacement policy (``None``: plain vLLM), ``tiers`` go
    from the fastest to the slowest, ``hottest_documents`` from the most used on. ``num_ignored_metadata`` requests
    named documents that contradicted their prompt; ``num_lost_blocks`` of the disk tier were missing, and recomputed.
    ``num_corrupt_blocks`` and ``num_dropped_blocks`` are the sums of the tiers' figures of the same name. The
    shared store failed, or did not answer in time, ``num_shared_failures`` times; ``num_shared_pending_blocks`` wait to
    be written there.

    ``num_reordered_requests`` were served before an earlier one; ``max_overtaken`` is the largest number of requests
    that overtook the same one. ``num_requests`` are real requests that were admitted: ``num_reordered_prompts`` of them
    showed their documents in another order than retrieved, and ``num_followup_turns`` continued a conversation.

    ``num_confirmed_speculations`` of ``num_speculative_requests`` were speculation hits. ``num_speculative_tokens`` of
    their prompts were computed before that, and ``num_wasted_tokens`` of these were used by no request.

    ``chunks`` is ``None`` in an engine without chunk reuse.
    """

    num_running: int = _of_vllm("num_requests_running", is_gauge=True)
    num_waiting: int = _of_vllm("num_requests_waiting", is_gauge=True)
    kv_cache_usage: float = _of_vllm("kv_cache_usage_perc", is_gauge=True, merge="mean")
    num_prompt_tokens: int = _of_vllm("prompt_tokens_total")
    num_output_tokens: int = _of_vllm("generation_tokens_total")
    num_prefix_query_tokens: int = _of_vllm("prefix_cache_queries_total")
    num_prefix_hit_tokens: int = _of_vllm("prefix_cache_hits_total")
    num_preemptions: int = _of_vllm("num_preemptions_total")
    num_first_tokens: int = _of_vllm("time_to_first_token_seconds_count", 0)
    sum_ttft_s: float = _of_vllm("time_to_first_token_seconds_sum", 0.0)
    num_restarts: int = 0
    policy: str | None = field(default=None, metadata=_ALWAYS_REPORTED)
    tiers: tuple[TierStats, ...] = field(default=(), metadata=_ALWAYS_REPORTED)
    hottest_documents: tuple[DocumentUse, ...] = field(default=(), metadata=_ALWAYS_REPORTED)
    num_requests: int = _counter(
        "ragcache_requests", "Real requests that were admitted; speculative ones once they are confirmed."
    )
    num_ignored_metadata: int = _counter(
        "ragcache_ignored_metadata", "Requests whose documents contradicted their prompt."
    )
    num_corrupt_blocks: int = field(default=0, metadata=_REPORTED)
    num_lost_blocks: int = _counter(
        "ragcache_lost_blocks", "Offload blocks that were incomplete or without their prefix at the start."
    )
    num_dropped_blocks: int = field(default=0, metadata=_REPORTED)
    num_shared_failures: int = _counter(
        "ragcache_shared_failures", "How often the shared store failed, or did not answer in time."
    )
    num_shared_pending_blocks: int = _gauge(
        "ragcache_shared_pending_blocks", "Blocks that wait to be written to the shared store.", 0
    )
    num_reordered_requests: int = _counter(
        "ragcache_reordered_requests", "Requests that were served before an earlier one."
    )
    max_overtaken: int = _gauge(
        "ragcache_max_overtaken", "The most later requests that were served before a waiting one.", 0, merge="max"
    )
    num_reordered_prompts: int = _counter(
        "ragcache_reordered_prompts", "Requests whose documents are not in retrieval order."
    )
    num_followup_turns: int = _counter(
        "ragcache_followup_turns", "Requests that begin with an earlier one and its answer: a conversation's next turn."
    )
    num_speculative_requests: int = _counter("ragcache_speculative_requests", "Speculative requests.")
    num_confirmed_speculations: int = _counter(
        "ragcache_confirmed_speculations", "Speculation hits: speculative requests that became real ones."
    )
    num_speculative_tokens: int = _counter("ragcache_speculative_tokens", "Prompt tokens computed speculatively.")
    num_wasted_tokens: int = _gauge(
        "ragcache_wasted_tokens", "Speculatively computed prompt tokens that no request used.", 0
    )
    chunks: ChunkStats | None = field(default=None, metadata=_REPORTED)

    @property
    def prefix_hit_rate(self) -> float:
        """Share of looked-up prompt tokens that hit the GPU KV cache; 0 before the first lookup."""
        return self.num_prefix_hit_tokens / self.num_prefix_query_tokens if self.num_prefix_query_tokens else 0.0

    @property
    def cached_share(self) -> float:
        """Share of looked-up prompt tokens that hit in any tier; 0 before the first lookup."""
        return sum(map(self.tier_hit_rate, self.tiers)) if self.tiers else self.prefix_hit_rate

    @property
    def mean_ttft_s(self) -> float | None:
        """Mean seconds from a request's arrival at the server to its first token; None before the first one."""
        return self.sum_ttft_s / self.num_first_tokens if self.num_first_tokens else None

    def since(self, earlier: EngineStats) -> EngineStats:
        """Return the counts since an earlier reading; gauges keep their present value.

        If the server's counters were reset in between, the counts are those since the reset.
        """
        before = {tier.name: tier for tier in earlier.tiers}
        if not before.keys() >= {tier.name for tier in self.tiers}:
            return self
        spent, of_tiers = _growth(self, earlier), [_growth(tier, before[tier.name]) for tier in self.tiers]
        if min(count for growth in (spent, *of_tiers) for count in growth.values()) < 0:
            return self
        tiers = (replace(tier, **growth) for tier, growth in zip(self.tiers, of_tiers, strict=True))
        return replace(self, **spent, tiers=tuple(tiers))

    @property
    def reordered_share(self) -> float:
        """Share of requests whose documents are not in retrieval order; 0 before the first request."""
        return self.num_reordered_prompts / self.num_requests if self.num_requests else 0.0

    def tier_hit_rate(self, tier: TierStats) -> float:
        """Return the share of looked-up prompt tokens that ``tier`` served; 0 before the first look-up."""
        return tier.num_hit_tokens / self.num_prefix_query_tokens if self.num_prefix_query_tokens else 0.0

    def to_dict(self) -> dict[str, object]:
        """Return plain JSON data."""
        return {
            **asdict(self),
            "tiers": [{**asdict(t), "hit_rate": self.tier_hit_rate(t)} for t in self.tiers],
            "hottest_documents": [document.to_dict() for document in self.hottest_documents],
            "prefix_hit_rate": self.prefix_hit_rate,
            "cached_share": self.cached_share,
            "mean_ttft_s": self.mean_ttft_s,
            "reordered_share": self.reordered_share,
        }


ENGINE_SERIES = {
    "num_prompt_tokens": Series("ragcache_prompt_tokens", "Prompt tokens of real requests that were admitted."),
    "num_loaded_bytes": Series("ragcache_loaded_bytes", "Bytes of KV copied into GPU memory."),
    "num_stored_bytes": Series("ragcache_stored_bytes", "Bytes of KV copied out of GPU memory."),
    **series_of(EngineStats),
}
"""Series of the engine's report; the first three are sums over requests, which a client reads of each response."""
TIER_SERIES = series_of(TierStats)
CHUNK_SERIES = series_of(ChunkStats)
REQUEST_TIMES = {
    "queue_s": Series("ragcache_queue_seconds", "Seconds that a request waited to be scheduled, by its lowest tier."),
    "load_s": Series("ragcache_load_seconds", "Seconds that a request waited for its KV, by its lowest tier."),
}
"""Histograms over requests. A request's lowest tier is the slowest one that had some of its KV."""
TENANT_SERIES = {
    "num_requests": Series("ragcache_tenant_requests", "Requests of a tenant, without speculative ones."),
    "num_prompt_tokens": Series("ragcache_tenant_prompt_tokens", "Prompt tokens of these requests."),
}
TENANT_TIER_SERIES = {
    "num_hit_tokens": Series("ragcache_tenant_hit_tokens", "Prompt tokens of a tenant that came from this tier."),
    "num_evicted_blocks": Series("ragcache_tenant_evicted_blocks", "Blocks of a tenant that were evicted."),
    "used_bytes": Series("ragcache_tenant_used_bytes", "Bytes that a tenant has in this tier.", is_gauge=True),
}


def request_stats_from_dict(data: Mapping[str, object]) -> RequestStats:
    """Return the stats that :meth:`RequestStats.to_dict` wrote (a callback reads them from a response).

    Raises:
        ValueError: ``data`` is not such a dictionary.
    """
    fields = dict(data)
    for beside in ("num_computed_tokens", PIPELINE_KEY):  # derived; the report of a search
        fields.pop(beside, None)
    documents = fields.pop("documents", [])
    reuse: Any = fields.pop("chunk_reuse", None)
    deadline: Any = fields.pop("deadline", None)
    try:
        chunk_reuse = None if reuse is None else ChunkReuseStats(**{**reuse, "variants": tuple(reuse["variants"])})
        return RequestStats(
            **fields,  # type: ignore[arg-type]
            documents=tuple(DocumentStats(**d) for d in documents),  # type: ignore[attr-defined]
            chunk_reuse=chunk_reuse,
            deadline=None if deadline is None else _deadline_from(deadline),
        )
    except (TypeError, KeyError) as error:
        raise ValueError(f"not the statistics of a RAGCache request: {error}") from error


def _deadline_from(data: Mapping[str, Any]) -> DeadlineReport:
    return DeadlineReport(**{**data, "options": tuple(PlannedPrompt(**option) for option in data["options"])})


_MAXIMA = fields_merged_by("max", EngineStats)


def merged_report(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return one report for those of several engines, which have the same settings: figures add up.

    A tier is enabled where it is in all of them.
    """
    if len(reports) == 1:
        return reports[0]
    total = _merged(reports)
    shared = {}
    for kind in ("tenants", "collections"):
        by_name = [report.get(kind, {}) for report in reports]  # one may have begun with another file of tenants
        names = dict.fromkeys(name for each in by_name for name in each)
        shared[kind] = {name: _merged([each[name] for each in by_name if name in each]) for name in names}
    return {
        **total,
        **{name: max(report[name] for report in reports) for name in _MAXIMA},
        **{kind: by_name for kind, by_name in shared.items() if by_name},
    }


def _merged(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return figures that are added up, tier by tier and document by document."""
    total = reports[0]
    for report in reports[1:]:
        total = added(total, report)
    tiers: dict[str, dict[str, Any]] = {}
    uses: dict[str, dict[str, Any]] = {}
    for report in reports:
        for tier in report["tiers"]:
            tiers[tier["name"]] = added(tiers[tier["name"]], tier) if tier["name"] in tiers else tier
        for use in report.get("hottest_documents", ()):
            uses[use["doc_id"]] = _merged_use(uses[use["doc_id"]], use) if use["doc_id"] in uses else use
    hottest = sorted(uses.values(), key=lambda use: (-use["frequency"], use["doc_id"]))[:MAX_HOTTEST]
    return {**total, "tiers": [*tiers.values()], **({"hottest_documents": hottest} if hottest else {})}


def _merged_use(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    return {
        "doc_id": one["doc_id"],
        "frequency": one["frequency"] + other["frequency"],
        "num_tokens": max(one["num_tokens"], other["num_tokens"]),
        "tiers": [tier.label for tier in Tier if tier.label in {*one["tiers"], *other["tiers"]}],
        **({"label": label} if (label := one.get("label") or other.get("label")) else {}),
    }


def added(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return the sum of two records, number by number; a flag is set where it is in both, all else is the first's."""
    total = {**other, **one}
    for name in one.keys() & other.keys():
        match one[name], other[name]:
            case bool(first), bool(second):
                total[name] = first and second
            case (int() | float()) as first, (int() | float()) as second:
                total[name] = first + second
            case dict(first), dict(second):
                total[name] = added(first, second)
    return total
