"""Send token ids to a server and read what its answer says."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx

from ragcache_core.bench.comparison import read_counter
from ragcache_core.bench.prompts import TokenRequest
from ragcache_core.client import EngineClient
from ragcache_core.wire import KEY

_TIERS = ("gpu", "host", "disk", "shared")
_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class TokenAnswer:
    """A greedy answer as token ids, and what the server said of its prompt."""

    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    num_cached_tokens: int
    tokens_by_tier: Mapping[str, int] = field(default_factory=dict)
    num_chunk_tokens: int = 0
    """Tokens whose KV was reused behind other documents."""
    total_s: float = 0.0
    ttft_s: float | None = None
    """The engine's own figure, from the request's arrival there; plain vLLM has none."""
    text: str = ""


class TokenClient:
    """Asks an engine or a fleet; requests cut off by its death are sent again, as these do it."""

    def __init__(self, engine: EngineClient, *, api_key: str | None = None) -> None:
        """Use a tenant's ``api_key``, if one is given, in place of the engine's."""
        self._engine = engine
        self._http = engine.http_client()
        self._headers = {"Authorization": f"Bearer {api_key or engine.api_key}"}

    def ask(self, request: TokenRequest, *, is_plain: bool = False) -> TokenAnswer:
        """Return the greedy answer to one request.

        Raises:
            httpx.HTTPError: the server did not answer, or refused.
        """
        started_s = time.perf_counter()
        body = self._body(request, is_plain=is_plain)
        response = self._http.post(self._url, json=body, headers=self._headers, timeout=_TIMEOUT_S)
        if response.is_error:
            raise httpx.HTTPStatusError(
                f"the engine answered {response.status_code}: {response.text:.500}; its log is "
                f"{getattr(self._engine, 'log_path', 'of its replicas')}",
                request=response.request,
                response=response,
            )
        total_s = time.perf_counter() - started_s
        answer = response.json()
        usage = answer["usage"]
        figures = (answer.get("kv_transfer_params") or {}).get(KEY) or {}
        return TokenAnswer(
            tuple(answer["choices"][0]["token_ids"]),
            usage["prompt_tokens"],
            (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
            {tier: figures.get(f"num_{tier}_tokens") or 0 for tier in _TIERS},
            num_chunk_tokens=(figures.get("chunk_reuse") or {}).get("num_reused_tokens") or 0,
            total_s=total_s,
            ttft_s=figures.get("ttft_s"),
            text=answer["choices"][0]["text"],
        )

    def abort(self, request: TokenRequest) -> None:
        """Send one request and close the connection after the first event of the answer."""
        body = {**self._body(request, is_plain=False), "stream": True}
        with self._http.stream("POST", self._url, json=body, headers=self._headers, timeout=_TIMEOUT_S) as response:
            next(response.iter_lines(), None)

    @property
    def _url(self) -> str:
        return f"{self._engine.base_url}/completions"

    def _body(self, request: TokenRequest, *, is_plain: bool) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._engine.model,
            "prompt": list(request.token_ids),
            "max_tokens": request.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        if request.params is not None and not is_plain:
            body["kv_transfer_params"] = dict(request.params)
        return body

    def ask_all(
        self,
        requests: Sequence[TokenRequest],
        *,
        in_flight: int,
        is_plain: bool = False,
        on_answer: Callable[[int], None] | None = None,
    ) -> list[TokenAnswer]:
        """Return the answers to ``requests`` in their order, ``in_flight`` of them being asked at any time.

        ``on_answer`` is told how many have been answered. An interruption takes back what was not sent yet.
        """
        num_answered = 0
        counting = threading.Lock()

        def ask(request: TokenRequest) -> TokenAnswer:
            nonlocal num_answered
            answer = self.ask(request, is_plain=is_plain)
            with counting:
                num_answered += 1
                count = num_answered
            if on_answer is not None:
                on_answer(count)
            return answer

        with ThreadPoolExecutor(in_flight) as pool:
            try:
                return [future.result() for future in [pool.submit(ask, request) for request in requests]]
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def counter(self, name: str) -> float:
        """Return the sum of a counter or gauge of the server's Prometheus page."""
        return read_counter(self._engine, name)
