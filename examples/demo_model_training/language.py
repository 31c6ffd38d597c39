"""The demo language: entities with invented names, encyclopedia entries about them, and questions.

    grammar.RELATIONS --draw--> Entity --write--> Context(documents) --ask--> Question(text, answer)

Everything is drawn from a `random.Random` that the caller owns: one seed gives one language sample,
byte for byte.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from examples.demo_model_training.grammar import (
    ENTITY_KIND_WEIGHTS,
    ENTITY_KINDS,
    FILLERS,
    FIRST_NAMES,
    MALE_FIRST_NAMES,
    NAME_HEADS,
    NAME_TAILS,
    RELATIONS,
    WORD_LISTS,
    Relation,
)

QuestionKind = Literal[
    "single", "continued", "two-hop", "three-hop", "continued two-hop", "reverse", "yes-no", "absent"
]
"""`continued` asks a fact that its chunk tells with "It" only, `continued two-hop` needs one; `absent` has the answer
"unknown"."""

UNKNOWN = "unknown"


@dataclass(slots=True)
class Names:
    """Gives names that were not given before."""

    rng: random.Random
    used: set[str] = field(default_factory=set)
    shared_head_share: float = 0.0
    """Share of names that begin like an earlier one ("Zorval", "Zortan")."""
    foreign_share: float = 0.0
    """Share of words spelt freely ("Ackmil"), of pieces that invented names do not have."""
    _heads: list[str] = field(default_factory=list)

    def word(self, long_share: float = 0.25) -> str:
        """Return a new invented word of two syllables, or of three with probability `long_share`."""
        while self.foreign_share and self.rng.random() < self.foreign_share:
            name = self._foreign_word()
            if name not in self.used:
                self.used.add(name)
                return name
        while True:
            shares_head = bool(self._heads) and self.rng.random() < self.shared_head_share
            head = self.rng.choice(self._heads) if shares_head else self.rng.choice(NAME_HEADS)
            num_tails = 2 if self.rng.random() < long_share else 1
            name = head + "".join(self.rng.choice(NAME_TAILS) for _ in range(num_tails))
            if name not in self.used:
                self.used.add(name)
                self._heads.append(head)
                return name

    def _foreign_word(self) -> str:
        letters = [
            self.rng.choice("aeiouy" if index % 2 else "bcdfghjklmnpqrstvwxz")
            for index in range(self.rng.randint(3, 8))
        ]
        letters.insert(self.rng.randint(0, len(letters)), self.rng.choice("aeiklmnorst"))
        return "".join(letters).capitalize()

    def person(self) -> str:
        """Return a new person's name: a common first name and an invented family name."""
        return self.rng.choice(FIRST_NAMES) + " " + self.word(long_share=0.0)

    def value(self, value_kind: str) -> str:
        """Return a value of the kind: a new name, a number or a word of a closed list."""
        if value_kind == "person":
            return self.person()
        if value_kind == "year":
            return str(self.rng.randint(1500, 1999))
        if value_kind == "number":
            return str(self.rng.randint(110, 999))
        if value_kind in WORD_LISTS:
            return self.rng.choice(WORD_LISTS[value_kind])
        return self.word()


@dataclass(frozen=True, slots=True)
class Entity:
    """One thing an entry tells about; `facts` maps relation names to values in the order told."""

    kind: str
    name: str
    facts: dict[str, str]

    @property
    def pronoun(self) -> str:
        if self.kind != "person":
            return "It"
        return "He" if self.name.split()[0] in MALE_FIRST_NAMES else "She"

    def relation(self, key: str) -> Relation:
        return RELATIONS[self.kind][key]


@dataclass(frozen=True, slots=True)
class Question:
    kind: QuestionKind
    text: str
    answer: str


@dataclass(frozen=True, slots=True)
class WritingStyle:
    """How entries are written. Shares are probabilities between 0 and 1."""

    pronoun_share: float = 0.5
    split_share: float = 0.0
    """Share of entries cut into documents that, but for the first, say only "It", "He" or "She"."""
    max_pieces: int = 2
    """Of an entry that is cut, the most documents; each has a fact at least."""
    heading_share: float = 0.5
    filler_share: float = 0.15
    """Probability of a sentence without facts after each fact."""


