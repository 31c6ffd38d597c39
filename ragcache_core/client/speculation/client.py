"""Requests that are sent before a search has ended, and what the engine says of its load."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import httpx

from ragcache_core.client.prefetching import Prefetching
from ragcache_core.client.prompts.bound_prompt import BoundPrompt
from ragcache_core.client.prompts.kv_scope import KVScope, KVScopes
from ragcache_core.client.prompts.request_plan import merge_bodies, plan_rendered
from ragcache_core.client.speculation import request_capture
from ragcache_core.client.speculation.engine_load import EngineLoad, LoadRoute
from ragcache_core.client.speculation.manager import SpeculationManager
from ragcache_core.client.speculation.request_capture import CapturedRequest
from ragcache_core.client.speculation.speculation import Speculation
from ragcache_core.prompt import RenderedPrompt
from ragcache_core.types import Document


class PreparedRequest:
    """A request that was made ahead: sent as a speculation when it is called, or only read ahead."""

    def __init__(
        self,
        start: Callable[[CapturedRequest], Speculation],
        prefetching: Prefetching,
        captured: CapturedRequest,
    ) -> None:
        self._start = start
        self._prefetching = prefetching
        self._captured = captured

    def __call__(self) -> Speculation:
        return self._start(self._captured)

    def prefetch(self) -> None:
        """Have the engine read what it has on disk of the prompt, if that was tokenised here.

        Raises:
            EngineError: the server cannot be asked, or refuses.
        """
        asked = json.loads(self._captured.body)
        token_ids = (asked.get("kv_transfer_params") or {}).get("prompt_token_ids") or asked.get("prompt")
        if isinstance(token_ids, list) and all(isinstance(token, int) for token in token_ids):
            self._prefetching.prefetch(
                token_ids,
                asked.get("cache_salt"),
                model=asked.get("model"),
                authorization=self._captured.authorization,
            )


class SpeculationClient:
    """Sends one engine requests before they are certain."""

    def __init__(
        self,
        base_url: str,
        api_key: str,
        *,
        model: str,
        max_model_len: int,
        speculations: SpeculationManager,
        load: LoadRoute,
        prefetching: Prefetching,
        scopes: KVScopes,
    ) -> None:
        """``base_url`` ends in ``/v1``; ``speculations`` are those of the transports that send its requests.

        ``scopes`` says what separates the KV of the requests for which something is prefilled.
        """
        self._scopes = scopes
        self._url = f"{base_url}/completions"
        self._headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
        self._model = model
        self._max_model_len = max_model_len
        self._speculations = speculations
        self._load = load
        self._prefetching = prefetching

    async def acan_speculate(self) -> bool:
        """Return whether the engine takes speculative requests.

        It is asked once; a server without RAGCache's scheduler is named in one warning. Never fails.
        """
        return await self._load.amay_speculate()

    async def apending_prefills(self) -> EngineLoad | None:
        """Return the prefills that wait in the engine, and whether one more fits; ``None`` if it does not say.

        Never fails.
        """
        return await self._load.apending()

    def capture_request(self, call: Callable[[], object]) -> CapturedRequest:
        """Return the request for a completion that ``call`` would send to this engine; it is not sent.

        ``call`` is the very code that will make the request later, with the engine's ``http_client()``; it
        ends where it would send that request. Its other requests are sent.

        Raises:
            ConfigError: it sent none.
            Exception: whatever ``call`` raised before it came to that.
        """
        return request_capture.capture_request(call, self._speculations)

    def prepare(self, call: Callable[[], object]) -> PreparedRequest:
        """Return what sends the request of ``call`` as a speculation: a real one that is the same joins it.

        Ask :meth:`acan_speculate` before: plain vLLM would treat it as any other request.

        Raises:
            ConfigError: ``call`` sent no request.
            EngineClosedError: when it is sent: this handle was closed.
            Exception: whatever ``call`` raised before it came to that.
        """
        return PreparedRequest(self._speculations.start, self._prefetching, self.capture_request(call))

    def prepare_prefill(
        self, bound: BoundPrompt, shown_documents: Sequence[Any], documents: Sequence[Document]
    ) -> PreparedRequest | None:
        """Return what prefills the beginning of a prompt about documents, for the request that will show them.

        Args:
            bound: the prompt.
            shown_documents: the documents as the framework's, for the user's own formatting.
            documents: the same documents.

        Returns:
            ``None`` where nothing is known of the prompt that is worth a prefill, or where it is not known what
            separates the KV of its requests.

        Raises:
            PromptTooLongError: it does not fit into the context window.
        """
        if (scope := self._scopes.of(bound.scope)) is None:
            return None
        if (known := bound.prefix(shown_documents, documents)) is None:
            return None
        return self.prepare_warm(known, has_documents=bound.has_documents, scope=scope)

    def prepare_warm(
        self,
        prompt: RenderedPrompt,
        *,
        scope: KVScope,
        has_documents: bool = True,
        expected_uses: int = 0,
        chunk_reuse: Literal["store", False] = False,
    ) -> PreparedRequest:
        """Return what has ``prompt`` prefilled while the engine is idle: later requests that begin with it find it.

        ``has_documents`` says whether documents are in it; without any it hides nothing of the search for them. It is
        computed exactly, since KV that was assembled from reused chunks serves no other request; with ``"store"`` its
        documents are kept for others to reuse as well. The engine counts it neither as a request nor as a use of its
        documents: with ``expected_uses`` they rank by those. Requests of its ``scope`` find it, and no others.

        Raises:
            PromptTooLongError: it does not fit into the context window.
            EngineClosedError: when it is sent: this handle was closed.
        """
        plan = plan_rendered(
            prompt,
            max_model_len=self._max_model_len,
            chunk_reuse=chunk_reuse,
            is_prefill=True,
            expected_uses=expected_uses,
        )
        asked = {"model": self._model, "prompt": list(prompt.token_ids), "max_tokens": 1, "temperature": 0.0}
        body = merge_bodies(asked, scope.fields(), plan.extra_body)
        headers = {**self._headers, **scope.headers()}
        request = httpx.Request("POST", self._url, headers=headers, content=json.dumps(body).encode())
        captured = CapturedRequest.of(request)
        start = partial(self._speculations.start, is_claimable=False, has_documents=has_documents)
        return PreparedRequest(start, self._prefetching, captured)
