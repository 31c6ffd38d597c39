"""What a kept conversation, a hidden embedding or reranker, and stages of a remote store bring to the first token.

The baselines are, on the same engine: second turns whose history nobody kept, since no conversation had gone on yet;
and the same searches without speculation.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from langchain_core.callbacks import Callbacks
from langchain_core.documents import BaseDocumentCompressor
from langchain_core.documents import Document as LangChainDocument
from numpy.typing import NDArray

from ragcache_core.bench.token_client import TokenAnswer, TokenClient, TokenRequest
from ragcache_core.client import Engine
from ragcache_core.config import CacheConfig
from ragcache_core.retrieval import DocumentStore, StageSource, TfidfSvdEmbedder, qdrant_stages
from ragcache_core.types import Document, PromptSegment, SegmentKind
from ragcache_core.wire import encode_kv_transfer_params, tile
from tests.benchmarks.engines import BLOCK_SIZE, TokenTexts, block_bytes, launch
from tests.benchmarks.pipeline.overlap import Asked, ask_in_turn, chain, vars_of
from tests.benchmarks.report import Figure, Part, Plan, percentiles_ms
from tests.benchmarks.searches import DocumentTexts, Vectors

_GPU_BLOCKS, _HOST_BLOCKS = 128, 4096
_DOCUMENT_TOKENS, _ANSWER_TOKENS = 300, 192
_WORDS = 330
_EMBEDDING_S = _RERANKER_S = 0.15
_REMOTE_S = {16: 0.02, 128: 0.2}
"""How long a remote store searches with an effort, ``hnsw_ef``."""


def measure_live(plan: Plan) -> Part:
    """Measure them on one engine, one after the other."""
    details: dict[str, Any] = {}
    figures: list[Figure] = []
    cache = CacheConfig(
        kv_cache_bytes=_GPU_BLOCKS * block_bytes(plan.model),
        block_size=BLOCK_SIZE,
        host_bytes=_HOST_BLOCKS * block_bytes(plan.model),
    )
    plan.report("live: starting the engine")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ragcache-bench-")))
        engine = stack.enter_context(launch(plan.model, cache, max_num_batched_tokens=512))
        plan.report("live: conversations")
        not_kept, kept = _conversations(engine, plan)
        details["turns"] = {"not kept": [vars_of_turn(a) for a in not_kept], "kept": [vars_of_turn(a) for a in kept]}
        figures.append(_turn_figure(not_kept, kept))
        texts = DocumentTexts(plan.corpus, _WORDS)
        count, num_documents = plan.sized(12, 3), plan.sized(150, 60)
        sources: dict[str, Callable[[], DocumentStore | StageSource]] = {
            "embedding": lambda: _embedded_elsewhere(folder / "words", stack, texts, num_documents, word_weight=0.7),
            "repeated": lambda: _embedded_elsewhere(folder / "vectors", stack, texts, num_documents, word_weight=0.0),
            "reranker": lambda: _one_stage(folder / "reranked", stack, texts, num_documents),
            "remote": lambda: _remote("slow", stack, texts, num_documents, _REMOTE_S),
            "remote_at_once": lambda: _remote("fast", stack, texts, num_documents, {}),
        }
        for number, (name, made) in enumerate(sources.items()):
            plan.report(f"live: {name}")
            # each question names a record that nobody has asked about
            start = number * (num_documents // len(sources))
            questions = [f"Where does {_key(start + i)} stand?" for i in range(2 * count + 4)]
            source = made()
            reranked: dict[str, Any] = (
                {"compressor": _SlowReranker(), "num_candidates": 8} if name == "reranker" else {}
            )
            asking = partial(chain, engine, source, k=1, **reranked)
            chains = asking(speculate=False), asking(speculate=True)
            if name == "repeated":
                asyncio.run(ask_in_turn(chains, questions))
            without, with_it = asyncio.run(ask_in_turn(chains, questions))
            details[name] = {"without": [vars_of(a) for a in without], "ours": [vars_of(a) for a in with_it]}
            figures.append(_search_figure(name, without, with_it))
    return Part("4 questions of each kind; of conversations a dozen requests", tuple(figures), details)


# Conversations


def _conversations(engine: Engine, plan: Plan) -> tuple[list[TokenAnswer], list[TokenAnswer]]:
    """Return the second turns of conversations before any has gone on, and of others after that."""
    client, texts = TokenClient(engine), TokenTexts.read(plan.corpus, engine.tokenizer)
    count = plan.sized(12, 3)

    def flush(first: int) -> None:
        """Take the GPU's memory for others, and wait for what goes below it."""
        for i in range(8):
            client.ask(texts.request([(first + i, 4 * _DOCUMENT_TOKENS)], "What is it?"))
        time.sleep(0.5)  # the copies to host memory end

    flush(1_000)  # warms up
    sides = []
    for side in range(2):
        first_turns = [_turn(texts, 100 * side + i) for i in range(count)]
        answers = [client.ask(request) for request in first_turns]
        flush(2_000 + 100 * side)
        sides.append(
            [client.ask(_turn(texts, 100 * side + i, answers[i].token_ids)) for i in range(count)],
        )
    return sides[0], sides[1]