@dataclass(frozen=True, slots=True)
class Context:
    """Entities and the documents that tell about them, in the order of the prompt."""

    entities: tuple[Entity, ...]
    documents: tuple[str, ...]
    continued: frozenset[tuple[str, str]] = frozenset()
    """(entity name, relation name) of facts told in a chunk without the entity's name."""


def draw_entity(
    rng: random.Random, names: Names, kind: str, name: str, num_facts: int, keys: Sequence[str] | None = None
) -> Entity:
    """Return an entity with `num_facts` facts (fewer if its kind has fewer), only of `keys` if given."""
    chosen = list(keys if keys is not None else RELATIONS[kind])
    rng.shuffle(chosen)
    return Entity(kind, name, {key: names.value(RELATIONS[kind][key].value_kind) for key in chosen[:num_facts]})


def _new_name(names: Names, kind: str) -> str:
    return names.person() if kind == "person" else names.word()


def draw_linked_entities(
    rng: random.Random, names: Names, num_entities: int, num_facts: int, link_share: float = 0.6
) -> list[Entity]:
    """Return entities of mixed kinds; with probability `link_share` a value of one is the next one."""
    entities: list[Entity] = []
    while len(entities) < num_entities:
        kind = rng.choices(ENTITY_KINDS, ENTITY_KIND_WEIGHTS)[0]
        entity = draw_entity(rng, names, kind, _new_name(names, kind), num_facts)
        entities.append(entity)
        links = [key for key in entity.facts if _leads_to_entity(entity.relation(key))]
        if links and len(entities) < num_entities and rng.random() < link_share:
            key = rng.choice(links)
            entities.append(draw_entity(rng, names, entity.relation(key).value_kind, entity.facts[key], num_facts))
    return entities


def _leads_to_entity(relation: Relation) -> bool:
    return relation.noun_phrase is not None and relation.value_kind in RELATIONS


def draw_chained_entities(
    rng: random.Random, names: Names, num_entities: int, num_facts: int, chain_length: int = 3
) -> list[Entity]:
    """Return entities; the first `chain_length` are a chain: a value of each is the next one."""
    kind = rng.choices(ENTITY_KINDS, ENTITY_KIND_WEIGHTS)[0]
    name = _new_name(names, kind)
    chain: list[Entity] = []
    while len(chain) < chain_length - 1:
        entity = draw_entity(rng, names, kind, name, num_facts)
        links = [key for key in entity.facts if _leads_to_entity(entity.relation(key))]
        if links:
            key = rng.choice(links)
            kind, name = entity.relation(key).value_kind, entity.facts[key]
            chain.append(entity)
    chain.append(draw_entity(rng, names, kind, name, num_facts))
    return chain + draw_linked_entities(rng, names, num_entities - len(chain), num_facts)


def draw_same_kind_entities(rng: random.Random, names: Names, num_entities: int, num_facts: int) -> list[Entity]:
    """Return entities of ONE kind with the same relations: only the name tells them apart."""
    kind = rng.choice(ENTITY_KINDS)
    keys = list(RELATIONS[kind])
    rng.shuffle(keys)
    return [
        draw_entity(rng, names, kind, _new_name(names, kind), num_facts, keys[:num_facts]) for _ in range(num_entities)
    ]


def _capitalised(text: str) -> str:
    return text[0].upper() + text[1:]


def tell(rng: random.Random, entity: Entity, key: str, pronoun_share: float) -> str:
    """Return one sentence that tells a fact, with the entity's pronoun with probability `pronoun_share`."""
    statements = entity.relation(key).statements
    if rng.random() < pronoun_share:
        statement, subject = statements[0], entity.pronoun
    else:
        statement, subject = rng.choice(statements), entity.name
    return statement.replace("{S}", subject).replace("{V}", entity.facts[key])


