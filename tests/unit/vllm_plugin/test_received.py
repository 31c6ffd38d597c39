"""What the server's process knows of its engines, before and after they have said anything."""

from __future__ import annotations

import asyncio

from ragcache_core.vllm_plugin.server.engine_view import Received, Wait
from ragcache_core.vllm_plugin.settings import PluginSettings


def test_what_an_idle_engine_says_without_a_step_is_its_report() -> None:
    received, observed = Received(), list[object]()
    received.begin(PluginSettings(policy="pgdsf"), lambda *said: observed.append(said), engines=[3, 2])
    received.update([{"num_requests": 1}, None])
    received.update([None, {"num_requests": 2}])
    assert observed == [({"engine": {"num_requests": 1}}, 2), ({"engine": {"num_requests": 2}}, 3)]
    received = Received()
    received.update([{"num_requests": 1}])
    assert received.engine() == {"num_requests": 1}


def test_an_engine_has_room_until_it_says_otherwise_and_again_when_it_reports_it() -> None:
    received = Received()
    received.begin(PluginSettings(policy="pgdsf", max_prefill_bs=2))

    def has_room() -> object:
        load = received.load()
        assert load is not None
        return load["has_room"]

    assert has_room() is True
    received.add({"has_room": False}, engine_index=0)
    received.add({"has_room": True}, engine_index=1)
    received.add({"has_room": None}, engine_index=0)
    assert has_room() is False
    received.add({"has_room": True}, engine_index=0)
    assert has_room() is True


def test_an_engine_whose_disk_works_reads_ahead() -> None:
    received = Received()
    received.begin(PluginSettings(policy="pgdsf", max_prefill_bs=2))
    for tiers, reads_ahead in (
        ([], False),
        ([{"name": "host", "is_enabled": True}], False),
        ([{"name": "disk", "is_enabled": True}], True),
        ([{"name": "disk", "is_enabled": False}], False),
    ):
        received.add({"engine": {"tiers": tiers}}, engine_index=0)
        load = received.load()
        assert load is not None
        assert load["reads_ahead"] is reads_ahead


def test_an_engine_has_as_long_to_compute_as_it_said_less_the_time_since() -> None:
    received = Received()
    received.begin(PluginSettings(policy="pgdsf"))

    def pending_s() -> float:
        load = received.load()
        assert load is not None
        return float(load["pending_prefill_s"])

    assert pending_s() == 0.0
    received.add({"num_pending_prefills": 1, "pending_prefill_s": 100.0}, engine_index=0)
    received.add({"num_pending_prefills": 1, "pending_prefill_s": 1e-9}, engine_index=1)
    first = pending_s()
    assert 0.0 < pending_s() <= first <= 100.0
    received.add({"num_pending_prefills": 0, "pending_prefill_s": 0.0}, engine_index=0)
    assert pending_s() == 0.0


def test_how_long_a_speculation_waited_is_what_the_first_engine_said_last() -> None:
    received = Received()
    assert received.wait_of("s") is None
    received.add({"waited_s": {"s": (0.25, None)}}, engine_index=0)
    received.add({"waited_s": {"s": (100.0, None)}}, engine_index=1)
    assert received.wait_of("s") == Wait(0, 1, 0.25)
    assert received.wait_of("s", after=1) is None, "that is known"
    received.add({"waited_s": {"s": (1.5, None)}}, engine_index=0)
    assert received.wait_of("s", after=1) == received.wait_of("s") == Wait(0, 2, 1.5)
    for i in range(1100):
        received.add({"waited_s": {f"s{i}": (0.0, None)}}, engine_index=0)
    assert received.wait_of("s") is None, "the newest are remembered"
    assert received.wait_of("s1099") is not None


async def test_waiting_requests_get_figures_when_they_arrive() -> None:
    received = Received()
    waiting = [
        asyncio.create_task(received.notifier.wait_for(lambda: received.request("cmpl-1"), 5.0)),
        asyncio.create_task(received.notifier.wait_for(lambda: received.wait_of("s"), 5.0)),
        asyncio.create_task(received.notifier.wait_for(lambda: received.wait_of("unknown"), 0.0)),
    ]
    await asyncio.sleep(0)  # let the three begin to wait
    received.add({"requests": {"cmpl-1": {"queue_s": 0.5}}}, engine_index=0)
    assert await waiting[0] == {"queue_s": 0.5}
    assert not waiting[1].done()
    await asyncio.to_thread(received.add, {"waited_s": {"s": (0.25, None)}}, 0)
    assert await waiting[1] == Wait(0, 1, 0.25)
    assert await waiting[2] is None


def test_a_tenants_requests_and_waits_neither_replace_nor_evict_those_of_others() -> None:
    received = Received(max_requests=3)
    for tenant, figure in (("a", 1), ("b", 2), (None, 3)):
        own = {} if tenant is None else {"tenant": tenant}
        received.add({"requests": {"cmpl-same": {"num_gpu_tokens": figure, **own}}}, engine_index=0)
        received.add({"waited_s": {f"of {tenant}": (float(figure), tenant)}}, engine_index=0)
    for i in range(1200):
        received.add({"requests": {f"cmpl-{i}": {"num_gpu_tokens": 0, "tenant": "b"}}}, engine_index=0)
        received.add({"waited_s": {f"s{i}": (0.0, "b")}}, engine_index=0)
    assert received.request("cmpl-same", "a") == {"num_gpu_tokens": 1, "tenant": "a"}
    assert received.request("cmpl-same") == {"num_gpu_tokens": 3}
    assert received.request("cmpl-same", "b") is None, "evicted by its own tenant's"
    assert received.request("cmpl-1199", "a") is None
    assert received.request("cmpl-1199", any_tenant=True) is not None, "operators see each tenant's"
    assert received.wait_of("of a", "a") == Wait(0, 1, 1.0)
    assert received.wait_of("of None") == Wait(0, 1, 3.0)
    assert received.wait_of("of b", "b") is None
