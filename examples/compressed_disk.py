"""A compressed disk tier: more KV on a disk of the same size, and the same answers.

GPU and host memory are small, so earlier documents are found on disk. Two engines get the same questions, one round
after another; the second engine compresses what it writes to disk (``pip install 'ragcache[compression]'``). Run it
with ``python -m examples.compressed_disk``.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence

from examples._shared import demo_questions, open_demo_store, open_engine, read_options
from ragcache_core import CacheConfig, PromptLayout

SIZES = {"kv_cache_bytes": "12MiB", "host_bytes": "8MiB", "disk_bytes": "24MiB", "block_size": 32}
NUM_DOCUMENTS, NUM_ROUNDS = 4, 2


def main(arguments: Sequence[str] | None = None) -> None:
    options = read_options(__doc__, arguments)
    layout, texts, rows = PromptLayout(), [], []
    with open_demo_store() as store:
        asked = [(each, store.search(each["question"], NUM_DOCUMENTS).documents) for each in demo_questions("single")]
    for compression in ("off", "zstd"):
        with tempfile.TemporaryDirectory() as folder:
            cache = CacheConfig(**SIZES, directory=folder, compression=compression)
            with open_engine(options, cache) as engine:
                answers = [
                    engine.generate(layout.messages(documents, each["question"]), max_tokens=24)
                    for _ in range(NUM_ROUNDS)
                    for each, documents in asked
                ]
                disk = next(tier for tier in engine.stats().tiers if tier.name == "disk")
        texts.append([answer.text for answer in answers])
        rows.append(
            {
                "compression": compression,
                "num_blocks": disk.num_blocks,
                "used_bytes": disk.used_bytes,
                "num_disk_tokens": sum(answer.stats.num_disk_tokens or 0 for answer in answers),
                "num_equal": sum(a == b for a, b in zip(texts[0], texts[-1], strict=True)),
                "num_answers": len(answers),
            }
        )
    if options.as_json:
        print(json.dumps(rows, indent=2))
        return
    print(f"{'compression':<12} {'blocks':>6} {'MiB':>5} {'KiB a block':>11} {'tokens from disk':>16}  equal answers")
    for row in rows:
        name, num_blocks, num_bytes, num_tokens, num_equal, num_answers = row.values()
        sizes = f"{num_blocks:>6} {num_bytes / 2**20:>5.1f} {num_bytes / num_blocks / 2**10:>11.1f}"
        print(f"{name:<12} {sizes} {num_tokens:>16,}  {num_equal} of {num_answers}")


if __name__ == "__main__":
    main()
