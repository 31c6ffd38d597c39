"""Choosing what is recomputed, by what a shallow and a deep model answer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from ragcache_core.bench.quality import FULL, PREFIX, AskedAnswer, Question, Summary, Way, chunk_ways
from tests.benchmarks.chunks import depth
from tests.benchmarks.chunks.depth import chosen, measure_depth
from tests.benchmarks.report import Plan, to_json

CANDIDATES = [*chunk_ways("whole_chunks", (1.5, 2.0)), *chunk_ways("cache_craft", (1.0,))]


def by_way(**exact_and_computed: tuple[float, float, int]) -> dict[str, dict[str, Summary]]:
    """Return what ways came to: right answers to two kinds of questions, and tokens computed for both."""
    names = {"full": FULL.name, "prefix": PREFIX.name, "w15": "whole_chunks 1.5", "w2": "whole_chunks 2",
             "cc": "cache_craft 1"}  # fmt: skip
    return {
        names[way]: {
            kind: Summary(names[way], kind, 50, exact, exact, 2000, num_computed, 0.0, None)
            for kind, exact in (("single", single), ("continued", continued), ("all", (single + continued) / 2))
        }
        for way, (single, continued, num_computed) in exact_and_computed.items()
    }


SHALLOW = by_way(
    full=(1.0, 1.0, 2000), prefix=(1.0, 1.0, 1000), w15=(1.0, 0.98, 200), w2=(1.0, 1.0, 400), cc=(1.0, 1.0, 900)
)
DEEP = by_way(
    full=(1.0, 1.0, 2000), prefix=(1.0, 1.0, 1000), w15=(1.0, 0.9, 200), w2=(1.0, 0.98, 500), cc=(1.0, 1.0, 950)
)


def test_what_computes_least_is_chosen_of_what_keeps_every_kind_of_answer() -> None:
    assert chosen([SHALLOW], CANDIDATES) == "whole_chunks 1.5"
    assert chosen([DEEP], CANDIDATES) == "whole_chunks 2"


def test_what_both_models_keep_is_chosen_for_both() -> None:
    assert chosen([SHALLOW, DEEP], CANDIDATES) == "whole_chunks 2"


def test_one_answer_of_a_kind_may_be_lost() -> None:
    one, two = (
        by_way(full=(1.0, 1.0, 9), prefix=(1.0, 1.0, 9), w15=(1.0, 1.0 - n / depth.NUM_QUESTIONS, 5)) for n in (1, 2)
    )
    assert chosen([one], CANDIDATES[:1]) == "whole_chunks 1.5"
    assert chosen([two], CANDIDATES[:1]) is None


def test_nothing_is_chosen_where_all_lose_too_much() -> None:
    assert chosen([DEEP], CANDIDATES[:1]) is None


def test_the_choice_is_made_on_one_seeds_questions_and_the_others_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deep model loses with little recomputed what the shallow one keeps; on the second seed all is wrong."""
    for name, num_layers in (("shallow", 4), ("deep", 12)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"num_hidden_layers": num_layers}), encoding="utf-8")

    def asked(
        _plan: Plan, model: str, questions: Sequence[Question], ways: Sequence[Way]
    ) -> Iterator[tuple[Way, list[AskedAnswer]]]:
        for way in ways:
            alpha = 100.0 if way.chunks is None else way.chunks.alpha or 0.0
            is_kept = alpha >= (2.0 if model.endswith("deep") else 1.5)
            computed = round(1000 * min(alpha, 10.0))
            yield (
                way,
                [
                    AskedAnswer(question.kind, "x", is_kept and place < len(questions) / 2, 1.0, 1000, computed)
                    for place, question in enumerate(questions)
                ],
            )

    monkeypatch.setattr(depth, "asked", asked)
    monkeypatch.setattr(depth, "DEEP_MODEL", tmp_path / "deep")
    part = measure_depth(Plan(str(tmp_path / "shallow"), tmp_path, 0, True, lambda _: None, None))
    assert part.details["chosen"] == {
        "default": "whole_chunks 1.7",
        "chosen": "whole_chunks 2",
        "order": PREFIX.name,
        "4_layers": "whole_chunks 1.7",
        "12_layers": "whole_chunks 2",
    }
    figures = {figure.key: figure for figure in part.figures}
    assert figures["em_12_layers_full_recompute"].value == 0.0
    assert figures["computed_4_layers_whole_chunks_1.7"].value == 0.17
    assert "continued two-hop" in figures["em_4_layers_cache_aware"].note
    assert json.dumps(to_json(part, {}))
