"""Three tiers: documents whose KV leaves the GPU wait in host memory, and those that leave that wait on disk.

Each request says how many of its tokens came from where, and the engine how full its tiers are. The sizes are for the
demo model: give another one as many times more as its KV is larger. Run it with ``python -m examples.tiers``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence

from examples._shared import Row, demo_questions, open_demo_store, open_engine, read_options, show
from ragcache_core import CacheConfig, PromptLayout

NUM_QUESTIONS, NUM_DOCUMENTS = 8, 20


def main(arguments: Sequence[str] | None = None) -> None:
    options = read_options(__doc__, arguments)
    questions = [q["question"] for q in demo_questions("single")[:NUM_QUESTIONS]]
    layout, rows = PromptLayout(), []
    with tempfile.TemporaryDirectory() as folder:  # name one that stays, and the next engine starts with what is there
        cache = CacheConfig(
            kv_cache_bytes="16MiB",  # three of these prompts
            host_bytes="24MiB",
            disk_bytes="256MiB",
            directory=folder,
            block_size=32,
        )
        with open_engine(options, cache) as engine, open_demo_store() as store:
            asked = [(q, "cold") for q in questions] + [(q, "again") for q in reversed(questions)]
            for question, note in asked:
                documents = store.search(question, NUM_DOCUMENTS).documents
                prompt = layout.render(engine.tokenizer, documents, question)
                answer = engine.generate(prompt, max_tokens=32)
                rows.append(Row.of(question, note, answer.text, answer.stats))
            tiers = engine.stats().tiers
    show(rows, options)
    if not options.as_json:
        for tier in tiers:
            print(f"{tier.name:<4} {tier.usage:4.0%} full, {tier.num_hit_tokens} tokens served")


if __name__ == "__main__":
    main()
