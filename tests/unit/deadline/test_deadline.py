"""Which way to show a prompt meets its deadline, with the least deviation; deciding sends no request."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.chunk import AlphaPoint, chunk_spans
from ragcache_core.deadline import MeasuredReuse, PromptOption, PromptOptions, choose, options_of
from ragcache_core.ordering import CachedPaths, PathChange, chunk_change, static_prefix_digest
from ragcache_core.stats import DeadlineReport
from ragcache_core.types import PromptSegment, SegmentKind

STATIC, LENGTH, QUESTION = 32, 100, 20
NAMES = ("sun", "moon", "tau")
POINTS = (AlphaPoint(1.3, 0.90, 0.2), AlphaPoint(1.7, 0.98, 0.4), AlphaPoint(3.0, 1.0, 0.8))
OFF = "the engine was started without chunk reuse"


class PerToken:
    """A millisecond for each new token."""

    def estimate_s(self, num_cached_tokens: int, num_new_tokens: int) -> float:
        return num_new_tokens / 1000


def prompt(*names: str) -> tuple[list[int], list[PromptSegment]]:
    token_ids, segments = [1] * STATIC, [PromptSegment(SegmentKind.PREFIX, 0, STATIC)]
    for name in names:
        start = len(token_ids)
        token_ids += [ord(name[0]) * 1000 + i for i in range(LENGTH)]
        segments.append(PromptSegment(SegmentKind.DOCUMENT, start, len(token_ids), name))
    segments.append(PromptSegment(SegmentKind.QUESTION, len(token_ids), len(token_ids) + QUESTION))
    return token_ids + [7] * QUESTION, segments


def cached(*orders: str, chunks: str = "") -> CachedPaths:
    token_ids, segments = prompt(*NAMES)
    prefix, paths = static_prefix_digest(token_ids, segments), CachedPaths()
    assert prefix is not None
    paths.set(PathChange(prefix, (), STATIC))
    for order in orders:
        ids = tuple(order.split())
        for end in range(1, len(ids) + 1):
            paths.set(PathChange(prefix, ids[:end], STATIC + end * LENGTH))
    for name in chunks.split():
        places = [(s.start, s.end) for s in segments if s.kind is SegmentKind.DOCUMENT]
        paths.set(chunk_change(chunk_spans(token_ids, places)[NAMES.index(name)].key, LENGTH))
    return paths


def decided(
    ttft_slo_s: float, paths: CachedPaths | None, reuse: MeasuredReuse | str = OFF, queue_s: float | None = 0.0
) -> tuple[PromptOption, DeadlineReport]:
    return choose(ttft_slo_s, options_of(*prompt(*NAMES), paths, reuse), PerToken(), queue_s)


def test_a_prompt_that_is_in_time_stays_as_it_is_though_others_were_faster() -> None:
    option, report = decided(0.33, cached("moon sun"), MeasuredReuse(1.3, POINTS))
    assert (option.name, report.is_in_time) == ("exact", True)
    assert report.exact_ttft_s == pytest.approx(0.32)
    assert [each.name for each in report.options] == ["exact", "document_order"]


def test_the_order_that_is_cached_the_furthest_is_the_next_deviation() -> None:
    option, report = decided(0.2, cached("moon sun"))
    assert option.order == (1, 0, 2)
    assert (report.choice, report.is_in_time) == ("document_order", True)
    assert report.exact_ttft_s == pytest.approx(0.32)
    assert [each.ttft_s for each in report.options] == pytest.approx([0.32, 0.12])
    assert "0.32 s, more than 0.2 s" in report.why
    assert report.left_out == {"chunk_reuse": OFF}


@pytest.mark.parametrize(("ttft_slo_s", "alpha", "quality"), [(0.26, 3.0, 1.0), (0.15, 1.7, 0.98), (0.1, 1.3, 0.9)])
def test_chunk_reuse_computes_no_less_than_the_deadline_asks_for(
    ttft_slo_s: float, alpha: float, quality: float
) -> None:
    option, report = decided(ttft_slo_s, cached(chunks="sun moon tau"), MeasuredReuse(1.3, POINTS))
    assert (option.alpha, option.quality, report.is_in_time) == (alpha, quality, True)
    assert report.left_out == {"document_order": "no other order of the documents is cached further"}


def test_only_stored_documents_behind_what_is_cached_exactly_are_reused() -> None:
    _, report = decided(0.001, cached("sun", chunks="sun tau"), MeasuredReuse(1.7, POINTS[1:2]))
    exact, reused = report.options
    assert (exact.num_cached_tokens, exact.num_new_tokens) == (132, 220)
    assert (reused.num_cached_tokens, reused.num_new_tokens) == (192, 160)  # 60 of tau are kept


@pytest.mark.parametrize(
    ("reuse", "chunks", "why"),
    [
        (OFF, "sun", "without chunk reuse"),
        (MeasuredReuse(1.7), "sun", "ragcache calibrate"),
        (MeasuredReuse(1.7, POINTS), "", "none of the documents"),
        (MeasuredReuse(9.0, POINTS), "sun", "no alpha of 9"),
    ],
)
def test_what_cannot_be_chosen_is_reported(reuse: MeasuredReuse | str, chunks: str, why: str) -> None:
    _, report = decided(0.1, cached(chunks=chunks), reuse)
    assert why in report.left_out["chunk_reuse"]
    assert [each.name for each in report.options] == ["exact"]


def test_an_unreachable_deadline_gets_the_fastest_option_and_is_reported() -> None:
    option, report = decided(0.01, cached("moon sun"))
    assert (option.name, report.is_in_time) == ("document_order", False)
    assert report.why == "nothing is predicted to meet 0.01 s: document_order is the fastest, 0.12 s"


def test_the_engines_work_for_others_comes_first() -> None:
    assert decided(0.4, cached("moon sun"), queue_s=0.0)[1].choice == "exact"
    _, report = decided(0.4, cached("moon sun"), queue_s=0.25)
    assert (report.choice, report.queue_s) == ("document_order", 0.25)
    assert report.exact_ttft_s == pytest.approx(0.57)
    assert decided(0.4, cached("moon sun"), queue_s=None)[1].queue_s is None


@given(
    st.lists(st.integers(1, 500), min_size=1, max_size=5),
    st.floats(0.001, 1),
    st.floats(0, 0.3),
)
def test_the_first_in_time_is_chosen_and_otherwise_the_fastest(new: list[int], slo: float, queue_s: float) -> None:
    ways = PromptOptions(tuple(PromptOption(0, n, alpha=float(i)) for i, n in enumerate(new)), {})
    option, report = choose(slo, ways, PerToken(), queue_s)
    times = [queue_s + n / 1000 for n in new]
    if any(each <= slo for each in times):
        assert report.is_in_time
        assert option is ways.options[[each <= slo for each in times].index(True)]
    else:
        assert option is ways.options[times.index(min(times))]
