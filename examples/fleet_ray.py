"""A fleet on Ray Serve: replicas of an engine behind one address, which Serve places, watches and replaces.

Questions about a few entries of the demo corpus more often than about others are asked of that address. Each goes to
the replica that knows its documents, so that together the replicas hold what one of them could not.

Examples:
  python -m examples.fleet_ray
  python -m examples.fleet_ray --replicas 3 --questions 200 --json
  python -m examples.fleet_ray --address auto --stay       (on the cluster of this machine, until Ctrl-C)
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from tqdm import tqdm

from examples._shared import DEMO_MODEL, open_demo_store
from examples.document_order import at_least_one, popular_questions
from ragcache_core import CacheConfig, DocumentStore, Engine, PromptLayout, ragcache_deployment

NUM_DOCUMENTS = 4
CACHE = CacheConfig(kv_cache_bytes="32MiB", host_bytes=0, block_size=32)
"""A part of the demo corpus: with all of it in each replica there would be nothing to choose."""
DEMO_ENGINE = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 2048,
    # Engines side by side on a few cores would wait for each other's threads.
    "env": {"HF_HUB_OFFLINE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"},
}


@contextmanager
def served(options: argparse.Namespace) -> Iterator[Engine]:
    """Give the engine that replicas on Ray Serve are together; they end with it, and so does a Ray that was started.

    On a Ray that runs already they are an application of its own, with a route of its own.

    Raises:
        ConfigError: Ray is not installed.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    key = os.environ.get("RAGCACHE_API_KEY") or secrets.token_urlsafe(24)
    settings = DEMO_ENGINE if options.model == str(DEMO_MODEL) else {}
    replicas = ragcache_deployment(options.model, api_key=key, num_replicas=options.replicas, cache=CACHE, **settings)
    name = f"ragcache-example-{secrets.token_hex(4)}"
    route = f"/{name}" if options.address else "/"
    import ray
    from ray import serve

    here = {} if options.address else {"num_cpus": options.replicas, "object_store_memory": 100 << 20}
    ray.init(options.address, include_dashboard=False if here else None, log_to_driver=False, **here)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": options.port})
        serve.run(replicas, name=name, route_prefix=route)
        with Engine.connect(f"http://127.0.0.1:{options.port}{route}", api_key=key) as joined:
            yield joined
    finally:
        if options.address:  # others may have applications there
            serve.delete(name)
        else:
            serve.shutdown()
        ray.shutdown()


def ask(engine: Engine, store: DocumentStore, num_questions: int) -> dict[str, float]:
    """Return what it comes to when popular questions are asked, one after the other."""
    layout, answers = PromptLayout(), []
    for asked in tqdm(popular_questions(num_questions), "asking", unit="question", disable=None):
        found = store.search(asked.question, NUM_DOCUMENTS).documents
        shown = engine.arrange_documents(found, "cache_aware").documents
        answers.append(engine.generate(layout.render(engine.tokenizer, shown, asked.question), max_tokens=16).stats)
    return {
        "num_questions": num_questions,
        "cached_share": sum(a.num_cached_tokens for a in answers) / sum(a.num_prompt_tokens for a in answers),
        "mean_ttft_ms": 1000 * sum(a.ttft_s or 0.0 for a in answers) / len(answers),
        "num_first_tokens": engine.stats().num_first_tokens,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(DEMO_MODEL), metavar="MODEL", help="a model for each replica")
    parser.add_argument("--replicas", type=at_least_one, default=2, metavar="N", help="how many (2)")
    parser.add_argument("--questions", type=at_least_one, default=100, metavar="N", help="how many to ask (100)")
    parser.add_argument("--address", metavar="ADDRESS", help="of a Ray that runs already, instead of starting one")
    parser.add_argument("--port", type=int, default=8000, metavar="PORT", help="where to answer (8000)")
    parser.add_argument("--stay", action="store_true", help="answer until Ctrl-C")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(arguments)
    with suppress(KeyboardInterrupt), open_demo_store() as store, served(options) as engine:
        measured = ask(engine, store, options.questions)
        if options.json:
            print(json.dumps(measured))
        else:
            print(f"{'replicas':>8}{'questions':>11}{'cached':>8}{'ttft':>10}")
            share, ttft_ms = measured["cached_share"], measured["mean_ttft_ms"]
            print(f"{options.replicas:>8}{options.questions:>11}{share:>8.1%}{ttft_ms:>7.1f} ms")
        if options.stay:
            print(f"answering at {engine.base_url} with the key {engine.api_key} until Ctrl-C")
            threading.Event().wait()


if __name__ == "__main__":
    main()
