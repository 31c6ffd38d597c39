"""Prefill the prefixes that a forecast picked while the engine is idle; cached ones are skipped."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace

from ragcache_core.chunk.types import chunk_spans
from ragcache_core.client.http.errors import translate_errors
from ragcache_core.client.ordering.cached_prefixes import CachedPrefixIndex
from ragcache_core.client.prompts.bound_prompt import HINT, BoundPrompt, KVScope, KVScopes
from ragcache_core.client.server_api import ServerAPI
from ragcache_core.client.speculation.client import LoadRoute, PreparedRequest, SpeculationClient
from ragcache_core.client.speculation.speculation import Speculation
from ragcache_core.client.stats.cache_stats import KV_MEMORY
from ragcache_core.errors import ConfigError, EngineError, PromptTooLongError
from ragcache_core.ordering import CachedPaths, static_prefix_digest
from ragcache_core.prompt import RenderedPrompt
from ragcache_core.stats import EngineStats
from ragcache_core.types import Document, PromptSegment, SegmentKind

_MIRROR_S = 10.0


@dataclass(frozen=True, slots=True)
class WarmingReceipt:
    """The present result of warming.

    Attributes:
        num_warmed: prefilled prefixes.
        num_cached: prefixes that were cached; their blocks that are only on disk are being read into host memory.
        num_left_out: prefixes that exceed the context window, or are too short for a request.
        num_tokens: prefilled tokens: for each prefix those of its last document.
        duration_s: seconds so far.
    """

    num_warmed: int = 0
    num_cached: int = 0
    num_left_out: int = 0
    num_tokens: int = 0
    duration_s: float = 0.0

    @property
    def num_done(self) -> int:
        """Number of prefixes that are finished."""
        return self.num_warmed + self.num_cached + self.num_left_out

    def to_dict(self) -> dict[str, object]:
        """Return plain JSON data."""
        return asdict(self)


class WarmingClient:
    """Warms one engine. Not thread-safe."""

    def __init__(
        self,
        speculation: SpeculationClient,
        load: LoadRoute,
        cached: CachedPrefixIndex,
        scopes: KVScopes,
        api: ServerAPI,
    ) -> None:
        self._speculation = speculation
        self._load = load
        self._cached = cached
        self._scopes = scopes
        self._api = api

    def warm(
        self,
        paths: Iterable[tuple[Sequence[Document], int]],
        bound: BoundPrompt,
        stats: EngineStats,
        on_path: Callable[[WarmingReceipt], object],
    ) -> WarmingReceipt:
        """Do what :meth:`EngineClient.warm_paths <ragcache_core.client.engine_client.EngineClient.warm_paths>` says."""
        if stats.policy is None or not self._load.may_speculate():
            why = "runs without RAGCache" if stats.policy is None else "takes no speculative requests"
            raise EngineError(
                f"the engine at {self._api.base_url} {why}, and cannot be warmed: start it with Engine.launch or "
                "'ragcache serve', with max_prefill_bs of 1 or more"
            )
        scope, keeps_chunks = known_scope(self._scopes, bound), stats.chunks is not None
        block_size, _ = self._api.ask(KV_MEMORY)
        self._cached.refresh(_MIRROR_S)
        has_disk = any(tier.name == "disk" and tier.is_enabled for tier in stats.tiers)
        began_s, receipt = time.monotonic(), WarmingReceipt()
        for documents, expected_uses in paths:
            prompt = bound.prefix(documents, documents)
            last = None if prompt is None else _last_document(prompt)
            if prompt is None or last is None:
                receipt = replace(receipt, num_left_out=receipt.num_left_out + 1)
            else:
                try:
                    request = self._speculation.prepare_warm(
                        prompt,
                        scope=scope,
                        expected_uses=expected_uses,
                        chunk_reuse="store" if keeps_chunks else False,
                    )
                    # The engine reports cached prefixes only for requests without a scope.
                    if scope == KVScope() and self._is_cached(prompt, last, block_size, anywhere=keeps_chunks):
                        if has_disk:
                            request.prefetch()
                        receipt = replace(receipt, num_cached=receipt.num_cached + 1)
                    else:
                        _prefill(request)
                        num_tokens = receipt.num_tokens + last.end - last.start
                        receipt = replace(receipt, num_warmed=receipt.num_warmed + 1, num_tokens=num_tokens)
                except PromptTooLongError:
                    receipt = replace(receipt, num_left_out=receipt.num_left_out + 1)
            receipt = replace(receipt, duration_s=time.monotonic() - began_s)
            on_path(receipt)
        return receipt

    def _is_cached(self, prompt: RenderedPrompt, last: PromptSegment, block_size: int, *, anywhere: bool) -> bool:
        """Return whether one of the engines has all whole blocks of a prompt up to the end of its last document cached.

        ``anywhere``: and the document's chunk, for reuse behind others.
        """
        prefix = static_prefix_digest(prompt.token_ids, prompt.segments)
        ids = [segment.doc_id or "" for segment in prompt.segments if segment.kind is SegmentKind.DOCUMENT]
        (chunk,) = chunk_spans(prompt.token_ids, [(last.start, last.text_end or last.end)])
        num_wanted = last.end // block_size * block_size

        def is_in(paths: CachedPaths) -> bool:
            if anywhere:
                return paths.has_chunk(chunk.key)
            return prefix is not None and paths.num_cached_tokens(prefix, ids) >= num_wanted

        return self._cached.look(lambda engines: any(map(is_in, engines))) or False


def _prefill(request: PreparedRequest) -> None:
    """Send a request and return when it is answered; an exception cancels it in the engine."""
    done = threading.Event()
    speculation = request()
    speculation.add_done_callback(lambda _: done.set())
    try:
        done.wait()
    finally:
        speculation.cancel()
    _check(speculation)


def _check(speculation: Speculation) -> None:
    if speculation.is_cancelled:
        raise EngineError("warming stopped, as the engine's handle was closed: start it again to continue")
    if (error := speculation.error) is not None:
        with translate_errors():
            raise error


def _last_document(prompt: RenderedPrompt) -> PromptSegment | None:
    documents = [segment for segment in prompt.segments if segment.kind is SegmentKind.DOCUMENT]
    return documents[-1] if documents else None


def known_scope(scopes: KVScopes, bound: BoundPrompt | None) -> KVScope:
    """Return the KV scope of the requests that will show a prompt; without a prompt, that of earlier requests.

    Raises:
        ConfigError: they differ, and the prompt was bound without their settings.
    """
    if (scope := scopes.of(None if bound is None else bound.scope)) is None:
        raise ConfigError(
            f"requests of this engine differ in model, salt or key, so it is unknown what to prefill. {HINT}"
        )
    return scope


def check_bound(bound: BoundPrompt | None) -> BoundPrompt:
    """Return the bound prompt in which documents are prefilled.

    Raises:
        ConfigError: there is none, or it shows the question first.
    """
    if bound is None:
        raise ConfigError(
            "no prompt is known in which documents could be prefilled: bind a PromptLayout with engine.bind_prompt"
        )
    if bound.is_question_first:
        raise ConfigError(
            "the bound prompt shows the question before the documents, whose KV no other question shares then: put the "
            "documents before the question"
        )
    return bound
