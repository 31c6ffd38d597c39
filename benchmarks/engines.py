"""Real engines for the measurements: prompts as token ids, many in flight, answers with what each tier served."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.token_client import TokenAnswer
from ragcache_core.bench.prompts import TokenRequest
from ragcache_core.client import Engine
from ragcache_core.client.launch.settings import VLLMOffload
from ragcache_core.config import CacheConfig
from ragcache_core.prompt import PromptTokenizer
from ragcache_core.stats import RequestStats
from ragcache_core.types import PromptSegment, SegmentKind
from ragcache_core.wire import encode_kv_transfer_params, tile

BLOCK_SIZE = 32
_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class TokenTexts:
    """Documents and questions cut out of a corpus, as token ids of one model; the same for the same number."""

    prefix: tuple[int, ...]
    stream: tuple[int, ...]
    encode: Callable[[str], tuple[int, ...]]

    @classmethod
    def read(cls, corpus: Path, tokenizer: PromptTokenizer) -> TokenTexts:
        """Return the texts of a folder of ``.md`` files."""

        def encode(text: str) -> tuple[int, ...]:
            return tokenizer.encode(text).token_ids

        paths = sorted(corpus.glob("*.md"))
        stream = [token for path in paths for token in encode(path.read_text(encoding="utf-8"))]
        return cls(encode("Answer the question from the documents.\n\n"), tuple(stream), encode)

    def document(self, number: int, num_tokens: int) -> tuple[int, ...]:
        """Return document ``number``: its name, then text from a place of its own."""
        name = self.encode(f"Document {number}: ")
        start = number * 7919 % len(self.stream)
        rest = max(num_tokens - len(name), 0)
        repeated = self.stream[start:] + self.stream * (1 + rest // len(self.stream))
        return name + repeated[:rest]

    def request(
        self,
        documents: Sequence[tuple[int, int]],
        question: str,
        *,
        max_tokens: int = 4,
        names: Sequence[str] | None = None,
    ) -> TokenRequest:
        """Return a request about ``documents`` (number, tokens); an empty list of ``names`` sends no metadata."""
        token_ids = list(self.prefix)
        spans = []
        given = [f"document-{number}" for number, _ in documents] if names is None else names
        for (number, num_tokens), name in zip(documents, given or [""] * len(documents), strict=True):
            start = len(token_ids)
            token_ids += self.document(number, num_tokens)
            spans.append(PromptSegment(SegmentKind.DOCUMENT, start, len(token_ids), name))
        token_ids += self.encode(f"\n\nQuestion: {question}")
        params = encode_kv_transfer_params(tile(spans, len(token_ids))) if given else None
        return TokenRequest(tuple(token_ids), params, max_tokens)


ONE_CORE = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
"""For each of two engines on two cores: with more threads, those of one spin in the way of the other."""


def launch(model: str, cache: CacheConfig | VLLMOffload | None, **vllm_args: object) -> Engine:
    """Return a real engine in float32 whose blocks hold 32 tokens; without ``cache`` it is plain vLLM."""
    settings: dict[str, Any] = {"dtype": "float32", "enforce_eager": True, "max_model_len": 2048, "max_restarts": 2}
    if has_gpu():  # several engines share it; each is told the size of its KV
        settings["gpu_memory_utilization"] = 0.25
    if not isinstance(cache, CacheConfig):
        settings["block_size"] = BLOCK_SIZE
    settings |= vllm_args
    env = {"HF_HUB_OFFLINE": "1", **settings.pop("env", {})}
    launched: Engine = Engine.launch(model, cache=cache, progress=False, env=env, **settings)
    return launched


@contextmanager
def side_by_side(num: int, start: Callable[[], Engine]) -> Iterator[list[Engine]]:
    """Start ``num`` engines at once, yield them, and close them."""
    with ExitStack() as stack, ThreadPoolExecutor(num) as threads:
        starting = [threads.submit(start) for _ in range(num)]
        for each in starting:
            stack.callback(_close, each)
        yield [each.result() for each in starting]


def _close(starting: Future[Engine]) -> None:
    if starting.exception() is None:
        starting.result().close()


def has_gpu() -> bool:
    """Return whether engines run on a GPU here."""
    import torch

    return bool(torch.cuda.is_available())


def cached_share(answers: Sequence[TokenAnswer | RequestStats]) -> float:
    """Return the share of all prompt tokens that did not have to be computed."""
    return sum(a.num_cached_tokens for a in answers) / sum(a.num_prompt_tokens for a in answers)


def block_bytes(model: str, dtype: str = "float32") -> int:
    """Return the bytes of a KV block of ``BLOCK_SIZE`` tokens.

    Raises:
        KeyError: the model's configuration does not name the sizes of its attention.
    """
    config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
    heads = config.get("num_key_value_heads", config["num_attention_heads"])
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(config["num_hidden_layers"] * heads * head_dim * 2 * _BYTES[dtype] * BLOCK_SIZE)


def kill_engine_core(engine: Engine) -> None:
    """Kill the engine's core process as ``kill -9`` does; its server stays and notices.

    Raises:
        RuntimeError: it is not there.
    """
    assert engine.pid is not None
    for process in psutil.Process(engine.pid).children(recursive=True):
        if "EngineCore" in process.name() or any("EngineCore" in part for part in process.cmdline()):
            process.kill()
            return
    raise RuntimeError(f"the engine with process {engine.pid} has no EngineCore below it: look into {engine.log_path}")
