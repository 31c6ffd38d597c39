"""``ragcache quality`` and ``ragcache calibrate``: what they ask, print, keep and refuse."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ragcache_core.chunk import choose_alpha
from ragcache_core.cli import cli
from ragcache_core.profiles.calibration import calibration_path, load_calibration
from ragcache_core.quality import Method, ScoredAnswer
from ragcache_core.quality.run import QualityRun

LINE = {"question": "Who founded Zorval?", "answer": "Anna", "documents": ["Zorval is."], "kind": "single"}


@pytest.fixture(autouse=True)
def user_data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platformdirs.user_data_dir", lambda name: str(tmp_path / "data" / name))


@pytest.fixture
def questions(tmp_path: Path) -> str:
    path = tmp_path / "questions.jsonl"
    path.write_text("\n".join(json.dumps({**LINE, "kind": kind}) for kind in ("single", "two-hop")), encoding="utf-8")
    return str(path)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[QualityRun]:
    """Every run that was asked for; of ten answers, as many are right as ten times the alpha, of 2 at most."""
    seen: list[QualityRun] = []

    def answers(
        self: QualityRun, ways: Sequence[Method], *, begin: Callable[[Method], Callable[[int], object]]
    ) -> Iterator[tuple[Method, list[ScoredAnswer]]]:
        seen.append(self)
        for way in ways:
            begin(way)(len(self.questions))
            alpha = 1.0 if way.chunks is None else way.chunks.alpha or 0.0
            right = round(8 * min(alpha, 1.0))
            recomputed = 0 if way.chunks is None else round(10 * min(alpha, 2.0))
            yield way, [ScoredAnswer("single", "x", i < right, 1.0, 100, 50, 40, recomputed) for i in range(10)]

    monkeypatch.setattr(QualityRun, "answers", answers)
    return seen


def run(command: str, model: str, *arguments: str) -> Result:
    return CliRunner().invoke(cli, [command, model, *arguments])


def test_quality_prints_a_row_for_every_way(runs: list[QualityRun], demo_model: str, questions: str) -> None:
    result = run("quality", demo_model, "--questions", questions, "--alphas", "0.5,2", "--max-tokens", "9")
    assert result.exit_code == 0, result.output
    head, *rows = result.stdout.splitlines()
    assert "ROUGE-L" in head
    assert [row.split("  ")[0] for row in rows] == ["single"] * 5
    for row, way in zip(
        rows, ["full recompute", "prefix caching", "naive reuse", "whole_chunks 0.5", "whole_chunks 2"], strict=True
    ):
        assert way in row
    assert (len(runs[0].questions), runs[0].max_tokens) == (2, 9)


def test_quality_compares_turns_that_refer_with_turns_that_show_again(
    runs: list[QualityRun], demo_model: str, tmp_path: Path, questions: str
) -> None:
    result = run("quality", demo_model, "--questions", questions, "--deduplicate")
    assert result.exit_code == 0, result.output
    assert "shown again" in result.stdout
    assert "referred to" in result.stdout
    alone = tmp_path / "alone.jsonl"
    alone.write_text(json.dumps(LINE), encoding="utf-8")
    refused = run("quality", demo_model, "--questions", str(alone), "--deduplicate")
    assert refused.exit_code != 0
    assert "no two of the questions share a document" in refused.stderr
    for also in (["--alphas", "2"], ["--document-order", "canonical"]):
        ignored = run("quality", demo_model, "--questions", questions, "--deduplicate", *also)
        assert (ignored.exit_code, f"leave {also[0]}" in ignored.stderr) == (2, True)
    assert len(runs) == 1


def scored(tmp_path: Path, **line: object) -> str:
    path = tmp_path / "scored.jsonl"
    asked = {**LINE, "documents": ["Zorval is.", "Mel is.", "Kel is."], "scores": [0.9, 0.8, 0.79], **line}
    path.write_text(json.dumps(asked), encoding="utf-8")
    return str(path)


def test_orders_and_nearly_equal_documents_are_audited_in_place_of_reuse(
    runs: list[QualityRun], demo_model: str, tmp_path: Path
) -> None:
    asked = ["--document-order", "cache_aware", "--max-score-loss", "0.02", "--documents", "2"]
    result = run("quality", demo_model, "--questions", scored(tmp_path), *asked, "--json")
    assert result.exit_code == 0, result.output
    summaries = json.loads(result.stdout)["summaries"]
    ways = ["prefix caching", "cache_aware", "score loss 0.02", "cache_aware, score loss 0.02"]
    assert [summary["way"] for summary in summaries] == ways
    assert [summary["agreement"] for summary in summaries] == [None, 1.0, 1.0, 1.0]
    assert runs[0].num_shown == 2
    both = run("quality", demo_model, "--questions", scored(tmp_path), "--document-order", "canonical", "--alphas", "2")
    for way in ("prefix caching", "canonical", "naive reuse", "whole_chunks 2"):
        assert way in both.stdout


def test_what_was_calibrated_is_kept_and_chooses_the_cheapest_alpha(
    runs: list[QualityRun], demo_model: str, questions: str
) -> None:
    arguments = ["--questions", questions, "--alphas", "0.5,1,2", "--quality", "0.9"]
    result = run("calibrate", demo_model, *arguments)
    assert result.exit_code == 0, result.output
    assert "alpha 1 keeps 100.0% of exact_match 0.800" in result.stdout
    kept = load_calibration(calibration_path(demo_model, "whole_chunks"))
    assert [(point.alpha, point.quality) for point in kept.points] == [(0.5, 0.5), (1.0, 1.0), (2.0, 1.0)]
    assert choose_alpha(kept.points, 0.9).alpha == 1.0
    assert json.loads(run("calibrate", demo_model, *arguments, "--json").stdout)["alpha"] == 1.0
    assert runs


@pytest.mark.parametrize("command", ["quality", "calibrate"])
def test_a_published_sets_file_is_asked_and_one_of_another_set_refused(
    command: str, runs: list[QualityRun], demo_model: str, tmp_path: Path
) -> None:
    path = tmp_path / "hotpot_dev_distractor_v1.json"
    record = {
        "question": "Who?",
        "answer": "Anna",
        "context": [["Zorval", ["Zorval is.", "It was."]]],
        "type": "bridge",
    }
    path.write_text(json.dumps([record]), encoding="utf-8")
    refused = run(command, demo_model, "--questions", str(path), "--format", "squad")
    assert refused.exit_code == 1
    assert f"{path}, record 1: paragraphs: Field required: SQuAD has" in refused.stderr
    assert not runs
    assert run(command, demo_model, "--questions", str(path), "--alphas", "1").exit_code == 0
    (question,) = runs[0].questions
    assert question.documents[0].text == "Zorval\nZorval is. It was."
