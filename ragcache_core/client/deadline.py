"""Plan a chat request so that its first token comes in time, by what the engine says of its costs and load.

::

    GET /v1/ragcache/costs  {"prefill": {...}, "chunk_reuse": {"alpha": 1.7, "points": [...]}}     asked once
    GET /v1/ragcache/load   {"num_pending_prefills": 3, "pending_prefill_s": 0.41, ...}            asked each time
"""

from __future__ import annotations

import hashlib
import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import httpx

from ragcache_core.chunk import AlphaPoint
from ragcache_core.client.ordering.cached_prefixes import CachedPrefixIndex
from ragcache_core.client.prompts.bound_prompt import KVScope
from ragcache_core.client.prompts.client import PromptClient
from ragcache_core.client.prompts.request_plan import RequestPlan
from ragcache_core.client.server_api import Call, ServerAPI
from ragcache_core.client.speculation.request_capture import current_scope
from ragcache_core.deadline import MeasuredReuse, PromptOption, check_ttft_slo, choose, options_of, unplanned
from ragcache_core.errors import ConfigError, EngineError
from ragcache_core.log import logger_of
from ragcache_core.policy import PrefillCostModel
from ragcache_core.prompt import ChatMessage
from ragcache_core.stats import DeadlineReport
from ragcache_core.types import Document
from ragcache_core.wire import ChunkReuseOption, read_chunk_reuse

_COSTS_TIMEOUT_S = 2.0
_COSTS_AGAIN_S = 60.0
"""A server that did not report costs is asked again after so long: another one may be there by then."""
_LOAD_TIMEOUT_S = 0.1
"""Asking is a part of what the user waits for."""

_NO_REUSE = "the engine was started without chunk reuse"
_COSTS_NOT_REPORTED = "the server did not say what its engine takes"
_UNSUPPORTED = "the server runs without RAGCache, or with an older one"
_NUM_REMEMBERED = 256
_UNKNOWN_PROMPT = "the server does not tell the tokens of this prompt"
_REFERRED_TO = "documents that the conversation shows already are referred to where they stand"
_NOT_WANTED = "the request rules it out: chunk_reuse=False"
_SEPARATE = "requests with a cache_salt or an adapter reuse no chunks"
logger = logger_of(__name__)


@dataclass(frozen=True, slots=True)
class EngineCosts:
    """Prefill times, and chunk reuse; or why they are not known, or not to be had."""

    prefill: PrefillCostModel | str
    reuse: MeasuredReuse | str


class DeadlineRoutes:
    """Asks one server. May be used by any thread."""

    def __init__(self, api: ServerAPI) -> None:
        self._api = api
        self._costs: EngineCosts | None = None
        self._unknown = EngineCosts(_COSTS_NOT_REPORTED, _COSTS_NOT_REPORTED)
        self._retry_at_s = 0.0

    def costs(self) -> EngineCosts:
        """Return the measured costs of the engine's model. Never fails; after a failure it asks once a minute."""
        if self._costs is None and time.monotonic() >= self._retry_at_s:
            try:
                costs = self._api.ask(
                    Call("/v1/ragcache/costs", _read_costs, timeout=_COSTS_TIMEOUT_S, is_sent_once=True)
                )
                if costs is None:
                    self._unknown = EngineCosts(_UNSUPPORTED, _UNSUPPORTED)
                self._costs = costs
            except (EngineError, ValueError, LookupError, TypeError) as error:
                logger.debug("the engine's costs are unknown: %s: %s", type(error).__name__, error)
                self._unknown = EngineCosts(_COSTS_NOT_REPORTED, _COSTS_NOT_REPORTED)
            self._retry_at_s = time.monotonic() + _COSTS_AGAIN_S
        return self._costs or self._unknown

    def queue_s(self) -> float | None:
        """Return how long the engine computes for requests that came before; None if it does not say. Never fails."""
        try:
            return self._api.ask(Call("/v1/ragcache/load", _read_queue, timeout=_LOAD_TIMEOUT_S, is_sent_once=True))
        except (EngineError, ValueError, LookupError, TypeError) as error:
            logger.debug("the engine's load is unknown: %s: %s", type(error).__name__, error)
            return None


def _read_queue(response: httpx.Response) -> float:
    return float(response.raise_for_status().json()["pending_prefill_s"])


def _read_costs(response: httpx.Response) -> EngineCosts | None:
    """Return what was measured; ``None`` where there is no such route."""
    if response.status_code == 404:
        return None
    data: Any = response.raise_for_status().json()
    prefill: PrefillCostModel | str = "how long its prefills take was not measured: run 'ragcache profile', and restart"
    if data["prefill"] is not None:
        prefill = PrefillCostModel.from_dict(data["prefill"])
    reuse: MeasuredReuse | str = _NO_REUSE
    if (measured := data["chunk_reuse"]) is not None:
        reuse = MeasuredReuse(float(measured["alpha"]), tuple(AlphaPoint(**point) for point in measured["points"]))
    return EngineCosts(prefill, reuse)


@dataclass(frozen=True, slots=True)
class _Decision:
    """What was chosen; ``messages`` are those of another order."""

    option: PromptOption
    report: DeadlineReport
    messages: list[ChatMessage] | None


