"""The words of the demo language: syllables of names, word lists, and what each kind of entity tells.

Names are glued from syllables, so a model cannot know them beforehand and has to read them in its
prompt. Everything else is a closed list, so the tokenizer holds each such word whole.
"""

import random
from dataclasses import dataclass
from typing import Final


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_SYLLABLE_SEED: Final = 7
_ONSETS: Final = _words("b d f g h k l m n p r s t v z br dr gr kr tr st sk th sh ch")
_SIMPLE_ONSETS: Final = _words("b d f g k l m n p r s t v z")
_VOWELS: Final = _words("a e i o u ai ea")
_CODAS: Final = ["n", "r", "l", "x", "k", "m", "s", "th", "nd", "rn", "lt", "", "", ""]
_NUM_SYLLABLES: Final = 220


def _syllables() -> tuple[tuple[str, ...], tuple[str, ...]]:
    rng = random.Random(_SYLLABLE_SEED)
    heads: dict[str, None] = {}
    while len(heads) < _NUM_SYLLABLES:
        if rng.random() < 0.4:
            heads[(rng.choice(_ONSETS) + rng.choice(_VOWELS)).capitalize()] = None
        else:
            heads[(rng.choice(_ONSETS) + rng.choice("aeiou") + rng.choice("lrnmskdv")).capitalize()] = None
    tails: dict[str, None] = {}
    while len(tails) < _NUM_SYLLABLES:
        tails[rng.choice(_SIMPLE_ONSETS) + rng.choice("aeiou") + rng.choice(_CODAS)] = None
    return tuple(heads), tuple(tails)


NAME_HEADS, NAME_TAILS = _syllables()
"""First syllables ("Zor") and later syllables ("val") of invented names."""

MALE_FIRST_NAMES: Final = _words(
    "Boris David Felix Hugo Jonas Leon Nils Peter Simon Viktor Yusuf Alan Carl Emil Georg Ivan Kurt Marco Oscar "
    "Ralf Tom Walter Adam Conrad"
)
FEMALE_FIRST_NAMES: Final = _words(
    "Anna Clara Elena Greta Irene Karin Maria Olga Rosa Tara Wanda Zoe Bella Dora Flora Helen Julia Laura Nina Paula "
    "Sara Ursula Vera Xenia Birgit Dana"
)
FIRST_NAMES: Final = tuple(sorted(MALE_FIRST_NAMES + FEMALE_FIRST_NAMES))

WORD_LISTS: Final[dict[str, tuple[str, ...]]] = {
    "product": _words(
        "clocks ships paper glass bicycles radios engines carpets chocolate cameras furniture tractors shoes pianos "
        "cement lamps"
    ),
    "profession": _words(
        "painter miller chemist poet lawyer sailor mason surgeon composer farmer pilot botanist sculptor baker "
        "judge tailor"
    ),
    "sight": _words(
        "bridges gardens markets towers theatres castles museums festivals bakeries canals libraries fountains"
    ),
    "subject": _words("war love trade music hunting winter medicine travel farming astronomy cooking chess"),
    "instrument": _words("violin flute guitar trumpet harp cello organ drum clarinet banjo oboe horn"),
    "animal": _words("lion eagle bear wolf swan horse owl stag otter falcon heron lynx"),
    "fish": _words("trout salmon carp pike perch eels sturgeon bream"),
}

FILLERS: Final = (
    "Little else is known about {S}.",
    "Many travellers write about {S}.",
    "{S} has a long history.",
    "{S} is often seen on stamps.",
    "Schools teach the story of {S}.",
    "Old letters speak well of {S}.",
)
"""Sentences that answer no question."""


@dataclass(frozen=True, slots=True)
class Relation:
    """How one fact is told and asked.

    `{S}` is the subject, `{V}` the value, `{X}` the asked entity or a noun phrase for it.
    `statements[0]` starts with `{S}`, so that it can be told with a pronoun.
    """

    value_kind: str
    statements: tuple[str, ...]
    questions: tuple[str, ...]
    noun_phrase: str | None = None
    reverse_question: str | None = None


