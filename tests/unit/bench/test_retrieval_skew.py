"""Figure 6 of the paper reproduction: the skew of searches over one's own questions and recorded searches."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.papers.retrieval_skew import Skew, figure_6

_TOWNS = ("Aro", "Bel", "Cor", "Dun", "Eft", "Fal", "Gor", "Hul", "Ist", "Jor")


def test_the_skew_is_the_share_of_searches_that_the_most_frequent_documents_answer() -> None:
    skew = Skew.of(["a"] * 6 + ["b"] * 2 + ["c", "d"])
    assert [skew.share(top) for top in (0.0, 0.25, 0.5, 1.0)] == pytest.approx([0.0, 0.6, 0.8, 1.0])
    assert skew.share(0.125) == pytest.approx(0.3), "between two documents in a straight line"
    even = Skew.of("abcd")
    assert skew.distance(even) == even.distance(skew) == pytest.approx(0.35)
    assert skew.distance(skew) == 0.0


def test_each_embedding_model_index_and_recorded_trace_has_its_curve(tmp_path: Path) -> None:
    texts = [f"{town} is a town. The mayor of {town} lives in {town}." for town in _TOWNS]
    asked = ["Aro"] * 11 + [*_TOWNS[1:]]
    questions, searches = tmp_path / "questions.jsonl", tmp_path / "monday.jsonl"
    lines = [
        {"question": f"Who is the mayor of {town}?", "answer": "x", "documents": [texts[_TOWNS.index(town)]]}
        for town in asked
    ]
    questions.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    request = {"doc_tokens": [9, 9], "question_tokens": 1, "output_tokens": 1}
    trace = [{"t": float(i), "docs": docs, **request} for i, docs in enumerate((["a", "b"], ["a", "c"], ["b", "a"]))]
    searches.write_text("".join(json.dumps(line) + "\n" for line in trace), encoding="utf-8")
    figure = figure_6([searches], questions)
    rows = {row[0]: row[1:] for row in figure.tables[0].rows}
    assert rows["monday"][:2] == ["3", "2"], "of each request the best document counts"
    exact = rows["TF-IDF, 128 dimensions, flat"]
    assert exact[:2] == ["20", "10"]
    assert exact[3] == "55.0%", "one of ten documents answers 11 of 20 searches"
    assert {"IVF", "HNSW", "IVF, SQ8"} <= {name.removeprefix("TF-IDF, 32 dimensions, ") for name in rows}
    assert figure.reproduction() == "the paper has no number to compare"
