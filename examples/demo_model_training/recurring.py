"""Questions over documents that recur in changing sets, for measuring what their reuse costs in answers.

Every question has five documents. Popular ones come often, but hardly ever twice in the same company. All documents of
a question tell of things of one kind with the same relations where its own kind allows, so that only names tell them
apart. Three kinds of questions, each with documents of its own:

    single-hop  one document holds the answer
    two-hop     one document names the thing that another one tells about; the answer is "bridge, value"
    continued   an entry is cut into two documents; the second, which says only "It", "He" or "She", holds the answer.
                Other questions show that second half behind the halves of strangers, or at the very beginning.

Two more kinds, for a model that was trained for them, come with --deep:

    three-hop          two documents name the thing that the next one tells about; "bridge, bridge, value"
    continued two-hop  as two-hop; the second half of the bridge's entry holds the value, and other questions show it
                       behind strangers

One seed gives the same file byte for byte, and none that training used.

Examples:
  python -m examples.demo_model_training.recurring --out build/recurring-questions.jsonl
  python -m examples.demo_model_training.recurring --out build/few.jsonl --num-questions 20 --seed 7
  python -m examples.demo_model_training.recurring --out build/deep-questions.jsonl --deep
"""

import argparse
import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from examples.demo_model_training.grammar import ENTITY_KINDS, RELATIONS
from examples.demo_model_training.language import (
    Entity,
    Names,
    QuestionKind,
    WritingStyle,
    draw_chained_entities,
    draw_entity,
    draw_linked_entities,
    hop_question,
    two_hop_question,
    write_entry,
)
from ragcache_core import Document
from ragcache_core.quality.questions import Question, to_line

SEED: Final = 888_000
NUM_DOCUMENTS: Final = 5
NUM_FACTS: Final = (3, 5)
_NUM_ENTRIES: Final = 96
_SKEW: Final = 0.6
"""The r-th most popular entry is drawn with a weight of r ** -0.6."""
_CHAIN_LENGTH: Final = 3
_WHOLE: Final = WritingStyle()
_SPLIT: Final = WritingStyle(split_share=1.0)


@dataclass(frozen=True, slots=True)
class Entry:
    """An entity, the documents that tell about it, and the relations that its second document tells."""

    entity: Entity
    documents: tuple[Document, ...]
    continued: tuple[str, ...]
    popularity: float


def single_hop(
    rng: random.Random, num_documents: int = NUM_DOCUMENTS, num_facts: tuple[int, int] = NUM_FACTS
) -> Iterator[Question]:
    """Yield single-hop questions over documents with bounded numbers of facts, without end."""
    entries = _entries(rng, _same_kind_entities(rng, _NUM_ENTRIES, num_facts), _WHOLE)
    while True:
        entry = _draw(rng, entries)
        others = [other for other in entries if other.entity.kind == entry.entity.kind and other is not entry]
        shown = [entry, *_draw_some(rng, others, num_documents - 1)]
        key = rng.choice(list(entry.entity.facts))
        yield _question(rng, "single-hop", entry, key, rng.sample([e.documents[0] for e in shown], num_documents))


def two_hop(rng: random.Random) -> Iterator[Question]:
    """Yield two-hop questions without end."""
    entities = draw_linked_entities(rng, Names(rng), _NUM_ENTRIES, num_facts=4, link_share=0.9)
    entries = _entries(rng, entities, _WHOLE)
    by_name = {entry.entity.name: entry for entry in entries}
    while True:
        first = _draw(rng, entries)
        links = [k for k, v in first.entity.facts.items() if first.entity.relation(k).noun_phrase and v in by_name]
        if not links:
            continue
        key = rng.choice(links)
        bridge = by_name[first.entity.facts[key]]
        others = [other for other in entries if other not in (first, bridge)]
        shown = [first, bridge, *_draw_some(rng, others, NUM_DOCUMENTS - 2)]
        asked = two_hop_question(rng, first.entity, key, bridge.entity, rng.choice(list(bridge.entity.facts)))
        documents = rng.sample([entry.documents[0] for entry in shown], NUM_DOCUMENTS)
        yield Question(asked.text, (asked.answer,), tuple(documents), "two-hop")