def _turn(texts: TokenTexts, number: int, answer: Sequence[int] | None = None) -> TokenRequest:
    """Return the first turn of a conversation about a document of its own; with its ``answer`` the second."""
    document = texts.document(number, _DOCUMENT_TOKENS)
    token_ids = [*texts.prefix, *document, *texts.encode(f"\n\nQuestion: What does document {number} say?")]
    if answer is not None:
        token_ids += [*answer, *texts.encode("\n\nQuestion: And what else does it say?")]
    start = len(texts.prefix)
    span = PromptSegment(SegmentKind.DOCUMENT, start, start + len(document), f"document-{number}")
    params = encode_kv_transfer_params(tile([span], len(token_ids)))
    return TokenRequest(tuple(token_ids), params, _ANSWER_TOKENS if answer is None else 1)


def _turn_figure(not_kept: Sequence[TokenAnswer], kept: Sequence[TokenAnswer]) -> Figure:
    ttfts = [[answer.ttft_s or 0.0 for answer in side] for side in (not_kept, kept)]
    cached = [median(answer.num_cached_tokens for answer in side) for side in (not_kept, kept)]
    note = (
        f"TTFT p50 {1000 * median(ttfts[0]):.0f} ms where it is not; {cached[1]:.0f} tokens of "
        f"{kept[0].num_prompt_tokens} from host memory, and {cached[0]:.0f} where it is not"
    )
    ratio = median(ttfts[0]) / median(ttfts[1])
    return Figure("kept_turn_ttft_ratio", round(ratio, 3), 1.0, *percentiles_ms(ttfts[1]), note)


def vars_of_turn(answer: TokenAnswer) -> dict[str, float]:
    """Return a second turn as plain JSON data."""
    return {"ttft_ms": round(1000 * (answer.ttft_s or 0.0), 2), "cached": answer.num_cached_tokens}


# Searches


def _search_figure(name: str, without: Sequence[Asked], ours: Sequence[Asked]) -> Figure:
    ttft = [median(asked.ttft_s for asked in side) for side in (without, ours)]
    search, unhidden = median(a.search_s for a in without), median(a.unhidden_s for a in ours)
    note = (
        f"TTFT p50 without {1000 * ttft[0]:.0f} ms; search {1000 * search:.0f} ms, of which {1000 * unhidden:.0f} ms "
        "not hidden"
    )
    p50, p99 = percentiles_ms([asked.ttft_s for asked in ours])
    return Figure(f"{name}_ttft_ratio", round(ttft[0] / ttft[1], 3), 1.0, p50, p99, note)