def write_entry(rng: random.Random, entity: Entity, style: WritingStyle) -> tuple[list[str], list[str]]:
    """Return the entry's documents (one, or several if it was split) and the facts told after the first split."""
    keys = list(entity.facts)
    num_first = len(keys)
    if len(keys) >= 2 and rng.random() < style.split_share:
        num_first = rng.randint(1, len(keys) - 1)
    sentences = [f"{entity.name} is a {entity.kind}."]
    if rng.random() < style.heading_share:
        sentences.insert(0, f"# {entity.name}")
    fillers = iter(rng.sample(FILLERS, len(FILLERS)))
    for key in keys[:num_first]:
        sentences.append(tell(rng, entity, key, style.pronoun_share))
        if rng.random() < style.filler_share:
            sentences.append(next(fillers).replace("{S}", entity.name))
    documents = [" ".join(sentences)]
    if num_first < len(keys):
        left = keys[num_first:]
        for num_pieces in range(style.max_pieces - 1, 0, -1):
            num_reports = rng.randint(1, len(left)) if num_pieces > 1 else len(left)
            documents.append(" ".join(tell(rng, entity, key, pronoun_share=1.0) for key in left[:num_reports]))
            left = left[num_reports:]
            if not left:
                break
    return documents, keys[num_first:]


def write_context(rng: random.Random, entities: Sequence[Entity], style: WritingStyle) -> Context:
    """Return the entities' entries as documents in random order (a split entry stays together)."""
    documents: list[str] = []
    continued: set[tuple[str, str]] = set()
    for entity in rng.sample(list(entities), len(entities)):
        entry, continued_keys = write_entry(rng, entity, style)
        documents += entry
        continued.update((entity.name, key) for key in continued_keys)
    return Context(tuple(entities), tuple(documents), frozenset(continued))


def ask(rng: random.Random, context: Context, names: Names, kind: QuestionKind) -> Question | None:
    """Return a question of the kind about the context, or None if the context holds none."""
    return _ASKERS[kind](rng, context, names)


def _told(context: Context, is_continued: bool) -> list[tuple[Entity, str]]:
    return [
        (entity, key)
        for entity in context.entities
        for key in entity.facts
        if ((entity.name, key) in context.continued) == is_continued
    ]


def _question_about(rng: random.Random, entity: Entity, key: str) -> str:
    return rng.choice(entity.relation(key).questions).replace("{X}", entity.name)


def _ask_single(rng: random.Random, context: Context, _names: Names) -> Question | None:
    told = _told(context, is_continued=False)
    if not told:
        return None
    entity, key = rng.choice(told)
    return Question("single", _question_about(rng, entity, key), entity.facts[key])


def _ask_continued(rng: random.Random, context: Context, _names: Names) -> Question | None:
    told = _told(context, is_continued=True)
    if not told:
        return None
    entity, key = rng.choice(told)
    return Question("continued", _question_about(rng, entity, key), entity.facts[key])


def hop_question(rng: random.Random, kind: QuestionKind, hops: Sequence[tuple[Entity, str]]) -> Question:
    """Return the question that follows the (entity, relation name) of `hops`, each leading to the next entity.

    Its answer is "bridge, value", with a bridge for each hop but the last.
    """
    asked = hops[0][0].name
    for entity, key in hops[:-1]:
        noun_phrase = entity.relation(key).noun_phrase
        assert noun_phrase is not None
        asked = noun_phrase.replace("{X}", asked)
    last, key = hops[-1]
    text = rng.choice(last.relation(key).questions).replace("{X}", asked)
    return Question(kind, text, ", ".join([*(entity.name for entity, _ in hops[1:]), last.facts[key]]))


def two_hop_question(rng: random.Random, first: Entity, key: str, bridge: Entity, bridge_key: str) -> Question:
    """Return the question for `bridge_key` of `first`'s `key`; its answer is "bridge, value"."""
    return hop_question(rng, "two-hop", ((first, key), (bridge, bridge_key)))


def _ask_two_hop(rng: random.Random, context: Context, _names: Names) -> Question | None:
    by_name = {entity.name: entity for entity in context.entities}
    told = _told(context, is_continued=False)
    paths = [
        (first, key, by_name[first.facts[key]])
        for first, key in told
        if first.relation(key).noun_phrase and first.facts[key] in by_name
    ]
    if not paths:
        return None
    first, key, bridge = rng.choice(paths)
    bridge_keys = [bridge_key for entity, bridge_key in told if entity is bridge]
    if not bridge_keys:
        return None
    return two_hop_question(rng, first, key, bridge, rng.choice(bridge_keys))