def continued(
    rng: random.Random, num_documents: int = NUM_DOCUMENTS, num_facts: tuple[int, int] = NUM_FACTS
) -> Iterator[Question]:
    """Yield questions whose answer the second half of an entry tells, without end.

    A document is half of an entry; the number of an entry's facts is bounded.
    """
    num_entries = max(_NUM_ENTRIES // 2, len(ENTITY_KINDS) * num_documents)
    entries = _entries(rng, _same_kind_entities(rng, num_entries, num_facts), _SPLIT)
    while True:
        entry = _draw(rng, entries)
        others = [other for other in entries if other.entity.kind == entry.entity.kind and other is not entry]
        groups = [entry.documents]
        if rng.random() < 0.5 and num_documents > 3:  # another whole entry, and halves of others
            whole, *others_shown = _draw_some(rng, others, num_documents - 3)
            groups.append(whole.documents)
        else:
            others_shown = _draw_some(rng, others, num_documents - 2)
        groups += [(rng.choice(other.documents),) for other in others_shown]
        shown = [document for group in rng.sample(groups, len(groups)) for document in group]
        behind = shown[shown.index(entry.documents[1]) + 1 :]
        is_ambiguous = bool(behind) and behind[0].doc_id.endswith(" 2")  # "It" of a stranger, as if said of our entry
        is_unique = len({document.text for document in shown}) == num_documents
        if is_unique and not is_ambiguous:
            yield _question(rng, "continued", entry, rng.choice(entry.continued), shown)


def three_hop(rng: random.Random) -> Iterator[Question]:
    """Yield three-hop questions without end."""
    entries = _chained_entries(rng, _WHOLE)
    while True:
        chain = _draw_chain(rng, entries)
        others = [other for other in entries if other not in chain]
        shown = [*chain, *_draw_some(rng, others, NUM_DOCUMENTS - _CHAIN_LENGTH)]
        documents = rng.sample([entry.documents[0] for entry in shown], NUM_DOCUMENTS)
        yield _hop_question(rng, "three-hop", chain, rng.choice(list(chain[-1].entity.facts)), documents)


def continued_two_hop(rng: random.Random) -> Iterator[Question]:
    """Yield two-hop questions whose value the second half of an entry tells, without end."""
    entries = _chained_entries(rng, _SPLIT)
    while True:
        first, bridge, _ = _draw_chain(rng, entries)
        others = [other for other in entries if other not in (first, bridge)]
        groups = [first.documents[:1], bridge.documents]
        groups += [(rng.choice(other.documents),) for other in _draw_some(rng, others, NUM_DOCUMENTS - 3)]
        shown = [document for group in rng.sample(groups, len(groups)) for document in group]
        asked = (*first.documents, *bridge.documents)
        is_ambiguous = any(  # "It" of a stranger, as if said of an entry that is asked about
            before in asked and document not in asked and document.doc_id.endswith(" 2")
            for before, document in itertools.pairwise(shown)
        )
        is_unique = len({document.text for document in shown}) == NUM_DOCUMENTS
        if is_unique and not is_ambiguous and _link(first, bridge) not in first.continued:
            yield _hop_question(rng, "continued two-hop", (first, bridge), rng.choice(bridge.continued), shown)


KINDS: Final[dict[str, Callable[[random.Random], Iterator[Question]]]] = {
    "single-hop": single_hop,
    "two-hop": two_hop,
    "continued": continued,
}
DEEP_KINDS: Final = {**KINDS, "three-hop": three_hop, "continued two-hop": continued_two_hop}


def recurring_questions(
    num_questions: int, seed: int = SEED, kinds: Mapping[str, Callable[[random.Random], Iterator[Question]]] = KINDS
) -> list[Question]:
    """Return the questions of each kind, one kind after the other."""
    questions = []
    for number, draw in enumerate(kinds.values()):
        drawn = draw(random.Random(seed + number))
        questions += [next(drawn) for _ in range(num_questions)]
    return questions


def _same_kind_entities(rng: random.Random, num_entities: int, num_facts: tuple[int, int]) -> list[Entity]:
    """Return as many entities of every kind; those of one kind have the same relations."""
    names = Names(rng)
    entities = []
    for kind in ENTITY_KINDS:
        keys = rng.sample(list(RELATIONS[kind]), rng.randint(*num_facts))
        for _ in range(num_entities // len(ENTITY_KINDS)):
            name = names.person() if kind == "person" else names.word()
            entities.append(draw_entity(rng, names, kind, name, len(keys), keys))
    return entities


def _chained_entries(rng: random.Random, style: WritingStyle) -> list[Entry]:
    """Return entries; each three of them are a chain."""
    names = Names(rng)
    chains = [
        draw_chained_entities(rng, names, _CHAIN_LENGTH, num_facts=4) for _ in range(_NUM_ENTRIES // _CHAIN_LENGTH)
    ]
    return _entries(rng, [entity for chain in chains for entity in chain], style)


def _draw_chain(rng: random.Random, entries: Sequence[Entry]) -> Sequence[Entry]:
    start = entries.index(_draw(rng, entries)) // _CHAIN_LENGTH * _CHAIN_LENGTH
    return entries[start : start + _CHAIN_LENGTH]


def _link(entry: Entry, target: Entry) -> str:
    """Return the relation of an entry that leads to the next one of its chain."""
    return next(key for key, value in entry.entity.facts.items() if value == target.entity.name)


def _hop_question(
    rng: random.Random, kind: QuestionKind, chain: Sequence[Entry], key: str, documents: Sequence[Document]
) -> Question:
    links = [(entry.entity, _link(entry, target)) for entry, target in itertools.pairwise(chain)]
    asked = hop_question(rng, kind, [*links, (chain[-1].entity, key)])
    return Question(asked.text, (asked.answer,), tuple(documents), kind)


def _entries(rng: random.Random, entities: Sequence[Entity], style: WritingStyle) -> list[Entry]:
    ranks = rng.sample(range(1, len(entities) + 1), len(entities))
    entries = []
    for entity, rank in zip(entities, ranks, strict=True):
        texts, continued_keys = write_entry(rng, entity, style)
        documents = tuple(Document(f"{entity.name} {half}", text) for half, text in enumerate(texts, start=1))
        entries.append(Entry(entity, documents, tuple(continued_keys), rank**-_SKEW))
    return entries


def _draw(rng: random.Random, entries: Sequence[Entry]) -> Entry:
    return rng.choices(entries, [entry.popularity for entry in entries])[0]


def _draw_some(rng: random.Random, entries: Sequence[Entry], count: int) -> list[Entry]:
    left, drawn = list(entries), []
    for _ in range(count):
        drawn.append(_draw(rng, left))
        left.remove(drawn[-1])
    return drawn


def _question(rng: random.Random, kind: str, entry: Entry, key: str, documents: Sequence[Document]) -> Question:
    entity = entry.entity
    text = rng.choice(entity.relation(key).questions).replace("{X}", entity.name)
    return Question(text, (entity.facts[key],), tuple(documents), kind)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    parser.add_argument("--num-questions", type=int, default=150, help="of each kind")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--deep", action="store_true", help="two more kinds, for a model that was trained for them")
    options = parser.parse_args(arguments)
    kinds = DEEP_KINDS if options.deep else KINDS
    lines = [to_line(question) for question in recurring_questions(options.num_questions, options.seed, kinds)]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{len(lines)} questions written to {options.out}")


if __name__ == "__main__":
    main()
