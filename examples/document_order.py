"""What the order of the documents in a prompt is worth, and what it costs: cached tokens and right answers.

The demo corpus is asked questions whose answers are known, about a few of its entries more often than about others.
Each order of documents answers the same questions, beginning with an empty cache: the engine serves
POST /reset_prefix_cache, as every vLLM with VLLM_SERVER_DEV_MODE=1 does.

Examples:
  python -m examples.document_order
  python -m examples.document_order --questions 100 --documents 8 --json
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from tqdm import tqdm

from examples._shared import open_demo_store, open_engine, option_parser, options_of
from examples.demo_model_training.corpus import make_corpus
from ragcache_core import CacheConfig, DocumentOrder, DocumentStore, Engine, PromptLayout

ORDERS: tuple[tuple[DocumentOrder, bool], ...] = (
    ("retrieval", False),
    ("canonical", False),
    ("cache_aware", False),
    ("cache_aware", True),
)
"""The orders that are compared, and whether the best document stays in front."""
SEED = 0


@dataclass(frozen=True, slots=True)
class Asked:
    """A question about one entry of the corpus, and its only right answer."""

    question: str
    answer: str


@dataclass(frozen=True, slots=True)
class Measured:
    """What one order came to; shares are of all prompt tokens, requests and questions."""

    order: str
    keep_first: bool
    num_questions: int
    num_documents: int
    num_prompt_tokens: int
    cached_share: float
    reordered_share: float
    exact_match: float
    arrange_ms: float

    @property
    def name(self) -> str:
        return f"{self.order}, first kept" if self.keep_first else self.order


def popular_questions(count: int, seed: int = SEED) -> list[Asked]:
    """Return questions about the demo corpus; the n-th most popular entry is asked for 1/n as often as the first."""
    rng = random.Random(seed)
    entities = list(make_corpus().entities.values())
    rng.shuffle(entities)
    asked = []
    for entity in rng.choices(entities, [1 / (rank + 1) for rank in range(len(entities))], k=count):
        key = rng.choice(list(entity.facts))
        text = rng.choice(entity.relation(key).questions).replace("{X}", entity.name)
        asked.append(Asked(text, entity.facts[key]))
    return asked


def measure(
    engine: Engine,
    store: DocumentStore,
    questions: Sequence[Asked],
    num_documents: int,
    order: DocumentOrder,
    *,
    keep_first: bool,
) -> Measured:
    """Return what ``order`` comes to when all questions are asked, one after the other."""
    empty_cache(engine)
    layout = PromptLayout()
    num_prompt_tokens = num_cached_tokens = num_reordered = num_right = 0
    arrange_s = 0.0
    label = f"{order}{', first kept' if keep_first else ''}"
    for asked in tqdm(questions, label, unit="question", disable=None):
        found = store.search(asked.question, num_documents).documents
        if order == "cache_aware":
            engine.integration.ordering.refresh()  # else what is cached is asked once a second
        arrangement = engine.arrange_documents(found, order, keep_first=keep_first)
        prompt = layout.render(engine.tokenizer, arrangement.documents, asked.question)
        answer = engine.generate(prompt, max_tokens=24)
        num_prompt_tokens += answer.stats.num_prompt_tokens
        num_cached_tokens += answer.stats.num_cached_tokens
        num_reordered += arrangement.is_reordered
        num_right += answer.text.strip() == asked.answer
        arrange_s += arrangement.duration_s
    return Measured(
        order=order,
        keep_first=keep_first,
        num_questions=len(questions),
        num_documents=num_documents,
        num_prompt_tokens=num_prompt_tokens,
        cached_share=num_cached_tokens / num_prompt_tokens,
        reordered_share=num_reordered / len(questions),
        exact_match=num_right / len(questions),
        arrange_ms=1000 * arrange_s / len(questions),
    )


def empty_cache(engine: Engine) -> None:
    """Empty every tier of the engine.

    Raises:
        SystemExit: the engine does not allow it.
    """
    response = engine.http_client().post(
        f"{engine.base_url.removesuffix('/v1')}/reset_prefix_cache",
        params={"reset_external": "true"},
        headers={"Authorization": f"Bearer {engine.api_key}"},
    )
    if response.status_code != 200:
        raise SystemExit(
            f"{engine.base_url} answers {response.status_code} to /reset_prefix_cache: start it with "
            "VLLM_SERVER_DEV_MODE=1, so that each order begins with an empty cache"
        )


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = option_parser(__doc__)
    parser.add_argument("--questions", type=at_least_one, default=300, metavar="N", help="how many to ask (300)")
    parser.add_argument("--documents", type=at_least_one, default=5, metavar="K", help="documents in a prompt (5)")
    return parser.parse_args(arguments)


def at_least_one(text: str) -> int:
    """Return the number of an argument that counts something."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} is too few: give 1 or more")
    return number


def print_measured(measured: Sequence[Measured]) -> None:
    """Print a table."""
    line = "{:<24}  {:>9}  {:>13}  {:>6}  {:>9}  {:>13}  {:>10}"
    print(line.format("order", "questions", "prompt tokens", "cached", "reordered", "right answers", "arrange ms"))
    for m in measured:
        shares = (f"{m.cached_share:.1%}", f"{m.reordered_share:.1%}", f"{m.exact_match:.1%}")
        print(line.format(m.name, m.num_questions, m.num_prompt_tokens, *shares, f"{m.arrange_ms:.3f}"))


def main(arguments: Sequence[str] | None = None) -> None:
    given = parse_arguments(arguments)
    options = options_of(given)
    questions = popular_questions(given.questions)
    cache = CacheConfig(kv_cache_bytes="1GiB", block_size=32, host_bytes=0)
    with open_engine(options, cache, env={"VLLM_SERVER_DEV_MODE": "1"}) as engine, open_demo_store() as store:
        measured = [
            measure(engine, store, questions, given.documents, order, keep_first=keep_first)
            for order, keep_first in ORDERS
        ]
    if options.as_json:
        print(json.dumps([asdict(m) for m in measured], indent=2))
    else:
        print_measured(measured)


if __name__ == "__main__":
    main()
