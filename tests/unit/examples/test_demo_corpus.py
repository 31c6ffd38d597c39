"""The demo corpus: what is committed is what the generator writes, and its questions have one answer."""

import json
from functools import cache
from pathlib import Path

from examples.demo_model_training.corpus import Corpus, file_name, make_corpus, questions_jsonl, write_corpus
from examples.demo_model_training.tokenizer import Vocabulary

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


def test_writing_again_removes_entries_of_another_seed(tmp_path: Path) -> None:
    write_corpus(make_corpus(1), tmp_path / "entries", tmp_path / "questions.jsonl")
    write_corpus(make_corpus(2), tmp_path / "entries", tmp_path / "questions.jsonl")
    assert {path.name for path in (tmp_path / "entries").iterdir()} == set(make_corpus(2).entries)


def test_names_are_distinct() -> None:
    assert len(corpus().entities) == len(corpus().entries) == 240


def test_entries_have_a_heading_and_between_40_and_150_tokens() -> None:
    vocabulary = Vocabulary()
    for entry in corpus().entries.values():
        assert entry.startswith("# ")
        assert 40 <= len(vocabulary.encode(entry)) <= 150


def test_answers_stand_in_the_named_documents() -> None:
    for question in corpus().questions:
        *bridge, value = question.answer.split(", ")
        assert value in corpus().entries[question.documents[-1]]
        if question.kind == "two-hop":
            assert bridge[0] in corpus().entries[question.documents[0]]
            assert corpus().entries[question.documents[1]].startswith(f"# {bridge[0]}\n")


def test_every_question_is_asked_once_and_about_one_entity() -> None:
    texts = [question.question for question in corpus().questions]
    assert len(set(texts)) == len(texts) == 60
    for question in corpus().questions:
        words = question.question.replace("?", " ?").split()
        named = [name for name in corpus().entities if " ".join(name.split()) in " ".join(words)]
        assert file_name(corpus().entities[max(named, key=len)]) == question.documents[0]


def test_question_file_has_one_object_per_line() -> None:
    kinds = [json.loads(line)["kind"] for line in questions_jsonl(corpus().questions).splitlines()]
    assert kinds.count("single") == 40
    assert kinds.count("two-hop") == 20


def test_marriages_hold_both_ways() -> None:
    entities = corpus().entities
    for entity in entities.values():
        if entity.kind == "person":
            assert entities[entity.facts["spouse"]].facts["spouse"] == entity.name
