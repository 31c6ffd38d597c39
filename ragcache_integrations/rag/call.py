"""One request of a framework's model: its options, its plan, the times of its answer, and its statistics."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from ragcache_core.client import EngineClient, RequestPlan
from ragcache_core.client.prompts.repeated_documents import check_deduplicate
from ragcache_core.client.prompts.retrieved_documents import DocumentHint
from ragcache_core.deadline import check_ttft_slo
from ragcache_core.stats import RequestStats
from ragcache_core.types import Document
from ragcache_core.wire import read_chunk_reuse

ChunkReuseSetting = bool | Literal["store"] | dict[str, Any] | None
"""Whether, and how, documents are reused behind others; ``None`` leaves it to the engine."""

OPTIONS = ("chunk_reuse", "deduplicate", "ttft_slo")
"""Settings of a model, or of a call, that are not sent to the server."""


def check_option(name: str, value: Any) -> Any:
    """Return the value of one of the ``OPTIONS``.

    Raises:
        ConfigError: it is not a possible value.
    """
    if name == "deduplicate":
        return check_deduplicate(value)
    if name == "ttft_slo":
        return None if value is None else check_ttft_slo(value)
    read_chunk_reuse(value)
    return value


def options_of(model: object, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``OPTIONS`` of a call: those in ``kwargs``, else the model's own.

    Raises:
        ConfigError: ``deduplicate`` is no bool.
    """
    options = {name: kwargs.get(name, getattr(model, name)) for name in OPTIONS}
    check_deduplicate(options["deduplicate"])
    return options


def sent_settings(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call without the ``OPTIONS``."""
    return {name: value for name, value in kwargs.items() if name not in OPTIONS}


def with_headers(settings: Mapping[str, Any], default_headers: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the settings of a request with all headers that are sent: one may be another tenant's key."""
    headers = {**(default_headers or {}), **(settings.get("extra_headers") or {})}
    return {**settings, **({"extra_headers": headers} if headers else {})}


def plan_chat(
    engine: EngineClient,
    hint: DocumentHint,
    messages: Sequence[Any],
    options: Mapping[str, Any],
    settings: Mapping[str, Any],
    documents: Sequence[Document] | None = None,
) -> RequestPlan:
    """Return the plan of a chat.

    Args:
        engine: the engine that answers.
        hint: warns once if no prompt shows a known document.
        messages: the messages as the server reads them.
        options: the ``OPTIONS`` of the call.
        settings: what the request sends, with its headers.
        documents: the documents that the prompt may show; by default those that were retrieved lately.

    Raises:
        EngineError: the prompt cannot be planned; see ``ragcache_core.errors``.
    """
    plan = engine.integration.deadlines.plan_chat(
        messages,
        ttft_slo=options["ttft_slo"],
        documents=documents,
        settings=settings,
        chunk_reuse=options["chunk_reuse"],
        deduplicates=options["deduplicate"],
    )
    hint.observe(plan)
    return plan


class MeasuredCall:
    """One request: its plan, and what is measured of its answer.

    The clock starts when the call is made, or at :meth:`start_clock`.
    """

    def __init__(self, engine: EngineClient, plan: RequestPlan) -> None:
        self.engine = engine
        self.plan = plan
        self.ttft_s: float | None = None
        self._started_s = time.perf_counter()

    def start_clock(self) -> None:
        """Start the clock again: a stream is requested when it is read."""
        self._started_s = time.perf_counter()

    def note_token(self) -> None:
        """Note the time of the first token; later ones change nothing."""
        if self.ttft_s is None:
            self.ttft_s = time.perf_counter() - self._started_s

    def note_tool_calls(self, as_sent: Callable[[], dict[str, Any]]) -> None:
        """Tell the engine what an agent waits for; ``as_sent`` gives the message as the chat's next request has it."""
        self.engine.integration.prompts.note_answer(self.plan, as_sent)

    def measured(self, usage: Mapping[str, Any] | None) -> RequestStats:
        """Return what was measured up to now; ``usage`` is the OpenAI protocol's, as the server sent it."""
        return self.plan.stats(usage, ttft_s=self.ttft_s, total_s=time.perf_counter() - self._started_s)

    def complete(self, usage: Mapping[str, Any] | None, response_id: str | None) -> RequestStats:
        """Return the statistics of the answered request, with the engine's own."""
        return self.engine.integration.stats.complete(self.measured(usage), response_id, self.plan.doc_ids)

    async def acomplete(self, usage: Mapping[str, Any] | None, response_id: str | None) -> RequestStats:
        """Return the statistics of the answered request, with the engine's own."""
        return await self.engine.integration.stats.acomplete(self.measured(usage), response_id, self.plan.doc_ids)
