"""The limits of recognition: what is found of known documents, processor time and memory."""

from __future__ import annotations

import pytest

from benchmarks.recognition.layouts import LAYOUTS
from benchmarks.recognition.measure import accuracies, cost
from benchmarks.recognition.tokenizers import NAMES


@pytest.mark.parametrize("tokenizer", NAMES)
def test_documents_are_recognised_in_every_layout(tokenizer: str) -> None:
    measured = list(accuracies(tokenizer, num_prompts=6))
    assert [each.layout for each in measured] == list(LAYOUTS)
    for each in measured:
        assert each.num_shown > 20
        assert each.recall >= 0.99, each
        assert each.precision >= 0.99, each


def test_a_document_takes_little_memory_and_is_found_among_many_with_the_same_beginning() -> None:
    measured = cost(1000, num_prompts=20, rounds=1)
    assert measured.recall >= 0.99
    assert measured.process_bytes <= 1200
