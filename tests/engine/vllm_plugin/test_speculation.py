"""Speculative requests run in idle time only, give way at once, and give the same answers."""

from __future__ import annotations

import random
from typing import Any

import pytest
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.request import RequestStatus

from ragcache_core.types import Tier
from tests.engine.vllm_plugin.scheduler_scene import FULL, LATENT, STATE, WINDOW, Stage

KINDS: dict[str, dict[str, Any]] = {
    "cpu": {},
    "gpu": {"is_gpu": True, "is_async": True},
    "async": {"is_async": True},
    "several groups": {"groups": (FULL, WINDOW)},
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> dict[str, Any]:
    return KINDS[request.param]


def check_answers(stage: Stage, *request_ids: str) -> None:
    for request_id in request_ids:
        assert stage.answers[request_id] == stage.expected(request_id), request_id
    stage.check_nothing_is_left()


def test_a_real_request_takes_the_very_next_step_and_the_speculation_resumes_with_the_same_answer(
    kind: dict[str, Any],
) -> None:
    stage = Stage(**kind)
    guess = stage.ask("ABCDE", speculation="s")
    assert stage.step() == {guess: 512}
    real = stage.ask("ABFG")
    assert stage.step() == {real: 644 - 320}, "with what the speculation has computed"
    stage.finish_all()
    check_answers(stage, guess, real)
    assert stage.requests[guess].num_preemptions == 1


def test_beside_answers_speculation_runs_on_a_gpu_only(kind: dict[str, Any]) -> None:
    stage = Stage(**kind)
    real = stage.ask("A", num_answers=20)
    for _ in range(3):
        stage.step()
    guess = stage.ask("BCDE", speculation="s")
    scheduled = stage.step()
    assert scheduled[real] == 1
    assert scheduled.get(guess, 0) == (256 if stage.is_gpu else 0)
    stage.finish_all()
    check_answers(stage, real, guess)


def test_a_model_that_reads_images_speculates_on_text_in_short_steps_and_takes_an_image_whole() -> None:
    stage = Stage()
    scheduler = stage.scheduler
    scheduler.max_num_encoder_input_tokens = 2048
    scheduler.encoder_cache_manager = EncoderCacheManager(2048)
    scheduler.scheduler_config.disable_chunked_mm_input = True  # as models have it whose images see all of themselves
    text = stage.ask("ABCDE", speculation="text")
    assert stage.step() == {text: 512}
    stage.finish_all()
    picture = stage.ask("FGHIJ", speculation="picture", image=(0, 700))
    assert stage.step() == {picture: 804}, "a step of 512 would never come past it"
    behind = stage.ask("KLMNO", speculation="behind")
    stage.finish_all()
    check_answers(stage, text, picture, behind)


@pytest.mark.parametrize("num_steps", [None, 0, 1, 2, 30])
def test_a_speculation_is_real_from_its_confirmation_on_whenever_that_comes(num_steps: int | None) -> None:
    stage = Stage()
    busy = stage.ask("A", num_answers=8)
    stage.step()
    if num_steps is None:
        stage.scheduler.confirm("s")
    guess = stage.ask("BCDE", speculation="s")
    for _ in range(num_steps or 0):
        stage.step()
    if num_steps is not None:
        stage.scheduler.confirm("s")
        stage.scheduler.confirm("s")
    if num_steps in (None, 0, 1, 2):
        assert guess in stage.step(), "it does not wait for the other's answer any more"
    stage.finish_all()
    check_answers(stage, busy, guess)
    report = stage.controller.report()
    assert report["num_confirmed_speculations"] == report["num_speculative_requests"] == 1
    assert report["num_wasted_tokens"] == 0
    assert report["num_speculative_tokens"] == (644 if num_steps == 30 else 0)
    assert set(stage.uses.values()) == {1}


def test_a_running_speculation_that_is_confirmed_goes_on_and_another_gives_way() -> None:
    stage = Stage()
    right, wrong = stage.ask("ABCDE", speculation="right"), stage.ask("FGHIJ", speculation="wrong")
    stage.step()
    stage.step()
    stage.scheduler.confirm("right")
    assert set(stage.step()) == {right}
    stage.finish_all()
    check_answers(stage, right, wrong)
    assert stage.requests[right].num_preemptions == 0


def test_an_unknown_confirmation_does_no_harm() -> None:
    stage = Stage()
    stage.scheduler.confirm("unknown")
    stage.finish_all()
    stage.check_nothing_is_left()


@pytest.mark.parametrize("num_steps", [0, 1, 2, 4])
def test_a_speculation_that_is_cancelled_leaves_nothing(kind: dict[str, Any], num_steps: int) -> None:
    stage = Stage(**kind)
    guess = stage.ask("ABCDE", speculation="s", num_answers=20)
    for _ in range(num_steps):
        stage.step()
    real = stage.ask("AB")
    stage.step()
    stage.abort(guess)
    stage.finish_all()
    check_answers(stage, real)
    report = stage.controller.report()
    assert report["num_wasted_tokens"] == report["num_speculative_tokens"] == (0, 512, 804, 804, 804)[num_steps]


def test_a_prefill_and_the_request_that_it_was_for_are_one_use_and_one_request() -> None:
    stage = Stage()
    stage.ask("A", speculation="s", num_answers=1, metadata={"prefill": True})
    stage.step()
    stage.scheduler.confirm("s")
    real = stage.ask("A", metadata={"reordered": True})
    stage.finish_all()
    check_answers(stage, real)
    assert stage.uses == {"A": 1}
    (node,) = [node for node in stage.controller.tree.nodes() if node.doc_id == "A"]
    assert node.avg_cost_s > 0
    report = stage.controller.report()
    assert (report["num_requests"], report["num_reordered_prompts"], report["num_wasted_tokens"]) == (1, 1, 0)


@pytest.mark.parametrize("salt", [None, "tenant-a"])
@pytest.mark.parametrize("is_early", [False, True])
def test_a_confirmed_prefill_is_wasted_unless_a_request_finds_its_blocks(salt: str | None, *, is_early: bool) -> None:
    stage = Stage()
    stage.ask("AB", speculation="s", num_answers=1, metadata={"prefill": True})
    for _ in range(1 if is_early else 4):
        stage.step()
    stage.scheduler.confirm("s")
    stage.ask("AB", salt=salt)
    stage.finish_all()
    report = stage.controller.report()
    num_computed = report["num_speculative_tokens"]
    assert num_computed == 324
    assert report["num_wasted_tokens"] == (0 if salt is None else num_computed)
    stage.ask("ABC")
    stage.finish_all()
    assert stage.controller.report()["num_wasted_tokens"] == 0, "this one finds them"


def test_when_memory_runs_out_speculation_goes_before_an_answer() -> None:
    stage = Stage(num_blocks=44, is_gpu=True)
    real = stage.ask("A", num_answers=200)
    stage.step()
    guess = stage.ask("BC", speculation="s", num_answers=200)
    stage.step()
    assert stage.running_ids == [real, guess]
    stage.finish_all()
    check_answers(stage, real, guess)
    assert stage.requests[real].num_preemptions == 0
    assert stage.requests[guess].num_preemptions > 0


def test_what_was_loaded_for_a_speculation_neither_delays_nor_blocks_a_real_request() -> None:
    stage = Stage(num_blocks=62)
    guess = stage.ask("ABCDE", speculation="s", is_loaded=True)
    stage.step()
    real = stage.ask("FGHIJ")
    assert stage.step() == {}, "there is no room for it while the load is written"
    stage.finish_loading(guess)
    stage.step()
    assert stage.step() == {real: 804}
    stage.finish_all()
    check_answers(stage, guess, real)


def test_a_real_request_that_cannot_start_yet_keeps_its_place_and_speculation_back() -> None:
    stage = Stage()
    guess = stage.ask("A", speculation="s")
    blocked = stage.ask("B")
    stage.requests[blocked].status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    other = stage.ask("C")
    assert set(stage.step()) == {other}
    assert [r.request_id for r in stage.scheduler.waiting] == [blocked, guess]
    stage.requests[blocked].status = RequestStatus.WAITING
    assert set(stage.step()) == {blocked, other}
    stage.finish_all()
    check_answers(stage, guess, blocked, other)


def test_the_load_that_is_reported_counts_real_requests_until_their_first_token() -> None:
    stage = Stage()
    stage.ask("A", speculation="s")
    assert stage.controller.num_pending_prefills == 0
    stage.ask("BCDEFGHIJKLM")
    stage.ask("NOPQ")
    assert stage.controller.num_pending_prefills == 2
    stage.step()
    assert stage.controller.num_pending_prefills == 1
    stage.step()
    assert stage.controller.num_pending_prefills == 0
    stage.finish_all()


def test_a_guess_whose_documents_contradict_its_prompt_stays_a_guess() -> None:
    stage = Stage()
    guess = stage.ask("A", speculation="s", metadata={"documents": [{"id": "A", "start": 0, "end": 99_999}]})
    assert stage.controller.is_speculative(guess)
    real = stage.ask("B", metadata={"documents": None})
    wrong = stage.ask("C", speculation="s", metadata={"speculation": "a/b"})
    assert not stage.controller.is_speculative(real)
    assert not stage.controller.is_speculative(wrong)
    assert stage.controller.counters.num_ignored_metadata == 3
    stage.finish_all()
    check_answers(stage, guess, real, wrong)


@pytest.mark.parametrize(
    "kind",
    [
        *KINDS.values(),
        {"groups": (LATENT,)},
        {"groups": (STATE, STATE, FULL)},
        {"groups": (STATE, WINDOW, FULL), "is_async": True, "is_gpu": True},
    ],
    ids=[*KINDS, "latent attention", "states", "states and windows"],
)
def test_whatever_happens_every_answer_is_right_and_nothing_is_left(kind: dict[str, Any]) -> None:
    num_hit_tokens = num_preempted = 0
    for seed in range(12):
        rng = random.Random(seed)
        stage = Stage(**kind, num_blocks=rng.choice((90, 200)), max_num_seqs=rng.choice((3, 8)))
        alive: list[str] = []
        given_up: set[str] = set()
        for number in range(120):
            match rng.randrange(9):
                case 0:
                    speculation = f"s{number}" if rng.random() < 0.6 else None
                    documents = "".join(rng.choices("ABCDEF", k=rng.randint(1, 4)))
                    is_loaded = rng.random() < 0.3
                    alive.append(
                        stage.ask(
                            documents, speculation=speculation, num_answers=rng.randint(1, 30), is_loaded=is_loaded
                        )
                    )
                case 1 if alive:
                    stage.scheduler.confirm(f"s{rng.randrange(number + 1)}")
                case 2 if alive and rng.random() < 0.5:
                    given_up.add(gone := alive.pop(rng.randrange(len(alive))))
                    stage.abort(gone)
                case 3:
                    stage.finish_all_loading()
                case _:
                    stage.step()
        stage.finish_all()
        check_answers(stage, *alive)
        for gone in given_up:
            assert stage.expected(gone)[: len(stage.answers[gone])] == stage.answers[gone]
        assert stage.controller.speculations.num_wasted_tokens >= 0
        num_hit_tokens += stage.controller.counters.num_tokens_by_tier[Tier.GPU]
        num_preempted += sum(request.num_preemptions for request in stage.requests.values())
    assert num_hit_tokens > 0
    assert num_preempted > 0


def test_several_requests_are_served_in_cache_aware_order() -> None:
    stage = Stage(max_num_seqs=1)
    first = stage.ask("AB")
    stage.finish_all()
    running = stage.ask("C")
    stage.step()
    unknown, half, whole = stage.ask("DE"), stage.ask("AE"), stage.ask("AB")
    stage.finish_all()
    order = list(dict.fromkeys(request_id for step in stage.steps for request_id in step))
    assert order == [first, running, whole, half, unknown]
    check_answers(stage, unknown, half, whole)
    report = stage.controller.report()
    assert (report["num_reordered_requests"], report["max_overtaken"]) == (2, 2)


def test_what_is_cached_while_a_request_waits_moves_it_forward() -> None:
    stage = Stage(max_num_seqs=1)
    running = stage.ask("AB", num_answers=2)
    other, same = stage.ask("DE"), stage.ask("AB")
    stage.finish_all()
    order = list(dict.fromkeys(request_id for step in stage.steps for request_id in step))
    assert order == [running, same, other]
    check_answers(stage, running, other, same)


def test_no_request_is_overtaken_more_often_than_the_window_allows() -> None:
    stage = Stage(max_num_seqs=1, settings={"queue_window": 3})
    first = stage.ask("A", num_answers=1)
    stage.step()
    stranger = stage.ask("ZY", num_answers=1)
    friends = [stage.ask("A", num_answers=1) for _ in range(6)]
    stage.finish_all()
    order = list(dict.fromkeys(request_id for step in stage.steps for request_id in step))
    assert order == [first, *friends[:3], stranger, *friends[3:]]
    assert stage.controller.report()["max_overtaken"] == 3