def _links(context: Context) -> list[tuple[Entity, str, Entity]]:
    """Return (entity, relation name, the entity that it leads to), wherever it is told."""
    by_name = {entity.name: entity for entity in context.entities}
    return [
        (entity, key, by_name[value])
        for entity in context.entities
        for key, value in entity.facts.items()
        if entity.relation(key).noun_phrase and value in by_name
    ]


def _ask_three_hop(rng: random.Random, context: Context, _names: Names) -> Question | None:
    links = _links(context)
    paths = [(one, two) for one in links for two in links if one[2] is two[0] and two[2].facts]
    if not paths:
        return None
    (first, key, second), (_, second_key, third) = rng.choice(paths)
    return hop_question(rng, "three-hop", ((first, key), (second, second_key), (third, rng.choice(list(third.facts)))))


def _ask_continued_two_hop(rng: random.Random, context: Context, _names: Names) -> Question | None:
    paths = [
        ((first, key), (bridge, bridge_key))
        for first, key, bridge in _links(context)
        for bridge_key in bridge.facts
        if {(first.name, key), (bridge.name, bridge_key)} & context.continued
    ]
    return hop_question(rng, "continued two-hop", rng.choice(paths)) if paths else None


def _ask_reverse(rng: random.Random, context: Context, _names: Names) -> Question | None:
    told = _told(context, is_continued=False)
    values = [(entity.kind, key, entity.facts[key]) for entity, key in told]
    unique = [
        (entity, key)
        for entity, key in told
        if entity.relation(key).reverse_question and values.count((entity.kind, key, entity.facts[key])) == 1
    ]
    if not unique:
        return None
    entity, key = rng.choice(unique)
    reverse_question = entity.relation(key).reverse_question
    assert reverse_question is not None
    return Question("reverse", reverse_question.replace("{V}", entity.facts[key]), entity.name)


def _ask_yes_no(rng: random.Random, context: Context, names: Names) -> Question | None:
    told = _told(context, is_continued=False)
    if not told:
        return None
    entity, key = rng.choice(told)
    truth = entity.facts[key]
    claimed = truth
    if rng.random() < 0.5:
        value_kind = entity.relation(key).value_kind
        others = [
            other.facts[other_key]
            for other, other_key in told
            if other.relation(other_key).value_kind == value_kind and other.facts[other_key] != truth
        ]
        claimed = rng.choice(others) if others and rng.random() < 0.7 else names.value(value_kind)
    statement = entity.relation(key).statements[0].replace("{S}", entity.name).replace("{V}", claimed)
    return Question("yes-no", f"Is it true that {statement[:-1]}?", "yes" if claimed == truth else "no")


def _ask_absent(rng: random.Random, context: Context, names: Names) -> Question | None:
    if not context.entities:
        kind = rng.choice(ENTITY_KINDS)
        stranger = draw_entity(rng, names, kind, _new_name(names, kind), num_facts=1)
        return Question("absent", _question_about(rng, stranger, next(iter(stranger.facts))), UNKNOWN)
    entity = rng.choice(context.entities)
    untold = [key for key in RELATIONS[entity.kind] if key not in entity.facts]
    if untold and rng.random() < 0.25:
        return Question("absent", _question_about(rng, entity, rng.choice(untold)), UNKNOWN)
    stranger = Entity(entity.kind, _new_name(names, entity.kind), entity.facts)
    return Question("absent", _question_about(rng, stranger, rng.choice(list(entity.facts))), UNKNOWN)


_ASKERS = {
    "single": _ask_single,
    "continued": _ask_continued,
    "two-hop": _ask_two_hop,
    "three-hop": _ask_three_hop,
    "continued two-hop": _ask_continued_two_hop,
    "reverse": _ask_reverse,
    "yes-no": _ask_yes_no,
    "absent": _ask_absent,
}
