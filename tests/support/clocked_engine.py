"""An engine that takes the time it is told to: stands in for ``ragcache_core.client.Engine`` where times count."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from ragcache_core.client.generation import Generation
from ragcache_core.prompt import RenderedPrompt
from ragcache_core.stats import RequestStats

TOKEN_IDS = tuple(range(5, 105))


def linear_s(num_cached_tokens: int, num_new_tokens: int) -> float:
    """A time that grows with both lengths."""
    return 0.01 + 1e-6 * num_cached_tokens + 1e-5 * num_new_tokens


@dataclass
class ClockedEngine:
    """Caches prompts in whole blocks, for ever, and says that an answer took ``time_s(cached, new)`` seconds.

    ``keeps`` off, it caches nothing; ``gpu_share`` of what it finds was in its own KV memory. ``on_request`` is called
    with the number of every request, before it is answered.
    """

    time_s: Callable[[int, int], float] = linear_s
    block_size: int = 16
    num_blocks: int = 129
    max_model_len: int = 2048
    keeps: bool = True
    gpu_share: float | None = None
    num_running: int = 0
    model: str = "demo_model"
    root: str = "examples/demo_model"
    base_url: str = "http://127.0.0.1:8000/v1"
    api_key: str = "key"
    log_path: Path | None = None
    on_request: Callable[[int], object] = lambda _: None
    metrics: str | None = None
    prompts: list[tuple[int, ...]] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    num_closed: int = 0

    def __post_init__(self) -> None:
        self._cached: set[tuple[int, ...]] = set()

    def generate(self, prompt: RenderedPrompt, *, max_tokens: int) -> Generation:
        self.on_request(len(self.prompts))
        tokens = prompt.token_ids
        assert set(tokens) <= set(TOKEN_IDS)
        assert max_tokens == 1
        assert len(tokens) < min(self.max_model_len, (self.num_blocks - 1) * self.block_size)
        self.prompts.append(tokens)
        ends = range(self.block_size, len(tokens) + 1, self.block_size)
        found = max((end for end in ends if end < len(tokens) and tokens[:end] in self._cached), default=0)
        if self.keeps:
            self._cached.update(tokens[:end] for end in ends)
        total_s = self.time_s(found, len(tokens) - found)
        on_gpu = None if self.gpu_share is None else int(found * self.gpu_share)
        stats = RequestStats(len(tokens), found, 1, ttft_s=None, total_s=total_s, num_gpu_tokens=on_gpu)
        return Generation("", "length", stats)

    def stats(self) -> Any:
        return type("Stats", (), {"num_running": self.num_running, "num_waiting": 0})

    def http_client(self) -> httpx.Client:
        return httpx.Client(transport=httpx.MockTransport(self._answer))

    def _answer(self, request: httpx.Request) -> httpx.Response:
        labels = f'block_size="{self.block_size}",num_gpu_blocks="{self.num_blocks}"'
        metrics = f"vllm:cache_config_info{{{labels}}} 1.0\n" if self.metrics is None else self.metrics
        card = {"id": self.model, "root": self.root, "max_model_len": self.max_model_len}
        match request.method, request.url.path:
            case "GET", "/metrics":
                return httpx.Response(200, text=metrics)
            case "GET", "/version":
                return httpx.Response(200, json={"version": "0.32.0"})
            case "GET", "/v1/models":
                return httpx.Response(200, json={"data": [card]})
            case "POST", "/tokenize" if request.headers["Authorization"] == f"Bearer {self.api_key}":
                return httpx.Response(200, json={"tokens": [*TOKEN_IDS, *TOKEN_IDS[:7]]})
        return httpx.Response(404)

    def __enter__(self) -> ClockedEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.num_closed += 1


def prompts_of(engine: ClockedEngine) -> Sequence[int]:
    """Return the lengths of the prompts that ``engine`` was asked, in order."""
    return [len(prompt) for prompt in engine.prompts]
