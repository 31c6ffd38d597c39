"""A server that is to end answers what it was asked before."""

from __future__ import annotations

import threading
import time

from ragcache_core.client import Engine
from tests.support.scripted_server import THREE_TIERS, Reply, ScriptedServer
from tests.support.waiting import until


def test_draining_waits_for_the_answers_that_are_under_way(demo_model: str) -> None:
    with ScriptedServer(root=demo_model, cache=THREE_TIERS) as server, Engine.connect(server.url) as engine:
        assert engine.drain(0.0)
        server.script(Reply("one two three", wait_s=0.5))
        answers: list[str] = []
        asking = threading.Thread(target=lambda: answers.append(engine.generate("Who?").text))
        asking.start()
        assert until(lambda: server.num_running == 1)
        assert not engine.drain(0.0)
        assert engine.drain(30.0)
        asking.join()
        assert answers == ["one two three"]


def test_a_server_that_cannot_be_drained_is_not_waited_for(demo_model: str) -> None:
    with ScriptedServer(root=demo_model) as server:
        engine = Engine.connect(server.url)
        began_s = time.monotonic()
        assert not engine.drain(600.0), "plain vLLM has no such route"
    assert not engine.drain(600.0), "no answer comes"
    assert time.monotonic() - began_s < 60.0
    engine.close()
