"""What a server's door offers to those who overlap retrieval with prefill."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial

import httpx

from ragcache_core.client.prompts.request_plan import plan_rendered
from ragcache_core.client.speculation import request_capture as rehearsing
from ragcache_core.client.speculation.engine_load import EngineLoad, LoadRoute
from ragcache_core.client.speculation.manager import SpeculationManager
from ragcache_core.client.speculation.request_capture import CapturedRequest
from ragcache_core.client.speculation.speculation import Speculation
from ragcache_core.prompt import RenderedPrompt


class SpeculationClient:
    """The part of ``EngineClient`` that sends requests before they are certain."""

    model: str
    max_model_len: int
    base_url: str
    api_key: str
    _speculations: SpeculationManager
    _load: LoadRoute

    def can_speculate(self) -> bool:
        """Return whether the engine takes speculative requests.

        It is asked once; a server without RAGCache's scheduler is named in one warning. Never fails.
        """
        return self._load.may_speculate()

    async def acan_speculate(self) -> bool:
        """Do :meth:`can_speculate` without blocking the event loop."""
        return await self._load.amay_speculate()

    def pending_prefills(self) -> EngineLoad | None:
        """Return what the engine says of its prefills and its room; ``None`` if it does not say. Never fails."""
        return self._load.pending()

    async def apending_prefills(self) -> EngineLoad | None:
        """Do :meth:`pending_prefills` without blocking the event loop."""
        return await self._load.apending()

    def capture_request(self, call: Callable[[], object]) -> CapturedRequest:
        """Return the request for a completion that ``call`` would send to this engine; it is not sent.

        ``call`` is the very code that will make the request later, with this engine's :meth:`http_client`; it ends
        where it would send it. What it asks the server before that is asked.

        Raises:
            ConfigError: it sent none.
            Exception: whatever ``call`` raised before it came to that.
        """
        return rehearsing.capture_request(call, self._speculations)

    def speculate(self, call: Callable[[], object]) -> Speculation:
        """Send the request that ``call`` would send, as a speculation: a real one that is the same joins it.

        Ask :meth:`can_speculate` before: plain vLLM would treat it as any other request.

        Raises:
            ConfigError: ``call`` sent no request. EngineClosedError: this handle was closed.
            Exception: whatever ``call`` raised before it came to that.
        """
        return self.prepare(call)()

    def prepare(self, call: Callable[[], object]) -> Callable[[], Speculation]:
        """Make the request of :meth:`speculate`, and return what sends it: with the same errors, some of them then."""
        return partial(self._speculations.start, self.capture_request(call))

    def warm(self, prompt: RenderedPrompt, *, has_documents: bool = True) -> Speculation:
        """Prefill ``prompt`` in idle room, so that later requests which begin with it find it cached.

        Without documents in it, it hides nothing of the search for them.

        It is computed exactly: KV that was put together from chunks is found by nobody else. The engine counts it as no
        request, and as no use of its documents: those that find it cached are.

        Raises:
            PromptTooLongError: it does not fit into the context window. EngineClosedError: this handle was closed.
        """
        return self.prepare_warm(prompt, has_documents=has_documents)()

    def prepare_warm(self, prompt: RenderedPrompt, *, has_documents: bool = True) -> Callable[[], Speculation]:
        """Make the request of :meth:`warm`, and return what sends it: with the same errors, some of them then."""
        plan = plan_rendered(prompt, max_model_len=self.max_model_len, chunk_reuse=False, is_prefill=True)
        body = {
            "model": self.model,
            "prompt": list(prompt.token_ids),
            "max_tokens": 1,
            "temperature": 0.0,
            **plan.extra_body,
        }
        request = httpx.Request(
            "POST",
            f"{self.base_url}/completions",
            headers={"Authorization": f"Bearer {self.api_key}", "Content-Type": "application/json"},
            content=json.dumps(body).encode(),
        )
        captured = CapturedRequest.of(request)
        return partial(self._speculations.start, captured, is_claimable=False, has_documents=has_documents)
