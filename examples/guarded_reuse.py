"""Chunk reuse with a bound on errors: the engine audits its own answers, and reuses documents where the bound holds.

Two kinds of questions come in turn. The documents of one kind stand alone. In the other kind some depend on the text
before them. In idle time the engine answers the approximate prompts once more, exactly, and learns how often each kind
differs. In the end all questions are asked exactly, to count the answers that did. Run it with
``python -m examples.guarded_reuse``.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict

from examples._shared import open_engine, read_options
from examples.demo_model_training.recurring import continued, single_hop
from ragcache_core import CacheConfig, ChunkReuse, PromptLayout

MAX_ERROR, NUM_OF_A_KIND = 0.2, 48
PAUSE_S = 0.1


def main(arguments: Sequence[str] | None = None) -> None:
    options = read_options(__doc__, arguments)
    layout, differing = PromptLayout(), Counter[str]()
    sources = [source(random.Random(0)) for source in (single_hop, continued)]  # five documents each, which recur
    cache = CacheConfig(
        kv_cache_bytes="64MiB", block_size=32, host_bytes="256MiB", chunk_reuse=ChunkReuse(max_error=MAX_ERROR)
    )
    with open_engine(options, cache) as engine:
        answers = []
        for asked in [next(source) for _ in range(NUM_OF_A_KIND) for source in sources]:
            prompt = layout.render(engine.tokenizer, asked.documents, asked.text)
            answers.append((prompt, asked, engine.generate(prompt, max_tokens=24, chunk_reuse={"kind": asked.kind})))
            time.sleep(PAUSE_S)  # idle time, as a server has it between requests
        found = engine.stats().chunks
        for prompt, asked, answer in answers:
            exact = engine.generate(prompt, max_tokens=24, chunk_reuse=False)
            differing[asked.kind] += answer.text != exact.text
    rows = [{**asdict(kind), "num_differing": differing[kind.kind]} for kind in (found.kinds if found else ())]
    if options.as_json:
        print(json.dumps(rows, indent=2))
        return
    heads = ("kind", "answers", "approximate", "differ", "audits", "errors", "error_bound")
    print("{:<12} {:>7} {:>11} {:>6} {:>6} {:>6} {:>11}".format(*heads))
    for row in rows:
        keys = ("kind", "num_answers", "num_approximate", "num_differing", "num_audits", "num_errors", "error_bound")
        print("{:<12} {:>7} {:>11} {:>6} {:>6} {:>6} {:>11.2f}".format(*(row[key] for key in keys)))


if __name__ == "__main__":
    main()
