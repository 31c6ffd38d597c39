"""Write the demo corpus: encyclopedia entries of one invented world as Markdown, and questions about it.

The entries are linked: a company's founder, a founder's birthplace, that city's country each have an
entry, so questions over two entries exist. One seed gives the same files byte for byte.

Examples:
  python -m examples.demo_model_training.corpus \\
      --out examples/demo_corpus --questions examples/demo_corpus_questions.jsonl
"""

import argparse
import json
import random
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Literal

from examples.demo_model_training.grammar import FILLERS, RELATIONS
from examples.demo_model_training.language import Entity, Names, tell, two_hop_question

CORPUS_SEED: Final = 2024
NUM_ENTRIES: Final = {"company": 52, "person": 80, "city": 40, "river": 20, "country": 12, "book": 36}
NUM_SINGLE_HOP: Final = 40
NUM_TWO_HOP: Final = 20
_PRONOUN_SHARE: Final = 0.5
_FILLER_SHARE: Final = 0.12


@dataclass(frozen=True, slots=True)
class CorpusQuestion:
    """A question, its only right answer, and the files that hold it."""

    id: str
    question: str
    answer: str
    kind: Literal["single", "two-hop"]
    documents: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Corpus:
    """The world: entities by name, and the Markdown of each entry by file name."""

    entities: dict[str, Entity]
    entries: dict[str, str]
    questions: tuple[CorpusQuestion, ...]


def file_name(entity: Entity) -> str:
    return entity.name.lower().replace(" ", "-") + ".md"


def make_corpus(seed: int = CORPUS_SEED) -> Corpus:
    """Return the corpus of a seed."""
    rng = random.Random(seed)
    entities = _make_world(rng)
    entries = {file_name(entity): _write_markdown(rng, entity) for entity in entities.values()}
    questions = [*_single_hop_questions(rng, entities), *_two_hop_questions(rng, entities)]
    return Corpus(entities, dict(sorted(entries.items())), tuple(questions))


def _make_world(rng: random.Random) -> dict[str, Entity]:
    names = Names(rng)
    by_kind: dict[str, list[Entity]] = {
        kind: [Entity(kind, names.person() if kind == "person" else names.word(), {}) for _ in range(number)]
        for kind, number in NUM_ENTRIES.items()
    }
    for kind, entities in by_kind.items():
        for entity in entities:
            keys = list(RELATIONS[kind])
            for key in rng.sample(keys, len(keys)):
                value_kind = RELATIONS[kind][key].value_kind
                others = [other.name for other in by_kind.get(value_kind, []) if other is not entity]
                entity.facts[key] = rng.choice(others) if others else names.value(value_kind)
    _make_consistent(rng, by_kind)
    return {entity.name: entity for entities in by_kind.values() for entity in entities}


def _make_consistent(rng: random.Random, by_kind: dict[str, list[Entity]]) -> None:
    """Let marriages hold both ways, capitals lie in their country and ports on their river."""
    people = rng.sample(by_kind["person"], len(by_kind["person"]))
    for one, other in zip(people[::2], people[1::2], strict=True):
        one.facts["spouse"], other.facts["spouse"] = other.name, one.name
    for person in people:
        while person.facts["teacher"] in (person.name, person.facts["spouse"]):
            person.facts["teacher"] = rng.choice(people).name
    cities = rng.sample(by_kind["city"], len(by_kind["city"]))
    for country, capital in zip(by_kind["country"], cities, strict=False):
        country.facts["capital"], capital.facts["country"] = capital.name, country.name
    for river, port in zip(by_kind["river"], reversed(cities), strict=False):
        river.facts["port"], port.facts["river"] = port.name, river.name


def _write_markdown(rng: random.Random, entity: Entity) -> str:
    sentences = [f"{entity.name} is a {entity.kind}."]
    for key in entity.facts:
        sentences.append(tell(rng, entity, key, _PRONOUN_SHARE))
        if rng.random() < _FILLER_SHARE:
            sentences.append(rng.choice(FILLERS).replace("{S}", entity.name))
    middle = (len(sentences) + 1) // 2
    return f"# {entity.name}\n\n{' '.join(sentences[:middle])}\n\n{' '.join(sentences[middle:])}\n"


def _single_hop_questions(rng: random.Random, entities: dict[str, Entity]) -> Iterable[CorpusQuestion]:
    kinds = list(RELATIONS)
    asked = rng.sample(list(entities.values()), len(entities))
    for number in range(NUM_SINGLE_HOP):
        kind = kinds[number % len(kinds)]
        entity = next(candidate for candidate in asked if candidate.kind == kind)
        asked.remove(entity)
        key = rng.choice(list(entity.facts))
        text = rng.choice(entity.relation(key).questions).replace("{X}", entity.name)
        yield CorpusQuestion(f"single-{number + 1:02d}", text, entity.facts[key], "single", (file_name(entity),))


def _two_hop_questions(rng: random.Random, entities: dict[str, Entity]) -> Iterable[CorpusQuestion]:
    paths: dict[tuple[str, str], list[tuple[Entity, Entity]]] = {}
    for entity in entities.values():
        for key, value in entity.facts.items():
            if entity.relation(key).noun_phrase is not None and value in entities:
                paths.setdefault((entity.kind, key), []).append((entity, entities[value]))
    relations = rng.sample(sorted(paths), len(paths))
    for number in range(NUM_TWO_HOP):
        _, key = relation = relations[number % len(relations)]
        first, bridge = rng.choice(paths[relation])
        # Back over the same pair ("the spouse of the spouse") would ask for the name in the question.
        bridge_keys = [bridge_key for bridge_key, value in bridge.facts.items() if value != first.name]
        question = two_hop_question(rng, first, key, bridge, rng.choice(bridge_keys))
        yield CorpusQuestion(
            f"two-hop-{number + 1:02d}",
            question.text,
            question.answer,
            "two-hop",
            (file_name(first), file_name(bridge)),
        )


def questions_jsonl(questions: Iterable[CorpusQuestion]) -> str:
    """Return one JSON object per line."""
    return "".join(json.dumps(asdict(question)) + "\n" for question in questions)


def write_corpus(corpus: Corpus, folder: Path, questions_file: Path) -> None:
    """Write the entries into `folder`, removing entries of another seed, and the questions file."""
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob("*.md"):
        if stale.name not in corpus.entries:
            stale.unlink()
    for name, markdown in corpus.entries.items():
        (folder / name).write_text(markdown, encoding="utf-8")
    questions_file.write_text(questions_jsonl(corpus.questions), encoding="utf-8")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the Markdown entries")
    parser.add_argument("--questions", type=Path, required=True, help="JSON Lines file for the questions")
    parser.add_argument("--seed", type=int, default=CORPUS_SEED, help="seed of the invented world")
    return parser.parse_args(arguments)


def main() -> None:
    arguments = parse_arguments()
    write_corpus(make_corpus(arguments.seed), arguments.out, arguments.questions)


if __name__ == "__main__":
    main()
