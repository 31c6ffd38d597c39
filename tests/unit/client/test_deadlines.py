"""A request with a deadline: what its engine says decides what is sent, and what is said of it afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from ragcache_core import Document
from ragcache_core.chunk import chunk_spans
from ragcache_core.client import Engine, RequestPlan
from ragcache_core.client.speculation.request_capture import request_scope
from ragcache_core.errors import ConfigError
from ragcache_core.ordering import PathChange, chunk_change, static_prefix_digest
from ragcache_core.policy import PrefillCostModel
from ragcache_core.types import SegmentKind
from tests.support.cached_orders import all_cached
from tests.support.scripted_server import IDLE, ScriptedServer
from tests.support.waiting import until

SUN = Document("sun", "The sun is a star, and every planet goes around it in its own time.")
MOON = Document("moon", "The moon goes around the earth once in a month, and it has no light.")
CHAT = [{"role": "user", "content": f"{SUN.text}\n\n{MOON.text}\n\nWhat is the sun?"}]
TIMES = PrefillCostModel((0, 1000), (1, 1001), ((0.001, 1.001), (0.001, 1.001)))  # a millisecond for each new token
MEASURED = {"prefill": TIMES.to_dict(), "chunk_reuse": None}
POINTS = [{"alpha": 1.7, "quality": 0.98, "recomputed": 0.25, "num_questions": 100}]
CALIBRATED = {**MEASURED, "chunk_reuse": {"alpha": 1.7, "points": POINTS}}


@pytest.fixture
def server(demo_model: str) -> Iterator[ScriptedServer]:
    with ScriptedServer(api_key="secret", root=demo_model, costs=MEASURED, load=IDLE) as running:
        yield running


def planned(engine: Engine, ttft_slo: Any, **asked: Any) -> RequestPlan:
    return engine.integration.deadlines.plan_chat(CHAT, ttft_slo=ttft_slo, documents=[SUN, MOON], **asked)


def content(plan: RequestPlan) -> str:
    return str(plan.extra_body.get("messages", CHAT)[0]["content"])


def know_cached(
    server: ScriptedServer,
    engine: Engine,
    order: str = "",
    *,
    stores_chunks: bool = False,
    chat: Sequence[dict[str, Any]] = CHAT,
    **asked: Any,
) -> None:
    """Have the engine say that the documents are cached in ``order``, or each is stored for reuse."""
    plan = engine.integration.prompts.plan_chat(chat, documents=[SUN, MOON], needs_tokens=True, **asked)
    assert plan.prompt is not None
    token_ids, segments = plan.prompt.token_ids, plan.prompt.segments
    prefix = static_prefix_digest(token_ids, segments)
    documents = {s.doc_id or "": s for s in segments if s.kind is SegmentKind.DOCUMENT}
    assert prefix is not None
    changes, num_tokens, ids = [], documents["sun"].start, order.split()
    for i, doc_id in enumerate(ids):
        num_tokens += documents[doc_id].num_tokens
        changes.append(PathChange(prefix, tuple(ids[: i + 1]), num_tokens))
    if stores_chunks:
        spans = chunk_spans(token_ids, [(s.start, s.text_end or s.end) for s in documents.values()])
        changes += [chunk_change(span.key, span.num_tokens) for span in spans]
    server.cached_paths = all_cached(changes)
    engine.arrange_documents([], "cache_aware")  # begins to ask
    mirror = engine.integration.cached_prefixes
    assert until(lambda: mirror.is_current)


def test_a_prompt_in_time_is_sent_as_it_would_be_without_a_deadline(engine: Engine) -> None:
    plan = planned(engine, 5.0)
    assert plan.doc_ids == planned(engine, None).doc_ids
    assert "messages" not in plan.extra_body
    assert plan.deadline is not None
    assert (plan.deadline.choice, plan.deadline.is_in_time, plan.deadline.queue_s) == ("exact", True, None)
    assert planned(engine, None).deadline is None


def test_documents_are_shown_in_the_cached_order_where_only_that_is_in_time(
    engine: Engine, server: ScriptedServer
) -> None:
    know_cached(server, engine, "moon sun")
    late = planned(engine, 5.0).deadline
    assert late is not None
    exact_s, order_s = (option.ttft_s for option in late.options)
    plan = planned(engine, (exact_s + order_s) / 2)
    assert content(plan) == f"{MOON.text}\n\n{SUN.text}\n\nWhat is the sun?"
    assert plan.deadline is not None
    assert (plan.deadline.choice, plan.deadline.exact_ttft_s) == ("document_order", exact_s)
    params = plan.extra_body["kv_transfer_params"]["ragcache"]
    assert [d["id"] for d in params["documents"]] == ["moon", "sun"]
    assert params["reordered"]


@pytest.mark.parametrize(
    "settings", [{"extra_body": {"cache_salt": "tenant-a"}}, {"model": "an-adapter"}, {"extra_body": {"model": "b"}}]
)
def test_a_request_with_separate_kv_ignores_blocks_of_other_requests(
    engine: Engine, server: ScriptedServer, settings: dict[str, Any]
) -> None:
    know_cached(server, engine, "moon sun")
    told, separate = planned(engine, 0.001).deadline, planned(engine, 0.001, settings=settings).deadline
    assert told is not None
    assert separate is not None
    assert told.choice == "document_order"
    assert separate.choice == "exact"


def test_an_agent_goes_on_with_the_messages_that_it_holds_whatever_was_sent(
    engine: Engine, server: ScriptedServer, demo_model: str
) -> None:
    settings = {"tools": [{"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}]}
    know_cached(server, engine, "moon sun", settings=settings)
    plan = planned(engine, 0.001, settings=settings)
    assert content(plan).startswith(MOON.text)
    assert plan.tool_chat is not None
    assert plan.tool_chat.messages[0]["content"] == CHAT[0]["content"]


@pytest.mark.parametrize(
    "chat",
    [
        [{"role": "user", "content": [{"type": "text", "text": part} for part in (SUN.text, f"\n\n{MOON.text}")]}],
        [{"role": "system", "content": None}, *CHAT],
    ],
)
def test_messages_of_several_texts_or_none_are_planned_as_well(
    engine: Engine, server: ScriptedServer, demo_model: str, chat: list[dict[str, Any]]
) -> None:
    know_cached(server, engine, "moon sun", chat=chat)
    plan = engine.integration.deadlines.plan_chat(chat, ttft_slo=0.001, documents=[SUN, MOON])
    assert plan.deadline is not None
    if isinstance(chat[0]["content"], list):
        assert "one message of plain text" in plan.deadline.left_out["document_order"]
    else:
        assert plan.deadline.choice == "document_order"


def test_numbered_documents_keep_their_places_and_the_report_reports_why(
    engine: Engine, server: ScriptedServer
) -> None:
    know_cached(server, engine, "moon sun")
    numbered = [{"role": "user", "content": f"{SUN.text}\n\n2. {MOON.text}\n\nWhat is the sun?"}]
    asked = {"ttft_slo": 0.001, "documents": [SUN, MOON]}
    plan = engine.integration.deadlines.plan_chat(numbered, **asked)  # type: ignore[arg-type]
    assert "messages" not in plan.extra_body
    assert plan.deadline is not None
    assert (plan.deadline.choice, plan.deadline.is_in_time) == ("exact", False)
    assert "a number" in plan.deadline.left_out["document_order"]


def test_documents_are_reused_where_that_was_calibrated_and_nothing_less_is_in_time(
    engine: Engine, server: ScriptedServer
) -> None:
    server.costs = CALIBRATED
    know_cached(server, engine, stores_chunks=True)
    ample = planned(engine, 5.0)
    assert ample.extra_body["kv_transfer_params"]["ragcache"]["chunk_reuse"] == "store"  # exact, and for later
    plan = planned(engine, 0.001)
    assert plan.extra_body["kv_transfer_params"]["ragcache"]["chunk_reuse"] == {"alpha": 1.7}
    assert plan.deadline is not None
    assert plan.deadline.options[-1].quality == 0.98
    ruled_out = planned(engine, 0.001, chunk_reuse=False)
    assert ruled_out.extra_body["kv_transfer_params"]["ragcache"]["chunk_reuse"] is False
    assert ruled_out.deadline is not None
    assert "chunk_reuse=False" in ruled_out.deadline.left_out["chunk_reuse"]


def test_an_uncalibrated_engine_with_default_reuse_is_set_to_no_reuse(engine: Engine, server: ScriptedServer) -> None:
    server.costs = {**CALIBRATED, "chunk_reuse": {"alpha": 1.7, "points": []}}
    assert planned(engine, 5.0).extra_body["kv_transfer_params"]["ragcache"]["chunk_reuse"] is False


def test_what_the_engine_has_to_do_for_others_is_asked_each_time(engine: Engine, server: ScriptedServer) -> None:
    for queue_s in (0.0, 0.7):
        server.load = {**IDLE, "pending_prefill_s": queue_s}
        plan = planned(engine, 5.0)
        assert plan.deadline is not None
        assert plan.deadline.queue_s == queue_s
    assert server.cache_questions.count("costs") == 1


@pytest.mark.parametrize(
    ("costs", "why"),
    [
        (None, "runs without RAGCache"),
        ({"prefill": None, "chunk_reuse": None}, "ragcache profile"),
        ({"something": "else"}, "did not say"),
        ({"prefill": {"format": 99}, "chunk_reuse": None}, "did not say"),
    ],
)
def test_without_measured_times_the_prompt_is_sent_as_it_is(
    engine: Engine, server: ScriptedServer, costs: Any, why: str
) -> None:
    server.costs = costs
    plan = planned(engine, 0.001)
    assert plan.extra_body == planned(engine, None).extra_body
    assert plan.deadline is not None
    assert (plan.deadline.choice, plan.deadline.is_in_time) == ("exact", None)
    assert why in plan.deadline.why
    planned(engine, 0.001)
    assert server.cache_questions.count("costs") == 1, "who says nothing keeps every request waiting"


def test_costs_that_appear_later_are_used(
    engine: Engine, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ragcache_core.client.deadline._COSTS_AGAIN_S", 0.0)
    measured, server.costs = server.costs, None
    plan = planned(engine, 5.0)
    server.costs = measured
    later = planned(engine, 5.0)
    assert plan.deadline is not None
    assert later.deadline is not None
    assert (plan.deadline.is_in_time, later.deadline.is_in_time) == (None, True)


def test_a_prompt_whose_tokens_the_server_does_not_report_is_sent_as_it_is(
    engine: Engine, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_laid_out", lambda body: None)
    plan = planned(engine, 0.001)
    assert plan.extra_body == planned(engine, None).extra_body
    assert plan.deadline is not None
    assert "does not report the tokens" in plan.deadline.why


def test_who_reports_how_documents_are_reused_cannot_leave_it_to_a_deadline(engine: Engine) -> None:
    with pytest.raises(ConfigError, match="leave chunk_reuse out"):
        planned(engine, 1.0, chunk_reuse={"alpha": 2.0})


def test_in_the_scope_of_a_question_a_prompt_is_planned_once(engine: Engine, server: ScriptedServer) -> None:
    scope = object()
    with request_scope(scope):
        ahead = planned(engine, 5.0)
        server.load = {**IDLE, "pending_prefill_s": 9.0}
        assert planned(engine, 5.0) == ahead
    with request_scope(object()):
        assert planned(engine, 5.0).deadline != ahead.deadline
