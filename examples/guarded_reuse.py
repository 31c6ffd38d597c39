"""Chunk reuse with a bound on errors: the engine audits its own answers, and reuses documents where the bound holds.

Two kinds of questions come in turn. The documents of one kind stand alone. In the other kind some depend on the text
before them. In idle time the engine answers the approximate prompts once more, exactly, and learns how often each kind
differs. In the end all questions are asked exactly, to count the answers that did. Run it with
``python -m examples.guarded_reuse``.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from examples._shared import open_engine, read_options
from examples.demo_model_training import recurring
from ragcache_core import CacheConfig, ChunkReuse, Engine, PromptLayout
from ragcache_core.quality import Question, read_questions

MAX_ERROR, NUM_OF_A_KIND = 0.2, 48
KINDS = ("single-hop", "continued")


def questions_of(kinds: Sequence[str]) -> list[Question]:
    """Return questions over five documents that recur in changing sets, the kinds in turn."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "questions.jsonl"
        recurring.main(["--out", str(path), "--num-questions", str(NUM_OF_A_KIND)])
        asked = read_questions(path)
    of_each = [[question for question in asked if question.kind == kind][:NUM_OF_A_KIND] for kind in kinds]
    return [question for in_turn in zip(*of_each, strict=True) for question in in_turn]


def wait_for_audits(engine: Engine) -> None:
    """Wait up to a second for the audits of the answers so far; a server has other times without requests."""
    for _ in range(50):
        chunks = engine.stats().chunks
        if chunks is None or all(kind.num_audits == kind.num_approximate for kind in chunks.kinds):
            return
        time.sleep(0.02)


def main(arguments: Sequence[str] | None = None) -> None:
    options = read_options(__doc__, arguments)
    layout, differing = PromptLayout(), Counter[str]()
    cache = CacheConfig(
        kv_cache_bytes="64MiB", block_size=32, host_bytes="256MiB", chunk_reuse=ChunkReuse(max_error=MAX_ERROR)
    )
    with open_engine(options, cache) as engine:
        answers = []
        for asked in questions_of(KINDS):
            prompt = layout.render(engine.tokenizer, asked.documents, asked.text)
            answers.append((prompt, asked, engine.generate(prompt, max_tokens=24, chunk_reuse={"kind": asked.kind})))
            wait_for_audits(engine)
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
