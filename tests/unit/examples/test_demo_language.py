"""The demo language: deterministic by seed, and every question is answered by its documents."""

import random

import pytest

from examples.demo_model_training.grammar import RELATIONS
from examples.demo_model_training.language import (
    UNKNOWN,
    Context,
    Names,
    WritingStyle,
    ask,
    draw_linked_entities,
    draw_same_kind_entities,
    write_context,
)


def make_context(seed: int, *, same_kind: bool = False, split_share: float = 0.0) -> tuple[Context, Names]:
    rng = random.Random(seed)
    names = Names(rng)
    draw_entities = draw_same_kind_entities if same_kind else draw_linked_entities
    style = WritingStyle(split_share=split_share)
    return write_context(rng, draw_entities(rng, names, 4, 4), style), names


def test_one_seed_gives_the_same_documents() -> None:
    assert make_context(5)[0] == make_context(5)[0]


def test_different_seeds_give_different_documents() -> None:
    assert make_context(5)[0].documents != make_context(6)[0].documents


def test_first_statement_of_every_relation_starts_with_its_subject() -> None:
    for relations in RELATIONS.values():
        for relation in relations.values():
            assert relation.statements[0].startswith("{S}")


@pytest.mark.parametrize("seed", range(20))
def test_answer_of_a_single_question_stands_in_a_document(seed: int) -> None:
    context, names = make_context(seed)
    question = ask(random.Random(seed), context, names, "single")
    assert question is not None
    assert any(question.answer in document for document in context.documents)


@pytest.mark.parametrize("seed", range(20))
def test_continued_fact_stands_in_a_document_without_the_name(seed: int) -> None:
    context, names = make_context(seed, split_share=1.0)
    question = ask(random.Random(seed), context, names, "continued")
    assert question is not None
    entity = next(entity for entity in context.entities if entity.name in question.text)
    holders = [document for document in context.documents if question.answer in document]
    assert any(entity.name not in document and document.startswith(entity.pronoun) for document in holders)


def test_two_hop_answer_names_the_bridge_and_the_value() -> None:
    context, names = make_context(1)
    question = ask(random.Random(1), context, names, "two-hop")
    assert question is not None
    bridge_name, value = question.answer.split(", ")
    bridge = next(entity for entity in context.entities if entity.name == bridge_name)
    assert value in bridge.facts.values()
    assert bridge_name not in question.text


@pytest.mark.parametrize("seed", range(20))
def test_absent_question_asks_what_no_document_tells(seed: int) -> None:
    context, names = make_context(seed)
    question = ask(random.Random(seed), context, names, "absent")
    assert question is not None
    assert question.answer == UNKNOWN
    for entity in context.entities:
        told = {text.replace("{X}", entity.name) for key in entity.facts for text in entity.relation(key).questions}
        assert question.text not in told


def test_same_kind_entities_have_the_same_relations() -> None:
    context, _ = make_context(2, same_kind=True)
    assert len({entity.kind for entity in context.entities}) == 1
    assert len({frozenset(entity.facts) for entity in context.entities}) == 1


def test_names_are_never_given_twice() -> None:
    names = Names(random.Random(0), shared_head_share=0.5)
    given = [names.word() for _ in range(2000)]
    assert len(set(given)) == len(given)
