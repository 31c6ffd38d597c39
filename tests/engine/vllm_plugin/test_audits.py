"""Audits of approximate answers run while the engine is idle, give way at once, and change nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import RequestStatus

from ragcache_core.chunk.guard import ErrorGuard
from ragcache_core.vllm_plugin.chunks.audits import AnswerAudits
from tests.engine.vllm_plugin.scheduler_scene import Stage, block_hasher

KINDS: dict[str, dict[str, Any]] = {
    "one step at a time": {},
    "two steps in flight": {"is_gpu": True, "is_async": True},
    "without our queue": {"settings": {"queue": "fifo", "max_prefill_bs": 0}},
}


class AuditedStage(Stage):
    """A stage on which answers that have ended count as approximate ones, if a test says so."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.guard = ErrorGuard(0.5, (0.0,), lambda: 0.0)
        self.audits = AnswerAudits(self.guard, block_hasher)
        self.scheduler.connector.audits = self.scheduler._audits = self.audits
        self.controller.forgetting.add_holder(self.audits)

    def begun(self, documents: str, **how: Any) -> str:
        """Have a request begin whose answer is approximate, and to be audited."""
        for _ in range(2):
            self.guard.on_answered(self.guard.choose("k", can_audit=False), is_shown=True, is_approximate=False)
        request_id = self.ask(documents, **how)
        request = self.requests[request_id]
        request.sampling_params.temperature = 0
        assert self.audits.alpha_for(request, "k") == 0.0
        return request_id

    def answered(self, documents: str, *, wrong_from: int | None = None, **how: Any) -> str:
        """Have a request answered, and its answer audited, with another token from ``wrong_from`` on."""
        request_id = self.begun(documents, **how)
        request = self.requests[request_id]
        while not request.is_finished():
            self.step()
        if wrong_from is not None:
            request._output_token_ids[wrong_from] += 1
        self.audits.on_finished(request, is_shown=True, is_approximate=True)
        return request_id

    def idle(self, max_steps: int = 300) -> int:
        """Run as long as the engine says that it has something to do, and return the number of steps."""
        for number in range(max_steps):
            if self.scheduler.has_requests():
                self.step()
            elif self.running:
                self._finish()
            else:
                return number
        raise AssertionError("it never becomes idle")

    @property
    def found(self) -> tuple[int, int]:
        """Audits and errors."""
        (figures,) = self.guard.report()
        return figures["num_audits"], figures["num_errors"]  # type: ignore[return-value]

    def _run(self, output: Any) -> ModelRunnerOutput:
        self.requests.update(self.scheduler.requests)  # an audit is no request of a test's
        return super()._run(output)


@pytest.fixture(params=KINDS)
def stage(request: pytest.FixtureRequest) -> AuditedStage:
    return AuditedStage(**KINDS[request.param])


def test_an_idle_engine_finds_out_which_answers_are_not_the_exact_ones(stage: AuditedStage) -> None:
    stage.answered("ABC", num_answers=6)
    stage.answered("CAB", num_answers=6, wrong_from=5)
    stage.idle()
    assert stage.found == (2, 1)
    stage.answered("ABCD", num_answers=200, wrong_from=0)
    assert stage.idle() < 10, "the first token that differs ends an audit"
    assert stage.found == (3, 2)
    stage.check_nothing_is_left()


def test_a_request_that_arrives_takes_the_very_next_step_alone_and_the_audit_begins_again(stage: AuditedStage) -> None:
    stage.answered("ABCDEFG", num_answers=8)
    with stage.scheduler._own_connector.keeping_weights():
        assert stage.scheduler.reset_prefix_cache()
    while not (scheduled := stage.step()):
        pass
    (audit,) = scheduled
    assert scheduled[audit] == 512, "so long is a step that a request waits for"
    real = stage.ask("XY", num_answers=3)
    assert stage.step() == {real: 324}
    stage.finish_all()
    stage.idle()
    assert stage.answers[real] == stage.expected(real)
    assert stage.found == (1, 0)
    stage.check_nothing_is_left()


