"""A fleet: replicas that are asked as one, so that together they hold what one of them could not.

Questions about a few entries of the demo corpus more often than about others go to two engines whose memory holds a
part of the corpus each: first each question to whose turn it is, as a load balancer sends it, then to the replica that
knows its documents, in the order that is cached there. Both begin with empty caches, unless the replicas run already.

Examples:
  python -m examples.fleet
  python -m examples.fleet --replicas 3 --questions 200 --json
  python -m examples.fleet --urls http://127.0.0.1:8000 http://127.0.0.1:8001     (their key in RAGCACHE_API_KEY)
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass

from tqdm import tqdm

from examples._shared import DEMO_MODEL, Options, open_demo_store, open_engine
from examples.document_order import popular_questions
from ragcache_core import CacheConfig, DocumentOrder, DocumentStore, Engine, Fleet, PromptLayout
from ragcache_core.client import EngineClient

NUM_DOCUMENTS = 4
CACHE = CacheConfig(kv_cache_bytes="32MiB", host_bytes=0, block_size=32)
"""A part of the demo corpus: with all of it in each replica there would be nothing to choose."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What one way of asking came to; ``busiest`` is how many requests the busiest replica had, over the mean."""

    way: str
    num_questions: int
    cached_share: float
    mean_ttft_ms: float
    busiest: float


def ask(
    choose: Callable[[], EngineClient],
    store: DocumentStore,
    engines: Sequence[Engine],
    way: str,
    num_questions: int,
    order: DocumentOrder,
) -> Measured:
    """Return what it comes to when each question is asked of the engine that ``choose`` returns."""
    layout = PromptLayout()
    answers = []
    before = [engine.stats().num_first_tokens for engine in engines]
    for asked in tqdm(popular_questions(num_questions), way, unit="question", disable=None):
        engine = choose()
        found = store.search(asked.question, NUM_DOCUMENTS).documents
        shown = engine.arrange_documents(found, order).documents
        answers.append(engine.generate(layout.render(engines[0].tokenizer, shown, asked.question), max_tokens=16).stats)
    served = [engine.stats().num_first_tokens - num for engine, num in zip(engines, before, strict=True)]
    return Measured(
        way=way,
        num_questions=num_questions,
        cached_share=sum(a.num_cached_tokens for a in answers) / sum(a.num_prompt_tokens for a in answers),
        mean_ttft_ms=1000 * sum(a.ttft_s or 0.0 for a in answers) / len(answers),
        busiest=max(served) * len(served) / max(sum(served), 1),
    )


@contextmanager
def replicas(options: argparse.Namespace) -> Iterator[list[Engine]]:
    """Give engines with empty caches: new ones, or those that run at the addresses."""
    urls = options.urls or [None] * options.replicas
    with ExitStack() as stack:
        yield [stack.enter_context(open_engine(Options(options.model, url, options.json), CACHE)) for url in urls]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(DEMO_MODEL), metavar="MODEL", help="a model for each replica")
    parser.add_argument("--replicas", type=int, default=2, metavar="N", help="how many to launch (2)")
    parser.add_argument("--urls", nargs="+", metavar="URL", help="replicas that run already, instead")
    parser.add_argument("--questions", type=int, default=100, metavar="N", help="how many to ask (100)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(arguments)
    measured = []
    with open_demo_store() as store:
        with replicas(options) as engines:
            turns = itertools.cycle(engines)
            measured.append(ask(lambda: next(turns), store, engines, "round robin", options.questions, "retrieval"))
        with replicas(options) as engines, Fleet(engines) as fleet:
            measured.append(ask(lambda: fleet, store, engines, "fleet", options.questions, "cache_aware"))
    if options.json:
        print(json.dumps([asdict(each) for each in measured]))
        return
    print(f"{'asked by':<14}{'cached':>8}{'ttft':>10}{'busiest':>10}")
    for each in measured:
        print(f"{each.way:<14}{each.cached_share:>8.1%}{each.mean_ttft_ms:>7.1f} ms{each.busiest:>9.2f}x")


if __name__ == "__main__":
    main()
