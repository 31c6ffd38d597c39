"""Print, as JSON, what vLLM is like where RAGCache relies on it: one import of vLLM for all tests of this folder."""

from __future__ import annotations

import json

from tests.vllm_facts import chunk_facts, engine_facts, offloading_facts

if __name__ == "__main__":
    parts = {"engine": engine_facts, "offloading": offloading_facts, "chunks": chunk_facts}
    print(json.dumps({name: part.facts() for name, part in parts.items()}))