def test_no_statistics_but_the_audits_own_tell_of_them(stage: AuditedStage) -> None:
    stage.answered("ABC", num_answers=5)
    stage.step()  # the first of the audit, or the last of the answer
    before, recent = stage.controller.report(), stage.controller.recent_requests(10, 0.0)
    said: list[Any] = []
    update = stage.scheduler.update_from_output

    def listen(*args: Any) -> Any:
        outputs = update(*args)
        said.extend(outputs.values())
        return outputs

    stage.scheduler.update_from_output = listen  # type: ignore[method-assign]
    stage.idle()
    assert stage.found == (1, 0)
    assert not any(each.outputs for each in said)
    for stats in [each.scheduler_stats for each in said if each.scheduler_stats is not None]:
        assert (stats.num_running_reqs, stats.num_waiting_reqs) == (0, 0)
        assert (stats.prefix_cache_stats.requests, stats.prefix_cache_stats.queries) == (0, 0)
    ignored = {"tiers"}  # what is cached of the audit's answer
    after = stage.controller.report()
    assert {k: v for k, v in after.items() if k not in ignored} == {k: v for k, v in before.items() if k not in ignored}
    assert stage.controller.recent_requests(10, 0.0) == recent
    assert stage.uses == {"A": 1, "B": 1, "C": 1}
    assert not stage.controller.take_finished().keys() - {"r0"}


@pytest.mark.parametrize("way", ["all are aborted", "paused", "emptied", "deleted"])
def test_whatever_ends_requests_or_their_kv_ends_audits(stage: AuditedStage, way: str) -> None:
    for documents in ("ABCDEFGH", "HGFEDCBA"):
        stage.answered(documents, num_answers=50)
    while not stage.step():
        pass
    assert stage.audits.running is not None
    match way:
        case "all are aborted":
            stage.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        case "paused":
            stage.scheduler.set_pause_state(PauseState.PAUSED_NEW)
        case "emptied":
            while stage.running:
                stage._finish()
            with stage.scheduler._own_connector.keeping_weights():
                assert stage.scheduler.reset_prefix_cache()
        case "deleted" if stage.scheduler._tree_queue is not None:
            stage.scheduler.forget(["A"])
            assert stage.scheduler.left()["num_requests"] == 0, "an audit holds none of it"
            assert not stage.audits.has_pending
    num_steps = stage.idle()
    stage.check_nothing_is_left()
    if way == "emptied":
        assert stage.found == (2, 0)
        return
    assert num_steps <= 3
    assert stage.found == (0, 0)
    if way == "paused":
        stage.scheduler.set_pause_state(PauseState.UNPAUSED)
        stage.idle()
        assert stage.found == (2, 0)


def test_an_answer_that_ends_after_a_deletion_is_not_audited(stage: AuditedStage) -> None:
    if stage.scheduler._tree_queue is None:
        pytest.skip("deletes no documents")
    request = stage.requests[stage.begun("AB", num_answers=6)]
    stage.step()
    stage.scheduler.forget(["A"])
    stage.finish_all()
    stage.audits.on_finished(request, is_shown=True, is_approximate=True)
    assert not stage.audits.has_pending, "it would compute KV of the deleted document again"


@pytest.mark.parametrize("is_approximate", [True, False])
def test_an_answer_that_began_with_other_weights_counts_for_nothing(is_approximate: bool) -> None:
    stage = AuditedStage()
    request = stage.requests[stage.begun("AB", num_answers=6)]
    stage.audits.forget_weights()
    assert stage.guard.choose("k", can_audit=True).alpha is None, "the bound of the new model is not known"
    stage.finish_all()
    stage.audits.on_finished(request, is_shown=True, is_approximate=is_approximate)
    assert not stage.audits.has_pending
    assert stage.guard.choose("k", can_audit=True).alpha is None


def test_speculation_is_admitted_as_if_no_audit_ran() -> None:
    stage = AuditedStage()
    stage.answered("ABCDE", num_answers=50)
    stage.step()
    assert stage.audits.running is not None
    assert stage.scheduler.has_room()  # type: ignore[attr-defined]
    guess = stage.ask("XYZ", speculation="s")
    assert guess in stage.step()
    stage.finish_all()
    stage.idle()
    assert stage.answers[guess] == stage.expected(guess)
    assert stage.found == (1, 0)


def test_a_sampled_answer_is_not_approximate_before_the_bound_holds_and_few_wait_for_audits() -> None:
    stage = AuditedStage()
    stage.guard.max_error = 0.02
    sampled = stage.requests[stage.ask("A")]
    stage.finish_all()
    for _ in range(200):
        assert stage.audits.alpha_for(sampled, "k") is None
        stage.audits.on_finished(sampled, is_shown=True, is_approximate=False)
    sampled.sampling_params.temperature = 0
    stage.guard.max_error = 0.5
    for _ in range(100):
        if stage.audits.alpha_for(sampled, "k") is not None:
            stage.audits.on_finished(sampled, is_shown=True, is_approximate=True)
        else:
            stage.audits.on_finished(sampled, is_shown=True, is_approximate=False)
    assert stage.idle() < 200
    assert stage.found[0] <= 16
