"""The load on a server: open loop, its clock, its answers."""

from __future__ import annotations

import numpy as np
import pytest

from ragcache_core.bench.load import Load, poisson_arrivals
from ragcache_core.bench.prompts import TracedPrompts
from ragcache_core.client import Engine
from ragcache_core.errors import ConfigError, RequestRejectedError
from ragcache_core.sim.traces.trace import Trace, TracedRequest
from tests.support.scripted_server import ENGINE_DEAD, Refusal, Reply, ScriptedServer, Seen

TRACE = Trace.from_requests(TracedRequest(float(i), (f"d{i % 3}", "x"), (40, 30), 8, 4) for i in range(12))
PROMPTS = TracedPrompts(TRACE, 1_024, seed=0)


def test_arrivals_are_poisson_and_the_same_for_every_rate() -> None:
    slow, fast = poisson_arrivals(2_000, 2.0, seed=1), poisson_arrivals(2_000, 8.0, seed=1)
    np.testing.assert_allclose(slow, np.array(fast) * 4)
    gaps = np.diff(slow)
    assert 0.47 < gaps.mean() < 0.53
    assert 0.9 < gaps.std() / gaps.mean() < 1.1
    assert poisson_arrivals(5, 1.0, seed=2) != poisson_arrivals(5, 1.0, seed=1)
    with pytest.raises(ConfigError, match="above 0"):
        poisson_arrivals(5, 0.0, seed=1)


def test_every_request_is_answered_and_reports_what_it_is(demo_model: str) -> None:
    answered = []
    with ScriptedServer(root=demo_model) as server, Engine.connect(server.url) as engine:
        load = Load(engine, PROMPTS, on_answer=lambda: answered.append(1))
        answers = load.replay(range(6), [0.01 * i for i in range(6)])
        bodies = [seen.body for seen in server.requests if "prompt" in seen.body]
    assert [a.number for a in answers] == list(range(6))
    assert len(answered) == 6
    sent = {tuple(body["prompt"]): body for body in bodies}
    for i in range(6):
        request = PROMPTS.request(i)
        body = sent[request.token_ids]
        assert body["kv_transfer_params"] == request.params
        assert (body["max_tokens"], body["ignore_eos"], body["temperature"]) == (4, True, 0)
    assert all(0 < a.ttft_s <= a.total_s and a.num_prompt_tokens > 0 for a in answers)


def test_a_slow_answer_delays_no_other_request(demo_model: str) -> None:
    def slow(seen: Seen) -> Reply | None:
        return Reply("late", wait_s=1.5) if seen.body.get("prompt") == list(PROMPTS.request(0).token_ids) else None

    with ScriptedServer(rules=[slow], root=demo_model) as server, Engine.connect(server.url) as engine:
        due_s = [0.0, 0.05, 0.1, 0.15]
        answers = Load(engine, PROMPTS).replay(range(4), due_s)
    assert answers[0].ttft_s >= 1.5
    slow_end_s, *ends_s = (after_s + answer.total_s for after_s, answer in zip(due_s, answers, strict=True))
    assert max(ends_s) < slow_end_s


@pytest.mark.parametrize("answer", [Refusal(400, "too long"), ENGINE_DEAD])
def test_a_request_that_is_not_answered_ends_the_load(demo_model: str, answer: Refusal) -> None:
    with ScriptedServer(root=demo_model) as server, Engine.connect(server.url) as engine:
        server.script(answer)
        with pytest.raises(RequestRejectedError, match=rf"rejected request \d \({answer.status}\)"):
            Load(engine, PROMPTS).replay(range(4), [0.0] * 4)