@dataclass(frozen=True, slots=True)
class _ServiceEmbedder:
    """The built-in embedder as a service far away: a question takes its time."""

    own: TfidfSvdEmbedder

    @property
    def name(self) -> str:
        return "service"

    @property
    def dimension(self) -> int | None:
        return self.own.dimension

    def embed_documents(self, texts: Sequence[str]) -> NDArray[np.float32]:
        return self.own.embed_documents(texts)

    def embed_query(self, text: str) -> NDArray[np.float32]:
        time.sleep(_EMBEDDING_S)  # the service
        return self.own.embed_query(text)


def _key(number: int) -> str:
    return f"key{number:04d}"


def _with_key(texts: DocumentTexts, number: int) -> Document:
    document = texts.document(number)
    return replace(document, text=f"{_key(number)}. {document.text}")


def _embedded_elsewhere(
    folder: Path, stack: ExitStack, texts: DocumentTexts, count: int, *, word_weight: float
) -> DocumentStore:
    documents = [_with_key(texts, i) for i in range(count)]
    embedder = _ServiceEmbedder(TfidfSvdEmbedder(64).fit([document.text for document in documents]))
    store = stack.enter_context(DocumentStore.create(folder, embedder=embedder, word_weight=word_weight))
    store.add(documents)
    return store


def _one_stage(folder: Path, stack: ExitStack, texts: DocumentTexts, count: int) -> DocumentStore:
    store = stack.enter_context(DocumentStore.create(folder))
    store.add([_with_key(texts, i) for i in range(count)])
    return store


class _SlowReranker(BaseDocumentCompressor):
    """A cross encoder that takes its time, and puts the record that the question names first."""

    async def acompress_documents(
        self, documents: Sequence[LangChainDocument], query: str, callbacks: Callbacks = None
    ) -> Sequence[LangChainDocument]:
        await asyncio.sleep(_RERANKER_S)  # the service
        return sorted(documents, key=lambda document: query.split()[2] not in document.page_content)

    def compress_documents(
        self, documents: Sequence[LangChainDocument], query: str, callbacks: Callbacks = None
    ) -> Sequence[LangChainDocument]:
        raise NotImplementedError("questions are asked asynchronously")


@dataclass(frozen=True, slots=True)
class _RemoteClient:
    """A Qdrant collection in this process, behind a network and a search that takes the longer the more it looks at."""

    own: Any
    takes_s: dict[int, float]

    def query_points(self, *, search_params: Any, **asked: Any) -> Any:
        time.sleep(self.takes_s.get(search_params.hnsw_ef, 0.0))  # the search
        return self.own.query_points(search_params=search_params, **asked)


def _remote(name: str, stack: ExitStack, texts: DocumentTexts, count: int, takes_s: dict[int, float]) -> StageSource:
    import qdrant_client

    models, size = qdrant_client.models, 64
    stack.enter_context(warnings.catch_warnings())
    warnings.filterwarnings("ignore", "Local mode")  # it is exact, and says so
    client = qdrant_client.QdrantClient(":memory:")
    stack.callback(client.close)
    client.create_collection(name, vectors_config=models.VectorParams(size=size, distance=models.Distance.COSINE))
    vectors = Vectors.draw(count, 1, 0).documents
    client.upsert(
        name,
        [
            models.PointStruct(id=i, vector=vectors[i].tolist(), payload={"text": _with_key(texts, i).text})
            for i in range(count)
        ],
    )
    return qdrant_stages(_RemoteClient(client, takes_s), name, _NearRecord(vectors), efforts=(16, 128))


@dataclass(frozen=True, slots=True)
class _NearRecord:
    """Embeds a question near the record that it names."""

    vectors: NDArray[np.float32]
    name: str = "near-record"

    @property
    def dimension(self) -> int | None:
        return int(self.vectors.shape[1])

    def embed_documents(self, texts: Sequence[str]) -> NDArray[np.float32]:
        raise NotImplementedError("documents have theirs")

    def embed_query(self, text: str) -> NDArray[np.float32]:
        vector: NDArray[np.float32] = self.vectors[int(text.split()[2].removeprefix("key"))]
        return vector
