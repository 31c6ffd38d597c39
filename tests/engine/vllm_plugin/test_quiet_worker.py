"""Which steps a worker leaves the connector alone in."""

from __future__ import annotations

import pickle
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from ragcache_core.vllm_plugin.compat import OffloadingConnectorMetadata
from ragcache_core.vllm_plugin.offload.compat import NOTHING_TO_COPY
from ragcache_core.vllm_plugin.offload.worker import QuietModelRunner


class Runner(KVConnectorModelRunnerMixin):
    """A model runner that is built already."""

    def __init__(self) -> None:
        self.weights = 7


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """The steps of which vLLM asked the connector: whether their end was deferred."""
    asked: list[bool] = []

    def ask(scheduler_output: Any, defer_finalize: bool = False) -> Any:
        asked.append(defer_finalize)
        return nullcontext("asked")

    monkeypatch.setattr(KVConnectorModelRunnerMixin, "maybe_get_kv_connector_output", staticmethod(ask))
    return asked


def output_of(runner: Runner, metadata: OffloadingConnectorMetadata, **deferred: bool) -> Any:
    """Return what a step says of the connector, whose metadata came from another process."""
    step = SimpleNamespace(kv_connector_metadata=pickle.loads(pickle.dumps(metadata)))
    with runner.maybe_get_kv_connector_output(step, **deferred) as output:
        return output


def test_the_connector_is_asked_in_a_step_with_copies_and_left_alone_in_one_without(asked: list[bool]) -> None:
    runner = Runner()
    QuietModelRunner.take_over(runner)
    assert isinstance(runner, Runner)
    assert runner.weights == 7
    assert output_of(runner, NOTHING_TO_COPY) is None
    assert asked == []
    assert output_of(runner, OffloadingConnectorMetadata({}, {}, set())) == "asked"
    assert asked == [False]


def test_the_connector_knows_a_step_whose_end_vllm_tells_it_later(asked: list[bool]) -> None:
    runner = Runner()
    QuietModelRunner.take_over(runner)
    assert output_of(runner, NOTHING_TO_COPY, defer_finalize=True) == "asked"
    assert asked == [True]


def test_runners_that_are_not_taken_over_ask_in_every_step(asked: list[bool]) -> None:
    QuietModelRunner.take_over(Runner())
    assert output_of(Runner(), NOTHING_TO_COPY) == "asked"
    assert asked == [False]
