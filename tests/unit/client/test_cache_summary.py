"""Both frameworks' handlers say the same in one line."""

from dataclasses import replace
from uuid import uuid4

from langchain_core.messages import AIMessage
from langchain_core.outputs import ChatGeneration, LLMResult

from ragcache_core.stats import DeadlineReport, DocumentStats, RequestStats
from ragcache_integrations.langchain import CacheStatsCallbackHandler
from ragcache_integrations.langchain.callbacks import SPECULATION_EVENT
from ragcache_integrations.llamaindex import CacheStatsEvent, CacheStatsEventHandler
from ragcache_integrations.llamaindex.events import SpeculationEvent

FIRST = RequestStats(1200, 0, 8, 0.08, 0.2, (DocumentStats("sun", 900, 0),))
AGAIN = RequestStats(
    1200, 1152, 8, 0.02, 0.1, (DocumentStats("sun", 900, 900),), num_gpu_tokens=1024, num_host_tokens=128,
    num_disk_tokens=0,
)  # fmt: skip


def test_both_handlers_print_the_same_line() -> None:
    callbacks, events = CacheStatsCallbackHandler(), CacheStatsEventHandler()
    for stats in (FIRST, AGAIN):
        message = AIMessage("The sun.", response_metadata={"ragcache": stats.to_dict()})
        callbacks.on_llm_end(LLMResult(generations=[[ChatGeneration(message=message)]]), run_id=uuid4())
        events.handle(CacheStatsEvent.from_stats(stats, model="any", span_id=None))
    for kind, hidden_s in (("start", None), ("confirm", None), ("settle", 0.25)):
        told = {"event": kind, "overlapped_search_s": hidden_s}
        callbacks.on_custom_event(SPECULATION_EVENT, told, run_id=uuid4())
        events.handle(
            SpeculationEvent(
                query="?",
                kind=kind,
                stage=0,
                document_ids=(),
                search_s=0.5,
                overlapped_search_s=hidden_s,  # type: ignore[arg-type]  # parametrised
            )
        )
    line = (
        "2 requests, 1,152 of 2,400 prompt tokens cached (48%: 1,024 GPU, 128 host, 0 disk), first token after 50 ms "
        "on average, 0.250 s of search time overlapped"
    )
    assert callbacks.summary() == events.summary()
    assert str(callbacks) == str(events) == line
    assert repr(callbacks) == f"<CacheStatsCallbackHandler: {line}>"
    assert repr(events) == f"<CacheStatsEventHandler: {line}>"
    assert callbacks.summary().documents["sun"].num_cached_tokens == 900


def test_deadlines_are_met_by_first_tokens_that_came_in_time() -> None:
    events = CacheStatsEventHandler()
    for stats, ttft_slo_s in ((FIRST, 0.08), (FIRST, 0.07), (AGAIN, 1.0), (replace(AGAIN, ttft_s=None), 1.0)):
        report = DeadlineReport(ttft_slo_s, "exact", None, "")
        events.handle(CacheStatsEvent.from_stats(replace(stats, deadline=report), model="any", span_id=None))
    assert (events.summary().num_met_deadlines, events.summary().num_deadlines) == (2, 4)
    assert ", 2 of 4 deadlines met" in str(events)
