"""The demo model over documents that were really retrieved, from a corpus outside its training."""

import pytest

from examples.demo_model_training import evaluate_retrieval
from tests.conftest import DEMO_MODEL


def test_nine_in_ten_answers_over_two_retrieved_documents_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate_retrieval, "NUM_CORPORA", 1)
    measured = evaluate_retrieval.evaluate(DEMO_MODEL)
    assert measured["num_questions"] == 40
    assert measured["exact_match"] >= 0.9
