"""Real engines for the measurements: prompts as token ids, many in flight, answers with what each tier served."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from ragcache_core.client import Engine
from ragcache_core.config import CacheConfig
from ragcache_core.prompt import PromptTokenizer
from ragcache_core.types import PromptSegment, SegmentKind
from ragcache_core.wire import KEY, encode_kv_transfer_params, tile

BLOCK_SIZE = 32
_TIERS = ("gpu", "host", "disk")
_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class TokenRequest:
    """A prompt as token ids, and its ``kv_transfer_params``; plain vLLM is sent none."""

    token_ids: tuple[int, ...]
    params: Mapping[str, object] | None = None
    max_tokens: int = 4


@dataclass(frozen=True, slots=True)
class TokenAnswer:
    """A greedy answer as token ids, and what the server said of its prompt."""

    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    num_cached_tokens: int
    tokens_by_tier: Mapping[str, int] = field(default_factory=dict)
    total_s: float = 0.0
    ttft_s: float | None = None
    """The engine's own figure, from the request's arrival there; plain vLLM has none."""


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


class TokenClient:
    """Asks one engine; requests cut off by its death are sent again, as :class:`Engine` does it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._http = engine.http_client()
        self._headers = {"Authorization": f"Bearer {engine.api_key}"}

    def ask(self, request: TokenRequest, *, is_plain: bool = False) -> TokenAnswer:
        """Return the greedy answer to one request.

        Raises:
            httpx.HTTPError: the server did not answer, or refused.
        """
        body: dict[str, Any] = {
            "model": self._engine.model,
            "prompt": list(request.token_ids),
            "max_tokens": request.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        if request.params is not None and not is_plain:
            body["kv_transfer_params"] = dict(request.params)
        started_s = time.perf_counter()
        url = f"{self._engine.base_url}/completions"
        response = self._http.post(url, json=body, headers=self._headers, timeout=_TIMEOUT_S)
        if response.is_error:
            raise httpx.HTTPStatusError(
                f"the engine answered {response.status_code}: {response.text:.500}; its log is {self._engine.log_path}",
                request=response.request,
                response=response,
            )
        total_s = time.perf_counter() - started_s
        answer = response.json()
        usage = answer["usage"]
        figures = (answer.get("kv_transfer_params") or {}).get(KEY) or {}
        return TokenAnswer(
            tuple(answer["choices"][0]["token_ids"]),
            usage["prompt_tokens"],
            (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
            {tier: figures.get(f"num_{tier}_tokens") or 0 for tier in _TIERS},
            total_s,
            figures.get("ttft_s"),
        )

    def ask_all(
        self,
        requests: Sequence[TokenRequest],
        *,
        in_flight: int,
        is_plain: bool = False,
        on_answer: Callable[[int], None] | None = None,
    ) -> list[TokenAnswer]:
        """Return the answers to ``requests`` in their order, ``in_flight`` of them being asked at any time.

        ``on_answer`` is told how many have been answered. An interruption takes back what was not sent yet.
        """
        num_answered = 0
        counting = threading.Lock()

        def ask(request: TokenRequest) -> TokenAnswer:
            nonlocal num_answered
            answer = self.ask(request, is_plain=is_plain)
            with counting:
                num_answered += 1
                count = num_answered
            if on_answer is not None:
                on_answer(count)
            return answer

        with ThreadPoolExecutor(in_flight) as pool:
            try:
                return [future.result() for future in [pool.submit(ask, request) for request in requests]]
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def counter(self, name: str) -> float:
        """Return the sum of a counter or gauge of the server's Prometheus page."""
        page = self._http.get(f"{self._engine.base_url.removesuffix('/v1')}/metrics").raise_for_status().text
        samples = (s for family in text_string_to_metric_families(page) for s in family.samples)
        return sum(sample.value for sample in samples if sample.name == name)


def launch(model: str, cache: CacheConfig | None, **vllm_args: object) -> Engine:
    """Return a real engine in float32 whose blocks hold 32 tokens; without ``cache`` it is plain vLLM."""
    settings: dict[str, Any] = {"dtype": "float32", "enforce_eager": True, "max_model_len": 2048, "max_restarts": 2}
    if cache is None:
        settings["block_size"] = BLOCK_SIZE
    return Engine.launch(model, cache=cache, progress=False, env={"HF_HUB_OFFLINE": "1"}, **settings | vllm_args)


def block_bytes(model: str) -> int:
    """Return the bytes of a KV block of ``BLOCK_SIZE`` tokens in float32.

    Raises:
        KeyError: the model's configuration does not name the sizes of its attention.
    """
    config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
    heads = config.get("num_key_value_heads", config["num_attention_heads"])
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(config["num_hidden_layers"] * heads * head_dim * 2 * 4 * BLOCK_SIZE)


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
