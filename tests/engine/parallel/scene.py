"""The demo model on several workers, and prompts that go through all tiers of a small cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import httpx

from ragcache_core import CacheConfig, Document, PromptLayout, RequestStats
from ragcache_core.client import Engine
from tests.conftest import DEMO_MODEL, ENGINE_ARGS
from tests.support.waiting import until

BLOCK = 32
TIMEOUT_S = 60.0
WORDS = ("Zorval", "Tenrik", "was", "a", "company", "founded", "by", "Anna", "Boris", "in", "1823", "makes", "clocks")
QUESTION = "Who founded Zorval?"
_ENV = {
    # vLLM binds each worker to a NUMA node of its own, and a small machine has one.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_SERVER_DEV_MODE": "1",
}


@contextmanager
def launched(folder: Path, cache: CacheConfig, env: dict[str, str] | None = None, **settings: Any) -> Iterator[Engine]:
    """Run the demo model; its log is ``server.log`` in ``folder``."""
    together: dict[str, Any] = {**ENGINE_ARGS, "cache": cache, "env": {**_ENV, **(env or {})}, **settings}
    with Engine.launch(str(DEMO_MODEL), log_path=folder / "server.log", **together) as running:
        yield running


def documents(mark: str, num_documents: int = 2, num_words: int = 110) -> list[Document]:
    """Return documents of some 190 tokens that no other test has in the cache."""
    return [
        Document(f"{mark}-{i}", " ".join(Random(f"{mark} {i}").choices(WORDS, k=num_words)))
        for i in range(num_documents)
    ]


def ask(engine: Engine, shown: list[Document], **settings: Any) -> tuple[str, RequestStats]:
    """Return the answer about some documents, and how it was made."""
    prompt = PromptLayout().render(engine.tokenizer, shown, QUESTION)
    generation = engine.generate(prompt, **{"max_tokens": 8, **settings})
    return generation.text, generation.stats


def empty_the_gpu(engine: Engine) -> None:
    """Make vLLM forget its own KV memory, and nothing else."""
    url = f"{engine.base_url.removesuffix('/v1')}/reset_prefix_cache"
    headers = {"Authorization": f"Bearer {engine.api_key}"}
    assert until(lambda: httpx.post(url, headers=headers, timeout=30).status_code == 200, TIMEOUT_S)


def log_of(engine: Engine) -> str:
    """Return what the engine has said."""
    assert engine.log_path is not None
    return engine.log_path.read_text(encoding="utf-8", errors="replace")
