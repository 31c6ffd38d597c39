"""Load on one engine: an open loop of streamed requests at given arrival times.

A request's clock starts at its arrival time, not when the client sends it: a slow client does not make an engine look
faster.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np

from ragcache_core.bench.prompts import TracedPrompts
from ragcache_core.client import Engine, translate_errors
from ragcache_core.errors import ConfigError, EngineDiedError, RequestRejectedError
from ragcache_core.ordering import DocumentOrder

_TIMEOUT = httpx.Timeout(900.0, connect=30.0)


@dataclass(frozen=True, slots=True)
class Answered:
    """Outcome of one request of a trace. Times count from its arrival time."""

    number: int
    ttft_s: float
    total_s: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    is_reordered: bool

    @property
    def tpot_s(self) -> float | None:
        """Seconds for each token after the first; ``None`` for an answer of one token."""
        return (self.total_s - self.ttft_s) / (self.num_output_tokens - 1) if self.num_output_tokens > 1 else None


def poisson_arrivals(num_requests: int, requests_per_s: float, seed: int) -> list[float]:
    """Return arrival times in seconds; another rate stretches the same times.

    Raises:
        ConfigError: the rate is not above 0 and finite.
    """
    if not 0 < requests_per_s < float("inf"):
        raise ConfigError(f"{requests_per_s:g} requests a second: the rate must be above 0 and finite")
    gaps = np.random.default_rng(seed).exponential(1.0, num_requests)
    times: list[float] = (np.cumsum(gaps) / requests_per_s).tolist()
    return times


class Load:
    """Sends the requests of a trace to one engine.

    Args:
        engine: the engine.
        prompts: the requests.
        order: the order of documents in a prompt; the engine's cache decides some orders.
        sends_documents: send the metadata of documents.
        on_answer: called after each answer.
    """

    def __init__(
        self,
        engine: Engine,
        prompts: TracedPrompts,
        *,
        order: DocumentOrder = "retrieval",
        sends_documents: bool = True,
        on_answer: Callable[[], object] = lambda: None,
    ) -> None:
        self._engine = engine
        self._prompts = prompts
        self._order = order
        self._sends_documents = sends_documents
        self._on_answer = on_answer
        self._orders: dict[int, list[str]] = {}  # by request: a conversation's later turns repeat them

    def replay(self, numbers: Sequence[int], arrival_s: Sequence[float]) -> list[Answered]:
        """Send request ``numbers[i]`` after ``arrival_s[i]`` seconds, and return the answers when all have ended.

        Raises:
            EngineDiedError, EngineUnreachableError, RequestRejectedError: a request failed.
        """

        async def send(http: httpx.AsyncClient) -> list[Answered]:
            began_s = time.perf_counter() + 0.05
            async with asyncio.TaskGroup() as tasks:
                sent = []
                for number, after_s in zip(numbers, arrival_s, strict=True):
                    due_s = began_s + after_s
                    if (pause_s := due_s - time.perf_counter()) > 0:
                        await asyncio.sleep(pause_s)
                    sent.append(tasks.create_task(self._ask(http, number, due_s)))
            return [task.result() for task in sent]

        return self._run(send)

    def run_through(self, numbers: Sequence[int], *, in_flight: int) -> list[Answered]:
        """Send requests, ``in_flight`` of them at a time, and return the answers in the order of their ends.

        Raises:
            EngineDiedError, EngineUnreachableError, RequestRejectedError: a request failed.
        """
        answers: list[Answered] = []
        left = iter(numbers)

        async def ask_in_turn(http: httpx.AsyncClient) -> None:
            for number in left:
                answers.append(await self._ask(http, number, time.perf_counter()))  # noqa: PERF401 (one by one)

        async def send(http: httpx.AsyncClient) -> list[Answered]:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(in_flight):
                    tasks.create_task(ask_in_turn(http))
            return answers

        return self._run(send)

    def _run(self, send: Callable[[httpx.AsyncClient], Coroutine[Any, Any, list[Answered]]]) -> list[Answered]:
        async def connected() -> list[Answered]:
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
            async with httpx.AsyncClient(limits=limits, trust_env=False) as http:
                return await send(http)

        with translate_errors():
            try:
                return asyncio.run(connected())
            except ExceptionGroup as group:  # the first failure, which cancelled the other requests
                raise group.exceptions[0] from group

    async def _ask(self, http: httpx.AsyncClient, number: int, due_s: float) -> Answered:
        is_reordered = False
        if self._order != "retrieval":
            arranged = self._engine.arrange_documents(self._prompts.documents(number), self._order)
            self._orders[number] = [document.doc_id for document in arranged.documents]
            is_reordered = arranged.is_reordered
        request = self._prompts.request(number, orders=self._orders, sends_documents=self._sends_documents)
        body = {
            "model": self._engine.model,
            "prompt": list(request.token_ids),
            "max_tokens": request.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if request.params is not None:
            body["kv_transfer_params"] = dict(request.params)
        first_s, usage = None, None
        url, headers = f"{self._engine.base_url}/completions", {"Authorization": f"Bearer {self._engine.api_key}"}
        async with http.stream("POST", url, json=body, headers=headers, timeout=_TIMEOUT) as response:
            if response.is_error:
                text = (await response.aread()).decode(errors="replace")
                raise RequestRejectedError(
                    f"the engine rejected request {number} ({response.status_code}): {text:.300}"
                )
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                came_s, event = time.perf_counter(), json.loads(line.removeprefix("data: "))
                if first_s is None and event.get("choices"):
                    first_s = came_s
                usage = event.get("usage") or usage
        ended_s = time.perf_counter()
        if first_s is None or usage is None:
            raise EngineDiedError(f"the answer to request {number} is incomplete; see {self._engine.log_path}")
        self._on_answer()
        num_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return Answered(
            number,
            first_s - due_s,
            ended_s - due_s,
            usage["prompt_tokens"],
            num_cached,
            usage["completion_tokens"],
            is_reordered,
        )
