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
    draw_chained_entities,
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


def make_chain(seed: int, max_pieces: int = 3) -> tuple[Context, Names]:
    rng = random.Random(seed)
    names = Names(rng)
    style = WritingStyle(split_share=1.0, max_pieces=max_pieces)
    return write_context(rng, draw_chained_entities(rng, names, 4, 4), style), names


@pytest.mark.parametrize("seed", range(20))
def test_three_hop_answer_follows_two_bridges_to_the_value(seed: int) -> None:
    context, names = make_chain(seed)
    question = ask(random.Random(seed), context, names, "three-hop")
    assert question is not None
    by_name = {entity.name: entity for entity in context.entities}
    second, third, value = question.answer.split(", ")
    assert third in by_name[second].facts.values()
    assert value in by_name[third].facts.values()
    (first,) = (
        entity
        for name, entity in by_name.items()
        if question.text.endswith((f" {name}?", f" {name} lie?")) or f" {name} " in question.text
    )
    assert second in first.facts.values()


@pytest.mark.parametrize("seed", range(20))
def test_continued_two_hop_question_needs_a_document_that_names_nobody(seed: int) -> None:
    context, names = make_chain(seed)
    question = ask(random.Random(seed), context, names, "continued two-hop")
    assert question is not None
    needed = [
        document
        for document in context.documents
        if any(f" {part}." in document or f" {part} " in document for part in question.answer.split(", "))
    ]
    assert any(document.startswith(("It ", "He ", "She ")) for document in needed)


def test_an_entry_is_cut_into_as_many_documents_as_its_style_says() -> None:
    per_entity = {
        max_pieces: [len(make_chain(seed, max_pieces)[0].documents) / 4 for seed in range(30)] for max_pieces in (2, 3)
    }
    assert max(per_entity[2]) == 2
    assert 2 < max(per_entity[3]) <= 3


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
