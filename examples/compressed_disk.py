"""A compressed disk tier: more KV on a disk of the same size, and the same answers.

Forty questions come back at random. GPU and host memory are small, so most of their documents are found on disk, if at
all. What goes there is compressed without loss (``pip install 'ragcache[compression]'``). Each answer is compared with
the first one to the same question. Run it with ``python -m examples.compressed_disk``.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path

from examples._shared import demo_questions, open_demo_store, open_engine, read_options
from ragcache_core import CacheConfig, PromptLayout

SIZES = {"kv_cache_bytes": "12MiB", "host_bytes": "8MiB", "disk_bytes": "24MiB", "block_size": 32}
NUM_DOCUMENTS, NUM_QUESTIONS = 4, 120


def main(arguments: Sequence[str] | None = None) -> None:
    options = read_options(__doc__, arguments)
    layout, first = PromptLayout(), dict[str, str]()
    num_equal = num_disk_tokens = 0
    with tempfile.TemporaryDirectory() as folder, open_demo_store() as store:
        cache = CacheConfig(**SIZES, directory=Path(folder), compression="zstd")  # by default "auto": what is worth it
        with open_engine(options, cache) as engine:
            for asked in random.Random(0).choices(demo_questions("single"), k=NUM_QUESTIONS):
                question = asked["question"]
                prompt = layout.messages(store.search(question, NUM_DOCUMENTS).documents, question)
                answer = engine.generate(prompt, max_tokens=24)
                num_equal += question in first and answer.text == first[question]
                first.setdefault(question, answer.text)
                num_disk_tokens += answer.stats.num_disk_tokens or 0
            tiers = {tier.name: tier for tier in engine.stats().tiers}
    gpu, disk = tiers["gpu"], tiers["disk"]
    found = {
        "num_blocks": disk.num_blocks,
        "used_bytes": disk.used_bytes,
        "num_uncompressed_blocks": disk.capacity_bytes * gpu.num_blocks // gpu.used_bytes,
        "num_disk_tokens": num_disk_tokens,
        "num_repeated": NUM_QUESTIONS - len(first),
        "num_equal": num_equal,
    }
    if options.as_json:
        print(json.dumps(found, indent=2))
        return
    print(f"disk: {disk.num_blocks} blocks in {disk.used_bytes / 2**20:.1f} MiB", end="")
    print(f"; uncompressed, {found['num_uncompressed_blocks']} would fit")
    print(f"prompt tokens from disk: {num_disk_tokens:,}")
    print(f"repeated questions with the same answer: {num_equal} of {found['num_repeated']}")


if __name__ == "__main__":
    main()
