"""The demo corpus: what is committed is what the generator writes, and its questions have one answer."""

from functools import cache
from pathlib import Path

from examples.demo_model_training.corpus import Corpus, make_corpus, questions_jsonl

EXAMPLES = Path(__file__).parents[3] / "examples"


@cache
def corpus() -> Corpus:
    return make_corpus()


def test_committed_entries_equal_the_generated_ones() -> None:
    committed = {path.name: path.read_text(encoding="utf-8") for path in (EXAMPLES / "demo_corpus").glob("*.md")}
    assert committed == corpus().entries


def test_committed_questions_equal_the_generated_ones() -> None:
    committed = (EXAMPLES / "demo_corpus_questions.jsonl").read_text(encoding="utf-8")
    assert committed == questions_jsonl(corpus().questions)


def test_answers_stand_in_the_named_documents() -> None:
    for question in corpus().questions:
        *bridge, value = question.answer.split(", ")
        assert value in corpus().entries[question.documents[-1]]
        if question.kind == "two-hop":
            assert bridge[0] in corpus().entries[question.documents[0]]
            assert corpus().entries[question.documents[1]].startswith(f"# {bridge[0]}\n")