RELATIONS: Final[dict[str, dict[str, Relation]]] = {
    "company": {
        "founder": Relation(
            "person",
            ("{S} was founded by {V}.", "The founder of {S} is {V}."),
            ("Who founded {X}?", "Who is the founder of {X}?"),
            "the founder of {X}",
            "Which company was founded by {V}?",
        ),
        "year": Relation(
            "year",
            ("{S} was founded in {V}.", "{S} was started in {V}."),
            ("When was {X} founded?", "In which year was {X} founded?"),
            None,
            "Which company was founded in {V}?",
        ),
        "seat": Relation(
            "city",
            ("{S} is based in {V}.", "The main office of {S} is in {V}."),
            ("Where is {X} based?", "In which city is {X} based?"),
            "the home city of {X}",
            "Which company is based in {V}?",
        ),
        "product": Relation(
            "product",
            ("{S} makes {V}.", "{S} is known for its {V}."),
            ("What does {X} make?", "What is {X} known for?"),
            None,
            "Which company makes {V}?",
        ),
        "director": Relation(
            "person",
            ("{S} is led by {V}.", "The director of {S} is {V}."),
            ("Who leads {X}?", "Who is the director of {X}?"),
            "the director of {X}",
            "Which company is led by {V}?",
        ),
        "staff": Relation(
            "number",
            ("{S} employs {V} workers.", "The staff of {S} counts {V} workers."),
            ("How many workers does {X} employ?", "How many workers are at {X}?"),
            None,
            "Which company employs {V} workers?",
        ),
    },
    "person": {
        "birthplace": Relation(
            "city",
            ("{S} was born in {V}.", "The birthplace of {S} is {V}."),
            ("Where was {X} born?", "In which city was {X} born?"),
            "the birthplace of {X}",
            "Who was born in {V}?",
        ),
        "birth_year": Relation(
            "year",
            ("{S} was born in the year {V}.", "The birth year of {S} is {V}."),
            ("When was {X} born?", "In which year was {X} born?"),
            None,
            "Who was born in the year {V}?",
        ),
        "profession": Relation(
            "profession",
            ("{S} worked as a {V}.", "The profession of {S} was {V}."),
            ("What was the profession of {X}?", "What did {X} work as?"),
            None,
            "Who worked as a {V}?",
        ),
        "spouse": Relation(
            "person",
            ("{S} married {V}.", "The spouse of {S} is {V}."),
            ("Who married {X}?", "Who is the spouse of {X}?"),
            "the spouse of {X}",
        ),
        "teacher": Relation(
            "person",
            ("{S} was taught by {V}.", "The teacher of {S} is {V}."),
            ("Who taught {X}?", "Who is the teacher of {X}?"),
            "the teacher of {X}",
            "Who was taught by {V}?",
        ),
        "instrument": Relation(
            "instrument",
            ("{S} played the {V}.", "The instrument of {S} was the {V}."),
            ("Which instrument did {X} play?", "What was the instrument of {X}?"),
            None,
            "Who played the {V}?",
        ),
    },
    "city": {
        "country": Relation(
            "country",
            ("{S} lies in {V}.", "{S} is a city of {V}."),
            ("In which country is {X}?", "In which country does {X} lie?"),
            "the country of {X}",
            "Which city lies in {V}?",
        ),
        "river": Relation(
            "river",
            ("{S} lies on the river {V}.", "The river of {S} is the {V}."),
            ("Which river flows through {X}?", "What is the river of {X}?"),
            "the river of {X}",
            "Which city lies on the river {V}?",
        ),
        "mayor": Relation(
            "person",
            ("{S} is governed by {V}.", "The mayor of {S} is {V}."),
            ("Who is the mayor of {X}?", "Who governs {X}?"),
            "the mayor of {X}",
            "Which city is governed by {V}?",
        ),
        "sight": Relation(
            "sight",
            ("{S} is famous for its {V}.", "Visitors come to {S} for its {V}."),
            ("What is {X} famous for?", "For what do visitors come to {X}?"),
            None,
            "Which city is famous for its {V}?",
        ),
        "year": Relation(
            "year",
            ("{S} was settled in {V}.", "{S} dates from {V}."),
            ("When was {X} settled?", "In which year was {X} settled?"),
            None,
            "Which city was settled in {V}?",
        ),
        "emblem": Relation(
            "animal",
            ("{S} has the {V} as its emblem.", "The emblem of {S} is the {V}."),
            ("What is the emblem of {X}?", "Which animal is the emblem of {X}?"),
            None,
            "Which city has the {V} as its emblem?",
        ),
    },
    "river": {
        "source": Relation(
            "mountain",
            ("{S} rises on mount {V}.", "The source of {S} is mount {V}."),
            ("Where does {X} rise?", "What is the source of {X}?"),
            None,
            "Which river rises on mount {V}?",
        ),
        "length": Relation(
            "number",
            ("{S} is {V} miles long.", "The length of {S} is {V} miles."),
            ("How long is {X}?", "What is the length of {X}?"),
            None,
            "Which river is {V} miles long?",
        ),
        "sea": Relation(
            "sea",
            ("{S} flows into the {V} sea.", "{S} ends in the {V} sea."),
            ("Into which sea does {X} flow?", "Where does {X} end?"),
            None,
            "Which river flows into the {V} sea?",
        ),
        "fish": Relation(
            "fish",
            ("{S} is full of {V}.", "The fish of {S} are {V}."),
            ("What is {X} full of?", "Which fish live in {X}?"),
            None,
            "Which river is full of {V}?",
        ),
        "port": Relation(
            "city",
            ("{S} has its port in {V}.", "The port of {S} is {V}."),
            ("What is the port of {X}?", "Where is the port of {X}?"),
            "the port of {X}",
            "Which river has its port in {V}?",
        ),
    },
    "country": {
        "capital": Relation(
            "city",
            ("{S} is ruled from {V}.", "The capital of {S} is {V}."),
            ("What is the capital of {X}?", "From which city is {X} ruled?"),
            "the capital of {X}",
        ),
        "currency": Relation(
            "currency",
            ("{S} uses the {V} as its money.", "People in {S} pay with the {V}."),
            ("What is the currency of {X}?", "What do people in {X} pay with?"),
            None,
            "Which country uses the {V}?",
        ),
        "president": Relation(
            "person",
            ("{S} is headed by {V}.", "The president of {S} is {V}."),
            ("Who is the president of {X}?", "Who heads {X}?"),
            "the president of {X}",
            "Which country is headed by {V}?",
        ),
        "animal": Relation(
            "animal",
            ("{S} shows the {V} on its flag.", "The flag of {S} shows the {V}."),
            ("Which animal is on the flag of {X}?", "What does the flag of {X} show?"),
            None,
            "Which country shows the {V} on its flag?",
        ),
        "year": Relation(
            "year",
            ("{S} became free in {V}.", "The freedom of {S} dates from {V}."),
            ("When did {X} become free?", "In which year did {X} become free?"),
            None,
            "Which country became free in {V}?",
        ),
    },
    "book": {
        "author": Relation(
            "person",
            ("{S} was written by {V}.", "The author of {S} is {V}."),
            ("Who wrote {X}?", "Who is the author of {X}?"),
            "the author of {X}",
            "Which book was written by {V}?",
        ),
        "year": Relation(
            "year",
            ("{S} was published in {V}.", "{S} first appeared in {V}."),
            ("When was {X} published?", "In which year was {X} published?"),
            None,
            "Which book was published in {V}?",
        ),
        "subject": Relation(
            "subject",
            ("{S} is about {V}.", "The subject of {S} is {V}."),
            ("What is {X} about?", "What is the subject of {X}?"),
            None,
            "Which book is about {V}?",
        ),
        "pages": Relation(
            "number",
            ("{S} has {V} pages.", "The length of {S} is {V} pages."),
            ("How many pages does {X} have?", "How many pages are in {X}?"),
            None,
            "Which book has {V} pages?",
        ),
        "publisher": Relation(
            "company",
            ("{S} was printed by {V}.", "The publisher of {S} is {V}."),
            ("Who printed {X}?", "Which company is the publisher of {X}?"),
            "the publisher of {X}",
            "Which book was printed by {V}?",
        ),
    },
}
"""Entity kind -> relation name -> how it is told and asked."""

ENTITY_KINDS: Final = tuple(RELATIONS)
ENTITY_KIND_WEIGHTS: Final = (4, 4, 3, 2, 2, 2)
"""How often each kind is drawn, in the order of `ENTITY_KINDS`."""
