"""What the scheduler's side of chunk reuse decides, with the real library and no engine."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle, islice

import pytest

from ragcache_core.chunk import ChunkVariant, make_selection, plan_reuse
from ragcache_core.chunk.scores import LEAST_LOST
from ragcache_core.chunk.types import chunk_key, chunk_spans
from ragcache_core.policy import PrefillCostModel, make_policy
from ragcache_core.tree import KnowledgeTree
from ragcache_core.vllm_plugin.chunks.manager.entries import Reservation
from ragcache_core.vllm_plugin.chunks.manager.eviction import ChunkEviction
from ragcache_core.vllm_plugin.chunks.manager.manager import ChunkManager
from ragcache_core.vllm_plugin.chunks.messages import Capture, CapturedChunk, ChunkJob, ChunkReport, ChunkStep
from ragcache_core.vllm_plugin.chunks.reuse_state import OpenCapture, ReuseOptions, statistics_of
from ragcache_core.vllm_plugin.chunks.scheduler import ChunkScheduling
from tests.support.chunk_disk import FakeDisk, Read, Scrub, Write

_T = 16
_DOCUMENTS = {name: [100 * number + i for i in range(40)] for number, name in enumerate("abcd", 1)}
_SYSTEM = range(10)
_KEYS = {name: chunk_key(ids, behind=chunk_key(_SYSTEM)) for name, ids in _DOCUMENTS.items()}
_HALF = ReuseOptions(selection="cache_craft", alpha=1e9, max_recompute=0.5)
_SCATTERED = (0.1, 0.5, 0.2, 0.0, 0.4, 0.3, 0.6)  # the tokens with the most attention are not neighbours


class Bench:
    """A scheduling whose workers do at once what a step says."""

    def __init__(
        self,
        *,
        num_pages: int = 64,
        num_workers: int = 1,
        max_step_tokens: int = 64,
        max_step_runs: int = sys.maxsize,
        num_disk_pages: int = 0,
        is_eager: bool = True,
        run_tokens: int = 1,
        token_inter: Sequence[float] = (0.1,),
    ) -> None:
        self.token_inter = token_inter
        cost = PrefillCostModel.default()
        ranks = ChunkEviction(KnowledgeTree(make_policy("lru", cost)), cost)
        library = ChunkManager(ranks, num_pages=num_pages, tokens_per_page=_T, max_variants=5)
        self.disk = FakeDisk(num_disk_pages)
        if num_disk_pages:
            library.open_disk(self.disk)  # type: ignore[arg-type]  # a fake
        self.guesses: set[str] = set()
        self.scheduling = ChunkScheduling(
            library,
            num_workers=num_workers,
            max_step_tokens=max_step_tokens,
            max_step_runs=max_step_runs,
            prefill_cost=cost,
            is_eager=is_eager,
            run_tokens=run_tokens,
            is_guess=lambda name: name in self.guesses,
        )
        self.num_workers = num_workers

    def arrive(
        self, name: str, documents: str, options: ReuseOptions = _HALF, *, question: Sequence[int] = (6, 7, 8)
    ) -> list[int]:
        tokens, places = list(_SYSTEM), []
        for document in documents:
            ids = _DOCUMENTS[document]
            places.append((len(tokens), len(tokens) + len(ids)))
            tokens += [*ids, 5]
        tokens += question
        spans = chunk_spans(tokens, places)
        self.scheduling.on_new_request(name, tokens, spans, options)
        return tokens

    def start(self, name: str, documents: str, options: ReuseOptions = _HALF) -> ChunkJob:
        """Have a request arrive that is stored in part, run a slice of its job, and return the job."""
        self.arrive(name, documents, options)
        assert self.scheduling.offer(name, 0)
        self.scheduling.begin(name, [1], awaits_load=False)
        (job,) = self.step().jobs
        return job

    def step(self, **progress: tuple[int, int]) -> ChunkStep:
        num_scheduled = sum(end - start for start, end in progress.values())
        step = self.scheduling.take_step(num_scheduled, progress, lambda _: [1, 2, 3])
        for call in self.disk.calls:
            if isinstance(call, Write | Read | Scrub) and not call.transfer.has_ended:
                call.transfer.end(None)
        report = ChunkReport(fence=step.fence)
        for capturing in step.captures:
            for capture in capturing.captures:
                if capture.end <= capturing.end:
                    self._captured(report, capture)
        self.scheduling.on_report(report)
        return step

    def finish_job(self, name: str, step_captures: Sequence[object] = ()) -> None:
        report = ChunkReport(computed_rows={name: 1.0})
        for capture in step_captures:
            self._captured(report, capture)
        self.scheduling.on_report(report)
        self.scheduling.on_job_done(name)

    def _captured(self, report: ChunkReport, capture: object) -> None:
        num_tokens = capture.end - capture.start
        for _ in range(self.num_workers):
            one = ChunkReport()
            one.num_captured[capture.id] += 1
            measured = CapturedChunk(
                tuple(1.0 for _ in capture.before), 20.0, tuple(islice(cycle(self.token_inter), num_tokens))
            )
            one.captured[capture.id] = measured
            merged = report.merged(one)
            report.num_captured, report.captured = merged.num_captured, merged.captured

    def store(self, documents: str) -> None:
        """Prefill a request of these documents, and capture them."""
        tokens = self.arrive("storing", documents)
        assert self.scheduling.offer("storing", 0) == 0
        self.scheduling.compute("storing", 0)
        self.step(storing=(0, len(tokens)))
        self.scheduling.on_finished("storing")


def test_a_request_without_stored_chunks_is_prefilled_and_captured() -> None:
    bench = Bench()
    bench.store("ab")
    library = bench.scheduling.library
    assert library.counters.num_captured_chunks == 2
    stored = library.find({_KEYS["b"]: _DOCUMENTS["b"]})
    (variant,) = stored[_KEYS["b"]]
    assert variant.statistics.prefix == (_KEYS["a"],)
    assert variant.statistics.prefix_lengths == (40,)


def test_chunks_that_a_forecast_has_stored_are_kept_with_the_uses_that_are_expected() -> None:
    bench = Bench(num_disk_pages=64)
    tokens = bench.arrive("forecast", "ab", replace(_HALF, reuses=False, expected_uses=9))
    assert bench.scheduling.offer("forecast", 0) == 0
    bench.scheduling.compute("forecast", 0)
    bench.step(forecast=(0, len(tokens)))
    assert [call.chunk.frequency for call in bench.disk.calls if isinstance(call, Write)] == [9.0, 9.0]


def test_a_chunk_is_captured_once_a_chunked_prefill_has_reached_its_end() -> None:
    bench = Bench()
    tokens = bench.arrive("r", "ab")
    bench.scheduling.offer("r", 0)
    bench.scheduling.compute("r", 0)
    first = bench.step(r=(0, 30))
    assert [len(each.captures) for each in first.captures] == [1]
    assert bench.scheduling.library.counters.num_captured_chunks == 0
    bench.step(r=(30, 60))
    assert bench.scheduling.library.counters.num_captured_chunks == 1
    bench.step(r=(60, len(tokens)))
    assert bench.scheduling.library.counters.num_captured_chunks == 2
    assert not bench.scheduling.wants_progress


def test_an_offer_is_all_tokens_but_the_last_and_begins_behind_what_is_cached() -> None:
    bench = Bench()
    bench.store("ab")
    tokens = bench.arrive("r", "ba")
    assert bench.scheduling.offer("r", 0) == len(tokens) - 1
    assert bench.scheduling.offer("r", 16) == len(tokens) - 17
    assert bench.scheduling.begin("r", [1], awaits_load=False) == 16
    (job,) = bench.step().jobs
    assert job.positions.min() >= 16
    assert job.positions.max() == len(tokens) - 2
    assert job.token_ids.tolist() == [tokens[at] for at in job.positions]


def test_slices_respect_the_budget_and_what_a_step_computes_already() -> None:
    bench = Bench(max_step_tokens=32)
    bench.store("ab")
    bench.arrive("r", "ba", ReuseOptions("cache_craft", 1e9, 0.5, focus=0))
    bench.scheduling.offer("r", 0)
    bench.scheduling.begin("r", [1], awaits_load=False)
    (job,) = bench.scheduling._jobs.values()
    sizes = []
    while bench.scheduling._requests["r"].num_rows_left > 0:
        (part,) = bench.step(other=(0, 20)).slices
        sizes.append(part.num_rows)
    assert sum(sizes) == len(job.positions)
    assert max(sizes) == 12
    assert bench.step().slices == []


def test_a_full_step_still_leaves_a_quarter_of_its_tokens_to_jobs() -> None:
    bench = Bench(max_step_tokens=32)
    bench.store("ab")
    bench.arrive("r", "ba", ReuseOptions("cache_craft", 1e9, 0.5, focus=0))
    bench.scheduling.offer("r", 0)
    bench.scheduling.begin("r", [1], awaits_load=False)
    assert [part.num_rows for part in bench.step(other=(0, 32)).slices] == [8]


def test_a_job_waits_until_every_worker_has_the_exact_tokens_from_below() -> None:
    bench = Bench(num_workers=2)
    bench.store("ab")
    bench.arrive("r", "ba")
    bench.scheduling.offer("r", 16)
    bench.scheduling.begin("r", [1], awaits_load=True)
    assert bench.step().slices == []
    loaded = ChunkReport()
    loaded.num_loaded["r"] += 1
    bench.scheduling.on_report(loaded)
    assert bench.step().slices == []
    bench.scheduling.on_report(loaded)
    assert [part.request_id for part in bench.step().slices] == ["r"]


def test_a_chunk_computed_wholly_among_reused_ones_is_captured_behind_its_present_prefix() -> None:
    bench = Bench()
    bench.store("ab")
    job = bench.start("r", "bca")
    assert [capture.end - capture.start for capture in job.captures] == [40]
    while bench.scheduling._requests["r"].num_rows_left > 0:
        bench.step()
    bench.finish_job("r", job.captures)
    key = _KEYS["c"]
    (variant,) = bench.scheduling.library.find({key: _DOCUMENTS["c"]})[key]
    assert variant.statistics.prefix == (_KEYS["b"],)


def test_a_chunk_that_is_computed_as_a_whole_counts_as_recomputed_and_becomes_a_variant() -> None:
    bench = Bench()
    bench.store("ab")
    job = bench.start("r", "acb", ReuseOptions(selection="whole_chunks", alpha=10.0, max_recompute=1.0))
    assert [injection.start for injection in job.injections] == [10], "only the first has lost no neighbour"
    assert len(job.captures) == 2
    while bench.scheduling._requests["r"].num_rows_left > 0:
        bench.step()
    bench.finish_job("r", job.captures)
    figures = bench.scheduling.on_finished("r")
    assert figures is not None
    stats = figures.to_stats()
    assert (stats.num_chunks, stats.num_reused_tokens, stats.num_recomputed_tokens) == (2, 40, 40)
    assert stats.fix_overhead == 0.5
    key = _KEYS["b"]
    assert len(bench.scheduling.library.find({key: _DOCUMENTS["b"]})[key]) == 2


def test_what_is_captured_behind_reused_documents_inherits_what_they_have_lost_until_it_is_computed_exactly() -> None:
    everything = ReuseOptions(selection="cache_craft", alpha=1e9, max_recompute=1.0)
    bench = Bench()
    bench.store("ab")
    key, behind = _KEYS["c"], (_KEYS["b"],)

    def stored() -> dict[tuple[bytes, ...], float]:
        found = bench.scheduling.library.find({key: _DOCUMENTS["c"]})[key]
        return {each.statistics.prefix: each.statistics.inherited for each in found}

    job = bench.start("half", "bc")
    bench.finish_job("half", job.captures)
    bench.scheduling.on_finished("half")
    assert stored()[behind] > 0.0
    tokens = bench.arrive("wholly", "bc", everything)
    assert bench.scheduling.offer("wholly", 0) == 0, "of what is there, nothing is what a prefill makes"
    bench.scheduling.compute("wholly", 0)
    bench.step(wholly=(0, len(tokens)))
    bench.scheduling.on_finished("wholly")
    assert stored() == {behind: 0.0}
    assert len(bench.start("again", "bc", everything).injections) == 2, "both are now what a prefill makes"


def test_an_aborted_job_is_cancelled_and_holds_nothing() -> None:
    bench = Bench()
    bench.store("ab")
    bench.arrive("r", "bca")
    bench.scheduling.offer("r", 0)
    bench.scheduling.begin("r", [1], awaits_load=False)
    bench.step()
    bench.scheduling.on_finished("r")
    step = bench.step()
    assert step.cancelled == ["r"]
    assert step.slices == []
    assert not bench.scheduling.is_known("r")
    assert not bench.scheduling.library._pins
    assert not bench.scheduling.library._reservations


def test_a_preempted_request_restarts() -> None:
    bench = Bench()
    bench.arrive("r", "ab")
    bench.scheduling.offer("r", 0)
    bench.scheduling.compute("r", 0)
    bench.step(r=(0, 30))
    assert bench.scheduling.offer("r", 0) == 0
    assert bench.scheduling.take_step(0, {}, lambda _: []).forgotten == ["r"]
    bench.scheduling.compute("r", 0)
    bench.step(r=(0, 95))
    assert bench.scheduling.library.counters.num_captured_chunks == 2


def test_clearing_keeps_nothing_that_is_being_computed() -> None:
    bench = Bench()
    bench.store("ab")
    bench.arrive("r", "cd")
    bench.scheduling.offer("r", 0)
    bench.scheduling.compute("r", 0)
    bench.step(r=(0, 30))
    bench.scheduling.clear()
    step = bench.step(r=(30, 95))
    assert step.forgotten == ["r"]
    assert step.captures == []
    bench.scheduling.on_finished("r")
    assert not bench.scheduling.library._reservations
    bench.arrive("s", "ab")
    assert bench.scheduling.offer("s", 0) == 0


def test_clearing_forgets_a_request_that_only_waited_for_its_captures() -> None:
    bench = Bench()
    tokens = bench.arrive("r", "a")
    bench.scheduling.offer("r", 0)
    bench.scheduling.compute("r", 0)
    step = bench.scheduling.take_step(len(tokens), {"r": (0, len(tokens))}, lambda _: [1, 2, 3])
    bench.scheduling.on_finished("r")
    assert bench.scheduling.is_known("r")
    bench.scheduling.clear()
    assert not bench.scheduling.is_known("r")
    report = ChunkReport()
    bench._captured(report, step.captures[0].captures[0])
    bench.scheduling.on_report(report)
    assert bench.scheduling.library.counters.num_captured_chunks == 0
    assert bench.scheduling.library.num_used_pages == 0


def test_a_chunk_whose_attention_cannot_be_is_not_kept() -> None:
    bench = Bench()
    tokens = bench.arrive("r", "a")
    bench.scheduling.offer("r", 0)
    bench.scheduling.compute("r", 0)
    step = bench.scheduling.take_step(len(tokens), {"r": (0, len(tokens))}, lambda _: [1, 2, 3])
    (capture,) = step.captures[0].captures
    report = ChunkReport()
    report.num_captured[capture.id] += 1
    report.captured[capture.id] = CapturedChunk((), float("nan"), tuple(0.0 for _ in range(40)))
    bench.scheduling.on_report(report)
    assert bench.scheduling.library.counters.num_captured_chunks == 0
    assert not bench.scheduling.library._reservations


def test_a_request_waits_for_a_disk_no_longer_than_computing_takes() -> None:
    """Its turn begins the waiting; what has come until then is reused, and the rest is read for others."""
    bench = Bench(num_pages=6, num_disk_pages=64)
    for document in "abc":
        bench.store(document)
        bench.step()
    tokens = bench.arrive("r", "da")
    library = bench.scheduling.library
    at_most_s = PrefillCostModel.default().estimate_s(0, len(tokens))
    library.now_s += 100.0
    assert bench.scheduling.offer("r", 0) is None
    library.now_s += 0.01 * at_most_s
    assert bench.scheduling.offer("r", 0) is None
    library.now_s += at_most_s
    assert bench.scheduling.offer("r", 0) == 0, "nothing of it has come"
    bench.step()
    bench.step()
    assert bench.scheduling.offer("r", 0) == len(tokens) - 1, "now it has"


def test_what_lies_on_disk_alone_is_read_while_its_request_waits() -> None:
    bench = Bench(num_pages=6, num_disk_pages=64)
    for document in "abc":
        bench.store(document)
        bench.step()
    bench.arrive("r", "da")
    (read,) = [call for call in bench.disk.calls if isinstance(call, Read)]
    assert read.variant.key == _KEYS["a"]
    bench.step()
    assert bench.scheduling.offer("r", 0) is not None, "it is there when its turn comes"


def test_an_offer_waits_for_what_is_being_read_and_does_without_what_is_lost() -> None:
    bench = Bench(num_pages=6, num_disk_pages=64)
    for document in "abc":
        bench.store(document)
        bench.step()
    bench.arrive("r", "da")
    assert bench.scheduling.offer("r", 0) is None
    (read,) = [call for call in bench.disk.calls if isinstance(call, Read)]
    read.transfer.end(None, is_found=False)
    assert bench.scheduling.offer("r", 0) == 0
    bench.scheduling.on_finished("r")
    assert not bench.scheduling.library._pins


@pytest.mark.parametrize("seed", range(8))
def test_whatever_happens_nothing_stays_held(seed: int) -> None:
    rng = random.Random(seed)
    bench = Bench(
        num_pages=rng.choice([4, 9, 40]), max_step_tokens=rng.choice([16, 64]), num_disk_pages=rng.choice([0, 12])
    )
    scheduling = bench.scheduling
    for number in range(120):
        name = f"r{number}"
        tokens = bench.arrive(name, "".join(rng.sample("abcd", rng.randint(1, 4))))
        for _ in range(rng.randint(1, 2)):
            offered = scheduling.offer(name, rng.choice([0, 16]))
        if offered:
            scheduling.begin(name, [1], awaits_load=False)
            captures = list(scheduling._jobs[name].captures)
            if rng.random() < 0.3:
                bench.step()
            else:
                while scheduling._requests[name].num_rows_left > -1:
                    bench.step()
                bench.finish_job(name, captures)
        else:
            scheduling.compute(name, 0)
            bench.step(**{name: (0, rng.choice([20, len(tokens)]))})
        scheduling.on_finished(name)
        bench.step()
    assert not scheduling._requests
    assert not scheduling._running
    assert not scheduling._capturing
    assert not scheduling.library._pins
    assert not scheduling.library._reservations


@pytest.mark.parametrize(
    ("one", "other", "is_shared"),
    [
        (ReuseOptions("cache_craft", 1.0, 1.0), ReuseOptions("cache_craft", 1.0, 1.0), False),
        (ReuseOptions("cache_craft", 1.0, 1.0, focus=0), ReuseOptions("cache_craft", 1.0, 1.0, focus=0), True),
        (ReuseOptions("whole_chunks", 1.7, 1.0), ReuseOptions("whole_chunks", 1.7, 1.0), True),
        (ReuseOptions("whole_chunks", 1.7, 1.0), ReuseOptions("whole_chunks", 1.6, 1.0), False),
        (ReuseOptions("whole_chunks", 1.7, 1.0), ReuseOptions("whole_chunks", 1.7, 0.5), False),
        (ReuseOptions("whole_chunks", 1.7, 1.0), ReuseOptions("cache_craft", 1.7, 1.0), False),
    ],
)
def test_requests_find_what_another_left_where_it_is_what_they_would_compute(
    one: ReuseOptions, other: ReuseOptions, is_shared: bool
) -> None:
    """With other questions; the same question and settings always do, and no other engine."""
    bench = Bench()
    tokens = bench.arrive("one", "ab", one)
    spans = bench.scheduling._requests["one"].spans
    bench.scheduling.on_new_request("same", tokens, spans, one)
    bench.scheduling.on_new_request("other", [*tokens[:-1], tokens[-1] + 1], spans, other)
    names = [bench.scheduling.namespace(name) for name in ("one", "same", "other")]
    assert names[0] == names[1]
    assert (names[0] == names[2]) == is_shared
    elsewhere = Bench()
    elsewhere.arrive("one", "ab", one)
    assert elsewhere.scheduling.namespace("one") != names[0]


def test_what_a_found_prefix_has_lost_is_known_or_taken_for_all() -> None:
    bench = Bench()
    bench.store("abc")
    how = ReuseOptions("cache_craft", 1e9, 0.3, focus=0)
    tokens = bench.arrive("first", "cba", how)
    bench.scheduling.offer("first", 0)
    bench.scheduling.begin("first", [1], awaits_load=False)
    lost = list(bench.scheduling._requests["first"].lost)
    assert any(0.0 < each < 1.0 for each in lost)
    spans = bench.scheduling._requests["first"].spans
    bench.scheduling.on_new_request("next", tokens, spans, how)
    bench.scheduling.on_shared("next", 0, len(tokens) - 1)
    assert bench.scheduling._requests["next"].lost == lost
    bench.scheduling.on_new_request("unknown", tokens, spans, ReuseOptions("cache_craft", 1e9, 0.2, focus=0))
    bench.scheduling.on_shared("unknown", 0, len(tokens) - 1)
    assert bench.scheduling._requests["unknown"].lost == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("is_focused", [True, False])
@pytest.mark.parametrize("max_step_runs", [1, 5, 23])
def test_a_step_has_no_more_runs_of_neighbours_than_backends_have_room_for(
    is_focused: bool, max_step_runs: int
) -> None:
    bench = Bench(max_step_tokens=640, max_step_runs=max_step_runs, token_inter=_SCATTERED)
    bench.store("abcd")
    left: dict[str, list[int]] = {}
    questions: dict[str, list[int]] = {}
    for name, documents in (("first", "dcba"), ("second", "cab")):
        bench.arrive(name, documents, ReuseOptions("cache_craft", 1e9, 0.3, focus=3 * is_focused))
        bench.scheduling.offer(name, 0)
        bench.scheduling.begin(name, [1], awaits_load=False)
        job = bench.scheduling._jobs[name]
        assert (job.focus is not None) == is_focused
        assert job.focus is None or job.focus.window == 3
        left[name] = job.positions.tolist()
        questions[name] = [at for at in left[name] if job.focus is not None and at >= job.focus.question_start]
    while any(left.values()):
        num_runs = 0
        slices = bench.step().slices
        assert slices
        for part in slices:
            rows = left[part.request_id][: part.num_rows]
            del left[part.request_id][: part.num_rows]
            rows += [at for at in questions[part.request_id] if at not in rows]
            num_runs += sum(at - 1 not in rows for at in rows)
        assert num_runs <= max(max_step_runs, 1 + is_focused)
    assert bench.step().slices == []


def test_workers_that_compute_scattered_rows_get_them_one_by_one_and_all_at_once() -> None:
    def first_slice(*, is_scattered: bool) -> tuple[int, list[int]]:
        bench = Bench(max_step_tokens=640, max_step_runs=2, run_tokens=16, token_inter=_SCATTERED)
        if is_scattered:
            bench.scheduling.scatter_rows()
        bench.store("abcd")
        bench.arrive("r", "dcba", ReuseOptions("cache_craft", 1e9, 0.3, focus=0))
        bench.scheduling.offer("r", 0)
        bench.scheduling.begin("r", [1], awaits_load=False)
        positions = bench.scheduling._jobs["r"].positions.tolist()
        (part,) = bench.step().slices
        runs = [at for at in positions if at - 1 not in positions]
        return part.num_rows, [len(runs), len(positions)]

    num_rows, (num_runs, num_positions) = first_slice(is_scattered=True)
    assert num_rows == num_positions
    num_rows_in_runs, (num_long_runs, num_in_runs) = first_slice(is_scattered=False)
    assert num_rows_in_runs < num_in_runs
    assert num_runs > num_long_runs


def test_speculative_jobs_run_in_short_steps() -> None:
    bench = Bench(max_step_tokens=4096)
    bench.store("ab")
    bench.arrive("r", "ba", question=range(1000, 2500))
    bench.scheduling.offer("r", 0)
    bench.scheduling.begin("r", [1], awaits_load=False)
    bench.guesses.add("r")
    (part,) = bench.step().slices
    assert part.num_rows == 512
    bench.guesses.clear()
    (part,) = bench.step().slices
    assert part.num_rows > 512, "a request waits for it now"


@pytest.mark.parametrize(("is_eager", "is_scattered", "first"), [(True, False, 10), (False, False, 0), (True, True, 0)])
def test_rows_that_vllm_would_round_differently_are_not_reused(is_eager: bool, is_scattered: bool, first: int) -> None:
    bench = Bench(is_eager=is_eager)
    if is_scattered:
        bench.scheduling.scatter_rows()
    bench.store("ab")
    bench.arrive("r", "ba")
    bench.scheduling.offer("r", 0)
    assert bench.scheduling.begin("r", [1], awaits_load=False) == first


def test_what_is_prefilled_behind_its_own_approximate_blocks_inherits_as_well() -> None:
    bench = Bench()
    bench.store("ab")
    bench.start("r", "bc")
    bench.finish_job("r", ())  # preempted: the first document's blocks are still its own
    assert bench.scheduling.offer("r", 50) == 0
    bench.scheduling.compute("r", 50)
    bench.step(r=(50, 95))
    key = _KEYS["c"]
    (variant,) = bench.scheduling.library.find({key: _DOCUMENTS["c"]})[key]
    assert variant.statistics.inherited > 0.0


def test_a_document_whose_first_part_is_a_requests_own_approximate_kv_is_not_captured() -> None:
    bench = Bench()
    bench.store("ab")
    bench.start("r", "bc", ReuseOptions(selection="cache_craft", alpha=0.0, max_recompute=1.0))
    bench.finish_job("r", ())
    bench.scheduling.clear()  # preempted, and what it read is gone: of its first document 20 tokens are still there
    assert bench.scheduling.offer("r", 30) == 0
    bench.scheduling.compute("r", 30)
    bench.step(r=(30, 95))
    library = bench.scheduling.library
    assert not library.find({_KEYS["b"]: _DOCUMENTS["b"]})
    key = _KEYS["c"]
    (variant,) = library.find({key: _DOCUMENTS["c"]})[key]
    assert variant.statistics.inherited > 0.0


@pytest.mark.parametrize("selection", ["cache_craft", "whole_chunks"])
def test_however_little_is_inherited_a_request_for_everything_computes_it_again(selection: str) -> None:
    """A share of 1e-4 of the attention went to a document that had lost next to nothing: 2^-20 of its context."""
    spans = chunk_spans(range(24), [(0, 8), (9, 16), (17, 24)])
    reservation = Reservation(0, spans[2].key, 7, spans[2].context, (0,), "r")
    capture = Capture(("r", spans[2].key, 0), 17, 24, ((0, 8), (9, 16)), (0,))
    each = OpenCapture(capture, reservation, tuple(spans[:2]), lost=(0.0, LEAST_LOST))
    statistics = statistics_of(each, CapturedChunk((3.0, 7e-4), 2.0, (0.4,) * 7))
    assert statistics is not None
    stored = {spans[2].key: [ChunkVariant(spans[2].key, 0, 7, statistics)]}
    found = plan_reuse(spans, stored, start=17, end=24, selection=make_selection(selection), alpha=1e9)
    assert found.recomputed == tuple(range(17, 24))