class DeadlineClient:
    """Plans requests of one engine. May be used by any thread."""

    def __init__(self, prompts: PromptClient, cached: CachedPrefixIndex, routes: DeadlineRoutes) -> None:
        """``cached`` is what the engine has."""
        self._prompts = prompts
        self._cached = cached
        self._routes = routes
        self._decided: OrderedDict[tuple[object, bytes], _Decision] = OrderedDict()
        self._lock = threading.Lock()

    def plan_chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        ttft_slo: float | None = None,
        documents: Iterable[Document] | None = None,
        settings: Mapping[str, Any] | None = None,
        chunk_reuse: ChunkReuseOption = None,
        deduplicates: bool = False,
    ) -> RequestPlan:
        """Do ``PromptClient.plan_chat``; with a ``ttft_slo`` in seconds so that the first token comes in time.

        Asks the engine what it has to do, for 0.1 s at most. In the scope of a question the same prompt is planned
        once, so that the request is the one that was sent ahead of it.

        Raises:
            ConfigError: ``ttft_slo`` is no positive number, or ``chunk_reuse`` says how documents are reused, which the
                deadline decides.
        """
        documents = None if documents is None else list(documents)
        planned = partial(
            self._prompts.plan_chat,
            documents=documents,
            settings=settings,
            deduplicates=deduplicates,
            needs_tokens=ttft_slo is not None,
        )
        if ttft_slo is None:
            return planned(messages, chunk_reuse=chunk_reuse)
        ttft_slo_s = check_ttft_slo(ttft_slo)
        wish = read_chunk_reuse(chunk_reuse)
        if wish:
            raise ConfigError(
                f"chunk_reuse is {chunk_reuse!r:.80} beside ttft_slo {ttft_slo_s:g}, which decides whether documents "
                "are reused: leave chunk_reuse out, or set it to False to rule it out"
            )
        costs = self._routes.costs()
        exactly: ChunkReuseOption = None  # where there is no reuse, the request is what it is without a deadline
        if isinstance(costs.reuse, MeasuredReuse):
            exactly = "store" if costs.reuse.points else False  # to be chosen from when there is less time
        if isinstance(costs.prefill, str):
            planned = partial(planned, needs_tokens=False)
        plan = planned(messages, chunk_reuse=wish if wish is not None else exactly)
        why_not = _UNKNOWN_PROMPT if plan.prompt is None and not isinstance(costs.prefill, str) else costs.prefill
        if isinstance(why_not, str):
            return replace(plan, deadline=unplanned(ttft_slo_s, why_not))
        key = current_scope(), _digest(plan, ttft_slo_s, rules_out_reuse=wish is False)
        decision = self._remembered(key)
        if decision is None:
            is_reported = self._prompts.scope_of(settings or {}) == KVScope() and "cache_salt" not in plan.extra_body
            movable = None if deduplicates else messages
            decision = self._decide(
                ttft_slo_s, movable, documents, plan, costs, rules_out_reuse=wish is False, is_reported=is_reported
            )
            self._remember(key, decision)
        if decision.option.alpha is not None:
            plan = planned(messages, chunk_reuse={"alpha": decision.option.alpha})
        elif decision.messages is not None:
            moved = planned(decision.messages, chunk_reuse=wish if wish is not None else exactly)
            moved = replace(moved, extra_body={"messages": decision.messages, **moved.extra_body})
            plan = replace(moved, tool_chat=plan.tool_chat)  # the chat goes on with the messages that it holds
        return replace(plan, deadline=decision.report)

    def _decide(
        self,
        ttft_slo_s: float,
        messages: Sequence[ChatMessage] | None,
        documents: Sequence[Document] | None,
        plan: RequestPlan,
        costs: EngineCosts,
        *,
        rules_out_reuse: bool,
        is_reported: bool,
    ) -> _Decision:
        """Choose how a prompt is shown; ``is_reported``: what the engine tells of its cache is true of this request."""
        assert not isinstance(costs.prefill, str)
        assert plan.prompt is not None
        token_ids, segments = plan.prompt.token_ids, plan.prompt.segments
        reuse = _NOT_WANTED if rules_out_reuse else costs.reuse if is_reported else _SEPARATE
        ways = None
        if is_reported:
            ways = self._cached.look(  # of several engines it goes to the one that has most of it
                lambda engines: min(
                    (options_of(token_ids, segments, cached, reuse) for cached in engines),
                    key=lambda ways: ways.options[0].num_new_tokens,
                )
            )
        ways = ways or options_of(token_ids, segments, None, reuse)
        queue_s = self._routes.queue_s()
        option, report = choose(ttft_slo_s, ways, costs.prefill, queue_s)
        if option.order is None:
            return _Decision(option, report, None)
        moved: list[ChatMessage] | str = _REFERRED_TO
        if messages is not None:
            moved = self._prompts.rearranged(messages, option.order, documents=documents)
        if isinstance(moved, str):
            option, report = choose(ttft_slo_s, ways.without_order(moved), costs.prefill, queue_s)
            return _Decision(option, report, None)
        return _Decision(option, report, moved)

    def _remembered(self, key: tuple[object, bytes]) -> _Decision | None:
        with self._lock:
            return None if key[0] is None else self._decided.get(key)

    def _remember(self, key: tuple[object, bytes], decision: _Decision) -> None:
        if key[0] is None:
            return
        with self._lock:
            self._decided[key] = decision
            while len(self._decided) > _NUM_REMEMBERED:
                self._decided.popitem(last=False)


def _digest(plan: RequestPlan, ttft_slo_s: float, *, rules_out_reuse: bool) -> bytes:
    """Return what names a prompt and what is asked of it."""
    token_ids = array("q", () if plan.prompt is None else plan.prompt.token_ids)
    return hashlib.sha256(f"{ttft_slo_s} {rules_out_reuse} ".encode() + token_ids.tobytes()).digest()
