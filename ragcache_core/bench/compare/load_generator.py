"""A load on an engine: requests at the moments of their arrival, whatever became of those before, streamed answers.

The clock of a request starts when it was due, not when it was sent: a client that lags behind does not make an engine
look faster.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

import httpx
import numpy as np

from ragcache_core.bench.compare.prompts import TracedPrompts
from ragcache_core.bench.compare.search.prompts import SearchedPrompts
from ragcache_core.bench.compare.search.question import Searched, Searching
from ragcache_core.bench.token_client import TokenRequest
from ragcache_core.client import Engine, translate_errors
from ragcache_core.errors import ConfigError, EngineDiedError, RequestRejectedError
from ragcache_core.ordering import DocumentOrder

_TIMEOUT = httpx.Timeout(900.0, connect=30.0)


@dataclass(frozen=True, slots=True)
class Answered:
    """What became of one request of a trace; times are counted from the moment when it was due."""

    number: int
    ttft_s: float
    total_s: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    is_reordered: bool
    search: Searched | None = None

    @property
    def tpot_s(self) -> float | None:
        """Seconds for each token after the first; ``None`` for an answer of one."""
        return (self.total_s - self.ttft_s) / (self.num_output_tokens - 1) if self.num_output_tokens > 1 else None


def poisson_arrivals(num_requests: int, requests_per_s: float, seed: int) -> list[float]:
    """Return when requests arrive, in seconds: the same moments for every rate, stretched.

    Raises:
        ConfigError: the rate is not above 0.
    """
    if not 0 < requests_per_s < float("inf"):
        raise ConfigError(f"{requests_per_s:g} requests a second: the rate must be above 0 and finite")
    gaps = np.random.default_rng(seed).exponential(1.0, num_requests)
    times: list[float] = (np.cumsum(gaps) / requests_per_s).tolist()
    return times


class Load:
    """Asks one engine for the requests of a trace; documents are shown in ``order``, which its cache may decide.

    Prompts that are searched for are so within the time of their requests: in stages where the engine is told of
    documents, and ``speculates`` asks it from what a stage found.
    """

    def __init__(
        self,
        engine: Engine,
        prompts: TracedPrompts,
        *,
        order: DocumentOrder = "retrieval",
        sends_documents: bool = True,
        speculates: bool = False,
        on_answer: Callable[[], object] | None = None,
    ) -> None:
        self._engine = engine
        self._prompts = prompts
        self._order = order
        self._sends_documents = sends_documents
        self._on_answer = on_answer
        self._url = f"{engine.base_url}/completions"
        self._headers = {"Authorization": f"Bearer {engine.api_key}"}
        self._searching: Searching | None = None
        if isinstance(prompts, SearchedPrompts):
            self._searching = Searching(engine, prompts, order, sends_documents, speculates, self._body, self._post)
        self._orders: dict[int, list[str]] = {}
        """In which order documents were shown; a conversation's next turn shows them so again."""

    def replay(self, numbers: Sequence[int], arrival_s: Sequence[float]) -> list[Answered]:
        """Send request ``numbers[i]`` after ``arrival_s[i]`` seconds, and return all answers when the last is there.

        Raises:
            EngineDiedError, EngineUnreachableError, RequestRejectedError: not all of them were answered.
        """

        async def send(http: httpx.AsyncClient) -> list[Answered]:
            began_s = time.perf_counter() + 0.05
            async with asyncio.TaskGroup() as tasks:
                asked = []
                for number, after_s in zip(numbers, arrival_s, strict=True):
                    due_s = began_s + after_s
                    if (pause_s := due_s - time.perf_counter()) > 0:
                        await asyncio.sleep(pause_s)
                    asked.append(tasks.create_task(self._ask(http, number, due_s)))
            return [task.result() for task in asked]

        return self._run(send)

    def run_through(self, numbers: Sequence[int], *, in_flight: int) -> list[Answered]:
        """Ask for ``numbers``, always ``in_flight`` of them at a time, and return their answers.

        Raises:
            EngineDiedError, EngineUnreachableError, RequestRejectedError: not all of them were answered.
        """
        answers: list[Answered] = []
        left = iter(numbers)

        async def ask_one_after_another(http: httpx.AsyncClient) -> None:
            for number in left:
                answers.append(await self._ask(http, number, time.perf_counter()))  # noqa: PERF401 (one by one)

        async def send(http: httpx.AsyncClient) -> list[Answered]:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(in_flight):
                    tasks.create_task(ask_one_after_another(http))
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
            except ExceptionGroup as group:  # what went wrong first; the others were cancelled for it
                raise group.exceptions[0] from group

    async def _ask(self, http: httpx.AsyncClient, number: int, due_s: float) -> Answered:
        if self._searching is not None:
            return await self._ask_searched(self._searching, http, number, due_s)
        is_reordered = False
        if self._order != "retrieval":
            arranged = self._engine.arrange_documents(self._prompts.documents(number), self._order)
            self._orders[number] = [d.doc_id for d in arranged.documents]
            is_reordered = arranged.is_reordered
        request = self._prompts.request(number, orders=self._orders, sends_documents=self._sends_documents)
        return await self._answer(http, number, due_s, self._body(request), is_reordered)

    async def _ask_searched(self, searching: Searching, http: httpx.AsyncClient, number: int, due_s: float) -> Answered:
        question = await searching.question(number)
        try:
            http = self._engine.http_async_client() if searching.is_staged else http  # joins what was sent ahead
            with question.asking():
                answered = await self._answer(http, number, due_s, question.body(), question.is_reordered)
            return replace(answered, search=question.searched())
        finally:
            question.close()

    def _body(self, request: TokenRequest) -> dict[str, Any]:
        body: dict[str, Any] = {
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
        return body

    def _post(self, body: dict[str, Any]) -> object:
        """Send a request as :meth:`_answer` does, in a thread: what is sent ahead must be the same."""
        return self._engine.http_client().post(self._url, json=body, headers=self._headers, timeout=_TIMEOUT)

    async def _answer(
        self, http: httpx.AsyncClient, number: int, due_s: float, body: dict[str, Any], is_reordered: bool
    ) -> Answered:
        first_s, usage = None, None
        async with http.stream("POST", self._url, json=body, headers=self._headers, timeout=_TIMEOUT) as response:
            if response.is_error:
                said = (await response.aread()).decode(errors="replace")
                raise RequestRejectedError(f"the engine refused request {number} ({response.status_code}): {said:.300}")
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                came_s, event = time.perf_counter(), json.loads(line.removeprefix("data: "))
                if first_s is None and event.get("choices"):
                    first_s = came_s
                usage = event.get("usage") or usage
        ended_s = time.perf_counter()
        if first_s is None or usage is None:
            raise EngineDiedError(f"the answer to request {number} ended before its end; see {self._engine.log_path}")
        if self._on_answer is not None:
            self._on_answer()
        return Answered(
            number,
            first_s - due_s,
            ended_s - due_s,
            usage["prompt_tokens"],
            (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
            usage["completion_tokens"],
            is_reordered,
        )
