"""What outlives a reset of the caches goes when the weights change, and stays when an engine only pauses or sleeps.

The engine core's methods are vLLM's own; its scheduler is ours; its workers record what they are called with.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.sched.interface import PauseState

from ragcache_core.vllm_plugin.compat import EngineCore, attach_utilities
from tests.engine.vllm_plugin.scheduler_scene import Stage


class Core(EngineCore):
    """An engine core on a :class:`Stage`: its connector counts how often it forgets what outlives a reset."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, scheduler: Any = None) -> None:
        attach_utilities()
        self.scheduler = Stage().scheduler if scheduler is None else scheduler
        self.mm_receiver_cache = None
        self.called: list[object] = []
        self.model_executor: Any = SimpleNamespace(
            sleep=lambda level: self.called.append(f"sleep {level}"),
            collective_rpc=lambda method, *args: self.called.append(method),
            **{name: lambda *args: None for name in ("reset_mm_cache", "reset_encoder_cache", "discard")},
            is_sleeping=False,
        )
        self.batch_queue = None
        self.num_resets = self.num_forgotten = 0
        connector = self.scheduler.connector
        reset, forget = connector.reset_cache, connector.forget_weights
        monkeypatch.setattr(connector, "reset_cache", lambda: (self._count("num_resets"), reset())[1])
        monkeypatch.setattr(connector, "forget_weights", lambda: (self._count("num_forgotten"), forget())[1])

    def _count(self, name: str) -> None:
        setattr(self, name, getattr(self, name) + 1)


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> Core:
    return Core(monkeypatch)


def test_an_engine_that_pauses_or_sleeps_with_its_weights_keeps_what_outlives_a_reset(core: Core) -> None:
    core.pause_scheduler()
    core.resume_scheduler()
    core.sleep()
    core.resume_scheduler()
    core.sleep(level=1)
    core.release_kv_cache_memory()
    core.resume_scheduler()
    assert core.called.count("sleep 1") == 2
    assert (core.num_resets, core.num_forgotten) == (4, 0)


def test_a_sleep_that_discards_the_weights_forgets_it(core: Core) -> None:
    core.sleep(2)
    assert (core.called[-1], core.num_forgotten) == ("sleep 2", 1)


def _anything(worker: object) -> None: ...


@pytest.mark.parametrize(
    "method", ["update_weights", "reload_weights", "start_weight_update", "load_model", "reset_weights"]
)
@pytest.mark.parametrize("is_paused", [False, True])
def test_new_weights_are_noticed(
    core: Core, method: str, is_paused: bool, plugin_log: pytest.LogCaptureFixture
) -> None:
    core.scheduler.set_pause_state(PauseState.PAUSED_NEW if is_paused else PauseState.UNPAUSED)
    core.collective_rpc(method)
    assert (core.called[-1], core.num_forgotten) == (method, 1)
    core.collective_rpc(method)
    assert core.num_forgotten == 2
    assert plugin_log.text.count(f"the workers are called with '{method}'") == 1, "once is enough"


@pytest.mark.parametrize("method", [_anything, "a_method_of_my_own"])
def test_an_unknown_call_may_change_weights_while_an_engine_is_paused(core: Core, method: object) -> None:
    core.collective_rpc(method)
    assert core.num_forgotten == 0, "weights that change in a running engine have to be told of"
    core.pause_scheduler()
    core.collective_rpc(method)
    assert core.num_forgotten == 1


@pytest.mark.parametrize("method", ["compute_weight_checksums", "init_weight_transfer_engine", "checkpoint_prepare"])
def test_calls_that_leave_the_weights_alone_forget_nothing(core: Core, method: str) -> None:
    core.pause_scheduler()
    core.collective_rpc(method)
    assert (core.called[-1], core.num_forgotten) == (method, 0)


def test_another_scheduler_in_the_same_process_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    core = Core(monkeypatch)
    core.scheduler = SimpleNamespace(  # one that knows nothing of us
        **{name: lambda *args, **kwargs: True for name in ("reset_prefix_cache", "finish_requests", "set_pause_state")},
        has_unfinished_requests=lambda: False,
        reset_encoder_cache=lambda: None,
        pause_state=PauseState.PAUSED_NEW,
    )
    core.sleep(2)
    core.collective_rpc("update_weights")
    assert core.called[-2:] == ["sleep 2", "update_weights"]
    assert core.num_forgotten == 0


def test_an_explicit_reset_forgets_it_also_while_the_engine_is_paused(core: Core) -> None:
    core.reset_prefix_cache(reset_connector=True)
    core.pause_scheduler()
    core.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    assert (core.num_resets, core.num_forgotten) == (3, 2)
    core.reset_prefix_cache()
    assert core.num_forgotten == 2, "that is for GPU memory alone"
